"""Weights, weight gradients and updates, against values worked out by hand."""

import json

import numpy as np
import pytest
import torch
from pandas.testing import assert_frame_equal
from recorded import assert_same_histogram, model_and_optimizer, not_recorded, rows, step, steps
from recorded_steps import record_steps
from recording.counting.reference import expected_update
from torch import nn
from torch.nn.utils import parametrize

import mpdiag
from mpdiag.numerics.histograms import ExponentHistogram
from mpdiag.recording import weights
from mpdiag.recording.counting.device import DeviceRows
from mpdiag.recording.counting.host import rows_on
from mpdiag.recording.counting.layout import RATIO_FIRST
from mpdiag.recording.counting.tensors import countable
from mpdiag.recording.weights import BLOCK, WeightCopies, copied, sampled


def test_a_step_that_calls_its_base_class_is_one_step(tmp_path):
    class Warm(torch.optim.SGD):
        def step(self, closure=None):
            return super().step(closure)

    def loss(layer, _step):
        return layer(torch.randn(4, 3)).square().mean()

    layer = nn.Linear(3, 2, bias=False)
    torch.optim.SGD(layer.parameters(), 0.5)  # from here on the base's step calls hooks, too
    run = record_steps(tmp_path / "run", layer, loss, 3, Warm, 0.5, every=1)
    assert run.meta["steps_seen"] == 3
    assert set(run.records.texts("placement")) == {"local"}
    assert set(run.records.numel[run.records.of_kind("weight_grad")].tolist()) == {6}


def test_an_accelerator_counts_what_a_step_holds_together(tmp_path, monkeypatch):
    """Gradients before an optimizer's step at once, and updates after it; the numbers are the CPU's."""
    calls = []

    class Rows(DeviceRows):
        def count_many(self, tensors):
            calls.append(len(tensors))
            return super().count_many(tensors)

        def count_many_updates(self, pairs):
            calls.append(-len(pairs))
            return super().count_many_updates(pairs)

    found = []
    for make in (rows_on, Rows):
        monkeypatch.setattr("mpdiag.recording.ledger.rows_on", make)
        model, optimizer = model_and_optimizer()
        run = tmp_path / make.__name__
        with mpdiag.record(model, optimizer, run, every=1):
            steps(2, model, optimizer, torch.ones(5, 8))
        found.append(rows(run).sort_values(["step", "kind", "name"], ignore_index=True))
    number = len(list(model.parameters()))
    assert calls == [number, -number] * 2
    assert_frame_equal(*found)


def test_a_gradient_that_fails_costs_the_others_nothing(tmp_path, monkeypatch):
    model, optimizer = model_and_optimizer()
    first = next(model.parameters())

    def fails(tensor):
        if tensor is first.grad:
            raise RuntimeError("no storage")
        return countable(tensor)

    monkeypatch.setattr("mpdiag.recording.weights.countable", fails)
    run = mpdiag.record(model, optimizer, tmp_path / "run")
    with pytest.warns(RuntimeWarning, match="no storage"), run:
        step(model, optimizer)
    found = rows(tmp_path / "run")
    number = len(list(model.parameters()))
    assert (found["kind"] == "weight_grad").sum() == number - 1
    assert (found["kind"] == "update").sum() == number


def test_contributions_of_micro_batches_are_what_each_backward_added(tmp_path):
    model, optimizer = model_and_optimizer()
    parts, total = [], None
    with mpdiag.record(model, optimizer, tmp_path / "run", every=1):
        for _ in range(2):
            optimizer.zero_grad()
            parts, sofar = [], torch.zeros(16, 8)
            for _ in range(2):
                model(torch.randn(5, 8)).square().mean().backward()
                parts.append(model[0].weight.grad - sofar)
                sofar = model[0].weight.grad.clone()
            total = sofar
            optimizer.step()
    where = {"kind": "weight_grad", "name": "0.weight", "step": 1}
    assert_same_histogram(tmp_path / "run", total, micro=-1, **where)
    assert_same_histogram(tmp_path / "run", parts[0], micro=0, **where)
    assert sorted(rows(tmp_path / "run", **where)["micro"]) == [-1, 0, 1]
    activations = rows(tmp_path / "run", step=1, kind="activation_grad", name="0")
    assert sorted(activations["micro"]) == [0, 1]
    second = rows(tmp_path / "run", micro=1, **where)  # a difference is rounded once more
    assert second["absmax"].item() == pytest.approx(parts[1].abs().max().item(), rel=1e-5)


