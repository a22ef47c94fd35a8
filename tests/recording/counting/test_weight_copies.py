"""Copies of weights stay within their budget, and what was left out is said."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from torch import nn

import mpdiag
from mpdiag.errors import UsageError
from mpdiag.numerics.histograms import ExponentHistogram
from mpdiag.recording.counting import weight_copies
from mpdiag.recording.counting.tensors import countable
from mpdiag.recording.counting.weight_copies import BLOCK, WeightCopies, copied, sampled


def test_weights_that_fit_are_copied_whole():
    parameter = torch.randn(10 * BLOCK + 7)
    copies = WeightCopies(parameter.nbytes)
    copies.decide(1, [parameter])
    ready = countable(parameter)
    assert copies.blocks(1, ready) is None
    copy = copied(ready, None)
    assert torch.equal(copy.values, parameter)
    assert copy.values.data_ptr() != parameter.data_ptr()
    assert sampled(ready, None) is ready


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


def test_a_parameter_of_less_than_two_blocks_is_copied_whole():
    copies = WeightCopies(0)
    parameter = torch.randn(BLOCK + 1)
    copies.decide(1, [parameter])
    assert copies.blocks(1, countable(parameter)) is None


def test_without_a_budget_a_quarter_of_the_free_memory_is_one(monkeypatch):
    parameter = torch.randn(8 * BLOCK)
    monkeypatch.setattr(weight_copies, "free_memory", lambda _device: 2 * parameter.nbytes)
    copies = WeightCopies()
    copies.decide(1, [parameter])
    assert len(copies.blocks(1, countable(parameter))) == 4
    monkeypatch.setattr(weight_copies, "free_memory", lambda _device: None)
    copies = WeightCopies()
    copies.decide(1, [parameter])
    assert copies.blocks(1, countable(parameter)) is None


def test_a_containers_limit_bounds_what_is_free(tmp_path):
    (tmp_path / "memory.max").write_text("5000\n")
    (tmp_path / "memory.current").write_text("3000\n")
    assert weight_copies._left_in_group(tmp_path) == 2000
    (tmp_path / "memory.max").write_text("max\n")
    assert weight_copies._left_in_group(tmp_path) is None
    assert weight_copies._left_in_group(tmp_path / "none") is None
    free = weight_copies.free_memory(torch.device("cpu"))
    assert free is None or free > 0


@pytest.mark.parametrize("budget", [-1, 0.5, "1 GB", True])
def test_a_budget_is_a_number_of_bytes(budget):
    with pytest.raises(UsageError, match="copy_budget"):
        WeightCopies(budget)


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
    assert "of 1 parameter 25.00 % of the updates were recorded" in masters["reason"], masters[
        "reason"
    ]


def test_small_parameters_are_copied_together_and_others_by_themselves():
    torch.manual_seed(0)
    tensors = [torch.randn(7), torch.randn(3).double(), torch.randn(1 << 16), torch.randn(2, 3)]
    tensors += [torch.randn(4, 5).t()[::2], torch.randn(0), torch.randn(4 * BLOCK)]
    ready = [countable(t) for t in tensors]
    blocks = [None] * (len(ready) - 1) + [torch.tensor([0, 2])]
    copies = weight_copies.all_copied(list(zip(ready, blocks, strict=True)))
    expected = [
        weight_copies.copied(r, b).values.clone() for r, b in zip(ready, blocks, strict=True)
    ]
    assert copies[0].values.untyped_storage().nbytes() == 4 * (7 + 6)
    for tensor in tensors:
        tensor.zero_()
    for copy, values in zip(copies, expected, strict=True):
        assert torch.equal(copy.values, values)
        assert copy.values.dtype == values.dtype
        assert not copy.shared
