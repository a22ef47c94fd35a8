"""The workloads of the studies promise what the built-in ones do."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from workloads.test_protocol import *  # noqa: F403 - the same promises
from workloads.test_protocol import _leave_the_random_state_alone  # noqa: F401 - a fixture

from mpdiag import workloads

STUDIED = sorted(path.stem for path in Path(__file__).parents[1].glob("workloads/*.py"))


@pytest.fixture(params=STUDIED)
def workload(request, monkeypatch):
    found = workloads.load(request.param)
    if request.param == "language_model":
        # A softmax of 8,000 words over 5,120 tokens would take most of this file's time.
        sizes = sys.modules[type(found).__module__].SIZES
        monkeypatch.setitem(sizes, "small", (500, 16, 32, 16, 1))
    return found


@pytest.mark.parametrize("name", STUDIED)
def test_every_workload_has_a_size_for_a_gpu(name):
    small, large = (workloads.load(name, size=size) for size in workloads.SIZES)
    assert small == workloads.load(name) != large
