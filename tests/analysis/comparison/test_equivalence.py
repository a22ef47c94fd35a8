"""The equivalence test against SciPy and against simulation; ``compare`` end to end."""

import dataclasses
import json
import math
import random

import numpy as np
import pytest
from calls import run
from hypothesis import given
from hypothesis import strategies as st
from made_runs import write_log
from row_buffer import write_rows
from seed_runs import make_run

import mpdiag
from mpdiag.analysis import run_statistics
from mpdiag.analysis.comparison.equivalence import (
    judge_equivalence,
    judge_family,
    seeds_to_decide,
)
from mpdiag.analysis.comparison.groups import read_group, save_baseline
from mpdiag.errors import DamagedRun, RunNotFound, UsageError
from mpdiag.reports.text.comparison import draw_interval
from mpdiag.runs.run import Run

scipy_stats = pytest.importorskip("scipy.stats", reason="SciPy is the oracle; pip install scipy")


def test_the_interval_is_welchs():
    a, b = [1.0, 2.0, 3.0, 4.5], [2.0, 2.5, 2.75]
    found = judge_equivalence(a, b, 1.0)
    expected = scipy_stats.ttest_ind(b, a, equal_var=False).confidence_interval(0.9)
    assert (found.low, found.high) == pytest.approx((expected.low, expected.high))
    paired = judge_equivalence(a[:3], b, 1.0, paired=True)
    expected = scipy_stats.ttest_rel(b, a[:3]).confidence_interval(0.9)
    assert (paired.low, paired.high) == pytest.approx((expected.low, expected.high))


def share(verdict, seeds, difference, margin, *, paired, rounds=600):
    draw = random.Random(0)
    hits = 0
    for _ in range(rounds):
        a = [draw.gauss(0, 1) for _ in range(seeds)]
        b = [draw.gauss(difference, 1) for _ in range(seeds)]
        hits += judge_equivalence(a, b, margin, paired=paired).verdict == verdict
    return hits / rounds


@pytest.mark.parametrize("paired", [True, False])
@pytest.mark.parametrize("seeds", [4, 20])
def test_what_lies_on_the_margin_is_seldom_called_equivalent(seeds, paired):
    assert share("equivalent", seeds, 2.0, 2.0, paired=paired) <= 0.075
    assert share("different", seeds, 2.0, 2.0, paired=paired) <= 0.075


@pytest.mark.parametrize(("difference", "margin"), [(0.0, 1.0), (0.4, 1.0), (1.5, 0.5)])
@pytest.mark.parametrize("paired", [True, False])
def test_the_number_of_seeds_decides_four_times_out_of_five(difference, margin, paired):
    spread = math.sqrt(2) if paired else 1.0
    seeds = seeds_to_decide(difference, spread, margin, paired=paired)
    verdict = "equivalent" if difference < margin else "different"
    assert 0.73 <= share(verdict, seeds, difference, margin, paired=paired) <= 0.92


def test_what_is_no_mean_is_not_judged_and_no_margin_is_refused():
    """How often a side diverges is a rate, and is compared as one (test_rates.py)."""
    for a, b in ([1.0, 2.0], [1.0, math.nan]), ([math.inf, 2.0], [1.0, math.nan]):
        assert judge_equivalence(a, b, 1.0).verdict == "inconclusive"
    single = judge_equivalence([1.0], [1.0], 0.5)
    assert (single.verdict, single.seeds_to_decide) == ("inconclusive", None)
    assert (single.low, single.high) == (-math.inf, math.inf)
    for margin in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(UsageError, match="margin"):
            judge_equivalence([1.0, 2.0], [1.0, 2.0], margin)


@given(
    st.lists(st.floats(-2, 2), min_size=2, max_size=6),
    st.lists(st.floats(-2, 2), min_size=2, max_size=6),
    st.floats(0.01, 0.3),
)
def test_the_p_values_are_the_levels_at_which_the_verdict_turns(a, b, alpha):
    found = judge_equivalence(a, b, 1.0, alpha=alpha)
    expected = "inconclusive"
    for verdict, p in (("equivalent", found.p_equivalent), ("different", found.p_different)):
        if p < alpha - 1e-9:
            expected = verdict
        elif p < alpha + 1e-9:
            return  # on the edge
    assert found.verdict == expected


