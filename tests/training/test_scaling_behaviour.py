"""How a loss-scaling trainer must behave: one test for each behaviour, named after what it protects.

The behaviours are those that the public suites of PyTorch, Apex, jmp, Keras, DeepSpeed, OpenSeq2Seq,
Lightning and accelerate describe, and those that users of these found missing.
"""

from __future__ import annotations

import math
import warnings

import pytest
import torch
from support import backoff, batch, constant, network
from torch import nn

import mpdiag
from mpdiag.errors import StateMismatch, TrainingDiverged, UsageError
from mpdiag.numerics.loss_scalers import Backoff, LogNormal
from mpdiag.plan import LossScalePlan, PrecisionPlan

INF, NAN = float("inf"), float("nan")


class Linear(nn.Module):
    """y = w · x, so that the gradient of w is the input, times what the loss is multiplied by."""

    def __init__(self, size: int = 4) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.w * x).sum()


def trainer(model, plan=None, optimizer=None, **options):
    optimizer = optimizer or torch.optim.SGD(model.parameters(), 0.1)
    return mpdiag.MixedPrecision(model, optimizer, plan or backoff(), **options)


def step(mp, model, x, **options):
    with mp.autocast():
        loss = model(x)
    return mp.step(loss, **options)


def test_unscaled_gradients_are_the_plain_ones():
    plain, model = network(), network()
    x, y = batch()
    nn.functional.cross_entropy(plain(x), y).backward()
    mp = trainer(
        model, constant(2.0**10), level="O0", overrides=mpdiag.PrecisionOverrides(loss_scale=1024)
    )
    mp.backward(nn.functional.cross_entropy(model(x), y))
    mp.unscale()
    for p, q in zip(plain.parameters(), model.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)


