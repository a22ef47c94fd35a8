"""The losses of a recorded training: noted as they are, and left to whoever else notes them."""

from __future__ import annotations

import contextlib
import threading

import pytest
import torch
from torch import nn

import mpdiag
from mpdiag.recording import losses
from mpdiag.runs.training_log import RECORDED, is_recorded, read_log

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


def step(model, optimizer, parts=1):
    """One step; returns the sum of its parts' losses: the mean, as each is divided by their number."""
    seen = []
    for _ in range(parts):
        loss = model(torch.randn(5, 4)).square().mean() / parts
        loss.backward()
        seen.append(loss.item())
    optimizer.step()
    optimizer.zero_grad()
    return sum(seen)


def train(model, optimizer, steps=5, parts=1):
    return [step(model, optimizer, parts) for _ in range(steps)]


def noted(folder):
    """The losses in the log of a run."""
    return [s.loss for s in read_log(folder).steps]


def train_by_plan(model, optimizer, folder, steps=1, **options):
    plan = mpdiag.PrecisionPlan()
    with mpdiag.MixedPrecision(model, optimizer, plan, run=folder, **options) as mp:
        for _ in range(steps):
            with mp.autocast():
                loss = model(torch.randn(5, 4)).square().mean()
            mp.step(loss)


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("every", [None, 3])  # of each step, recorded or not
def test_every_steps_loss_is_noted(tmp_path, parts, every):
    model, optimizer = setup()
    with mpdiag.record(model, optimizer, tmp_path / "run", every=every):
        seen = train(model, optimizer, parts=parts)
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
        model, optimizer = setup()
        recorder = mpdiag.record(model, optimizer, tmp_path / name, operations=1)
        if name == "without":
            recorder._losses.forget()
        with recorder:
            train(model, optimizer, steps=1)
        operations = mpdiag.open_run(tmp_path / name).operations()
        found.append([(o.op, o.phase) for o in operations])
    assert found[0] == found[1]


def test_many_are_written_on_the_way(tmp_path, monkeypatch):
    monkeypatch.setattr(losses, "MANY", 4)
    model, optimizer = setup()
    with mpdiag.record(model, optimizer, tmp_path / "run", every=100):
        seen = train(model, optimizer, steps=4)
        assert noted(tmp_path / "run") == seen[:-1]
        seen += train(model, optimizer, steps=3)
    assert noted(tmp_path / "run") == seen


def test_each_step_of_several_optimizers_has_its_loss(tmp_path):
    a, b = setup(), setup()
    seen = []
    with mpdiag.record([a[0], b[0]], [a[1], b[1]], tmp_path / "run"):
        for _ in range(2):
            seen += [step(*a), step(*b)]
    log = read_log(tmp_path / "run")
    assert [(s.step, s.loss) for s in log.steps] == list(enumerate(seen))


def test_optimizers_that_share_a_step_have_one_loss(tmp_path):
    a, b = setup(), setup()
    seen = []
    with mpdiag.record([a[0], b[0]], [a[1], b[1]], tmp_path / "run"):
        for _ in range(3):
            losses = [model(torch.randn(5, 4)).square().mean() for model, _ in (a, b)]
            sum(losses).backward()
            for _, optimizer in (a, b):
                optimizer.step()
                optimizer.zero_grad()
            seen.append(sum(losses).item())
    assert noted(tmp_path / "run") == seen


def test_what_is_no_loss_is_left_alone(tmp_path):
    model, optimizer = setup()
    with mpdiag.record(model, optimizer, tmp_path / "run"):
        output = model(torch.randn(5, 4))
        output.backward(torch.ones_like(output))
        optimizer.step()
        torch.autograd.backward(tensors=[model(torch.randn(5, 4)).sum()])
        optimizer.step()
    assert [s.step for s in read_log(tmp_path / "run").steps] == [1]


def test_weights_and_several_losses_count_as_torch_counts_them(tmp_path):
    model, optimizer = setup()
    with mpdiag.record(model, optimizer, tmp_path / "run"):
        first, second = (model(torch.randn(5, 4)).mean() for _ in range(2))
        torch.autograd.backward([first, second], [None, torch.tensor(-0.5)])
        optimizer.step()
    (noted,) = read_log(tmp_path / "run").steps
    assert noted.loss == first.item() - 0.5 * second.item()


def test_gradients_that_were_cleared_take_their_loss_along(tmp_path):
    model, optimizer = setup()
    with mpdiag.record(model, optimizer, tmp_path / "run"):
        model(torch.randn(5, 4)).mean().backward()
        optimizer.zero_grad()  # a batch that the script discards
        seen = step(model, optimizer)
    assert noted(tmp_path / "run") == [seen]


def test_of_a_closure_the_first_evaluation_counts(tmp_path):
    model, _ = setup()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=4)
    x, seen = torch.randn(5, 4), []

    def closure():
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        seen.append(loss.item())
        return loss

    with mpdiag.record(model, optimizer, tmp_path / "run"):
        optimizer.step(closure)
    assert len(seen) > 1
    assert noted(tmp_path / "run") == seen[:1]


def test_a_trainer_of_ours_writes_its_own(tmp_path):
    model, optimizer = setup()
    overrides = mpdiag.PrecisionOverrides(loss_scale=64.0)
    with mpdiag.record(model, optimizer, tmp_path / "run"):
        train_by_plan(model, optimizer, tmp_path / "run", 3, overrides=overrides)
    assert not is_recorded(tmp_path / "run")
    assert [s.scale for s in read_log(tmp_path / "run").steps] == [64.0] * 3