@pytest.mark.parametrize(
    ("different", "equivalent", "others", "levels"),
    [
        ((0.2,), (), (), [0.06]),
        ((0.5, 0.001, 0.025), (), (), [0.06, 0.02, 0.03]),
        ((0.5, 0.001, 0.035), (), (), [0.03, 0.02, 0.03]),  # stops at .03
        ((0.021, 0.021, 0.021), (), (), [0.02, 0.02, 0.02]),
        ((0.5,), (), (0.001,), [0.06, 0.03]),
        ((), (), (0.5,), [0.06]),
        ((), (0.04, 0.05), (), [0.06, 0.06]),  # that all are equivalent is one claim
        ((), (0.04, 0.07), (), [0.03, 0.03]),
    ],
)
def test_several_metrics_share_one_level_by_holms_procedure(different, equivalent, others, levels):
    template = judge_equivalence([0.0, 1.0], [0.0, 1.0], 1.0)
    family = [dataclasses.replace(template, p_different=p, p_equivalent=1.0) for p in different]
    family += [dataclasses.replace(template, p_different=1.0, p_equivalent=p) for p in equivalent]
    assert judge_family(family, 0.06, list(others)) == levels


def test_where_both_sides_diverged_the_advice_is_no_other_margin(tmp_path):
    for place in ("a/0", "a/1", "b/0", "b/1"):
        make_run(tmp_path / place, seed=int(place[-1]), metric=math.nan)
    found = mpdiag.compare(tmp_path / "a", tmp_path / "b", metric="accuracy")
    (finding,) = (f for f in found.findings if f.code == "metric-inconclusive")
    assert "not finite on either side" in finding.message
    assert "margin" not in finding.fix


def test_the_interval_is_drawn_between_its_margins():
    line = draw_interval(judge_equivalence([0.0, 0.2], [0.1, 0.3], 1.0))
    assert line.index("[") < line.index("●") < line.index("]")
    assert len(line) == 33
    ends = [draw_interval(judge_equivalence([0.0], [by], 1.0)) for by in (-9.0, -2.0, 2.0, 9.0)]
    assert [line.strip("·[]|") for line in ends] == ["◀", "●", "●", "▶"]


@pytest.fixture
def seeds(tmp_path):
    draw = np.random.default_rng(0)
    for seed in range(8):
        base = 0.9 + 0.01 * draw.standard_normal()
        make_run(tmp_path / "fp32" / f"s{seed}", seed=seed, metric=base)
        near = base + 0.001 * draw.standard_normal()
        make_run(tmp_path / "fp16" / f"s{seed}", seed=seed, metric=near)
        worse = {"metric": base - 0.3, "losses": (3.0, 2.9, 2.8)}
        make_run(tmp_path / "broken" / f"s{seed}", seed=seed, **worse)
    return tmp_path


def test_seeds_are_compared_pair_by_pair_and_a_stored_baseline_stands_for_its_runs(seeds):
    found = mpdiag.compare(seeds / "fp32", seeds / "fp16", metric="accuracy", margin=0.005)
    (metric,) = found.metrics
    assert (found.verdict, found.curve.worst_step) == ("equivalent", 0)
    assert (metric.result.paired, metric.result.seeds) == (True, (8, 8))
    broken = mpdiag.compare(seeds / "fp32", seeds / "broken")
    assert (broken.verdict, broken.curve.worst_step) == ("different", 2)
    save_baseline(read_group(seeds / "fp32"), seeds / "baseline.json")
    stored = mpdiag.compare(seeds / "baseline.json", seeds / "broken").to_json()
    assert stored["metrics"] == broken.to_json()["metrics"]


