"""Accelerate: a loop as its users write it, under a plan, is a loop by hand under that plan."""

import copy
import pickle

import pytest
import torch
from support import backoff, network
from torch import nn
from trained_by_hand import BATCHES, by_hand, fresh, momentum, same  # noqa: F401 - a fixture

import mpdiag
from mpdiag.errors import UsageError
from mpdiag.integrations.loop import record_loop
from mpdiag.plan import PrecisionPlan

accelerate = pytest.importorskip("accelerate")
bridge = pytest.importorskip("mpdiag.integrations.accelerate")

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("fresh")]


def train(plan, batches=BATCHES, clip=None, every=1, level=None, schedule=False, split=False):
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=every)
    accelerator = bridge.apply_plan(accelerator, plan, level=level)
    model = network()
    optimizer = momentum(model)
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


def prepared(plan=None, level=None):
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = bridge.apply_plan(
        accelerate.Accelerator(cpu=True), plan or backoff(), level=level
    )
    model = network()
    return accelerator, *accelerator.prepare(model, momentum(model))


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
    clipped = train(backoff(), clip=0.1, level=level)[0]
    hand = by_hand(backoff(), clip=0.1, level=level)
    for a, b in zip(clipped.parameters(), hand.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)
    assert not same(clipped, by_hand(backoff(), level=level))


@pytest.mark.parametrize(
    ("ours", "hand"), [({"every": 2}, {"every": 2}), ({"split": True}, {})], ids=["every", "split"]
)
def test_accumulation_and_a_model_and_an_optimizer_prepared_apart(ours, hand):
    assert same(train(backoff(), **ours)[0], by_hand(backoff(), **hand))


def test_a_skip_is_told_and_the_scheduler_waits():
    x, y = BATCHES[5]
    batches = [*BATCHES[:5], (x * float("inf"), y)]
    model, skipped, rate = train(backoff(), batches, schedule=True)
    assert skipped
    assert rate == 0.05 * 0.5**5
    assert all(torch.isfinite(buffer).all() for buffer in model.buffers())


@pytest.mark.parametrize(
    ("level", "into"),
    [*((level, "a new training") for level in ("O1", "O2", "O3")), ("O2", "the same one")],
)
def test_a_training_resumed_from_a_saved_state_is_the_uninterrupted_one(tmp_path, level, into):
    """Bit for bit, masters and counts too; at O2 ``save_state`` itself saves the model's halves."""

    def train_on(accelerator, model, optimizer, batches):
        for x, y in batches:
            accelerator.backward(nn.functional.cross_entropy(model(x), y))
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()

    def reached(accelerator, model, optimizer):
        mp = accelerator.mp
        assert optimizer.state_dict()["param_groups"]
        full = {k: v.clone() for k, v in mp.fp32_state_dict(model).items()}
        return full, (mp.loss_scaler, mp.steps, mp.skipped, mp.context.monitor.skips.to_plain())

    spoiled = (BATCHES[2][0] * float("inf"), BATCHES[2][1])
    plan = backoff(64.0, growth_interval=2)
    parts = prepared(plan, level)
    train_on(*parts, [*BATCHES[:3], spoiled])
    parts[0].save_state(str(tmp_path))
    at_save = reached(*parts)
    assert at_save[1][3][0]["in_a_row"] == 1
    train_on(*parts, BATCHES[3:])
    whole = reached(*parts)
    if into == "a new training":
        parts[0].end_plan()
        parts = prepared(plan, level)
    parts[0].load_state(str(tmp_path))
    for then, more in ((at_save, []), (whole, BATCHES[3:])):
        train_on(*parts, more)
        weights, counts = reached(*parts)
        assert counts == then[1]
        for name, value in then[0].items():
            assert torch.equal(weights[name], value), name
    parts[0].end_plan()


