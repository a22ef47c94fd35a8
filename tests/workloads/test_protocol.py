"""What every workload promises, and the loop that trains one."""

import math
from collections.abc import Iterator

import pytest
import torch

from mpdiag.workloads import load, names
from mpdiag.workloads.digits import Digits
from mpdiag.workloads.protocol import Batch, Session, Workload, plain_step, start


@pytest.fixture(autouse=True)
def _leave_the_random_state_alone() -> Iterator[None]:
    with torch.random.fork_rng():
        yield


@pytest.fixture(params=names())
def workload(request: pytest.FixtureRequest) -> Workload:
    return load(request.param)


def test_describes_itself(workload: Workload) -> None:
    assert load(workload.name) == workload
    assert workload.summary.endswith(".")
    assert all((workload.title, workload.family, workload.metric, workload.default_steps > 0))
    assert workload.margin > 0


def test_batches_depend_on_the_seed_alone(workload: Workload) -> None:
    first = list(workload.batches(2, seed=7))
    torch.rand(5)  # what others draw in between does not matter
    again = list(workload.batches(2, seed=7))
    other = list(workload.batches(2, seed=8))
    assert len(first) == 2
    assert all(
        torch.equal(a, b)
        for x, y in zip(first, again, strict=True)
        for a, b in zip(x, y, strict=True)
    )
    assert not torch.equal(first[0][0], first[1][0])
    assert not torch.equal(first[0][0], other[0][0])


def test_gradients_reach_every_parameter(workload: Workload) -> None:
    session = start(workload, steps=1, seed=0)
    (batch,) = workload.batches(1, seed=0)
    for loss in workload.losses(session.model, batch):
        loss.backward()
    dead = [n for n, p in session.model.named_parameters() if p.grad is None or not p.grad.any()]
    assert dead == []


def test_the_loss_falls(workload: Workload) -> None:
    steps = 40 if workload.name == "speech" else 25  # CTC first learns to say nothing
    losses = start(workload, steps=steps, seed=0).run()
    assert all(map(math.isfinite, losses))
    assert sum(losses[-5:]) < 0.95 * sum(losses[:5])


def test_evaluation_repeats_itself_and_leaves_no_trace(workload: Workload) -> None:
    session = start(workload, steps=1, seed=0)
    before = {name: value.clone() for name, value in session.model.state_dict().items()}
    assert session.evaluate() == session.evaluate()
    assert session.model.training
    assert all(
        torch.equal(value, before[name]) for name, value in session.model.state_dict().items()
    )


def test_digits_are_learned() -> None:
    session = start(Digits(), steps=100, seed=0)
    session.run()
    assert session.evaluate() > 0.97


def test_start_takes_no_step_and_takes_the_default_number_of_steps() -> None:
    session = start(Digits(), seed=0)
    assert session.steps == Digits.default_steps
    assert not session.optimizer.state


def test_another_way_to_take_a_step_can_be_put_in_and_each_is_told() -> None:
    def scaled(session: Session, batch: Batch) -> torch.Tensor:
        loss = session.workload.loss(session.model, batch)
        session.optimizer.zero_grad()
        (loss * 1024).backward()
        for parameter in session.model.parameters():
            assert parameter.grad is not None
            parameter.grad /= 1024
        session.optimizer.step()
        session.schedulers[0].step()
        return loss.detach()

    told: list[tuple[int, float]] = []
    sessions = [start(Digits(), steps=3) for _ in range(3)]
    plain = sessions[0].run(take_step=plain_step)
    assert sessions[1].run(on_step=lambda step, loss: told.append((step, loss))) == plain
    assert told == list(enumerate(plain))
    # A power of two changes no digit of a float, so all are the same to the last bit.
    assert sessions[2].run(take_step=scaled) == plain
    for weights in zip(*(session.model.parameters() for session in sessions), strict=True):
        assert all(torch.equal(weights[0], other) for other in weights)


def test_a_loss_that_is_not_finite_is_not_hidden() -> None:
    diverging = Digits(learning_rate=1e30)
    losses = start(diverging, steps=6, seed=0).run()
    assert len(losses) == 6
    finite = [math.isfinite(loss) for loss in losses]
    assert not all(finite)
    assert finite[0]