def test_no_gradient_no_row(tmp_path):
    model = nn.ModuleDict({"used": nn.Linear(8, 4), "unused": nn.Linear(8, 4)})
    model["frozen"] = nn.Linear(4, 4).requires_grad_(False)

    def loss(model, _step):
        return model["frozen"](model["used"](torch.randn(5, 8))).square().mean()

    run = record_steps(tmp_path / "run", model, loss, 2, torch.optim.AdamW, 0.1, every=1)
    assert run.meta["failures"] == []
    for kind in ("weight_grad", "update"):
        names = set(rows(tmp_path / "run", kind=kind)["name"])
        assert names == {"used.weight", "used.bias"}, kind
    reasons = not_recorded(tmp_path / "run")
    assert "no gradient" in reasons["unused.weight"]
    assert "frozen" in reasons["frozen.weight"]
    assert "never called" in reasons["unused"]
    frozen = rows(tmp_path / "run", kind="weight", name="frozen.weight")
    assert frozen["numel"].tolist() == [16]  # once, it never changes


def test_update_facts_equal_casts_done_one_by_one(tmp_path):
    torch.manual_seed(0)
    layer = nn.Linear(64, 64, bias=False)
    with torch.no_grad():  # all magnitudes, some zeros
        layer.weight.mul_(torch.exp2(torch.randint(-20, 17, layer.weight.shape)))
        layer.weight[0] = 0
    optimizer = torch.optim.SGD(layer.parameters(), 1.0)
    gradient = torch.randn(64, 64) * torch.exp2(torch.randint(-30, 5, (64, 64)))
    gradient[1] = 0
    w = layer.weight.detach().clone()
    with mpdiag.record(layer, optimizer, tmp_path / "run"):
        layer.weight.grad = gradient
        optimizer.step()
    row = rows(tmp_path / "run", kind="update").iloc[0]
    formats = dict(row["formats"])
    swallowed = [formats[name]["swallowed"] for name in ("fp16", "bf16")]
    facts = [row["changed"], *swallowed, formats["fp16"]["vanished"], row["ratio_zeros"]]
    *_, expected, ratios = expected_update(w, layer.weight.detach())
    assert facts == expected.tolist()
    bins = np.trim_zeros(ratios, "b").nonzero()[0][0], np.trim_zeros(ratios).tolist()
    assert (row["ratio_first_exponent"] - RATIO_FIRST, list(row["ratio_counts"])) == bins


def names_of(folder, kind):
    return set(rows(folder, kind=kind)["name"])


def test_what_a_model_gains_while_it_trains_is_recorded(tmp_path):
    model, optimizer = model_and_optimizer()
    with mpdiag.record(model, optimizer, tmp_path / "run", every=1) as recorder:
        step(model, optimizer)
        model.add_module("head", nn.Linear(model[-1].out_features, 2))
        optimizer.add_param_group({"params": model.head.parameters()})
        steps(2, model, optimizer)
        optimizer.zero_grad()
        parametrize.register_parametrization(model.head, "bias", Factor())
        factors = torch.optim.SGD(model.head.parametrizations.bias[0].parameters(), 0.1)
        recorder.adopt({}, [factors])
        steps(2, model, factors)
    added = {"head.weight", "head.bias", "head.parametrizations.bias.0.factor"}
    assert added <= names_of(tmp_path / "run", "weight_grad")
    assert added <= names_of(tmp_path / "run", "update")
    assert "head" in names_of(tmp_path / "run", "activation_grad")
    run = mpdiag.open_run(tmp_path / "run")
    assert {"head.weight", "head.parametrizations.bias.0"} <= {row["name"] for row in run.modules()}
    aliases = {row["name"]: row["aliases"] for row in run.modules()}
    assert not any(aliases.values())  # what has moved is not tied
    seen, count = run.meta["coverage"]["seen"], sum(p.numel() for p in model.parameters())
    assert (seen["parameters"], seen["parameters_seen"]) == (count, count)


class Factor(nn.Module):
    """Adds a factor to a parameter, as adapters do."""

    def __init__(self):
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(0.5))

    def forward(self, bias):
        return bias + self.factor


def test_what_the_names_leave_out_stays_out_when_a_model_grows(tmp_path):
    model, optimizer = model_and_optimizer()
    with mpdiag.record(model, optimizer, tmp_path / "run", every=1, exclude="head"):
        model.add_module("head", nn.Linear(model[-1].out_features, 2))
        optimizer.add_param_group({"params": model.head.parameters()})
        steps(2, model, optimizer)
    assert not any("head" in name for name in names_of(tmp_path / "run", "weight_grad"))


def blocks_of(parameter, budget=None):
    """The blocks of a parameter that are copied; None: all of it."""
    copies = WeightCopies(budget)
    copies.decide(1, [parameter])
    return copies.blocks(1, countable(parameter))


