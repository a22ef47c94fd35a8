"""The search on tiny trainings: what it finds, its budget, and that it goes on after a kill."""

import dataclasses
import json
import math
import signal
import textwrap

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from recorded_steps import Layers
from support import constant
from torch import nn

import mpdiag
from mpdiag.errors import DamagedSearch, StateMismatch, UsageError
from mpdiag.plan import PrecisionPlan
from mpdiag.sensitivity import fp32_search as searching
from mpdiag.sensitivity.fp32_search import find_smallest, search_fp32
from mpdiag.sensitivity.loss_estimate import Fp32Candidate
from mpdiag.sensitivity.search_state import spread_of
from mpdiag.training.trainer import MixedPrecision

SMALL = {"seeds": (0, 1), "probe_seeds": 1, "higher_is_better": False}


def squares(_, x):
    """Of values some thousand in size, centred: the square overflows, and so does the sum."""
    squares = x * x
    centred = squares - squares.sum(-1, keepdim=True) / 8
    return centred / (centred.abs().sum(-1, keepdim=True) + 1)


def builder(size, steps=12, built=None):
    def build(seed):
        torch.manual_seed(seed)
        parts = {"first": nn.Linear(4, 8), "squares": Layers(squares), "last": nn.Linear(8, 2)}
        model = Layers(lambda m, x: m.last(m.squares(m.first(x) * size)), **parts)
        optimizer = torch.optim.Adam(model.parameters(), 1e-2)
        if built is not None:
            built.append(seed)

        def train(mp):
            generator = torch.Generator().manual_seed(seed)
            total = 0.0
            for _ in range(steps):
                x = torch.randn(16, 4, generator=generator)
                with mp.autocast():
                    loss = (model(x) - x[:, :2]).square().mean()
                total = mp.step(loss).loss
            return total

        return model, optimizer, train

    return build


@pytest.fixture(scope="module")
def found():
    return search_fp32(builder(2000.0), constant(8.0), **SMALL)


def test_the_operation_that_overflows_is_found(found):
    assert found.answer == "found"
    assert found.fp32 == (Fp32Candidate("squares", "mul"),)
    assert found.candidates[0][0] == Fp32Candidate("squares", "mul")  # ranked first
    assert len(found.probes) == 2  # nothing in FP32, then this
    choice = found.plan.fp32_operations[0]
    assert (choice.module, choice.op) == ("squares", "mul")
    assert "diverges without it" in choice.reason
    assert choice.evidence["metrics_without"] == [None]
    assert choice.evidence["metrics_with"][0] <= choice.evidence["bound"]
    json.dumps(found.to_json(), allow_nan=False)
    assert PrecisionPlan.from_json(found.plan.to_json()) == found.plan


def test_the_trainer_applies_what_was_found(found):
    model, optimizer, train = builder(2000.0)(0)
    with MixedPrecision(model, optimizer, found.plan) as mp:
        metric = train(mp)
        assert mp.skipped == 0
    assert found.spread.holds(metric)


MUL, SUM = Fp32Candidate("squares", "mul"), Fp32Candidate("squares", "sum")
GUESS = (mpdiag.plan.Fp32Choice("linear", "last", "a rule says so"),)


@pytest.mark.parametrize(
    ("size", "changes", "options", "fp32"),
    [
        # The sum is FP32 by the lists; without them it overflows, too, and so does the square.
        (2000.0, {}, {"lists": False}, {MUL, SUM}),
        (2000.0, {"level": "O2"}, {}, {Fp32Candidate("squares", "")}),  # nothing casts by operation
        (1.0, {"fp32_operations": GUESS}, {}, set()),  # no guess of the plan is taken for granted
    ],
)
def test_what_is_searched_goes_by_the_lists_and_the_level(size, changes, options, fp32):
    plan = dataclasses.replace(constant(8.0), **changes)
    result = search_fp32(builder(size), plan, **SMALL, **options)
    assert result.answer == ("found" if fp32 else "none")
    assert set(result.fp32) == fp32
    assert fp32 or [p.fp32 for p in result.probes] == [frozenset()]  # after one question
    chosen = (*result.plan.fp32_operations, *result.plan.fp32_modules)
    assert {Fp32Candidate(c.module, c.op) for c in chosen} == fp32
    if options:
        assert {"mul", "sum", "linear", "div"} <= {c.op for c, _ in result.candidates}


def test_impossible_when_even_all_candidates_fail():
    """A metric that is worse in any mixed precision, whatever stays in FP32."""

    def build(seed):
        model, optimizer, train = builder(1.0)(seed)
        return model, optimizer, lambda mp: train(mp) + (mp.precision.level != "O0") * 1e4

    result = search_fp32(build, constant(8.0), **SMALL)
    assert result.answer == "impossible"
    assert result.plan.fp32_operations == ()


class Clock:
    """Time that passes only in trainings."""

    def __init__(self):
        self.now = 0.0

    def monotonic(self):
        return self.now


