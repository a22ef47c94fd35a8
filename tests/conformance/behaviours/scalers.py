"""Loss scales of other projects: jmp, Keras, DeepSpeed, Apex; by their rules, in one loop."""

from __future__ import annotations

import pytest
import torch
from conformance.behaviours.loss_scale import ONE, overflow
from conformance.models import INF, NAN, Weighted, poisoned, values
from conformance.outcomes import Chapter
from conformance.subjects.protocol import Scale, Subject

CHAPTER = Chapter("Loss scales of jmp, Keras, DeepSpeed and Apex")

JMP = "jmp: loss_scale_test.py"
DEEPSPEED = "DeepSpeed: test_dynamic_loss_scale.py"


class Three(torch.nn.Module):
    """Three parameters, each with an output of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = torch.nn.ModuleList([Weighted() for _ in range(3)])

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        return [part(x) for part in self.parts]


def scales(subject: Subject, scale: Scale, steps: str) -> list[float]:
    """The scale after each step: ``.`` is finite, ``x`` overflows."""
    seen = []
    with subject.training(Weighted(), scale=scale) as training:
        for step in steps:
            if step == "x":
                overflow(training)
            else:
                training.train(ONE)
            seen.append(training.scale)
    return seen


@CHAPTER.behaviour(f"{JMP}, test_no_op_loss_scale")
def no_op(subject: Subject) -> None:
    """A constant scale of 1 leaves losses and gradients bit for bit as they are."""
    model = Weighted()
    with subject.training(model, scale=Scale(1.0, constant=True)) as training:
        training.backward(training.forward(torch.tensor([3.0, 5.0])).sum())
        assert model.weight.grad.tolist() == [3.0, 5.0]


@CHAPTER.behaviour(f"{JMP}, test_static_loss_scale")
def static(subject: Subject) -> None:
    """A constant scale of 3 stays, whatever happens, and unscales by 3."""
    with subject.training(Weighted(), scale=Scale(4.0, constant=True)) as training:
        training.train(ONE)
        assert values(training.weights()) == [0.5, 1.5]
        overflow(training)
        assert training.scale == 4.0


@CHAPTER.behaviour("Apex: apex/amp/scaler.py; Keras: loss_scale_optimizer.py")
def static_checks(subject: Subject) -> None:
    """A constant scale, too, skips a step that is not finite."""
    with subject.training(Weighted(), scale=Scale(4.0, constant=True)) as training:
        assert not overflow(training)
        assert values(training.weights()) == [1, 2]


@CHAPTER.behaviour(f"{JMP}, test_dynamic_loss_scale_adjust_increases_on_finite")
def jmp_increases(subject: Subject) -> None:
    """From 10, by a factor of 3 after a period of 5, and not before."""
    scale = Scale(10.0, growth=3.0, backoff=1 / 3, interval=5)
    assert scales(subject, scale, ".....") == [10, 10, 10, 10, 30]


@CHAPTER.behaviour(f"{JMP}, test_dynamic_loss_scale_adjust_reduce_on_non_finite")
def jmp_reduces_to_one(subject: Subject) -> None:
    """The scale falls to a smallest scale of 1 and no further."""
    scale = Scale(10.0, interval=20, least=1.0)
    assert scales(subject, scale, "xxxx..") == [5, 2.5, 1.25, 1, 1, 1]


@CHAPTER.behaviour(f"{JMP}, test_dynamic_loss_scale_explicit_min_loss_scale")
def jmp_explicit_minimum(subject: Subject) -> None:
    """The smallest scale can be chosen, below 1 as well."""
    scale = Scale(1.0, interval=20, least=0.3125)
    assert scales(subject, scale, "xx..") == [0.5, 0.3125, 0.3125, 0.3125]


@CHAPTER.behaviour(f"{JMP}, test_all_finite")
def all_finite(subject: Subject) -> None:
    """Infinity or NaN in any one of several parameters is seen, wherever it stands."""
    for place in range(3):
        for value in (INF, NAN):
            with subject.training(Three()) as training:
                factors = [value if i == place else 1.0 for i in range(3)]
                with training.autocast():
                    parts = training.model(ONE)
                losses = [poisoned(p.float(), f) for p, f in zip(parts, factors, strict=True)]
                training.backward(torch.stack(losses).sum())
                assert not training.step(), (place, value)


@CHAPTER.behaviour(f"{DEEPSPEED}, test_all_overflow")
def deepspeed_all_overflow(subject: Subject) -> None:
    """With overflows alone it halves to a smallest scale of 2 and stays there."""
    expected = [8, 4, 2, 2]
    assert scales(subject, Scale(16.0, interval=2, least=2.0), "xxx.") == expected


@CHAPTER.behaviour("DeepSpeed: runtime/fp16/loss_scaler.py; fairseq: optim/dynamic_loss_scaler.py")
def overflow_at_the_smallest_scale(subject: Subject) -> None:
    """Overflow after overflow at the smallest scale ends the training with the reason."""
    with (
        subject.training(Weighted(), scale=Scale(4.0, least=2.0)) as training,
        pytest.raises(Exception, match=r"overflow|diverges|skipped"),
    ):
        for _ in range(16):
            overflow(training)


@CHAPTER.behaviour(f"{DEEPSPEED}, test_some_overflow")
def deepspeed_some_overflow(subject: Subject) -> None:
    """Overflows, then a window of finite steps, then an overflow: down twice, up, down."""
    assert scales(subject, Scale(256.0, interval=2), "xx...x") == [128, 64, 64, 128, 128, 64]


@CHAPTER.behaviour(f"{DEEPSPEED}, test_hysteresis; Apex: test_update_scale_hysteresis.py")
def hysteresis(subject: Subject) -> None:
    """A hysteresis of 3 absorbs two overflows; from the third on each one halves the scale."""
    assert scales(subject, Scale(256.0, hysteresis=3), "xxxx") == [256, 256, 128, 64]


@CHAPTER.behaviour(f"{DEEPSPEED}, test_hysteresis; Apex: test_update_scale_hysteresis.py")
def hysteresis_is_not_refilled_by_a_finite_step(subject: Subject) -> None:
    """A finite step between two overflows does not refill a hysteresis of 2."""
    assert scales(subject, Scale(256.0, hysteresis=2), "x.x") == [256, 256, 128]


@CHAPTER.behaviour(f"{DEEPSPEED}, test_hysteresis; Apex: test_update_scale_hysteresis.py")
def hysteresis_is_refilled_by_growth(subject: Subject) -> None:
    """A growth refills the hysteresis."""
    expected = [256, 256, 512, 512, 256]
    assert scales(subject, Scale(256.0, interval=2, hysteresis=2), "x..xx") == expected


@CHAPTER.behaviour(f"{DEEPSPEED}, test_consecutive_hysteresis")
def consecutive_hysteresis(subject: Subject) -> None:
    """With DeepSpeed's ``consecutive_hysteresis`` a finite step refills the hysteresis."""
    scale = Scale(256.0, hysteresis=2, consecutive=True)
    assert scales(subject, scale, "x.x.x.") == [256] * 6


@CHAPTER.behaviour(f"{DEEPSPEED}, test_hysteresis_survives_a_checkpoint")
def hysteresis_in_a_checkpoint(subject: Subject) -> None:
    """What is left of the hysteresis is in the checkpoint."""
    scale = Scale(256.0, hysteresis=2)
    with subject.training(Weighted(), scale=scale) as training:
        overflow(training)
        state = training.state()
    with subject.training(Weighted(), scale=scale) as training:
        training.load(state)
        overflow(training)
        assert training.scale == 128


@CHAPTER.behaviour("Apex: apex/amp/scaler.py")
def a_largest_scale(subject: Subject) -> None:
    """The largest scale can be chosen, and growth stops there."""
    assert scales(subject, Scale(4.0, interval=1, most=16.0), "....") == [8, 16, 16, 16]
