"""Which counter a device gets; a stand-in takes the place of Triton, for there is no GPU here."""

from __future__ import annotations

import importlib.util
import logging
import sys
import types

import pytest
import torch

from mpdiag.recording.counting import device
from mpdiag.recording.counting.device import DeviceRows, best_tally, torch_tally, why_not_triton

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
KERNEL = "mpdiag.recording.counting.triton_kernel"


@pytest.fixture
def with_triton(monkeypatch):
    """Installs a Triton whose kernel does what is given."""

    def install(tally) -> None:
        stand_in = types.ModuleType(KERNEL)
        stand_in.triton_tally = tally
        monkeypatch.setitem(sys.modules, KERNEL, stand_in)
        find = importlib.util.find_spec
        monkeypatch.setattr(
            importlib.util, "find_spec", lambda name: name == "triton" or find(name)
        )
        why_not_triton.cache_clear()
        best_tally.cache_clear()

    yield install
    why_not_triton.cache_clear()
    best_tally.cache_clear()


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
    assert best_tally(CUDA) is torch_tally
    rows = DeviceRows(CPU, tally=best_tally(CUDA))
    row = rows.count(torch.tensor([1.0, 0.0, 3.0]))
    assert rows.read().counts[row].sum() == 3


def test_a_triton_that_works_counts(with_triton, monkeypatch):
    calls = []

    def counts(values, counts, extremes) -> None:
        calls.append(values.tolist())

    with_triton(counts)
    assert why_not_triton(CPU) == why_not_triton(CPU) == ""
    assert calls == [[1.0]]  # tried once
    monkeypatch.setattr(device, "why_not_triton", lambda _: "")
    assert best_tally(CUDA) is counts
    assert best_tally(CPU) is torch_tally


def test_without_triton_torch_counts(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    why_not_triton.cache_clear()
    assert why_not_triton(CPU) == "Triton is not installed"
    why_not_triton.cache_clear()
