"""The case collection's tools: what one arithmetic does, which operation is found, how it is counted."""

from __future__ import annotations

import importlib
import json
import math
import sys
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from mpdiag.plan import Fp32Choice, PrecisionPlan


@pytest.fixture(scope="module", autouse=True)
def collection(root):
    sys.path.insert(0, str(root / "studies"))
    from cases import collection

    yield collection
    sys.path.remove(str(root / "studies"))


def tiny(build, **fields):
    from cases.case import Case

    settings = {
        "name": "tiny",
        "about": "",
        "steps": 20,
        "metric": "loss",
        "higher_is_better": False,
        "margin": 0.1,
    }
    return Case(build=build, **settings | fields)


class Squares(nn.Module):
    """The squares of 100 are fine, those of 300 are not."""

    def __init__(self, size):
        super().__init__()
        self.size = size
        self.first, self.last = nn.Linear(2, 2, bias=False), nn.Linear(2, 1)
        nn.init.eye_(self.first.weight)

    def forward(self, x):
        h = self.first(self.size * x)
        return self.last(h * h / self.size**2)


def squares(size):
    from cases.case import Training

    def build(seed):
        torch.manual_seed(seed)
        model = Squares(size)
        x = torch.tensor([[1.0, 0.5], [0.5, 1.0]])

        def error():
            return ((model(x) - x[:, :1]) ** 2).mean()

        optimizer = torch.optim.SGD(model.last.parameters(), lr=0.1)
        return Training(model, optimizer, lambda step: error(), lambda: float(error()))

    return build


def test_the_operation_at_fault_is_found_by_training():
    from cases import truth

    found = truth.examine(truth.Bench(tiny(squares(300.0)), {}))
    assert not found["fp16_trains"]
    assert ["", "mul"] in found["operations"]
    assert ["first", "linear"] not in found["operations"]
    assert found["bf16_trains"]


def test_what_trains_in_every_way_needs_nothing():
    from cases import truth

    trainings = {}
    found = truth.examine(truth.Bench(tiny(squares(2.0)), trainings))
    assert found["fp16_trains"]
    assert found["bf16_trains"]
    assert not found["needs_scale"]
    assert not found["needs_masters"]
    assert not any("narrow" in way for way in trainings)
    again = truth.Bench(tiny(lambda seed: pytest.fail("trained again")), trainings)
    assert truth.examine(again) == found


def test_weights_in_fp16_stand_still_where_updates_are_tiny():
    from cases import arithmetic
    from cases.case import Training

    def build(seed):
        model = nn.Linear(1, 1, bias=False)
        nn.init.ones_(model.weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)

        def loss(step):
            return model.weight.sum()

        return Training(model, optimizer, loss, lambda: float(model.weight))

    case = tiny(build)
    assert arithmetic.train(case, 0) == pytest.approx(1 - 20e-4)
    assert arithmetic.train(case, 0, fp16_weights=True) == 1.0


def test_groups_that_fail_only_together_are_kept_together(monkeypatch):
    from cases import truth

    every = [("", f"op{i}") for i in range(8)]

    def fails(bench, group, scaled=True):
        return ("", "op6") in group or {("", "op1"), ("", "op2")} <= set(group)

    monkeypatch.setattr(truth, "narrow_fails", fails)
    assert truth._find(None, every) == ([("", "op6")], [every[:4]])


def test_gradients_of_gradients_pass_a_stored_layer():
    from cases import formats

    fp8, fp32 = formats.format_named("fp8_e4m3"), formats.format_named("fp32")
    x = torch.tensor([0.5, 1.0], requires_grad=True)
    cubes = formats._Stored.apply(x**3, (fp8, 1.0), (fp32, 1.0))
    (slope,) = torch.autograd.grad(cubes.sum(), x, create_graph=True)
    (bend,) = torch.autograd.grad(slope.sum(), x)
    assert torch.equal(slope, 3 * x * x)
    assert torch.equal(bend, 6 * x)
    y = formats._Stored.apply(x**3, (fp32, 1.0), (fp8, 1.0))
    (slope,) = torch.autograd.grad(1.03 * y.sum(), x, create_graph=True)
    (bend,) = torch.autograd.grad(slope.sum(), x)
    assert torch.equal(slope, 3 * x * x * 1.0)  # E4M3 makes 1.03 one
    assert torch.equal(bend, 6 * x)


def test_a_case_is_known_by_its_source(collection):
    fingerprints = {collection.fingerprint(c) for c in collection.load("tuning").values()}
    assert len(fingerprints) == len(collection.load("tuning")) >= 35
    one, other = tiny(squares(1.0)), tiny(squares(1.0), steps=21)
    assert collection.fingerprint(one) != collection.fingerprint(other)


