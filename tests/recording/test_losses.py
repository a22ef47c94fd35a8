"""The losses of a recorded training: noted as they are, and left to whoever else notes them."""

import contextlib
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

import mpdiag
from mpdiag.recording import losses
from mpdiag.runs.training_log import is_recorded, read_log

PLAIN = torch.autograd.backward


@pytest.fixture(autouse=True)
def nothing_is_left_behind():
    yield
    assert torch.autograd.backward is PLAIN
    assert losses._live == []


def setup():
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    return model, torch.optim.SGD(model.parameters(), 0.1)


pair = pytest.fixture(setup)


def loss_of(model):
    return model(torch.randn(5, 4)).square().mean()


def step(model, optimizer, parts=1):
    """One step; returns the sum of its parts' losses: the mean, as each is divided by their number."""
    seen = []
    for _ in range(parts):
        loss = loss_of(model) / parts
        loss.backward()
        seen.append(loss.item())
    optimizer.step()
    optimizer.zero_grad()
    return sum(seen)


def train(model, optimizer, steps=5, parts=1):
    return [step(model, optimizer, parts) for _ in range(steps)]


def noted(folder):
    return [s.loss for s in read_log(folder).steps]


def train_by_plan(model, optimizer, folder, steps=1, **options):
    plan = mpdiag.PrecisionPlan()
    with mpdiag.MixedPrecision(model, optimizer, plan, run=folder, **options) as mp:
        for _ in range(steps):
            parts = []
            for _ in range(2):
                with mp.autocast():
                    loss = loss_of(model) / 2
                mp.backward(loss)
                parts.append(loss.item())
            assert mp.step().loss == sum(parts)


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("every", [None, 3])  # of each step, recorded or not
def test_every_steps_loss_is_noted(tmp_path, pair, parts, every):
    with mpdiag.record(*pair, tmp_path / "run", every=every):
        seen = train(*pair, parts=parts)
    log = read_log(tmp_path / "run")
    assert [s.loss for s in log.steps] == seen
    assert [s.step for s in log.steps] == list(range(5))
    assert {(s.scale, s.skipped) for s in log.steps} == {(1.0, False)}
    assert log.steps[0].seconds is None
    assert log.steps[1].seconds > 0
    assert is_recorded(tmp_path / "run")


def test_it_is_no_operation_of_the_training(tmp_path):
    found = []
    for name in ("with", "without"):
        pair = setup()
        recorder = mpdiag.record(*pair, tmp_path / name, operations=1)
        if name == "without":
            recorder._losses.forget()
        with recorder:
            step(*pair)
        operations = mpdiag.open_run(tmp_path / name).operations()
        found.append([(o.op, o.phase) for o in operations])
    assert found[0] == found[1]


def test_many_are_written_on_the_way(tmp_path, monkeypatch, pair):
    monkeypatch.setattr(losses, "MANY", 4)
    with mpdiag.record(*pair, tmp_path / "run", every=100):
        seen = train(*pair, steps=4)
        assert noted(tmp_path / "run") == seen[:-1]
        seen += train(*pair, steps=3)
    assert noted(tmp_path / "run") == seen


def each_steps_by_itself(a, b):
    return [loss for _ in range(2) for loss in (step(*a), step(*b))]


def they_share_a_step(a, b):
    seen = []
    for _ in range(3):
        losses = [loss_of(model) for model, _ in (a, b)]
        sum(losses).backward()
        for _, optimizer in (a, b):
            optimizer.step()
            optimizer.zero_grad()
        seen.append(sum(losses).item())
    return seen


def what_is_no_loss_is_left_alone(pair):
    model, optimizer = pair
    output = model(torch.randn(5, 4))
    output.backward(torch.ones_like(output))
    optimizer.step()
    loss = model(torch.randn(5, 4)).sum()
    torch.autograd.backward(tensors=[loss])
    optimizer.step()
    return [None, loss.item()]


def weights_count_as_torch_counts_them(pair):
    model, optimizer = pair
    first, second = (model(torch.randn(5, 4)).mean() for _ in range(2))
    torch.autograd.backward([first, second], [None, torch.tensor(-0.5)])
    optimizer.step()
    return [first.item() - 0.5 * second.item()]


def cleared_gradients_take_their_loss_along(pair):
    model, optimizer = pair
    loss_of(model).backward()
    optimizer.zero_grad()  # a batch that the script discards
    return [step(*pair)]


@pytest.mark.parametrize(
    ("number", "loop"),
    [
        (2, each_steps_by_itself),
        (2, they_share_a_step),
        (1, what_is_no_loss_is_left_alone),
        (1, weights_count_as_torch_counts_them),
        (1, cleared_gradients_take_their_loss_along),
    ],
)
def test_the_losses_of_a_loop(tmp_path, number, loop):
    pairs = [setup() for _ in range(number)]
    with mpdiag.record([m for m, _ in pairs], [o for _, o in pairs], tmp_path / "run"):
        seen = loop(*pairs)
    found = {s.step: s.loss for s in read_log(tmp_path / "run").steps}
    assert found == {i: loss for i, loss in enumerate(seen) if loss is not None}