def test_a_trainer_in_the_folder_of_a_recording_begins_a_new_log(tmp_path):
    model, optimizer = setup()
    with mpdiag.record(model, optimizer, tmp_path / "run"):
        train(model, optimizer, steps=5)
    train_by_plan(model, optimizer, tmp_path / "run")
    assert len(read_log(tmp_path / "run").steps) == 1


def test_a_log_that_somebody_else_writes_is_theirs(tmp_path):
    model, optimizer = setup()
    with mpdiag.record(model, optimizer, tmp_path / "run"):
        train(model, optimizer)
        (tmp_path / "run" / "training.jsonl").write_text("", encoding="utf-8")
    assert (tmp_path / "run" / "training.jsonl").read_text(encoding="utf-8") == ""


def test_recordings_within_each_other_and_a_wrapper_of_somebody_else(tmp_path):
    model, optimizer = setup()
    with mpdiag.record(model, optimizer, tmp_path / "a"):
        with mpdiag.record(model, optimizer, tmp_path / "b"):
            seen = train(model, optimizer, steps=2)
        seen += train(model, optimizer, steps=1)
    assert noted(tmp_path / "a") == seen
    assert noted(tmp_path / "b") == seen[:2]
    recorder = mpdiag.record(model, optimizer, tmp_path / "c").start()
    ours = torch.autograd.backward

    def theirs(*args, **options):
        return ours(*args, **options)

    torch.autograd.backward = theirs
    recorder.close()
    assert torch.autograd.backward is theirs
    train(model, optimizer, steps=1)  # goes through all of them
    torch.autograd.backward = PLAIN


def test_what_a_scaler_scaled_is_noted_without_its_scale(tmp_path):
    model, optimizer = setup()
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    with mpdiag.record(model, optimizer, tmp_path / "run"):
        seen = []
        for _ in range(2):
            loss = model(torch.randn(5, 4)).square().mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            seen.append(loss.item())
    log = read_log(tmp_path / "run")
    assert [s.loss for s in log.steps] == seen
    assert [s.scale for s in log.steps] == [256.0] * 2


def test_compare_has_both_sides(tmp_path):
    model, optimizer = setup()
    with mpdiag.record(model, optimizer, tmp_path / "fp32"):
        train(model, optimizer, steps=30)
    model, optimizer = setup()
    plan = mpdiag.analyze(tmp_path / "fp32").plan
    mp = mpdiag.MixedPrecision(model, optimizer, plan, run=tmp_path / "fp16")
    for _ in range(30):
        seen = []
        for _ in range(2):
            with mp.autocast():
                loss = model(torch.randn(5, 4)).square().mean() / 2
            mp.backward(loss)
            seen.append(loss.item())
        result = mp.step()
        assert result.loss == sum(seen)
    mp.close()
    comparison = mpdiag.compare(tmp_path / "fp32", tmp_path / "fp16")
    assert comparison.curve.steps == 30
    assert RECORDED["source"] == "recording"


def test_a_metric_goes_into_the_run_that_began_last_also_after_its_end(tmp_path):
    model, optimizer = setup()
    with mpdiag.record(model, optimizer, tmp_path / "fp32") as recorder:
        train(model, optimizer, 2)
        mpdiag.log_metric("accuracy", torch.tensor(0.5))
    mpdiag.log_metric("accuracy", 0.75)
    recorder.log_metric("loss", 0.1, higher_is_better=False)
    train_by_plan(model, optimizer, tmp_path / "fp16")
    mpdiag.log_metric("accuracy", 0.7)
    log = read_log(tmp_path / "fp32")
    assert [m.value for m in log.metrics] == [0.5, 0.75, 0.1]
    assert len(log.steps) == 2
    assert read_log(tmp_path / "fp16").metric("accuracy").value == 0.7
    (metric, _) = mpdiag.compare(tmp_path / "fp32", tmp_path / "fp16").metrics
    assert (metric.metric, metric.a, metric.b) == ("accuracy", (0.75,), (0.7,))


def test_a_metric_without_a_run_is_no_error(monkeypatch):
    from mpdiag.runs import training_log

    monkeypatch.setattr(training_log, "_sinks", [])
    mpdiag.log_metric("accuracy", 1)


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

    threads = [threading.Thread(target=trained, args=(own,)) for own in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    for own in (0, 1):
        assert noted(tmp_path / str(own)) == seen[own]
        meta = mpdiag.open_run(tmp_path / str(own)).meta
        assert (meta["steps_seen"], meta["failures"]) == (6, [])


def test_a_model_that_trains_in_another_thread_is_heard(tmp_path):
    """Recording starts in the main thread, training runs in one of its own."""
    model, optimizer = setup()
    other = nn.Linear(4, 1)
    seen = []
    with mpdiag.record(model, optimizer, tmp_path / "run"):
        thread = threading.Thread(target=lambda: seen.extend(train(model, optimizer)))
        thread.start()
        thread.join(60)
        ignored = threading.Thread(target=lambda: other(torch.ones(2, 4)).sum().backward())
        ignored.start()
        ignored.join(60)
        seen += train(model, optimizer, steps=1)
    assert noted(tmp_path / "run") == seen