def test_answers_are_counted_and_bounded():
    from cases import score

    tally = score.Tally()
    for is_so, said in [(True, True)] * 9 + [(True, False), (False, True), (False, False)]:
        tally.add("case", is_so=is_so, said=said)
    counted = tally.to_json()
    assert (counted["found"], counted["missed"], counted["false"]) == (9, 1, 1)
    assert counted["recall"] == {"share": 0.9, "low": 0.5958, "high": 0.9821}
    assert score.share(0, 0) is None


def test_operations_are_counted_by_what_the_advice_does():
    from cases import score

    def case(needs, said, needed, *, fails=False):
        is_so = {"needs_operations": needs, "named_and_needed": needed, "plan_fails": fails}
        return {"operations": said}, is_so

    tally = score.Tally()
    for name, (said, is_so) in {
        "held, one too many": case(True, [("a", "mul"), ("b", "sin")], [("b", "sin")]),
        "named, and fails": case(True, [("c", "mm")], [["c", "mm"]], fails=True),
        "not named": case(True, [], []),
        "needless": case(False, [("d", "exp")], []),
        "nothing": case(False, [], []),
        "not trained": case(True, [("e", "mm")], None),
    }.items():
        score._count_operations(tally, name, said, is_so)
    counted = tally.to_json()
    assert (counted["found"], counted["missed"], counted["negatives"]) == (1, 2, 3)
    assert (counted["said"], counted["false"]) == (4, 2)
    assert counted["precision"]["share"] == 0.5
    assert math.isclose(counted["recall"]["share"], 1 / 3, abs_tol=1e-4)
    assert counted["mistakes"] == [
        "false: held, one too many a:mul", "missed: named, and fails", "missed: not named",
        "false: needless d:exp",
    ]  # fmt: skip


def test_a_smallest_set_of_a_plans_operations_is_needed():
    from cases import advice

    choices = [Fp32Choice(op, "m") for op in ("first", "either", "or", "alone")]
    whole = Fp32Choice("Linear", "body", evidence={"type": "Linear"})
    by_policy = Fp32Choice("exp", "m", evidence={"policy": True})
    plan = PrecisionPlan(fp32_operations=(whole, *choices, by_policy), fp32_modules=(whole,))
    named = advice.named(plan)
    assert named == [("body", ""), *((c.module, c.op) for c in choices)]

    def holds(changed):
        left = {(c.module, c.op) for c in changed.fp32_operations}
        wide = bool(changed.fp32_modules) and ("body", "Linear") in left
        return wide and ("m", "alone") in left and {("m", "either"), ("m", "or")} & left

    assert advice.needed(plan, named, holds) == [("body", ""), ("m", "or"), ("m", "alone")]
    assert advice.means(("body", ""), ("body.0", "linear"))
    assert advice.means(("m", "addmm"), ("m", "linear"))
    assert not advice.means(("m", "mul"), ("n", "mul"))


def test_plans_that_are_expected_to_train_are_counted_with_those_that_do_not():
    from cases import score

    def case(level, fails):
        return {"said": {"level": level}, "is_so": {"plan_fails": fails}}

    cases = [case("expected", False), case("expected", True), case("cannot", True)]
    found = score.expected_plans(dict(enumerate([*cases, case("expected", None)])))
    assert (found["trained"], found["failed"], found["share"]["share"]) == (2, 1, 0.5)


def test_the_plan_stands_beside_both_defaults():
    from cases import score

    def case(plan, fp16, bf16, level="expected"):
        fails = {"plan_fails": plan, "default_fails": fp16, "bf16_fails": bf16}
        return {"said": {"level": level}, "is_so": fails}

    cases = {
        "all train": case(False, False, False),
        "by the plan alone": case(False, True, True),
        "in BF16 alone": case(True, True, False, "cannot"),
        "by default": case(True, False, True),
        "plan not trained": case(None, False, False),
        "default not trained": case(True, None, False),
    }
    assert score.side_by_side(cases) == {
        "cases": 4,
        "trains": {"plan": 2, "fp16": 2, "bf16": 2},
        "plan worse than fp16": {"by default": "expected"},
        "plan worse than bf16": {"in BF16 alone": "cannot"},
    }
    assert score.side_by_side({"n": cases["plan not trained"]}) is None