def test_the_budget_is_kept_and_there_is_an_answer_all_the_same(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(searching, "time", clock)
    plain = builder(2000.0)

    def build(seed):
        model, optimizer, train = plain(seed)

        def slow(mp):
            clock.now += 60.0
            return train(mp)

        return model, optimizer, slow

    for minutes in range(1, 6):
        clock.now = 0.0
        result = search_fp32(build, constant(8.0), budget=minutes, lists=False, **SMALL)
        assert clock.now <= 60 * minutes
        assert result.answer == "unfinished"
        assert result.sufficient == any(p.good for p in result.probes)
        assert result.sufficient or result.fp32 == ()
    clock.now = 0.0
    result = search_fp32(build, constant(8.0), budget=60, lists=False, **SMALL)
    assert result.answer == "found"
    # Anytime: the best set known when time ran out is good, and goes into the plan.
    spent = clock.now / 60
    clock.now = 0.0
    almost = search_fp32(build, constant(8.0), budget=spent - 0.5, lists=False, **SMALL)
    assert almost.answer == "unfinished"
    assert len(result.fp32) <= len(almost.fp32) < len(almost.candidates)
    assert {(c.module, c.op) for c in almost.plan.fp32_operations} == {
        (c.module, c.op) for c in almost.fp32
    }


def test_without_time_nothing_is_claimed_and_the_plan_stays_as_it_was():
    plan = dataclasses.replace(constant(8.0), fp32_operations=GUESS)
    result = search_fp32(builder(2000.0), plan, budget=1e-9, **SMALL)
    assert (result.answer, result.sufficient, result.fp32) == ("unfinished", False, ())
    assert result.plan == plan
    document = result.to_json()
    ran = {"fp32": 0, "fp32_wanted": 2, "sets": 0, "of_sets": 0}
    assert (document["sufficient"], document["trainings"]) == (False, ran)


def test_it_goes_on_where_it_stopped(tmp_path):
    built = []

    def search(plan):
        built.clear()
        return search_fp32(builder(2000.0, built=built), plan, run=tmp_path, **SMALL)

    first = search(constant(8.0))
    assert built
    # Nothing is trained twice, and another wording of the plan is no other search.
    scale = dataclasses.replace(constant(8.0).loss_scale, reason="in other words")
    again = search(dataclasses.replace(constant(8.0), run="renamed", loss_scale=scale))
    assert built == []
    assert (again.answer, again.fp32) == (first.answer, first.fp32)
    assert search(constant(8.0)).to_json() == first.to_json()
    assert built == []
    # With the last answer lost, only that one is trained again.
    state = json.loads((tmp_path / "search.json").read_text())
    state["probes"].pop()
    (tmp_path / "search.json").write_text(json.dumps(state))
    assert search(constant(8.0)).fp32 == first.fp32
    assert len(built) == 1


SCRIPT = """
    import os, signal, sys
    sys.path[:0] = {paths!r}
    from support import constant
    from test_fp32_search import SMALL, builder
    from mpdiag.sensitivity.fp32_search import search_fp32

    def tell(what, probes, best):
        if probes == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    search_fp32(builder(2000.0), constant(8.0), run={run!r}, on_progress=tell, **SMALL)
"""


def test_it_survives_a_kill(tmp_path, root, found, fork_server):
    paths = [str(root), str(root / "tests"), str(root / "tests" / "sensitivity")]
    script = textwrap.dedent(SCRIPT).format(paths=paths, run=str(tmp_path))
    done = fork_server("python", "-c", script, cwd=tmp_path)
    assert done.code == -signal.SIGKILL, done.err
    state = json.loads((tmp_path / "search.json").read_text())
    assert len(state["probes"]) == 1
    built = []
    result = search_fp32(builder(2000.0, built=built), constant(8.0), run=tmp_path, **SMALL)
    assert built == [0]  # the references and the first question are known
    assert result.fp32 == found.fp32


def test_another_searchs_file_and_a_damaged_one_are_refused(tmp_path):
    def search(scale=8.0):
        return search_fp32(builder(1.0), constant(scale), run=tmp_path, **SMALL)

    search()
    with pytest.raises(StateMismatch, match="another search"):
        search(16.0)
    state = json.loads((tmp_path / "search.json").read_text())
    state["probes"] = [{**state["probes"][0], "metrics": []}]  # as if it was never trained
    texts = ("{", "[]", '{"version": 1}', '{"version": 1, "key": 3, "probes": 4}')
    for text, words in (*((t, "delete it") for t in texts), (json.dumps(state), "without metrics")):
        (tmp_path / "search.json").write_text(text)
        with pytest.raises(DamagedSearch, match=words):
            search()


def test_the_search_is_kept_at_a_url_too(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    url, built = f"memory://{tmp_path.name}/search", []
    first = search_fp32(builder(1.0, built=built), constant(8.0), run=url, **SMALL)
    trainings = len(built)
    again = search_fp32(builder(1.0, built=built), constant(8.0), run=url, **SMALL)
    assert len(built) == trainings
    assert again.to_json() == first.to_json()
    assert list(tmp_path.iterdir()) == []  # no folder that is called "memory:"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"budget": 0}, "budget"),
        ({"budget": float("nan")}, "budget"),
        ({"seeds": (1,)}, "two or more different"),
        ({"seeds": (1, 1)}, "two or more different"),
        ({"probe_seeds": 0}, "probe_seeds"),
        ({"probe_seeds": 3}, "probe_seeds"),
        ({"plan": dataclasses.replace(constant(), level="O0")}, "nothing to search"),
        ({"build": builder(math.inf)}, "an FP32 training diverged"),
    ],
)
def test_what_makes_no_sense_is_refused(options, words):
    usual = {"build": builder(1.0), "plan": constant(8.0), **SMALL}
    with pytest.raises(UsageError, match=words):
        search_fp32(**{**usual, **options})