def test_a_state_saved_right_after_a_master_was_written_is_whole(tmp_path):
    """The model itself has the value in its next forward pass, which a resumed training must see."""

    accelerator, model, _ = prepared(level="O2")
    with torch.no_grad():
        accelerator.mp.master_parameters()[0].add_(0.123)
    accelerator.save_state(str(tmp_path))
    before = accelerator.mp.fp32_state_dict(model), model(BATCHES[0][0])
    accelerator.end_plan()
    accelerator, model, _ = prepared(level="O2")
    accelerator.load_state(str(tmp_path))
    assert torch.equal(model(BATCHES[0][0]), before[1])
    for name, value in accelerator.mp.fp32_state_dict(model).items():
        assert torch.equal(value, before[0][name]), name
    accelerator.end_plan()


def test_a_state_without_masters_goes_on_from_the_models_weights(tmp_path):
    accelerator, model, _ = prepared(level="O2")
    (held,) = accelerator._custom_objects
    state = held.state_dict()
    del state["masters"], state["skips_in_a_row"]
    with torch.no_grad():
        model[0].weight.fill_(0.1)
    held.load_state_dict(state)
    full = accelerator.mp.fp32_state_dict(model)
    assert torch.equal(full["0.weight"], model[0].weight.detach().float())
    accelerator.end_plan()


def test_a_mixed_precision_of_its_own_and_an_optimizer_too_late_are_refused():
    accelerator, *_ = prepared()
    with pytest.raises(UsageError, match="one call of prepare"):
        accelerator.prepare(torch.optim.SGD(network().parameters(), 0.1))
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    with pytest.raises(UsageError, match="mixed_precision='bf16'"):
        bridge.apply_plan(accelerate.Accelerator(cpu=True, mixed_precision="bf16"), backoff())


def test_a_prepared_loop_is_recorded_and_trains_the_same(tmp_path, capsys):
    """To the trackers of the accelerator; here TensorBoard's."""
    pytest.importorskip("tensorboard")

    def trained(recorded):
        accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
        accelerator = accelerate.Accelerator(
            cpu=True, log_with="tensorboard", project_dir=tmp_path / str(recorded)
        )
        accelerator.init_trackers("mine")
        model = network()
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.05))
        options = {"every": 1} if recorded else {"max_steps": 1}
        with record_loop(model, optimizer, tmp_path / f"run-{recorded}", **options) as recorder:
            if not recorded:
                recorder.close()
            for x, y in BATCHES:
                optimizer.zero_grad()
                accelerator.backward(nn.functional.cross_entropy(model(x), y))
                optimizer.step()
        accelerator.end_training()
        assert not recorder.failures
        return model

    assert same(trained(False), trained(True))
    assert capsys.readouterr().err.splitlines()[-1] == "mpdiag: FP32 weights"
    run = mpdiag.open_run(tmp_path / "run-True")
    assert run.meta["steps_seen"] == len(BATCHES)
    assert set(run.frame()["kind"]) >= {"weight_grad", "update"}
    (events,) = (tmp_path / "True").rglob("events.out.tfevents.*")
    assert b"mpdiag/update_ratio" in events.read_bytes()


@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_what_is_unwrapped_can_be_pickled_and_a_copy_computes_with_its_own_weights(level, keep):
    accelerator = bridge.apply_plan(accelerate.Accelerator(cpu=True), backoff(64.0), level=level)
    model = nn.Linear(4, 4)
    model, optimizer = accelerator.prepare(model, momentum(model))
    accelerator.backward(model(torch.ones(2, 4)).sum())
    optimizer.step()
    bare = accelerator.unwrap_model(model, keep_fp32_wrapper=keep)
    for copied in (pickle.loads(pickle.dumps(bare)), copy.deepcopy(bare)):
        nn.init.zeros_(copied.weight)
        nn.init.ones_(copied.bias)
        assert torch.equal(copied(torch.ones(1, 4)), torch.ones(1, 4))
    accelerator.end_plan()
