"""Kernels find their operation, their module and, backward, the module of the forward."""

import random

import pytest
from tensorcores.traces import ADD, SGEMM, TENSOR, kernel, launch, module, op, write

from mpdiag.tensorcores import collected
from mpdiag.tensorcores.collected import Collected
from mpdiag.tensorcores.kernel_linking import link
from mpdiag.tensorcores.readers.recognition import read


def places(path):
    records = Collected()
    records.take_all(read(path))
    linked = link(records)
    records.close()
    return linked, {
        (name, place.signature.name if place.signature else None, place.module, place.phase):
        (s.calls, s.time_us)
        for (name, place), s in linked.kernels.items()
    }  # fmt: skip


TRAINING = [
    module("Linear_0", 0, 20),
    op("aten::linear", 1, 19, **{"Sequence number": 5}),
    op("aten::addmm", 2, 18, **{"Sequence number": 5, "Fwd thread id": 0}),
    launch(1, 10),
    kernel(TENSOR, 1, 4),
    op("autograd::engine::evaluate_function: AddmmBackward0", 30, 60, thread=2,
       **{"Sequence number": 5, "Fwd thread id": 1}),
    op("aten::mm", 31, 50, thread=2),
    launch(2, 40, thread=2),
    kernel(SGEMM, 2, 8),
    op("aten::t", 70, 80),
]  # fmt: skip
EXPECTED = {
    (TENSOR, "aten::addmm", "Linear_0", "forward"): (1, 4.0),
    (SGEMM, "aten::mm", "Linear_0", "backward"): (1, 8.0),
}


@pytest.mark.parametrize("seed", [None, *range(5)])
def test_innermost_operation_and_module_whatever_the_order_of_events(tmp_path, seed):
    events = list(TRAINING)
    if seed is not None:
        random.Random(seed).shuffle(events)
    linked, found = places(write(tmp_path / "t.json", events))
    assert (found, linked.linked_fraction) == (EXPECTED, 1)


# Name -> events, kernels by place, and figures of the whole.
LINKS = {
    "external ids are not believed": (
        [op("aten::mm", 0, 10, **{"External id": 1}), op("aten::t", 20, 30, **{"External id": 999}),
         launch(1, 5), kernel(TENSOR, 1, 4, **{"External id": 999})],  # the launch's is 999, too
        {(TENSOR, "aten::mm", "", ""): (1, 4)}, {"linked_us": 4},
    ),
    "other threads and finished operations are not around": (
        [op("aten::mm", 0, 100, thread=2), op("aten::add", 0, 10), launch(1, 50), kernel(ADD, 1, 4)],
        {(ADD, None, "", ""): (1, 4)}, {"linked_fraction": 0, "launched_us": 4},
    ),
    "graphs are counted apart": (
        [op("aten::replay", 0, 100), launch(1, 50, name="cudaGraphLaunch"), kernel(TENSOR, 1, 4),
         kernel(ADD, 1, 2, **{"graph node id": 12})],
        {(TENSOR, None, "", ""): (1, 4), (ADD, None, "", ""): (1, 2)},
        {"graph_us": 6, "linked_us": 0, "total_us": 6},
    ),
    "calls are of operations, not of kernels": (
        [op("aten::mm", 0, 10), launch(1, 3), launch(2, 6), kernel(TENSOR, 1, 4), kernel(ADD, 2, 1)],
        {(TENSOR, "aten::mm", "", ""): (1, 4), (ADD, "aten::mm", "", ""): (1, 1)}, {"calls": [1]},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", LINKS)
def test_links(tmp_path, name):
    events, kernels, figures = LINKS[name]
    linked, found = places(write(tmp_path / "t.json", events))
    known = {"calls": list(linked.calls.values())}
    assert found == kernels
    assert {f: known.get(f, getattr(linked, f)) for f in figures} == figures


def many(steps):
    """Steps of two operations in two modules and a backward, with unshuffled times."""
    for i in range(steps):
        at = 100 * i
        yield module(f"Linear_{i % 2}", at, at + 20)
        yield op("aten::addmm", at + 2, at + 18, **{"Sequence number": i})
        yield launch(2 * i, at + 10)
        yield kernel(TENSOR, 2 * i, 4)
        yield op("autograd::engine::evaluate_function: X", at + 30, at + 60, thread=2,
                 **{"Sequence number": i, "Fwd thread id": 1})  # fmt: skip
        yield op("aten::mm", at + 31, at + 50, thread=2)
        yield launch(2 * i + 1, at + 40, thread=2)
        yield kernel(SGEMM, 2 * i + 1, 8)


@pytest.mark.parametrize("portion", [1, 3, 64])
def test_what_waits_on_disk_changes_nothing(tmp_path, monkeypatch, portion):
    path = write(tmp_path / "t.json", list(many(50)))
    expected = places(path)[1]
    assert expected[TENSOR, "aten::addmm", "Linear_1", "forward"] == (25, 100.0)
    assert expected[SGEMM, "aten::mm", "Linear_0", "backward"] == (25, 200.0)
    monkeypatch.setattr(collected, "PORTION", portion)
    linked, found = places(path)
    assert found == expected
    assert sum(linked.calls.values()) == 100