def test_training_at_o0_is_bit_for_bit_plain_training():
    x, y = batch()
    plain, model = network(), network()
    sgd = torch.optim.SGD(plain.parameters(), 0.1, momentum=0.9)
    mp = trainer(
        model, optimizer=torch.optim.SGD(model.parameters(), 0.1, momentum=0.9), level="O0"
    )
    for _ in range(4):
        sgd.zero_grad()
        nn.functional.cross_entropy(plain(x), y).backward()
        nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        sgd.step()
        with mp.autocast():
            loss = nn.functional.cross_entropy(model(x), y)
        mp.step(loss, clip_norm=0.5)
    for a, b in zip(plain.state_dict().values(), model.state_dict().values(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("value", [INF, -INF, NAN])
@pytest.mark.parametrize(
    "plan", [backoff(), constant(), PrecisionPlan()], ids=["backoff", "constant", "none"]
)
def test_a_step_that_is_not_finite_is_skipped_whatever_the_scaler(value, plan):
    model = Linear()
    mp = trainer(model, plan)
    before = model.w.detach().clone()
    x = torch.ones(4)
    x[2] = value
    result = step(mp, model, x)
    assert result.skipped
    assert torch.equal(model.w, before)
    assert not step(mp, model, torch.ones(4)).skipped
    assert not torch.equal(model.w, before)


def test_the_scale_backs_off_on_overflow_and_grows_after_the_window():
    model = Linear()
    mp = trainer(model, backoff(64.0, growth_interval=2))
    scales = []
    for value in (1.0, 1.0, INF, 1.0, 1.0, 1.0, 1.0):
        result = step(mp, model, torch.full((4,), value))
        scales.append((result.scale, result.next_scale))
    assert [s for s, _ in scales] == [64, 64, 128, 64, 64, 128, 128]
    assert scales[-1][1] == 256


def test_the_scale_stays_between_its_bounds():
    model = Linear()
    mp = trainer(model, backoff(8.0, growth_interval=1, min_scale=4.0, max_scale=16.0))
    seen = [step(mp, model, torch.ones(4)).next_scale for _ in range(4)]
    assert seen == [16, 16, 16, 16]
    assert step(mp, model, torch.full((4,), INF)).next_scale == 8
    assert step(mp, model, torch.full((4,), INF)).next_scale == 4


def test_hysteresis_tolerates_single_overflows():
    model = Linear()
    mp = trainer(model, backoff(64.0, hysteresis=2))
    bad = torch.full((4,), INF)
    assert step(mp, model, bad).next_scale == 64
    assert step(mp, model, bad).next_scale == 32


def test_a_constant_scale_never_changes():
    model = Linear()
    mp = trainer(model, constant(8.0))
    assert step(mp, model, torch.full((4,), INF)).next_scale == 8
    assert step(mp, model, torch.ones(4)).next_scale == 8


def test_lognormal_recovers_from_an_overflow_within_a_few_steps():
    """OpenSeq2Seq fed 65536 as a logarithm on an overflow, and stayed at scale 1 for 10,000 steps."""
    model = Linear()
    mp = trainer(
        model,
        overrides=mpdiag.PrecisionOverrides(
            loss_scale=LogNormal(init_scale=2.0**30, max_scale=2.0**40)
        ),
    )
    scales = [
        step(mp, model, torch.full((4,), v)).next_scale for v in (INF, 1e-4, 1e-4, 1e-4, 1e-4)
    ]
    assert all(s > 1 for s in scales)


def test_lognormal_survives_a_step_whose_gradients_are_all_zero():
    model = Linear()
    mp = trainer(model, overrides=mpdiag.PrecisionOverrides(loss_scale="lognormal"))
    for value in (0.0, 1.0, 0.0):
        result = step(mp, model, torch.full((4,), value))
        assert math.isfinite(result.next_scale)
        assert not result.skipped


def test_lognormal_sees_gradients_before_they_are_clipped():
    model, other = Linear(), Linear()
    mp, unclipped = (
        trainer(m, overrides=mpdiag.PrecisionOverrides(loss_scale=LogNormal(init_scale=8.0)))
        for m in (model, other)
    )
    for _ in range(3):
        clipped = step(mp, model, torch.full((4,), 100.0), clip_norm=1e-3)
        free = step(unclipped, other, torch.full((4,), 100.0))
    assert clipped.next_scale == free.next_scale


@pytest.mark.parametrize(
    ("kind", "settings", "word"),
    [
        (Backoff, {"init_scale": 0.0}, "init_scale"),
        (Backoff, {"init_scale": -1.0}, "init_scale"),
        (Backoff, {"init_scale": NAN}, "init_scale"),
        (Backoff, {"growth_factor": 1.0}, "growth_factor"),
        (Backoff, {"backoff_factor": 1.0}, "backoff_factor"),
        (Backoff, {"growth_interval": 1.5}, "growth_interval"),
        (Backoff, {"growth_interval": 0}, "growth_interval"),
        (Backoff, {"hysteresis": True}, "hysteresis"),
        (LogNormal, {"beta1": 1.0}, "beta1"),
        (LogNormal, {"quantile": NAN}, "quantile"),
    ],
)
def test_nonsense_settings_are_refused_by_name(kind, settings, word):
    with pytest.raises(UsageError, match=word):
        kind(**settings)


def test_an_unknown_setting_is_refused_by_name():
    with pytest.raises(UsageError, match="groth_interval"):
        trainer(
            Linear(),
            overrides=mpdiag.PrecisionOverrides(
                loss_scale={"method": "backoff", "groth_interval": 3}
            ),
        )


def test_a_tiny_scale_does_not_let_infinity_through():
    """torch.amp: at scales of 2^-128 and under 1/s is infinite, and so are the weights."""
    model = Linear()
    mp = trainer(model, overrides=mpdiag.PrecisionOverrides(loss_scale=2.0**-140))
    before = model.w.detach().clone()
    step(mp, model, torch.ones(4))
    assert torch.isfinite(model.w).all()
    result = step(mp, model, torch.full((4,), INF))
    assert result.skipped
    assert torch.isfinite(before).all()


def test_what_becomes_nan_after_unscale_is_not_stepped():
    """torch.amp steps a NaN that clipping or a hook brings in after ``unscale_``."""
    model = Linear()
    mp = trainer(model)
    with mp.autocast():
        loss = model(torch.ones(4))
    mp.backward(loss)
    mp.unscale()
    model.w.grad[1] = NAN
    before = model.w.detach().clone()
    assert mp.step().skipped
    assert torch.equal(model.w, before)


def test_unscale_twice_divides_once():
    model = Linear()
    mp = trainer(model, constant(8.0))
    mp.backward(model(torch.ones(4)))
    mp.unscale()
    mp.unscale()
    assert torch.equal(model.w.grad, torch.ones(4))
    mp.step()
    assert torch.allclose(model.w, torch.full((4,), 0.9))


def test_a_change_of_scale_within_an_accumulation_weighs_every_part_alike():
    """torch.amp gives 1.5 where 2 is right."""
    model, other = Linear(), Linear()
    optimizers = [torch.optim.SGD(m.parameters(), 1.0) for m in (model, other)]
    mp = mpdiag.MixedPrecision([model, other], optimizers, backoff(64.0, growth_interval=1))
    mp.backward(model(torch.ones(4)))
    assert mp.step(other(torch.ones(4)), optimizer=optimizers[1]).next_scale == 128
    mp.backward(model(torch.ones(4)))
    mp.unscale(optimizers[0])
    assert torch.equal(model.w.grad, torch.full((4,), 2.0))


def test_gradients_unscaled_early_may_still_be_added_to():
    model = Linear()
    mp = trainer(model, constant(8.0))
    mp.backward(model(torch.ones(4)))
    mp.unscale()
    mp.backward(model(torch.ones(4)))
    mp.unscale()
    assert torch.equal(model.w.grad, torch.full((4,), 2.0))


def test_an_fp16_loss_at_a_large_scale_does_not_overflow():
    model = nn.Linear(4, 1, bias=False)
    mp = trainer(model, constant(2.0**16))
    with mp.autocast():
        loss = model(torch.ones(1, 4)).squeeze() * 2
    assert loss.dtype == torch.float16
    assert torch.isfinite(mp.scale(loss))
    assert mp.scale(loss).dtype == torch.float32


@pytest.mark.parametrize("momentum", [0.1, None])
def test_a_skipped_step_leaves_batch_norm_as_it_was(momentum):
    """pytorch#88474: running statistics of an overflowing batch are infinite for ever."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4, momentum=momentum))
    mp = trainer(model)

    def take(x):
        with mp.autocast():
            loss = model(x).float().square().mean()
        return mp.step(loss)

    take(torch.randn(8, 4))
    before = {n: b.clone() for n, b in model.named_buffers()}
    bad = torch.randn(8, 4)
    bad[0, 0] = INF
    assert take(bad).skipped
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, before[name]), name
    assert not take(torch.randn(8, 4)).skipped
    assert model[1].num_batches_tracked == 2


def test_a_buffer_that_goes_infinite_alone_skips_the_step():
    """A branch whose result is thrown away still updates its statistics."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.ones(4))
            self.norm = nn.BatchNorm1d(4, affine=False)

        def forward(self, x):
            self.norm(x)
            return (self.w * x.clamp(-1, 1)).sum()

    model = Model()
    mp = trainer(model)
    result = step(mp, model, torch.full((3, 4), INF))
    assert result.skipped
    assert result.first.where == "buffers"
    assert "running_mean" in result.first.name
    assert torch.equal(model.norm.running_mean, torch.zeros(4))


def test_optimizer_state_is_untouched_by_a_skip():
    model = Linear()
    adam = torch.optim.Adam(model.parameters(), 0.1)
    mp = trainer(model, optimizer=adam)
    step(mp, model, torch.ones(4))
    before = {k: v.clone() for k, v in adam.state[model.w].items()}
    step(mp, model, torch.full((4,), NAN))
    assert all(torch.equal(adam.state[model.w][k], v) for k, v in before.items())


def test_gradients_whose_squares_leave_fp32_are_skipped():
    """Adam's second moment of a gradient of 1e25 is infinite, and its updates zero for ever."""
    model = Linear()
    adam = torch.optim.Adam(model.parameters(), 0.1)
    mp = trainer(model, optimizer=adam, level="O0")
    assert step(mp, model, torch.full((4,), 1e25)).skipped
    step(mp, model, torch.ones(4))
    assert torch.isfinite(adam.state[model.w]["exp_avg_sq"]).all()


def test_clipping_acts_on_unscaled_gradients():
    model = Linear()
    mp = trainer(model, constant(2.0**12), optimizer=torch.optim.SGD(model.parameters(), 1.0))
    result = step(mp, model, torch.full((4,), 3.0), clip_norm=1.0)
    assert result.gradient_norm == pytest.approx(6.0)
    assert torch.allclose(model.w, torch.full((4,), 0.5), atol=1e-6)


def test_clipping_by_value_acts_on_unscaled_gradients():
    model = Linear()
    mp = trainer(model, constant(2.0**12), optimizer=torch.optim.SGD(model.parameters(), 1.0))
    step(mp, model, torch.tensor([-3.0, 0.25, 3.0, 0.0]), clip_value=0.5)
    assert torch.equal(model.w, torch.tensor([1.5, 0.75, 0.5, 1.0]))


@pytest.mark.parametrize(
    "options", [{"clip_norm": 0}, {"clip_norm": -1.0}, {"clip_norm": NAN}, {"clip_value": 0.0}]
)
def test_nonsense_limits_are_refused(options):
    model = Linear()
    mp = trainer(model)
    with pytest.raises(UsageError, match="clip"):
        step(mp, model, torch.ones(4), **options)


def test_a_callers_zero_grad_does_no_harm():
    model, other = Linear(), Linear()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    mp, plain = trainer(model, optimizer=optimizer), trainer(other)
    for _ in range(3):
        optimizer.zero_grad()
        step(mp, model, torch.ones(4))
        step(plain, other, torch.ones(4))
    assert torch.equal(model.w, other.w)


def test_gradients_are_cleared_by_a_step_and_by_a_skip():
    model = Linear()
    mp = trainer(model)
    step(mp, model, torch.ones(4))
    assert model.w.grad is None
    step(mp, model, torch.full((4,), NAN))
    assert model.w.grad is None


def test_a_step_without_gradients_is_refused():
    mp = trainer(Linear())
    with pytest.raises(UsageError, match="no gradient"):
        mp.step()


def test_a_scheduler_after_a_skip_does_not_warn():
    """pytorch#44511: "lr_scheduler.step() before optimizer.step()", though the order was right."""
    model = Linear()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    mp = trainer(model, optimizer=optimizer)
    step(mp, model, torch.full((4,), NAN))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scheduler.step()


def test_k_skips_in_a_row_stop_with_a_diagnosis():
    model = Linear()
    mp = trainer(model, backoff(2.0**20), options=mpdiag.TrainerOptions(max_skips=3))
    bad = torch.full((4,), NAN)
    step(mp, model, bad)
    step(mp, model, bad)
    with pytest.raises(TrainingDiverged, match=r"3 steps in a row.*NaN in the forward pass"):
        step(mp, model, bad)
    assert torch.equal(model.w, torch.ones(4))


def test_single_skips_far_apart_do_not_stop():
    model = Linear()
    mp = trainer(model, options=mpdiag.TrainerOptions(max_skips=2))
    for _ in range(4):
        assert step(mp, model, torch.full((4,), NAN)).skipped
        assert not step(mp, model, torch.ones(4)).skipped
    assert (mp.steps, mp.skipped) == (8, 4)


def test_a_scale_at_its_floor_stops_with_an_error():
    """apex#318 and many more: scale 1e-20, 1e-40, 0, and no word."""
    model = nn.Linear(4, 1)
    mp = trainer(model, backoff(4.0))
    with pytest.raises(TrainingDiverged, match="floor of 1, where 8 steps"):
        for _ in range(12):
            with mp.autocast():
                loss = model(torch.ones(1, 4)).float().sum() * 1e6
            mp.step(loss)
    assert mp.loss_scale == 1.0


def test_the_result_names_what_went_non_finite_first():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    mp = trainer(model, constant(2.0**20))
    with mp.autocast():
        loss = model(torch.ones(2, 4)).float().square().sum() * 1e3
    result = mp.step(loss)
    assert result.skipped
    assert result.cause == "scale"
    assert result.first.where == "backward"
    assert result.first.name.startswith("2.")  # the last layer is the first that backward reaches
    assert "loss scale" in result.reason
    names = [n.name for n in result.non_finite]
    assert names == sorted(names, key=lambda n: -int(n[0]))


def test_replay_tells_the_scale_from_the_format_and_the_model():
    def attempt(x, factor, scale):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1))
        with torch.no_grad():
            for p in model.parameters():
                p.copy_(p.abs() + 0.5)
        mp = trainer(model, constant(scale))

        def loss_of():
            with mp.autocast():
                return model(x).float().sum() * factor

        before = [p.detach().clone() for p in model.parameters()]
        result = mp.step(loss_of(), replay=loss_of)
        assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
        assert all(p.grad is None for p in model.parameters())
        return result

    assert attempt(torch.ones(1, 4), 100.0, 2.0**16).cause == "scale"
    beyond = attempt(torch.full((1, 4), 60000.0), 1.0, 1.0)
    assert (beyond.cause, beyond.first.where, beyond.first.name) == ("format", "forward", "0")
    assert attempt(torch.full((1, 4), NAN), 1.0, 1.0).cause == "model"