def test_truths_of_an_older_rule_are_known_and_renewed(tmp_path, monkeypatch):
    from cases import collection, truth

    monkeypatch.setattr(truth, "FOLDER", tmp_path)
    case = tiny(squares(1.0))
    trainings = {"fp32": {"0": 1.0}, "fp16 dynamic": {"0": 2.0}, "narrow a": {"0": 3.0}}
    old = {"source": collection.fingerprint(case), "truth": {"x": 1}, "trainings": trainings}
    file = truth.TruthFile("tuning")
    file.cases["tiny"] = dict(old)
    assert file.is_old(case)
    file.save()
    file.renew(case)  # the old truth stays until there is a new one
    known = file.entry(case)
    assert known["truth"] == {"x": 1}
    assert set(known["renewing"]) == {"fp32"}
    with pytest.raises(truth.OutOfTime):
        truth.settle(case, file, 0.0, math.inf, lambda _: None)
    assert file.entry(case)["truth"] == {"x": 1}
    monkeypatch.setattr(truth, "examine", lambda bench: {"x": 2})
    monkeypatch.setattr(file, "save", lambda: None)
    truth.settle(case, file, math.inf, math.inf, lambda _: None)
    known = file.entry(case)
    assert (known["rule"], known["truth"]) == (truth.RULE, {"x": 2})
    assert {"fp16 dynamic", "narrow a", "renewing"}.isdisjoint({*known, *known["trainings"]})
    assert not file.is_old(case)


def test_a_case_that_diverges_in_fp32_is_settled_as_unusable(tmp_path, monkeypatch):
    from cases import truth

    monkeypatch.setattr(truth, "FOLDER", tmp_path)
    case = tiny(squares(1e30), steps=3)
    file = truth.TruthFile("tuning")
    file.drop_all_but(["tiny"])
    truth.settle(case, file, math.inf, math.inf, lambda _: None)
    again = truth.TruthFile("tuning").entry(case)
    assert again["truth"] is None
    assert truth.words(again) == "unusable: it diverges in FP32"


def test_a_comparison_rounds_its_number_and_a_sum_does_not():
    from cases import arithmetic

    one, bound = torch.ones(1), 1 - 1e-6
    assert arithmetic._narrow(torch.ops.aten.le.Scalar, (one, bound), {})
    assert float(arithmetic._narrow(torch.ops.aten.sub.Tensor, (one, bound), {})) > 0


def test_a_threshold_is_chosen_without_the_family_it_is_judged_on():
    from cases import curves

    families = {"a": "one", "b": "one", "c": "two"}
    by_value = {
        0.1: {"a": (True, True), "b": (True, True), "c": (False, True)},
        0.2: {"a": (True, False), "b": (True, False), "c": (False, False)},
    }
    answered, values = curves.chosen_without_each(by_value, families, 0.1)
    assert values == {"one": 0.2, "two": 0.1}
    assert dict(curves.counts(answered)) == {"missed": 2, "false": 1}
    threshold = curves.THRESHOLDS["wrong"]
    rules = importlib.import_module("mpdiag.analysis.operations.rules")
    before = rules.WRONG
    with curves._set(threshold, 0.5):
        assert rules.WRONG == 0.5
    assert before == rules.WRONG


@pytest.mark.parametrize(
    "half", ["tuning", "tuning_3", "tuning_4", "opened", "opened_2", "unseen_3", "unseen_4"]
)
def test_the_documentations_scores_are_those_of_the_results(root, half):
    from cases import score

    results = json.loads((score.RESULTS / f"cases-{half}.json").read_text("utf-8"))
    assert not results["left"]
    assert not results["by_an_older_rule"]
    table = score.docs_table(results)
    assert table in (root / "studies" / "cases" / "README.md").read_text("utf-8")
    assert table + "\n" == (score.RESULTS / f"cases-{half}.md").read_text("utf-8")


@pytest.mark.parametrize(
    ("level", "unanswered", "denies"),
    [("cannot", "", True), ("cannot", "no activation gradients", False), ("expected", "", False)],
)
def test_a_recording_that_allows_no_answer_denies_nothing(level, unanswered, denies):
    from cases import score

    verdict = SimpleNamespace(level=level)
    assert score._denies(SimpleNamespace(verdict=verdict, unanswered=unanswered)) == denies


def test_the_documentations_scores_of_the_unseen_half_are_those_of_the_results(root):
    from cases import score

    text = (root / "studies" / "cases" / "README.md").read_text("utf-8")
    before, now = (
        score.docs_table(json.loads((score.RESULTS / f"cases-{name}.json").read_text("utf-8")))
        for name in ("unseen_2-before", "unseen_2")
    )
    rows = list(zip(before.splitlines()[2:], now.splitlines()[2:], strict=True))
    assert len(rows) == 6
    for old, new in rows:
        earlier = " | ".join(old.strip("| ").split(" | ")[3:])
        question, yes, no, *later = new.strip("| ").split(" | ")
        assert f"| {question} | {yes} | {no} | {earlier} | {' | '.join(later)} |" in text


def test_the_documentations_formats_are_those_of_the_results(root):
    from cases import formats

    assert formats.docs_table() in (root / "studies" / "cases" / "README.md").read_text("utf-8")