def test_weights_that_fit_are_copied_whole(monkeypatch):
    parameter = torch.randn(10 * BLOCK + 7)
    ready = countable(parameter)
    assert blocks_of(parameter, parameter.nbytes) is None
    copy = copied(ready, None)
    assert torch.equal(copy.values, parameter)
    assert copy.values.data_ptr() != parameter.data_ptr()
    assert sampled(ready, None) is ready
    assert blocks_of(torch.randn(2 * BLOCK - 1), 0) is None  # less than two blocks
    assert len(blocks_of(torch.randn(2 * BLOCK), 0)) == 1
    for free, blocks in ((2 * parameter.nbytes, 5), (None, None)):  # a quarter of it is the budget
        monkeypatch.setattr(weights, "free_memory", lambda _device, free=free: free)
        found = blocks_of(parameter)
        assert found is blocks or len(found) == blocks


@pytest.mark.parametrize("share", [0.1, 0.5, 0.99])
def test_else_the_same_blocks_are_copied_within_the_budget(share):
    parameters = [torch.randn(100 * BLOCK + 7), torch.randn(37 * BLOCK)]
    budget = int(share * sum(p.nbytes for p in parameters))
    copies = WeightCopies(budget)
    spent = 0
    for parameter in parameters:
        copies.decide(1, parameters)
        ready = countable(parameter)
        blocks = copies.blocks(1, ready)
        copies.decide(1, parameters)
        assert torch.equal(blocks, copies.blocks(1, ready)), "the same ones in each step"
        assert len(blocks.unique()) == len(blocks)
        gaps = blocks.diff()
        assert gaps.max() - gaps.min() <= 1, "at equal distances"
        copy = copied(ready, blocks)
        whole = parameter[: len(parameter) // BLOCK * BLOCK].view(-1, BLOCK)
        assert torch.equal(copy.values, whole[blocks].flatten())
        spent += copy.values.nbytes
    assert 0.9 * budget - 4 * BLOCK * 2 <= spent <= budget


def test_a_containers_limit_bounds_what_is_free(tmp_path):
    (tmp_path / "memory.max").write_text("5000\n")
    (tmp_path / "memory.current").write_text("3000\n")
    assert weights._left_in_group(tmp_path) == 2000
    (tmp_path / "memory.max").write_text("max\n")
    assert weights._left_in_group(tmp_path) is None
    assert weights._left_in_group(tmp_path / "none") is None
    free = weights.free_memory(torch.device("cpu"))
    assert free is None or free > 0


def test_memory_that_torch_keeps_of_freed_tensors_is_free(monkeypatch):
    found = {"mem_get_info": (700, 9000), "memory_reserved": 5000, "memory_allocated": 2000}
    for name, value in found.items():
        monkeypatch.setattr(torch.cuda, name, lambda _device, value=value: value)
    assert weights.free_memory(torch.device("cuda")) == 3700


def test_sampled_updates_are_said_in_rows_and_by_the_analysis(tmp_path):
    torch.manual_seed(0)
    model = nn.Linear(128, 8 * BLOCK // 128, bias=False)
    small = nn.Parameter(torch.randn(5))
    optimizer = torch.optim.SGD([model.weight, small], 0.1)
    run = tmp_path / "run"
    truth = []
    with mpdiag.record(model, optimizer, run, every=1, copy_budget=3 * 4 * BLOCK):
        for _ in range(3):
            optimizer.zero_grad()
            before = model.weight.detach().clone()
            (model(torch.randn(16, 128)).square().mean() + small.square().sum()).backward()
            optimizer.step()
            truth.append((before, model.weight.detach() - before))
    records = mpdiag.open_run(run).records
    for kind, which, sampled_from in (("weight", 0, 0), ("update", 1, 8 * BLOCK)):
        mine = records.select(
            records.of_kind(kind) & (records.name == records.code("name", "weight"))
        )
        assert len(mine) == 3
        for i, h in enumerate(mine.histograms()):
            values = truth[i][which]
            if kind == "update":  # two of eight blocks: the other parameter takes room, too
                values = values.flatten().view(8, BLOCK)[[0, 4]]
            expected = ExponentHistogram.of(values.numpy())
            assert np.array_equal(h.counts, expected.counts), kind
            assert mine.numel[i] == values.numel()
            assert mine.sampled_from[i] == sampled_from
    others = records.name != records.code("name", "weight")
    assert not records.sampled_from[others].any()
    analysis = mpdiag.analyze(run)
    masters = json.loads(json.dumps(analysis.to_json()))["master_weights"]
    assert masters["evidence"]["sampled"] == 3 * 2 * BLOCK
    assert masters["evidence"]["sampled_from"] == 3 * 8 * BLOCK
    assert "25.00 % of the updates of 1 parameter were recorded" in masters["reason"]