def test_the_ranking_changes_nothing_in_the_training():
    from mpdiag.sensitivity.loss_estimate import RankingTrainer

    plain, ranked = builder(2000.0)(0), builder(2000.0)(0)
    with MixedPrecision(plain[0], plain[1], constant(), level="O0") as mp:
        expected = plain[2](mp)
    with RankingTrainer(ranked[0], ranked[1], constant(), 8.0) as mp:
        assert ranked[2](mp) == expected
        assert mp.weights
    for a, b in zip(plain[0].parameters(), ranked[0].parameters(), strict=True):
        assert torch.equal(a, b)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in ranked[0].modules())


class Planted:
    """Good is what contains one of the planted sets."""

    def __init__(self, *sets):
        self.sets = [frozenset(s) for s in sets]
        self.asked = []

    def __call__(self, subset):
        self.asked.append(subset)
        return any(s <= subset for s in self.sets)


@st.composite
def plantings(draw):
    n = draw(st.integers(1, 40))
    ranked = draw(st.permutations(range(n)))
    sets = draw(st.lists(st.sets(st.integers(0, n - 1), max_size=5), max_size=3))
    return ranked, sets


@given(plantings())
def test_nothing_can_be_taken_away_from_what_is_found(planting):
    ranked, sets = planting
    good = Planted(*sets)
    better = []
    found = find_smallest(ranked, good, better.append)
    if not sets:  # nothing is good
        assert found is None
        return
    assert good(found)
    assert not any(good(found - {item}) for item in found)
    assert all(good(b) for b in better)
    assert better[-1] == found
    if len(sets) == 1:  # few questions are asked
        assert found == frozenset(sets[0])
        each = 2 * math.log2(len(ranked) + 1) + 2
        assert len(set(good.asked)) <= (len(found) + 1) * each + len(found)


def test_one_question_is_enough_where_nothing_is_needed():
    for candidates in (range(9), []):
        good = Planted(())
        assert find_smallest(candidates, good) == frozenset()
        assert good.asked == [frozenset()]


@given(st.integers(1, 6), st.integers(8, 200))
def test_a_good_ranking_makes_it_cheap(needed, n):
    good = Planted(range(needed))
    assert find_smallest(range(n), good) == frozenset(range(needed))
    assert len(set(good.asked)) <= needed * (needed + 4)  # however many candidates


def test_more_that_hurts_does_not_stay():
    """Not everything is monotone: 3 hurts unless 7 is there as well."""

    def good(subset):
        return 5 in subset and (3 not in subset or 7 in subset)

    found = find_smallest([3, 7, 5, 1], good)
    assert found == frozenset({5})


@pytest.mark.parametrize(
    ("metrics", "center", "reach"),
    [
        # Student's t at 99 % with 4 degrees of freedom is 3.746947 (printed tables).
        ([0.90, 0.92, 0.91, 0.93, 0.89], 0.91, 3.746947 * math.sqrt(0.00025 * (1 + 1 / 5))),
        ([2.0, 2.0, 2.0], 2.0, 0.02),  # seeds that agree leave one per cent
        ([-2.0, -2.0], -2.0, 0.02),
    ],
)
@pytest.mark.parametrize("higher", [True, False])
def test_the_bound_is_a_prediction_interval_and_only_worse_counts(metrics, center, reach, higher):
    spread, sign = spread_of(metrics, higher_is_better=higher), 1 if higher else -1
    assert spread.bound == pytest.approx(center - sign * reach, rel=1e-5)
    assert spread.holds(sign * 1e9)
    assert not spread.holds(sign * -1e9)
    assert not any(map(spread.holds, (math.nan, math.inf, -math.inf)))


@pytest.mark.parametrize("metrics", [[], [1.0], [1.0, math.nan], [1.0, math.inf]])
def test_what_has_no_spread_is_refused(metrics):
    with pytest.raises(UsageError):
        spread_of(metrics, higher_is_better=True)
