"""Accelerate: a loop as its users write it, under a plan, is a loop by hand under that plan."""

from __future__ import annotations

import pytest
import torch
from support import backoff, batch, network
from torch import nn

import mpdiag
from mpdiag.errors import UsageError
from mpdiag.plan import PrecisionPlan

accelerate = pytest.importorskip("accelerate")
bridge = pytest.importorskip("mpdiag.integrations.accelerate")

BATCHES = [batch(i) for i in range(6)]


@pytest.fixture(autouse=True)
def fresh():
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerate.state.GradientState._reset_state()
    yield
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerate.state.GradientState._reset_state()


def train(plan, batches=BATCHES, clip=None, every=1, level=None, schedule=False, split=False):
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=every)
    accelerator = bridge.apply_plan(accelerator, plan, level=level)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    if split:
        model = accelerator.prepare(model)
        optimizer, scheduler = accelerator.prepare(optimizer, scheduler)
    else:
        model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    outputs = []
    for x, y in batches:
        with accelerator.accumulate(model):
            output = model(x)
            outputs.append(output.dtype)
            loss = nn.functional.cross_entropy(output, y)
            accelerator.backward(loss)
            if clip is not None and accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            if schedule:
                scheduler.step()
            optimizer.zero_grad()
    assert set(outputs) == {torch.float32}
    skipped, rate = accelerator.optimizer_step_was_skipped, optimizer.param_groups[0]["lr"]
    accelerator.end_plan()
    return model, skipped, rate


def by_hand(plan, steps=6, clip=None, every=1, level=None):
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    with mpdiag.MixedPrecision(model, optimizer, plan, level=level) as mp:
        for i, (x, y) in enumerate(BATCHES[:steps]):
            with mp.autocast():
                output = model(x)
            mp.backward(nn.functional.cross_entropy(output.float(), y) / every)
            if (i + 1) % every == 0:
                mp.step(clip_norm=clip)
    return model


def same(a, b):
    pairs = zip(a.state_dict().values(), b.state_dict().values(), strict=True)
    return all(torch.equal(x, y) for x, y in pairs)


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("target", ["fp16", "bf16"])
def test_as_a_loop_by_hand(level, target):
    plan = PrecisionPlan(target=target, loss_scale=backoff(1024.0).loss_scale)
    model, skipped, _ = train(plan, level=level)
    assert same(model, by_hand(plan, level=level))
    assert not skipped
    assert not same(model, by_hand(plan, level="O0"))


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_clipping_reaches_what_the_optimizer_holds(level):
    clipped, hand = (
        train(backoff(), clip=0.1, level=level)[0],
        by_hand(backoff(), clip=0.1, level=level),
    )
    for a, b in zip(clipped.parameters(), hand.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)
    assert not same(clipped, by_hand(backoff(), level=level))


def test_accumulation():
    assert same(train(backoff(), every=2)[0], by_hand(backoff(), every=2))


def test_model_and_optimizer_prepared_apart():
    assert same(train(backoff(), split=True)[0], by_hand(backoff()))


def test_a_skip_is_told_and_the_scheduler_waits():
    x, y = BATCHES[5]
    batches = [*BATCHES[:5], (x * float("inf"), y)]
    model, skipped, rate = train(backoff(), batches, schedule=True)
    assert skipped
    assert rate == 0.05 * 0.5**5
    assert all(torch.isfinite(buffer).all() for buffer in model.buffers())


def test_its_state_is_saved_with_the_accelerators(tmp_path):
    def make():
        accelerator = bridge.apply_plan(
            accelerate.Accelerator(cpu=True), backoff(64.0, growth_interval=2)
        )
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), 0.05)
        return accelerator, *accelerator.prepare(model, optimizer)

    accelerator, model, optimizer = make()
    for x, y in BATCHES[:4]:
        accelerator.backward(nn.functional.cross_entropy(model(x), y))
        optimizer.step()
    accelerator.save_state(str(tmp_path))
    accelerator.end_plan()
    again, *_ = make()
    again.load_state(str(tmp_path))
    assert again.mp.loss_scale == 256.0
    assert again.mp.steps == 4


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("into", ["a new training", "the same one"])
def test_a_training_resumed_from_a_saved_state_is_the_uninterrupted_one(tmp_path, level, into):
    """Bit for bit, where weights are not cast; at O2 from the halves that ``save_state`` has saved."""

    def make():
        accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
        accelerator = bridge.apply_plan(
            accelerate.Accelerator(cpu=True), backoff(64.0, growth_interval=2), level=level
        )
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
        return accelerator, *accelerator.prepare(model, optimizer)

    def train_on(accelerator, model, optimizer, batches):
        for x, y in batches:
            accelerator.backward(nn.functional.cross_entropy(model(x), y))
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()

    parts = make()
    train_on(*parts, BATCHES[:3])
    parts[0].save_state(str(tmp_path))
    train_on(*parts, BATCHES[3:])
    whole = {k: v.clone() for k, v in parts[1].state_dict().items()}
    if into == "a new training":
        parts[0].end_plan()
        parts = make()
    parts[0].load_state(str(tmp_path))
    train_on(*parts, BATCHES[3:])
    found = parts[1].state_dict()
    for name, value in whole.items():
        if level == "O1":
            assert torch.equal(found[name], value), name
        else:
            torch.testing.assert_close(found[name], value, rtol=0.02, atol=2e-3)
    parts[0].end_plan()


def test_a_mixed_precision_of_its_own_is_refused():
    with pytest.raises(UsageError, match="mixed_precision='bf16'"):
        bridge.apply_plan(accelerate.Accelerator(cpu=True, mixed_precision="bf16"), backoff())


def test_an_optimizer_too_late_is_refused():
    accelerator = bridge.apply_plan(accelerate.Accelerator(cpu=True), backoff())
    model = network()
    accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    with pytest.raises(UsageError, match="one call of prepare"):
        accelerator.prepare(torch.optim.SGD(network().parameters(), 0.1))


def test_without_a_plan_nothing_changes():
    accelerator = accelerate.Accelerator(cpu=True)
    assert type(accelerator) is accelerate.Accelerator


def test_a_prepared_optimizer_is_recorded(tmp_path):
    accelerator = accelerate.Accelerator(cpu=True)
    model = network()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.05))
    with mpdiag.record(model, optimizer, tmp_path / "run", every=1) as recorder:
        for x, y in BATCHES:
            optimizer.zero_grad()
            accelerator.backward(nn.functional.cross_entropy(model(x), y))
            optimizer.step()
    assert not recorder.failures
    run = mpdiag.open_run(tmp_path / "run")
    assert run.meta["steps_seen"] == len(BATCHES)
    assert set(run.frame()["kind"]) >= {"weight_grad", "update"}
