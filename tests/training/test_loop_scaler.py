"""``mp.scaler()`` reads as ``GradScaler`` does, and trains as ``mp.step`` does."""

import gc

import pytest
import torch
from support import LEVELS, backoff, batch, constant, loss_of_batch, network, trainer, wrapped
from torch import nn

import mpdiag
from mpdiag.errors import StateMismatch, UsageError
from mpdiag.runs.training_log import read_log

FP16 = mpdiag.PrecisionOverrides(dtype="fp16")


def build(plan=None, **options):
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    return model, optimizer, mpdiag.MixedPrecision(model, optimizer, plan or backoff(), **options)


def loss_of(model, mp, i, factor=1.0):
    return loss_of_batch(model, mp, i) * factor


@pytest.mark.parametrize("level", LEVELS)
def test_it_trains_bit_for_bit_as_step_does(level, tmp_path):
    plan = backoff(2.0**10, growth_interval=2)
    model, _, mp = build(plan, level=level, run=tmp_path / "step")
    other, optimizer, by_loop = build(plan, level=level, run=tmp_path / "loop")
    scaler = by_loop.scaler()
    for i in range(6):
        factor = float("inf") if i == 3 else 1.0
        half = level == "O3"  # where torch's own clipping rounds otherwise
        taken = mp.step(loss_of(model, mp, i, factor), clip_norm=None if half else 0.5)
        optimizer.zero_grad()
        scaler.scale(loss_of(other, by_loop, i, factor)).backward()
        scaler.unscale_(optimizer)
        if not half:
            nn.utils.clip_grad_norm_(by_loop.master_parameters(), 0.5)
        result = scaler.step(optimizer)
        assert scaler.get_scale() == taken.scale  # until update(), as torch's
        scaler.update()
        assert (result.skipped, result.reason) == (taken.skipped, taken.reason)
        assert scaler.get_scale() == taken.next_scale == mp.loss_scale
    for a, b in zip(model.state_dict().values(), other.state_dict().values(), strict=True):
        assert torch.equal(a, b)
    assert (by_loop.steps, by_loop.skipped) == (mp.steps, mp.skipped) == (6, 1)
    for one in (mp, by_loop):
        one.close()
    ours, theirs = (read_log(tmp_path / name).steps for name in ("step", "loop"))
    assert [(s.scale, s.loss, s.skipped, s.reason) for s in ours] == [
        (s.scale, s.loss, s.skipped, s.reason) for s in theirs
    ]


@pytest.mark.parametrize("backend", ["emulated", "native"])
def test_the_backward_pass_runs_in_the_plans_arithmetic(backend):
    overrides = mpdiag.PrecisionOverrides(dtype="bf16")
    grads = {}
    for way in ("step", "loop", "scale", "sum", "grad"):
        model, _, mp = build(constant(8.0), backend=backend, overrides=overrides)
        loss = loss_of(model, mp, 0)
        weights = list(model.parameters())
        if way == "step":
            mp.backward(loss)
        elif way == "loop":
            mp.scaler().scale(loss).backward()
        elif way == "scale":
            mp.scale(loss).backward()
        elif way == "sum":
            ((mp.scaler().scale(loss) + 0.0) * 1.0).backward()
        else:
            scaled = mp.scaler().scale(loss)
            for p, g in zip(weights, torch.autograd.grad(scaled, weights), strict=True):
                p.grad = g
        grads[way] = [p.grad.clone() for p in weights]
        assert not mp.step().skipped  # all have the scale
    for way in ("loop", "sum", "grad"):
        assert all(torch.equal(a, b) for a, b in zip(grads["step"], grads[way], strict=True)), way
        assert all(type(g) is torch.Tensor for g in grads[way])


def test_what_torch_refuses_is_refused():
    model, optimizer, mp = build()
    scaler = mp.scaler()
    with pytest.raises(UsageError, match="no step"):
        scaler.update()
    with pytest.raises(UsageError, match="no gradient"):
        scaler.step(optimizer)
    scaler.scale(loss_of(model, mp, 0)).backward()
    scaler.unscale_(optimizer)
    with pytest.raises(UsageError, match="since the last update"):
        scaler.unscale_(optimizer)
    with pytest.raises(UsageError, match="closure"):
        scaler.step(optimizer, closure=lambda: None)
    scaler.step(optimizer)
    for call in (scaler.step, scaler.unscale_):
        with pytest.raises(UsageError, match="since the last update"):
            call(optimizer)
    with pytest.raises(UsageError, match="not one that"):
        scaler.step(torch.optim.SGD(model.parameters(), 0.1))
    with pytest.raises(UsageError, match="list of tensors"):
        scaler.scale(1.0)
    losses = scaler.scale([torch.ones(()), (torch.ones(()),)])
    assert [type(losses), type(losses[1])] == [list, tuple]


def test_the_state_goes_round_and_torchs_own_is_taken():
    plan = backoff(64.0, growth_interval=3)
    model, optimizer, mp = build(plan)
    scaler = mp.scaler()
    assert scaler is mp.scaler()
    for i in range(4):
        optimizer.zero_grad()
        scaler.scale(loss_of(model, mp, i)).backward()
        scaler.step(optimizer)
        scaler.update()
    state = scaler.state_dict()
    assert (state["scale"], state["_growth_tracker"]) == (128.0, 1)
    _, _, other = build(plan)
    other.scaler().load_state_dict(state)
    assert other.loss_scaler == mp.loss_scaler
    theirs = torch.amp.GradScaler("cpu", init_scale=512.0)
    theirs.scale(torch.ones(()))
    other.scaler().load_state_dict(theirs.state_dict())
    assert other.loss_scale == 512.0
    _, _, fixed = build(constant(8.0))
    with pytest.raises(StateMismatch, match="backoff"):
        fixed.scaler().load_state_dict(state)
    with pytest.raises(StateMismatch, match="no scaler's state"):
        fixed.scaler().load_state_dict({})
    with pytest.raises(UsageError, match="cannot be set"):
        fixed.scaler().update(4.0)
    other.scaler().update(256.0)
    assert other.scaler().get_scale() == 256.0
    assert other.scaler().is_enabled()


