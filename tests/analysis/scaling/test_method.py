"""The method of loss scaling is chosen by replay: recordings for which each of them is right."""

import numpy as np
import pytest
from row_buffer import write_rows

from mpdiag.analysis.analyzer import analyze
from mpdiag.analysis.scaling.method import TOLERATED_SKIPS, choose_method, gradient_history
from mpdiag.analysis.scaling.replay import play, replay_run
from mpdiag.numerics.formats import FP16
from mpdiag.numerics.histograms import ExponentHistogram, stack
from mpdiag.numerics.loss_scalers import (
    Backoff,
    ConstantScale,
    LogNormal,
    ScaleRange,
    scaler_named,
)
from mpdiag.numerics.loss_scalers.backoff import INTERVALS

N = 200


def record(folder, top, low, steps=None):
    """A run whose largest gradient is 2^top[i] in step i, and one layer's lie around 2^low[i]."""
    rows = []
    for step, most, middle in zip(
        range(len(top)) if steps is None else steps, top, low, strict=True
    ):
        small = np.exp2(np.random.default_rng(int(step)).normal(middle, 2.0, 400))
        rows += [
            (step, "activation_grad", "small", small),
            (step, "weight_grad", "large.weight", [np.exp2(most)]),
        ]
    return write_rows(folder, rows, steps=len(top))


def noise(sigma, n=N):
    return np.random.default_rng(3).normal(0, sigma, n)


def chosen(folder):
    plan = analyze(folder).plan.loss_scale
    return plan, plan.evidence["replayed"]


def replayed(folder, plan):
    """The plan's scaler, replayed over the run by the other way in."""
    settings = {"init_scale": plan.init_scale, "growth_interval": plan.growth_interval}
    return replay_run(folder, plan.method, **settings, min_scale=plan.min_scale)


@pytest.mark.parametrize("low", [np.full(N, -14.0), np.where(np.arange(N) % 10, -25.0, -12.0)])
def test_no_scale_where_nothing_is_lost_or_only_in_steps_that_hardly_count(tmp_path, low):
    """Need and method are one judgement: by the sum over late steps, not by each step alike."""
    plan, judged = chosen(record(tmp_path / "run", np.full(N, -6.0), low))
    assert (plan.need, plan.method, plan.recommended) == ("not needed", "none", 1.0)
    assert [c["method"] for c in judged] == ["none"]
    # In the second run most steps by themselves lose more than is tolerated.
    assert (judged[0]["lost"] > 0.05) == (low.max() > -14.0)


def test_a_check_where_gradients_reach_up_to_the_edge(tmp_path):
    """Nothing is lost at scale 1, but a little growth would overflow: no scale leaves no check."""
    folder = record(tmp_path / "run", np.full(N, 15.5), np.full(N, -10.0))
    plan, judged = chosen(folder)
    assert plan.need == "not needed"
    assert plan.method == "constant"
    assert plan.recommended < 1
    assert plan.recommended * 2**15.5 * 4 < 65504
    assert [c["fits"] for c in judged] == [False, True]
    assert "leaves them room" in analyze(folder).verdict.text


def test_a_constant_where_gradients_are_steady(tmp_path):
    folder = record(tmp_path / "run", noise(0.5) - 6, np.full(N, -30.0))
    plan, judged = chosen(folder)
    assert (plan.need, plan.method) == ("needed", "constant")
    assert plan.lower <= plan.recommended <= plan.upper / 4  # headroom
    assert judged[-1]["fits"]
    assert not any(c["fits"] for c in judged[:-1])
    played = replayed(folder, plan)
    assert played.skips == 0
    assert played.lost.mean() < 0.05  # of the values, fewer than 1 % of their sum


def test_backoff_where_gradients_begin_large_and_shrink(tmp_path):
    """No constant serves both ends; grown often enough, Backoff does, and rarely would not."""
    steps = np.concatenate([np.arange(20), np.arange(20, 4000, 20)])
    fall = np.maximum(0, 12 - steps / 150)
    folder = record(tmp_path / "run", fall - 2, fall - 34, steps)
    plan, judged = chosen(folder)
    assert plan.method == "backoff"
    assert plan.growth_interval in INTERVALS[1:]
    assert plan.max_scale > plan.upper  # what early maxima forbid, later ones allow
    constants = [c for c in judged if c["method"] == "constant"]
    assert constants
    assert min(c["lost"] for c in constants) > 0.01
    longer = [c for c in judged if c["method"] == "backoff"][:-1]
    assert longer
    assert not any(c["fits"] for c in longer)
    played = replayed(folder, plan)
    assert played.overflow.mean() <= TOLERATED_SKIPS
    assert played.lost[steps > 2000].mean() < 0.05
    assert analyze(folder).loss_scale.fits