def test_the_state_round_trips_every_field():
    model = Linear()
    mp = trainer(
        model, backoff(64.0, growth_interval=7, hysteresis=3, min_scale=2.0, max_scale=512.0)
    )
    for value in (1.0, 1.0, NAN, 1.0):
        step(mp, model, torch.full((4,), value))
    state = mp.state_dict()
    mp.close()
    other = Linear()
    again = trainer(other, mp.plan)
    again.load_state_dict(state)
    assert again.loss_scaler == mp.loss_scaler
    assert (again.steps, again.skipped) == (4, 1)
    assert torch.equal(other.w, model.w)


def test_a_state_of_another_level_or_model_is_refused():
    model = Linear()
    mp = trainer(model, backoff(64.0))
    state = mp.state_dict()
    mp.close()
    with pytest.raises(StateMismatch, match="level"):
        trainer(model, backoff(64.0), level="O2").load_state_dict(state)
    with pytest.raises(StateMismatch):
        trainer(nn.Linear(3, 3), backoff(64.0)).load_state_dict(state)
    with pytest.raises(StateMismatch):
        trainer(Linear()).load_state_dict({"scale": 3})


def test_two_live_trainers_on_one_model_are_refused_and_a_dropped_one_is_forgotten():
    model = Linear()
    mp = trainer(model)
    with pytest.raises(UsageError, match="another MixedPrecision"):
        trainer(model)
    mp.close()
    mp = trainer(model)
    del mp
    trainer(model).close()