@pytest.mark.parametrize("level", LEVELS)
def test_a_parameter_of_two_optimizers_is_refused_and_stepped_by_both_by_step(level):
    model = network()
    optimizers = [torch.optim.SGD(model.parameters(), rate) for rate in (0.1, 0.01)]
    with mpdiag.MixedPrecision(model, optimizers, constant(8.0), level=level) as mp:
        with pytest.raises(UsageError, match=r"are in two: mp.backward\(loss\) and mp.step\(\)"):
            mp.scaler()
        both = mp.step(loss_of(model, mp, 0))
    model = network()
    with trainer(model, torch.optim.SGD(model.parameters(), 0.1), level, None) as alone:
        one = alone.step(loss_of(model, alone, 0))
    assert not both.skipped
    assert both.gradient_norm == pytest.approx(one.gradient_norm, rel=1e-3)  # each counted once


def test_its_backward_pass_is_emulated_as_that_of_step_is():
    """In the first steps FLOPs are counted, which needs to see every operation."""
    seen = {}
    for by_loop in (False, True):
        model = nn.Sequential(nn.Flatten(), nn.LazyLinear(8), nn.ReLU(), nn.Linear(8, 10))
        model(batch(0)[0])
        optimizer = torch.optim.SGD(model.parameters(), 0.05)
        mp = mpdiag.MixedPrecision(model, optimizer, backoff(), overrides=FP16, backend="emulated")
        depths = seen[by_loop] = []
        next(model.parameters()).register_hook(
            lambda _, to=depths: to.append(torch._C._len_torch_dispatch_stack())
        )
        for i in range(20):
            loss = loss_of(model, mp, i)
            if by_loop:
                mp.scaler().scale(loss).backward()
                mp.scaler().step(optimizer)
                mp.scaler().update()
                optimizer.zero_grad()
            else:
                mp.step(loss)
    assert seen[True] == seen[False]
    assert set(seen[True]) == {1, 2}


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_it_keeps_its_trainer_until_it_is_dropped_itself(level):
    model = nn.Linear(4, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    overrides = mpdiag.PrecisionOverrides(dtype="bf16")
    scaler = wrapped(model, optimizer=optimizer, level=level, overrides=overrides).scaler()
    gc.collect()
    with pytest.raises(UsageError, match="another MixedPrecision"):
        wrapped(model)
    scaler.scale(model(torch.ones(1, 4)).sum()).backward()
    assert not scaler.step(optimizer).skipped
    assert model.weight.dtype is (torch.bfloat16 if level == "O2" else torch.float32)
    del scaler
    assert model.weight.dtype is torch.float32
    wrapped(model).close()


# The running statistics of the first become infinite with its input.
KINDS = [lambda: nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 1)), lambda: nn.Linear(2, 1)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("bad", [0, 1])
def test_an_infinite_loss_of_one_model_skips_its_own_optimizer_alone(bad, level, kind):
    """As GradScaler does, whichever steps first; the other model's buffers are as its step left them."""
    models = [kind(), kind()]
    optimizers = [torch.optim.SGD(m.parameters(), 0.01) for m in models]
    plan = backoff(64.0, growth_interval=1)
    mp = mpdiag.MixedPrecision(models, optimizers, plan, level=level)
    scaler = mp.scaler()
    plain = [kind(), kind()]
    sgds = [torch.optim.SGD(m.parameters(), 0.01) for m in plain]
    theirs = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=1)
    before = [p.detach().clone() for p in models[bad].parameters()]
    for i in range(2):
        x = [torch.randn(4, 2, generator=torch.Generator().manual_seed(i)) for _ in models]
        if i:
            x[bad][0] = float("inf")
        seen = [[b.clone() for b in m.buffers()] for m in models]
        for one, nets, steppers in ((scaler, models, optimizers), (theirs, plain, sgds)):
            for stepper in steppers:
                stepper.zero_grad()
            for net, rows in zip(nets, x, strict=True):
                with mp.autocast():
                    loss = net(rows).float().square().mean()
                one.scale(loss).backward()
            taken = []
            for net, stepper in zip(nets, steppers, strict=True):
                old = [p.detach().clone() for p in net.parameters()]
                result = one.step(stepper)
                moved = any(
                    not torch.equal(a, b) for a, b in zip(old, net.parameters(), strict=True)
                )
                taken.append(moved if one is theirs else not result.skipped)
            assert taken == [not i or k != bad for k in range(2)]
            one.update()
        assert scaler.get_scale() == (theirs.get_scale() if level in ("O1", "O2") else 1.0)
        if i:
            assert mp.context.monitor.skips.in_a_row_of([bad]) == 1
            after = [[b.clone() for b in m.buffers()] for m in models]
            assert all(map(torch.equal, seen[bad], after[bad]))
            assert not after[1 - bad] or not all(map(torch.equal, seen[1 - bad], after[1 - bad]))
        else:
            assert not any(map(torch.equal, before, models[bad].parameters()))