def test_lognormal_where_a_violent_start_leaves_no_time_to_grow(tmp_path):
    """One huge step, then noise: Backoff would climb one power an interval."""
    top = noise(0.7) - 6
    top[0] += 16
    folder = record(tmp_path / "run", top, np.full(N, -36.0))
    plan, judged = chosen(folder)
    assert plan.method == "lognormal"
    backoffs = {c["growth_interval"]: c for c in judged if c["method"] == "backoff"}
    assert tuple(backoffs) == INTERVALS
    assert not any(c["fits"] for c in backoffs.values())
    assert replayed(folder, plan).overflow.mean() <= TOLERATED_SKIPS
    assert "LogNormal" in plan.reason


def test_infinities_of_the_training_itself_ask_for_a_check_but_are_nobodys_skips(tmp_path):
    top = np.full(N, -6.0)
    top[50] = np.inf
    plan, judged = chosen(record(tmp_path / "run", top, np.full(N, -14.0)))
    assert (plan.need, plan.method) == ("not needed", "constant")
    assert judged[-1]["skipped"] == 0


@pytest.mark.parametrize(
    "scaler", [ConstantScale(2.0**18), Backoff(2.0**20, growth_interval=7), LogNormal(2.0**18)]
)
def test_playing_is_adjusting_step_by_step(scaler):
    maxima = np.exp2(noise(2.0, 50) - 2)
    maxima[7] = np.inf
    steps = np.cumsum(np.random.default_rng(4).integers(1, 4, 50))
    played = play(steps, maxima, scaler)
    for i, top in enumerate(maxima):
        assert played.scale[i] == scaler.scale
        expected = not np.isfinite(top) or top * scaler.scale >= 65520
        assert played.overflow[i] == expected
        scaler = scaler.adjust(float(top))
        for _ in range(steps[i + 1] - steps[i] - 1 if i < 49 else 0):
            scaler = scaler.adjust(float(min(top, maxima[i + 1])))
    assert played.final_scale == scaler.scale
    assert played.overflow.any()


def history(top, low, shrinkage=0):
    layers = stack([ExponentHistogram.of(np.exp2(np.full(3, x)).astype(np.float32)) for x in low])
    return gradient_history(
        np.arange(len(top)), np.exp2(np.asarray(top)), [layers], FP16, 0.01, shrinkage
    )


def test_a_candidates_figures_by_hand():
    # Steps 2 and 3 are late; at scale 2^4 the first of them overflows, the second is lost.
    four = history([0.0, 0.0, 13.0, 0.0], [-20.0, -20.0, -20.0, -29.0])
    found = four.judge(ConstantScale(16.0))
    assert (found.skipped, found.lost, found.fits) == (0.25, 1.0, False)
    # 2^-29 · 2^4 = 2^-25 is a tie and lost; at 2^5 it is kept.
    assert four.judge(ConstantScale(32.0)).lost == 0.0
    assert four.judge(ConstantScale(1.0), headroom=2).skipped == 0.0
    assert four.judge(ConstantScale(1.0), headroom=3).skipped == 0.25
    assert four.judge(ConstantScale(2.0**20)).lost == 1.0  # each late step skipped


def test_what_shrank_is_taken_to_shrink_as_much_again():
    twice = history([0.0, -3.0], [-20.0, -23.0], shrinkage=3)
    assert np.log2(twice.maxima).tolist() == [0.0, -3.0, -6.0]
    assert twice.steps.tolist() == [0, 1, 2]
    assert twice.late.tolist() == [[False, True, True]]
    # The last step's values lie at 2^-26: lost at scale 2, kept at scale 4.
    assert twice.judge(ConstantScale(2.0)).lost == 0.5
    assert twice.judge(ConstantScale(4.0)).lost == 0.0


def test_every_method_the_choice_can_make_is_a_scaler_by_name():
    hopeless = history([15.9] * 4, [-60.0] * 4)
    allowed = ScaleRange(wanted=0, safe=-2, upper=0)
    judged = choose_method(hopeless, allowed, headroom=2, scaled=False).judged
    assert {c.method for c in judged} == {"none", "constant", "backoff", "lognormal"}
    for candidate in judged:
        if candidate.method != "none":
            assert scaler_named(candidate.method).scale > 0
