"""Which counter a device gets; a stand-in takes the place of Triton, for there is no GPU here."""

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
    """Installs a Triton whose kernels are those of torch, but for what is given."""

    def install(**kernels) -> Counter:
        stand_in = types.ModuleType(KERNEL)
        stand_in.COUNTER = dataclasses.replace(TORCH, name="stand-in", **kernels)
        monkeypatch.setitem(sys.modules, KERNEL, stand_in)
        monkeypatch.setattr(counting, "triton_kernels", stand_in, raising=False)
        find = importlib.util.find_spec
        monkeypatch.setattr(
            importlib.util, "find_spec", lambda name: name == "triton" or find(name)
        )
        return device._tried(CPU)

    cached = why_not_triton, best_counter, device._warn
    for function in cached:
        function.cache_clear()
    yield install
    for function in cached:
        function.cache_clear()


def refuses(*_) -> None:
    raise RuntimeError("Failed to find C compiler. Please specify via CC environment variable")


def test_a_triton_that_cannot_launch_leaves_counting_to_torch(with_triton, caplog):
    """Triton builds its launcher at the first launch, with a C compiler that a container may lack."""
    counter = with_triton(values=refuses, many=refuses, many_updates=refuses)
    values = torch.tensor([1.0, 0.0, 3.0])
    rows = DeviceRows(CPU, counter=counter)
    with caplog.at_level(logging.WARNING, "mpdiag"):
        rows.count(values)
        rows.count_many([(values, 1, 0), (values.half(), 1, 0)])
        rows.count_many_updates([(values, 2 * values)])
    said = why_not_triton(CPU)
    assert said.startswith("Triton does not work here (RuntimeError: Failed to find C compiler")
    assert [r.getMessage().partition(":")[0] for r in caplog.records] == [
        "Triton does not work here (RuntimeError"
    ]
    assert rows.read().counts.sum(1).tolist() == [3] * 5


def test_each_kernel_is_tried_with_each_type_before_it_counts(with_triton):
    """What fails or counts wrongly for one type is left to torch for that type alone."""
    calls = []

    def many(tensors, *into) -> None:
        calls.extend(str(t.dtype) for t in tensors)
        if any(t.dtype == torch.bfloat16 for t in tensors):
            refuses()
        TORCH.many(tensors, *into)

    def many_updates(pairs, rows, *into) -> None:
        calls.append("updates")
        TORCH.many_updates(pairs, rows, *into)
        into[2][rows[0][1]] += 1  # facts that are not those of the update

    rows = DeviceRows(CPU, counter=with_triton(many=many, many_updates=many_updates))
    values = torch.tensor([1.0, 0.0, 3.0])
    tensors = [(values, 1, 0), (values.bfloat16(), 1, 0), (values.to(torch.float8_e5m2), 1, 0)]
    rows.count_many(tensors)
    rows.count_many(tensors)
    rows.count_many_updates([(values, 2 * values)])
    rows.count_many_updates([(values.double(), 2 * values.double())])
    raw = rows.read()
    assert (raw.counts.sum(1) == 3).all()
    assert raw.facts[:, layout.CHANGED].tolist() == [2, 2]
    tried, used = (
        ["torch.float32"] * 2 + ["torch.bfloat16"] * 2,
        ["torch.float32", "torch.float8_e5m2"],
    )
    assert calls == [*tried, *used, *used, "updates"]
    assert why_not_triton(CPU) == ""
    assert "ValueError" not in why_not_triton(CPU, "many", torch.bfloat16)
    assert why_not_triton(CPU, "many_updates") == "Triton counts float32 wrongly here"


def test_triton_counts_on_cuda_alone(with_triton):
    with_triton()
    assert best_counter(CPU) is TORCH
    assert best_counter(CUDA).name == "Triton"


class Stream:
    """A stream that notes which others it waits for."""

    def __init__(self) -> None:
        self.waited = []

    def wait_stream(self, other) -> None:
        self.waited.append(other)


def test_rows_that_several_streams_use_are_used_in_turn(monkeypatch):
    """Each waits for the one before it; memory that growing gives up is not another's too early."""
    first, second = Stream(), Stream()
    kept = []
    monkeypatch.setattr(device, "current_stream", lambda _: now)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda t, s: kept.append((t.shape, s)))
    now = first
    rows = DeviceRows(CPU, capacity=1)
    rows.count(torch.ones(3))
    assert not first.waited
    now = second
    rows.count_many([(torch.ones(3), 1, 0)])  # grows
    rows.count(torch.ones(3))
    assert (first.waited, second.waited) == ([], [first])
    shapes = [(1, layout.RAW), (1, 2), (1, layout.UPDATE), (1, layout.RATIO_BINS)]
    assert kept == [(torch.Size(shape), second) for shape in shapes]
    for use in (rows.read, rows.clear, lambda: rows.count_many_updates([])):
        now = first if now is second else second
        use()
    assert (first.waited, second.waited) == ([second, second], [first, first])


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
