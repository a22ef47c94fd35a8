"""Loss scales of other projects: jmp, Keras, DeepSpeed, Apex; by their rules, in one loop."""

import pytest
import torch
from conformance.behaviours.loss_scale import overflow
from conformance.models import INF, NAN, ONE, Weighted, poisoned
from conformance.outcomes import Chapter
from conformance.subjects.protocol import Scale, Subject, Training

CHAPTER = Chapter("Loss scales of jmp, Keras, DeepSpeed and Apex")


class Three(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = torch.nn.ModuleList([Weighted() for _ in range(3)])

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        return [part(x) for part in self.parts]


@CHAPTER.trained(scale=Scale(1.0, constant=True))
def no_op(training: Training) -> None:
    """A constant scale of 1 leaves losses and gradients bit for bit as they are."""
    training.backward(training.forward(torch.tensor([3.0, 5.0])).sum())
    assert training.raw.weight.grad.tolist() == [3.0, 5.0]


@CHAPTER.behaviour
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


@CHAPTER.trained(scale=Scale(4.0, least=2.0))
def overflow_at_the_smallest_scale(training: Training) -> None:
    """Overflow after overflow at the smallest scale ends the training with the reason."""
    with pytest.raises(Exception, match=r"overflow|diverges|skipped"):
        for _ in range(16):
            overflow(training)
