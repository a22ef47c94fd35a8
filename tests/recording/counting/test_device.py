"""Which counter a device gets; a stand-in takes the place of Triton, for there is no GPU here."""

from __future__ import annotations

import ast
import dataclasses
import importlib.util
import logging
import sys
import types
from pathlib import Path

import pytest
import torch

from mpdiag.recording import counting
from mpdiag.recording.counting import device, layout
from mpdiag.recording.counting.device import DeviceRows, best_counter, why_not_triton
from mpdiag.recording.counting.torch_operations import COUNTER as TORCH
from mpdiag.recording.counting.torch_operations import Counter

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
KERNEL = "mpdiag.recording.counting.triton_kernels"


@pytest.fixture
def with_triton(monkeypatch):
    """Installs a Triton whose kernel does what is given."""

    def install(values) -> Counter:
        stand_in = types.ModuleType(KERNEL)
        stand_in.COUNTER = dataclasses.replace(TORCH, name="stand-in", values=values)
        monkeypatch.setitem(sys.modules, KERNEL, stand_in)
        monkeypatch.setattr(counting, "triton_kernels", stand_in, raising=False)
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


def test_a_kernel_is_compiled_once_for_a_type():
    """What is specialised is compiled apart, for seconds, in the middle of a training.

    The types of values are four, and no number, address or row of a launch is looked at.
    """
    kernels = {}
    for function in ast.parse(
        Path(layout.__file__).with_name("triton_kernels.py").read_text()
    ).body:
        if not isinstance(function, ast.FunctionDef):
            continue
        for decorator in function.decorator_list:
            if isinstance(decorator, ast.Call):
                free = {k.arg: ast.literal_eval(k.value) for k in decorator.keywords}
                constant = {a.arg for a in function.args.args if a.annotation is not None}
                every = {a.arg for a in function.args.args} - constant
                kernels[function.name] = every - {n for names in free.values() for n in names}
    whole = {"counts", "extremes", "facts", "ratios"}  # tensors of their own, always on 16 bytes
    assert {name: left - whole for name, left in kernels.items()} == {
        "one": set(),
        "many": set(),
        "many_updates": set(),
    }
    assert not kernels["one"]