def test_a_trainer_of_ours_writes_its_own(tmp_path, pair):
    overrides = mpdiag.PrecisionOverrides(loss_scale=64.0)
    with mpdiag.record(*pair, tmp_path / "run"):
        train_by_plan(*pair, tmp_path / "run", 3, overrides=overrides)
    assert not is_recorded(tmp_path / "run")
    assert [s.scale for s in read_log(tmp_path / "run").steps] == [64.0] * 3


def test_a_log_that_somebody_else_writes_is_theirs(tmp_path, pair):
    with mpdiag.record(*pair, tmp_path / "run"):
        train(*pair)
        (tmp_path / "run" / "training.jsonl").write_text("", encoding="utf-8")
    assert (tmp_path / "run" / "training.jsonl").read_text(encoding="utf-8") == ""


def test_recordings_within_each_other_and_a_wrapper_of_somebody_else(tmp_path, pair):
    with mpdiag.record(*pair, tmp_path / "a"):
        with mpdiag.record(*pair, tmp_path / "b"):
            seen = train(*pair, steps=2)
        seen += train(*pair, steps=1)
    assert noted(tmp_path / "a") == seen
    assert noted(tmp_path / "b") == seen[:2]
    recorder = mpdiag.record(*pair, tmp_path / "c").start()
    ours = torch.autograd.backward

    def theirs(*args, **options):
        return ours(*args, **options)

    torch.autograd.backward = theirs
    recorder.close()
    assert torch.autograd.backward is theirs
    train(*pair, steps=1)  # goes through all of them
    torch.autograd.backward = PLAIN


def test_what_a_scaler_scaled_is_noted_without_its_scale(tmp_path, pair):
    model, optimizer = pair
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    with mpdiag.record(model, optimizer, tmp_path / "run"):
        seen = []
        for _ in range(2):
            loss = loss_of(model)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            seen.append(loss.item())
    log = read_log(tmp_path / "run")
    assert [s.loss for s in log.steps] == seen
    assert [s.scale for s in log.steps] == [256.0] * 2


def test_a_metric_goes_into_the_run_that_began_last_also_after_its_end(tmp_path, pair):
    with mpdiag.record(*pair, tmp_path / "fp32") as recorder:
        train(*pair, 2)
        mpdiag.log_metric("accuracy", torch.tensor(0.5))
    mpdiag.log_metric("accuracy", 0.75)
    recorder.log_metric("loss", 0.1, higher_is_better=False)
    train_by_plan(*pair, tmp_path / "fp16")
    mpdiag.log_metric("accuracy", 0.7)
    log = read_log(tmp_path / "fp32")
    assert [m.value for m in log.metrics] == [0.5, 0.75, 0.1]
    assert len(log.steps) == 2
    assert read_log(tmp_path / "fp16").metric("accuracy").value == 0.7
    (metric, _) = mpdiag.compare(tmp_path / "fp32", tmp_path / "fp16").metrics
    assert (metric.metric, metric.a, metric.b) == ("accuracy", (0.75,), (0.7,))


def test_two_trainings_in_two_threads_have_their_own_losses_and_steps(tmp_path):
    """In turn, so that each backward pass comes while the other training is in its step."""
    turns = [threading.Semaphore(1), threading.Semaphore(0)]
    seen = [[], []]

    @contextlib.contextmanager
    def turn(own):
        assert turns[own].acquire(timeout=60)
        yield
        turns[1 - own].release()

    def trained(own):
        generator = torch.Generator().manual_seed(own)
        model = nn.Linear(4, 3)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        recorder = mpdiag.record(model, optimizer, tmp_path / str(own), every=1)
        with turn(own):
            recorder.start()
        for _ in range(6):
            with turn(own):
                loss = (model(torch.randn(5, 4, generator=generator)) - own).square().mean()
            with turn(own):
                loss.backward()
                seen[own].append(loss.item())
            with turn(own):
                optimizer.step()
                optimizer.zero_grad()
        with turn(own):
            recorder.close()

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(trained, (0, 1), timeout=120))
    for own in (0, 1):
        assert noted(tmp_path / str(own)) == seen[own]
        meta = mpdiag.open_run(tmp_path / str(own)).meta
        assert (meta["steps_seen"], meta["failures"]) == (6, [])


def test_a_model_that_trains_in_another_thread_is_heard(tmp_path, pair):
    """Recording starts in the main thread, training runs in one of its own."""
    other = nn.Linear(4, 1)
    with mpdiag.record(*pair, tmp_path / "run"):
        with ThreadPoolExecutor(1) as pool:
            seen = pool.submit(train, *pair).result(60)
        with ThreadPoolExecutor(1) as pool:  # in one more, what is not recorded
            pool.submit(lambda: other(torch.ones(2, 4)).sum().backward()).result(60)
        seen += train(*pair, steps=1)
    assert noted(tmp_path / "run") == seen
