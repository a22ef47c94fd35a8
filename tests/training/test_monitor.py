"""The alarm when training leaves what was recorded; and how many skips in a row end it.

A scale that still falls is searching; skips count where it stays, or where no scale helps.
"""

import json
import warnings

import pytest
import torch
from recorded_steps import loss_of_network, record_steps
from support import backoff, constant, loss_of_batch, network, wrapped
from torch import nn

import mpdiag
from mpdiag.errors import TrainingDiverged
from mpdiag.plan import LossScalePlan, PrecisionPlan
from mpdiag.training.monitor import DriftWatch, _tail

scipy_stats = pytest.importorskip("scipy.stats", reason="SciPy is the oracle; pip install scipy")


@pytest.fixture(scope="module")
def plan(tmp_path_factory):
    folder = tmp_path_factory.mktemp("recorded") / "run"
    record_steps(folder, network(), loss_of_network, 60, rate=0.01)
    return mpdiag.analyze(folder).plan


def train(plan, factor=1.0, steps=60, **options):
    model = network()
    mp = mpdiag.MixedPrecision(model, torch.optim.SGD(model.parameters(), 0.01), plan, **options)
    for i in range(steps):
        loss = loss_of_batch(model, mp, i) * factor
        mp.step(loss)
    mp.close()
    return mp


def test_a_training_like_the_recorded_one_raises_no_alarm(plan):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert train(plan).alarms == ()


def test_gradients_far_beyond_the_recorded_ones_are_an_alarm(plan, tmp_path):
    with pytest.warns(RuntimeWarning, match="octaves beyond") as said:
        mp = train(plan, factor=64.0, run=tmp_path / "trained")
    assert len(said) == 1  # once, however often it is seen
    (alarm,) = mp.alarms
    assert alarm.observed / alarm.predicted == pytest.approx(64, rel=0.5)
    lines = (tmp_path / "trained" / "training.jsonl").read_text().splitlines()
    assert alarm.to_json() in [json.loads(line) for line in lines]


def test_gradients_that_vanish_are_an_alarm(plan):
    with pytest.warns(RuntimeWarning, match="are zero"):
        mp = train(plan, factor=2.0**-24)
    assert [a.alarm for a in mp.alarms] == ["underflow"]


def test_gradients_that_are_zero_before_the_first_step_are_none():
    """Those of LoRA's A are, as B is 0 at first."""
    said = []
    evidence = {"weight_grad_absmax": 1.0, "weight_grad_zero_after": 0.0}
    watch = DriftWatch(PrecisionPlan(loss_scale=LossScalePlan(evidence=evidence)), said.append)
    assert [step for step in range(60) if watch.due(step)] == [0, 1, 50]
    assert watch.look(0, [torch.zeros(4)]) is None
    assert watch.look(1, [torch.arange(9.0) / 8]) is None  # a ninth is allowed
    assert watch.look(1, [torch.zeros(4)]).observed == 1
    assert len(said) == 1


@pytest.mark.parametrize(("rate", "skips"), [(0.0, 3), (0.001, 4)])
def test_more_skips_than_predicted_are_an_alarm(rate, skips):
    evidence = {"predicted_overflow_rate": rate}
    plan = PrecisionPlan(loss_scale=LossScalePlan(method="constant", evidence=evidence))
    watch = DriftWatch(plan)
    for step in range(100):
        assert watch.note_skip(step, skipped=False) is None
    for step in range(100, 99 + skips):
        assert watch.note_skip(step, skipped=True) is None
    with pytest.warns(RuntimeWarning, match="predicted at most 0"):
        alarm = watch.note_skip(99 + skips, skipped=True)
    assert alarm.observed == skips / (100 + skips)
    assert watch.note_skip(100 + skips, skipped=True) is None  # once
    assert watch.alarms == [alarm]


def test_without_a_recording_there_is_nothing_to_drift_from():
    watch = DriftWatch(PrecisionPlan())
    assert not watch.due(0)
    assert all(watch.note_skip(i, skipped=True) is None for i in range(10))


@pytest.mark.parametrize(("count", "size", "rate"), [(3, 200, 0.001), (1, 10, 0.2), (8, 200, 0.01)])
def test_the_chance_of_so_many_is_poissons(count, size, rate):
    assert _tail(count, size, rate) == pytest.approx(scipy_stats.poisson.sf(count - 1, size * rate))


class Steep(nn.Module):
    """A finite loss whose gradient overflows FP16 above a scale of ``65504 / steepness``."""

    def __init__(self, steepness: float) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(1, 1))
        self.steepness = steepness

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.w).float().sum() * self.steepness


def step(mp, model, value=1.0, **options):
    with mp.autocast():
        loss = model(torch.full((1, 1), value))
    return mp.step(loss, **options)


@pytest.mark.parametrize(
    ("plan", "steps", "said"),
    [
        (
            constant(1024.0),
            8,
            r"8 steps in a row were skipped at a loss scale of .*choose a smaller scale, or one that",
        ),
        (backoff(1024.0, hysteresis=20), 8, "let the scale fall sooner"),
        (backoff(64.0, min_scale=32.0), 9, r"floor of 32, where 8 .* allow smaller scales"),
    ],
)
def test_skips_count_at_an_unchanged_scale(plan, steps, said):
    model = Steep(7000.0)
    mp = wrapped(model, plan)
    with pytest.raises(TrainingDiverged, match=said):
        for _ in range(steps):
            step(mp, model)
    assert mp.steps == steps