def test_weight_decay_of_small_weights_survives_through_the_master():
    """1e-4 · 1e-4 is zero in FP16."""
    model = nn.Linear(4, 4, bias=False)
    with torch.no_grad():
        model.weight.fill_(1e-4)
    sgd = torch.optim.SGD(model.parameters(), lr=1.0, weight_decay=1e-4)
    mp = trainer(model, constant(1.0), optimizer=sgd, level="O2")
    with mp.autocast():
        loss = model(torch.zeros(2, 4)).sum()
    mp.step(loss)
    expected = torch.tensor(1e-4) - torch.tensor(1e-4) * torch.tensor(1e-4)
    assert torch.equal(mp.fp32_state_dict()["weight"], expected.expand(4, 4))
    assert expected != torch.tensor(1e-4)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_regularisers_act_on_the_fp32_master(level):
    model = nn.Linear(4, 4, bias=False)
    with torch.no_grad():
        model.weight.fill_(1e-4)
    sgd = torch.optim.SGD(model.parameters(), lr=1.0)
    mp = trainer(model, constant(1024.0), optimizer=sgd, level=level)
    mp.add_regularizer(
        lambda parameters: 0.5e-4 * sum(p.square().sum() for p in parameters.values())
    )
    with mp.autocast():
        loss = model(torch.zeros(2, 4)).sum()
    result = mp.step(loss)
    assert result.gradient_norm == pytest.approx(4e-8, rel=1e-3)
    assert (mp.fp32_state_dict()["weight"] < 1e-4).all()


def test_the_plan_sets_every_setting_of_the_scaler():
    plan = PrecisionPlan(
        loss_scale=LossScalePlan(
            method="backoff", init_scale=64.0, growth_factor=4.0, backoff_factor=0.25,
            growth_interval=5, hysteresis=2, min_scale=2.0, max_scale=4096.0,
        )
    )  # fmt: skip
    mp = trainer(Linear(), plan)
    assert mp.loss_scaler == Backoff(64.0, 4.0, 0.25, 5, 2, 2.0, 4096.0)
