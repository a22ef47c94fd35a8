"""Which counter a device gets; a stand-in takes the place of Triton, for there is no GPU here."""

from __future__ import annotations

import dataclasses
import importlib.util
import logging
import sys
import types

import numpy as np
import pytest
import torch

from mpdiag.recording import counting
from mpdiag.recording.counting import device, layout
from mpdiag.recording.counting.device import DeviceRows, best_counter, why_not_triton
from mpdiag.recording.counting.host import HostRows
from mpdiag.recording.counting.torch_operations import COUNTER as TORCH
from mpdiag.recording.counting.torch_operations import Counter

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
KERNEL = "mpdiag.recording.counting.triton_launches"


@pytest.fixture
def with_triton(monkeypatch):
    """Installs a Triton whose kernel does what is given."""

    def install(values) -> Counter:
        stand_in = types.ModuleType(KERNEL)
        stand_in.COUNTER = dataclasses.replace(TORCH, name="stand-in", values=values)
        monkeypatch.setitem(sys.modules, KERNEL, stand_in)
        monkeypatch.setattr(counting, "triton_launches", stand_in, raising=False)
        find = importlib.util.find_spec
        monkeypatch.setattr(
            importlib.util, "find_spec", lambda name: name == "triton" or find(name)
        )
        why_not_triton.cache_clear()
        best_counter.cache_clear()
        return stand_in.COUNTER

    yield install
    why_not_triton.cache_clear()
    best_counter.cache_clear()


def test_a_triton_that_cannot_launch_leaves_counting_to_torch(with_triton, monkeypatch, caplog):
    """Triton builds its launcher at the first launch, with a C compiler that a container may lack."""

    def refuses(*_) -> None:
        raise RuntimeError("Failed to find C compiler. Please specify via CC environment variable")

    with_triton(refuses)
    with caplog.at_level(logging.WARNING, "mpdiag"):
        said = why_not_triton(CPU)
    assert said.startswith("Triton does not work here (RuntimeError: Failed to find C compiler")
    assert [r.getMessage().partition(":")[0] for r in caplog.records] == [
        "Triton does not work here (RuntimeError"
    ]
    monkeypatch.setattr(device, "why_not_triton", lambda _: said)
    assert best_counter(CUDA) is TORCH
    rows = DeviceRows(CPU, counter=best_counter(CUDA))
    row = rows.count(torch.tensor([1.0, 0.0, 3.0]))
    assert rows.read().counts[row].sum() == 3


def test_a_triton_that_works_counts(with_triton, monkeypatch):
    calls = []

    def counts(values, counts, extremes) -> None:
        calls.append(values.tolist())

    counter = with_triton(counts)
    assert why_not_triton(CPU) == why_not_triton(CPU) == ""
    assert calls == [[1.0]]  # tried once
    monkeypatch.setattr(device, "why_not_triton", lambda _: "")
    assert best_counter(CUDA) is counter
    assert best_counter(CPU) is TORCH


def test_without_triton_torch_counts(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    why_not_triton.cache_clear()
    assert why_not_triton(CPU) == "Triton is not installed"
    why_not_triton.cache_clear()


TENSORS = [
    torch.tensor([0.0, 1.0, -2.0, torch.inf, torch.nan, 1e-45, 65520.0]),
    torch.zeros(0),
    torch.randn(5000).bfloat16(),
    torch.randn(5000).half(),
    torch.tensor([0.0, 1e-320, 1e300, -torch.inf, 2.0**-149], dtype=torch.float64),
    torch.zeros(3),
]


def rows_of(rows, n: int, updates: int = 0):
    raw = rows.read()
    return [raw.counts[list(range(n))], raw.extremes, raw.facts, raw.ratios[list(range(updates))]]


def test_many_tensors_are_counted_as_each_is():
    pairs = [
        (torch.ones(4), torch.tensor([1.0, 2.0, 1.0 + 2.0**-20, 0.5])),
        (torch.zeros(0), torch.zeros(0)),
        (torch.ones(3).bfloat16(), torch.zeros(3).bfloat16()),
    ]
    together, singly, host = DeviceRows(CPU, capacity=1), DeviceRows(CPU), HostRows()
    assert together.count_many([(t, 2, 7) for t in TENSORS]) == list(range(6))
    assert together.count_many_updates(pairs) == [(6, 7, 0), (8, 9, 1), (10, 11, 2)]
    for rows in (singly, host):
        for tensor in TENSORS:
            rows.count(tensor, 2, 7)
        for pair in pairs:
            rows.count_update(*pair)
    assert together.count_many([]) == []
    assert together.count_many_updates([]) == []
    found = rows_of(together, 12, 3)
    for other in (rows_of(singly, 12, 3), rows_of(host, 12, 3)):
        assert all(np.array_equal(a, b) for a, b in zip(found, other, strict=True))


def test_an_update_that_is_not_finite_has_no_ratio():
    before = torch.linspace(-3, 3, 700)
    after = before * 1.01
    after[::7] = torch.tensor([torch.inf, -torch.inf, torch.nan, 1e-40, 0.0]).repeat(20)
    before[3::50] = torch.inf
    before[4::50] = 0.0
    device, host = DeviceRows(CPU), HostRows()
    for rows in (device, host):
        rows.count_update(before, after)
    found, other = rows_of(device, 2, 1), rows_of(host, 2, 1)
    assert all(np.array_equal(a, b) for a, b in zip(found, other, strict=True))
    delta = after - before
    known = before.isfinite() & delta.isfinite() & (before != 0) & (delta != 0)
    assert found[3].sum() == int(known.sum())


def test_zeros_are_what_no_counter_counted():
    """A row's size is known on the host, so no launch counts zeros, repeats them or adds to them."""
    seen = []

    def values(tensor, counts, extremes) -> None:
        seen.append(tensor)
        TORCH.values(tensor, counts, extremes)

    rows = DeviceRows(CPU, counter=dataclasses.replace(TORCH, values=values))
    tensor = torch.tensor([0.0, -0.0, 1.0, torch.nan, torch.inf, 1e-45])
    rows.count(tensor, 3, 10)
    rows.count(torch.zeros(0), 1, 4)
    assert seen == [tensor]  # read in place, and nothing of no values
    assert rows._counts[:, layout.ZEROS].sum() == 0
    counts = rows.read().counts
    assert counts[:, layout.ZEROS].tolist() == [16, 4]
    assert counts.sum(1).tolist() == [18 + 10 + 3, 4]  # a subnormal stands in two columns


def test_ratios_beyond_powers_of_float32_keep_their_place():
    before, after = torch.tensor([2.0**127, 2.0**-149]), torch.tensor([2.0**127, 2.0**100])
    before[0], after[0] = 2.0**-149 * 3, 2.0**-149 * 2  # subnormals: 3 to 1
    rows = DeviceRows(CPU)
    rows.count_update(before, after)
    ratios = rows.read().ratios[0]
    places = ratios.nonzero()[0] + layout.RATIO_FIRST
    assert places.tolist() == [-250, 1]
    assert ratios.sum() == 2