def test_a_loss_that_is_not_finite_counts_while_the_scale_falls():
    model = Steep(1.0)
    mp = wrapped(model, backoff(2.0**16))
    for _ in range(7):
        result = step(mp, model, float("nan"))
        assert result.at_any_scale
        assert result.reason.startswith("NaN in the forward pass: the loss")
    with pytest.raises(TrainingDiverged, match="8 steps in a row had a loss or a forward pass"):
        step(mp, model, float("nan"))
    assert mp.loss_scale == 2.0**8


def test_the_good_steps_of_one_optimizer_do_not_hide_another_that_never_steps():
    good, bad = Steep(1.0), Steep(7000.0)
    optimizers = [torch.optim.SGD(m.parameters(), 1e-6) for m in (good, bad)]
    mp = mpdiag.MixedPrecision([good, bad], optimizers, constant(1024.0))

    def take(model, optimizer):
        with mp.autocast():
            loss = model(torch.ones(1, 1))
        return mp.step(loss, optimizer=optimizer)

    with pytest.raises(TrainingDiverged, match="8 steps in a row"):
        for _ in range(8):
            assert not take(good, optimizers[0]).skipped
            assert take(bad, optimizers[1]).skipped


def test_counts_go_on_from_a_checkpoint():
    model = Steep(7000.0)
    mp = wrapped(model, constant(1024.0))
    for _ in range(7):
        step(mp, model)
    state = mp.state_dict()
    mp.close()
    mp = wrapped(model, constant(1024.0))
    mp.load_state_dict(state)
    with pytest.raises(TrainingDiverged, match="8 steps in a row"):
        step(mp, model)
    del state["skips_in_a_row"]  # what is not known is not counted
    mp.load_state_dict(state)
    step(mp, model)


def test_gradients_whose_squares_leave_fp32_are_skipped():
    """Adam's second moment of a gradient of 1e25 is infinite, and its updates zero for ever."""
    model = nn.Linear(4, 1, bias=False)
    adam = torch.optim.Adam(model.parameters(), 0.1)
    mp = wrapped(model, optimizer=adam, level="O0")
    assert mp.step(model(torch.full((1, 4), 1e25)).sum()).skipped
    mp.step(model(torch.ones(1, 4)).sum())
    assert torch.isfinite(adam.state[model.weight]["exp_avg_sq"]).all()


def test_single_skips_far_apart_do_not_stop():
    model = Steep(1.0)
    mp = wrapped(model, options=mpdiag.TrainerOptions(max_skips=2))
    for _ in range(4):
        assert step(mp, model, float("nan")).skipped
        assert not step(mp, model).skipped
    assert (mp.steps, mp.skipped) == (8, 4)


class Backwards(nn.Sequential):
    """Calls the last of its modules first."""

    def forward(self, x):
        for module in reversed(self):
            x = module(x)
        return x


@pytest.mark.parametrize(("kind", "order"), [(nn.Sequential, "210"), (Backwards, "012")])
def test_the_result_names_what_went_non_finite_first(kind, order):
    torch.manual_seed(0)
    model = kind(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    mp = wrapped(model, constant(2.0**20))
    with mp.autocast():
        loss = model(torch.ones(2, 4)).float().square().sum() * 1e3
    result = mp.step(loss)
    assert result.skipped
    assert result.cause == "scale"
    assert result.first.where == "backward"
    assert result.first.name.startswith(order[0])  # the first that backward reaches
    assert "loss scale" in result.reason
    names = [n.name for n in result.non_finite]
    assert names == sorted(names, key=lambda n: order.index(n[0]))


def test_replay_tells_the_scale_from_the_format_and_the_model():
    def attempt(x, factor, scale, ends=torch.sum):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1))
        with torch.no_grad():
            for p in model.parameters():
                p.copy_(p.abs() + 0.5)
        mp = wrapped(model, constant(scale))

        def loss_of():
            with mp.autocast():
                return ends(model(x).float()) * factor

        before = [p.detach().clone() for p in model.parameters()]
        result = mp.step(loss_of(), replay=loss_of)
        assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
        assert all(p.grad is None for p in model.parameters())
        return result

    assert attempt(torch.ones(1, 4), 100.0, 2.0**16).cause == "scale"
    beyond = attempt(torch.full((1, 4), 60000.0), 1.0, 1.0)
    assert (beyond.cause, beyond.first.where, beyond.first.name) == ("format", "forward", "0")
    assert attempt(torch.full((1, 4), float("nan")), 1.0, 1.0).cause == "model"
    root = attempt(torch.ones(1, 4), 1.0, 1.0, lambda y: (y - y.detach()).sum().sqrt())
    assert (root.cause, root.first.where, root.first.name) == ("model", "backward", "2")


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_regularisers_act_on_the_fp32_master(level):
    model = nn.Linear(4, 4, bias=False)
    with torch.no_grad():
        model.weight.fill_(1e-4)
    sgd = torch.optim.SGD(model.parameters(), lr=1.0)
    mp = wrapped(model, constant(1024.0), optimizer=sgd, level=level)
    mp.add_regularizer(
        lambda parameters: 0.5e-4 * sum(p.square().sum() for p in parameters.values())
    )
    with mp.autocast():
        loss = model(torch.zeros(2, 4)).sum()
    result = mp.step(loss)
    assert result.gradient_norm == pytest.approx(4e-8, rel=1e-3)
    assert (mp.fp32_state_dict()["weight"] < 1e-4).all()