def test_the_command_and_its_exit_codes(seeds, monkeypatch):
    monkeypatch.chdir(seeds)
    same = run("compare", "fp32", "fp16", "--strict", "--json", "-o", "baseline.json")
    assert (same.exit_code, json.loads(same.stdout)["verdict"]) == (0, "equivalent")
    worse = run("compare", "baseline.json", "broken", "--strict")
    assert (worse.exit_code, "different" in worse.stdout, "next: " in worse.stderr) == (
        1,
        True,
        True,
    )
    (seeds / "empty").mkdir()
    for words, code, sentence in (
        ("fp32 nowhere", 3, ""),
        ("fp32 empty", 3, "training.jsonl"),
        ("fp32 fp16 --margin -1", 2, ""),
        ("fp32 fp16 --metric speed", 2, ""),
        ("fp32 fp16 -o nowhere/b.json", 2, "choose another file with -o"),
    ):
        found = run("compare", *words.split())
        assert (found.exit_code, sentence in found.stderr) == (code, True), words


@pytest.mark.parametrize(
    ("value", "margin", "code", "allowed"),
    [(0.9, 0.01, 0, 0), (0.88, 0.01, 1, 0), (0.8, 0.01, 1, 1), (0.95, 0.01, 0, 0)],
)
def test_a_strict_job_fails_on_worse_and_undecided_and_may_allow_the_latter(
    tmp_path, value, margin, code, allowed
):
    make_run(tmp_path / "fp32", metric=0.9)
    make_run(tmp_path / "fp16", metric=value)
    words = ("compare", tmp_path / "fp32", tmp_path / "fp16", "--margin", f"accuracy={margin}")
    given = ((), ("--strict",), ("--strict", "--allow-undecided"))
    assert [run(*words, *more).exit_code for more in given] == [0, code, allowed]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{}", "not a baseline"),
        ("[1]", "not a baseline"),
        ("{", "not a readable baseline"),
        ('{"kind": "mpdiag baseline", "schema_version": 9}', "newer"),
        ('{"kind": "mpdiag baseline", "schema_version": 1, "trainings": []}', "no training"),
        ('{"kind": "mpdiag baseline", "schema_version": 1, "trainings": [{}]}', "not a readable"),
    ],
)
def test_a_foreign_baseline_is_refused_in_a_sentence(tmp_path, text, words):
    (tmp_path / "b.json").write_text(text)
    with pytest.raises((DamagedRun, mpdiag.errors.NewerSchema), match=words):
        read_group(tmp_path / "b.json")


def side(folder, factor=1.0):
    """A run with statistics of three steps, whose values are larger by a factor, and its log."""
    values = factor * np.random.default_rng(0).standard_normal(200)
    rows = [(step, kind, "0", values) for step in range(3) for kind in ("activation", "weight")]
    write_rows(folder, rows, steps=3)
    write_log(folder, *({"step": step, "loss": 1.0, "scale": 1.0} for step in range(3)))


def test_a_side_that_outgrows_memory_is_streamed_and_a_damaged_one_is_not_taken_for_none(
    tmp_path, monkeypatch
):
    side(tmp_path)
    (held,) = read_group(tmp_path).trainings
    monkeypatch.setattr(run_statistics, "STREAM_FROM", 0)
    monkeypatch.delattr(Run, "records")  # nobody reads them whole
    (streamed,) = read_group(tmp_path).trainings
    assert streamed.layers == held.layers
    assert held.layers
    monkeypatch.undo()
    next((tmp_path / "stats").iterdir()).write_bytes(b"PAR1")
    with pytest.raises(DamagedRun, match="remove it to read the rest"):
        read_group(tmp_path)
    with pytest.raises(RunNotFound):
        read_group(tmp_path / "nowhere")


def test_a_layer_that_moved_three_octaves_is_a_finding(tmp_path):
    side(tmp_path / "a")
    side(tmp_path / "b", 1024.0)
    found = mpdiag.compare(tmp_path / "a", tmp_path / "b")
    moved = {(s.kind, s.name): s.octaves for s in found.shifts}
    assert moved["activation", "0"] == pytest.approx(10)
    assert any(f.code == "layer-towards-overflow" for f in found.findings)
