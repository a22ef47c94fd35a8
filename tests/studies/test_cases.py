"""The case collection's tools: what one arithmetic does, which operation is found, how it is counted."""

from __future__ import annotations

import math
import sys

import pytest
import torch
from torch import nn


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


def test_an_operation_counts_as_found_if_the_plan_keeps_it_out_of_fp16():
    from cases import score

    said = {"operations": [("a", "mul"), ("b", "")]}
    is_so = {
        "operations": [["a", "mul"], ["a", "add"], ["b.inner", "sin"]],
        "together": [],
        "still_narrow": [["a", "add"]],
    }
    tally = score.Tally()
    score._count_operations(tally, "case", said, is_so)
    assert (tally.found, tally.missed, tally.false) == (2, 1, 0)
    assert math.isclose(tally.to_json()["precision"]["share"], 1.0)
