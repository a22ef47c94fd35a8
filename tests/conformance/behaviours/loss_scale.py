"""How a dynamic loss scale moves, and what it does to gradients."""

import math

import torch
from conformance.models import INF, NAN, ONE, Weighted, poisoned, values
from conformance.outcomes import Chapter
from conformance.subjects.protocol import Scale, Subject, Training

CHAPTER = Chapter("Loss scale", about_loops=True)


def overflow(training: Training, value: float = INF) -> bool:
    """A step whose gradients are not finite; the forward pass is."""
    training.backward(poisoned(training.forward(ONE), value).sum())
    return training.step()


@CHAPTER.trained(scale=Scale(64.0))
def gradients_carry_the_scale(training: Training) -> None:
    """Before the step, gradients are the plain ones times the scale."""
    training.backward(training.forward(torch.tensor([1.0, -3.0])).sum())
    assert training.raw.weight.grad.tolist() == [64.0, -192.0]


@CHAPTER.behaviour
def unscaling_is_exact(subject: Subject) -> None:
    """Unscaled gradients are the plain ones, bit for bit, at a scale of a power of two."""
    for scale in (1.0, 2.0**10):
        with subject.training(Weighted(), scale=Scale(scale)) as training:
            training.backward(training.forward(torch.tensor([1.5, -0.375])).sum())
            training.unscale()
            (held,) = training.stepped()
            assert held.grad.tolist() == [1.5, -0.375]


@CHAPTER.trained(
    [0.5, -1.0, -0.5, 3.0], model=lambda: Weighted(1.0, 2.0, 3.0, 4.0), scale=Scale(2.0**13)
)
def a_finite_step_is_the_optimizers(training: Training) -> None:
    """A finite step moves the weights by the unscaled gradients."""
    assert training.train(torch.tensor([1.0, 6.0, 7.0, 2.0]))


@CHAPTER.behaviour
def an_infinite_step_changes_nothing(subject: Subject) -> None:
    """A step that is not finite leaves weights and the optimizer's state as they were."""
    model = Weighted()
    optimizer = torch.optim.Adam(model.parameters(), 0.1, eps=1e-3)
    with subject.training(model, optimizer) as training:
        training.train(ONE)
        before = values(training.weights())
        (held,) = training.stepped()
        state = {n: v.clone() for n, v in optimizer.state[held].items()}
        overflow(training)
        assert values(training.weights()) == before
        assert all(torch.equal(v, state[n]) for n, v in optimizer.state[held].items())


@CHAPTER.behaviour
def one_bad_gradient_skips_all(subject: Subject) -> None:
    """One infinite element among all parameters skips the whole step."""
    model = torch.nn.ModuleList([Weighted(), Weighted(3.0, 4.0)])
    forward = torch.nn.Module()
    forward.parts = model
    forward.forward = lambda x: (model[0](x), model[1](x))
    with subject.training(forward) as training:
        with training.autocast():
            first, second = training.model(ONE)
        weighted = poisoned(second.float()[:1])
        training.backward(first.float().sum() + weighted.sum())
        assert not training.step()
        assert values(training.weights()) == [1, 2, 3, 4]


def embedding() -> torch.nn.Module:
    return torch.nn.Embedding.from_pretrained(torch.ones(5, 2), freeze=False, sparse=True)


@CHAPTER.trained([1, 1, 0.5, 0.5, 1, 1, 0, 0, 1, 1], model=embedding, scale=Scale(256.0))
def sparse_gradients(training: Training) -> None:
    """Sparse gradients are unscaled exactly."""
    assert training.train(torch.tensor([1, 3, 3]))


@CHAPTER.trained(model=lambda: torch.nn.Embedding(5, 2, sparse=True))
def sparse_infinity(training: Training) -> None:
    """An infinity in a sparse gradient skips the step."""
    before = training.weights()["weight"]
    training.backward(poisoned(training.forward(torch.tensor([1, 3]))).sum())
    assert not training.step()
    assert torch.equal(training.weights()["weight"], before)


@CHAPTER.trained(model=lambda: torch.nn.Embedding(3, 2, sparse=True), scale=Scale(1.0))
def sparse_duplicates(training: Training) -> None:
    """Entries of a sparse gradient whose sum overflows never make a weight infinite."""
    output = training.forward(torch.tensor([1, 1, 1, 1, 1]))
    training.backward(poisoned(output, 2.0**127).sum())
    training.step()
    assert bool(torch.isfinite(training.weights()["weight"]).all())


@CHAPTER.trained(scale=Scale(64.0))
def unscaling_twice(training: Training) -> None:
    """Unscaling twice divides once."""
    training.backward(training.forward(torch.tensor([1.0, 3.0])).sum())
    training.unscale()
    training.unscale()
    (held,) = training.stepped()
    assert held.grad.tolist() == [1.0, 3.0]


@CHAPTER.trained()
def nan_after_unscale_is_not_stepped(training: Training) -> None:
    """A gradient that becomes NaN after it was unscaled is not stepped."""
    training.backward(training.forward(ONE).sum())
    training.unscale()
    for held in training.stepped():
        held.grad.fill_(NAN)
    training.step()
    assert all(map(math.isfinite, values(training.weights())))


@CHAPTER.behaviour
def growth_stays_finite(subject: Subject) -> None:
    """A scale that grows without end stays finite."""
    scale = Scale(2.0**100, growth=2.0**20, interval=1)
    if subject.ours:
        scale = Scale(2.0**20, growth=2.0**20, interval=1)
    model = Weighted(0.0, 0.0)
    with subject.training(model, scale=scale) as training:
        for _ in range(4):
            training.train(torch.zeros(2))
        assert math.isfinite(training.scale)


@CHAPTER.behaviour
def a_scale_that_falls_without_end(subject: Subject) -> None:
    """A scale that falls and falls never makes a weight infinite or NaN."""
    scale = Scale(2.0**-120, growth=2.0, backoff=2.0**-20)
    if subject.ours:
        scale = Scale(2.0**-120, backoff=2.0**-20, least=2.0**-140)
    with subject.training(Weighted(), scale=scale) as training:
        overflow(training)
        for _ in range(2):
            training.backward(training.forward(ONE).sum())
            training.step()
        assert all(map(math.isfinite, values(training.weights())))


@CHAPTER.trained([0.5, 1.5], scale=Scale(64.0))
def a_loss_of_one_element(training: Training) -> None:
    """A loss of shape (1,) is scaled like a scalar."""
    training.backward(training.forward(ONE).sum().reshape(1))
    assert training.step()


def half_loss(training: Training) -> torch.Tensor:
    """An FP16 loss of 8 whose gradients are 1/2."""
    with training.autocast():
        output = training.model(torch.full((2,), 0.5))
    return output.half().sum(dtype=torch.float16)


@CHAPTER.behaviour
def a_half_loss(subject: Subject) -> None:
    """An FP16 loss of 8 at a scale of 2^15, a product that FP16 cannot hold, gives right gradients."""
    for shape in ((), (1,)):
        with subject.training(Weighted(8.0, 8.0), scale=Scale(2.0**15)) as training:
            training.backward(half_loss(training).reshape(shape))
            assert training.step()
            assert values(training.weights()) == [7.75, 7.75]


@CHAPTER.trained(model=lambda: Weighted(8.0, 8.0), scale=Scale(2.0**16))
def a_half_loss_at_a_larger_scale(training: Training) -> None:
    """An FP16 loss at a scale of 2^16 is stepped."""
    training.backward(half_loss(training) * 2.0**-6)
    assert training.step()
