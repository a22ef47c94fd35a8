"""Training loops: clipping, accumulation, several models, closures, schedulers, groups."""

import pytest
import torch
from conformance.models import INF, ONE, Weighted, poisoned, values
from conformance.outcomes import Chapter
from conformance.subjects.protocol import Scale, Subject, Training
from torch import nn

CHAPTER = Chapter("Training loops", about_loops=True)


@CHAPTER.behaviour
def clipping_sees_unscaled_gradients(subject: Subject) -> None:
    """The norm that clipping returns, and the step after it, are those of unscaled gradients."""
    with subject.training(Weighted(), scale=Scale(1024.0)) as training:
        training.backward(training.forward(torch.tensor([3.0, 4.0])).sum())
        assert training.clip(2.5) == 5.0
        assert training.step()
        expected = [1 - 0.5 * 1.5, 2 - 0.5 * 2.0]
        assert values(training.weights()) == pytest.approx(
            expected, abs=1e-6 if not subject.low_model else 1e-3
        )


@CHAPTER.trained(scale=Scale(1024.0))
def clipping_the_models_parameters(training: Training) -> None:
    """``clip_grad_norm_(model.parameters())`` after unscaling clips, or raises: it never returns 0."""
    training.backward(training.forward(torch.tensor([3.0, 4.0])).sum())
    training.unscale()
    try:
        norm = float(nn.utils.clip_grad_norm_(training.raw.parameters(), 2.5))
    except RuntimeError:
        return
    assert norm == 5.0
    training.step()
    assert values(training.weights()) == pytest.approx([0.25, 1.0], abs=1e-3)


@CHAPTER.trained(scale=Scale(64.0))
def clipping_scaled_gradients(training: Training) -> None:
    """Clipping by hand at a limit times the scale, before unscaling, is clipping at the limit."""
    training.backward(training.forward(torch.tensor([3.0, 4.0])).sum())
    nn.utils.clip_grad_norm_(training.raw.parameters(), 2.5 * training.scale)
    training.step()
    assert values(training.weights()) == pytest.approx([0.25, 1.0], abs=2e-3)


def two_models() -> list[nn.Module]:
    return [Weighted(), Weighted()]


@CHAPTER.trained([0, 1], model=two_models, scale=Scale(64.0, interval=1))
def a_change_of_scale_within_an_accumulation(training: Training) -> None:
    """A change of scale between accumulated parts weighs all parts alike."""
    one, two = training.optimizers
    for model in training.models:
        training.backward(training.forward(ONE, model=model).sum())
    training.step(two)  # the scale grows
    assert training.scale == 128
    training.backward(training.forward(ONE, model=training.models[0]).sum())
    training.step(one)


@CHAPTER.behaviour
def two_models_one_optimizer(subject: Subject) -> None:
    """Two models, two losses, one optimizer: an overflow in either loss skips both."""
    for bad in range(2):
        models = [Weighted(), Weighted()]
        optimizer = torch.optim.SGD([{"params": m.parameters()} for m in models], 0.5)
        with subject.training(models, optimizer) as training:
            for i, model in enumerate(training.models):
                output = training.forward(ONE, model=model)
                training.backward(poisoned(output, INF if i == bad else 1.0).sum())
            assert not training.step()
            for model in training.models:
                training.backward(training.forward(ONE, model=model).sum())
            assert training.step()
            assert all(values(training.weights(m)) == [0.5, 1.5] for m in training.models)


@CHAPTER.behaviour
def two_models_two_optimizers(subject: Subject) -> None:
    """Two models with an optimizer each: an overflow in one skips that one alone."""
    for bad in range(2):
        with subject.training([Weighted(), Weighted()]) as training:
            for i, model in enumerate(training.models):
                output = training.forward(ONE, model=model)
                training.backward(poisoned(output, INF if i == bad else 1.0).sum())
            training.step(*training.optimizers)
            found = [values(training.weights(m)) for m in training.models]
            assert found[bad] == [1, 2]
            assert found[1 - bad] == [0.5, 1.5]


@CHAPTER.trained([-2, -2], model=lambda: [Weighted(x, x) for x in (1.0, 2.0, 4.0)])
def a_model_shared_by_two_losses(training: Training) -> None:
    """A model shared by two losses receives the gradients of both."""
    for head in training.models[1:]:
        with training.autocast():
            output = head(training.models[0](ONE))
        training.backward(output.float().sum())
    assert training.step()


@CHAPTER.trained(model=two_models, scale=Scale(64.0, interval=2))
def two_optimizers_grow_the_scale_once(training: Training) -> None:
    """Two optimizers stepped one after the other count as one step of the growth interval."""
    for model in training.models:
        training.backward(training.forward(ONE, model=model).sum())
    training.step(*training.optimizers)
    assert training.scale == 64


@CHAPTER.trained([1.78515625] * 2, model=lambda: [Weighted(x, x) for x in (1.0, 2.0)], rate=0.25)
def a_gan(training: Training) -> None:
    """Generator and discriminator in turn, with gradients that pass through the other one."""
    made, judge = training.models
    for _ in range(2):
        with training.autocast():
            judged = judge(made(ONE).detach())
        training.backward(judged.float().sum())
        assert training.step(training.optimizers[1])
        with training.autocast():
            judged = judge(made(ONE))
        training.backward(-judged.float().sum())
        assert training.step(training.optimizers[0])
        training.optimizers[1].zero_grad()


@CHAPTER.trained()
def a_step_without_gradients_is_refused(training: Training) -> None:
    """A step for which there is no gradient raises an error rather than do nothing."""
    with pytest.raises(Exception, match=r"gradient|inf checks|_scale"):
        training.step()


@CHAPTER.behaviour
def unused_parameters(subject: Subject) -> None:
    """Parameters without gradients, or without elements, are left alone."""
    model = Weighted()
    model.unused = nn.Parameter(torch.ones(3))
    model.empty = nn.Parameter(torch.ones(0))
    with subject.training(model) as training:
        assert training.train(ONE)
        assert training.weights()["unused"].tolist() == [1, 1, 1]
