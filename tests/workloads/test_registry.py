"""Finding workloads by name."""

from __future__ import annotations

import subprocess
import sys

import pytest

from mpdiag import workloads
from mpdiag.workloads.denoiser import Denoiser


def test_names_are_those_that_load() -> None:
    assert len(workloads.names()) == 11
    assert workloads.names() == tuple(sorted(workloads.names()))
    assert [workloads.load(name).name for name in workloads.names()] == list(workloads.names())


def test_options_reach_the_workload() -> None:
    assert workloads.load("denoiser", size="large") == Denoiser(size="large")


def test_every_workload_has_a_size_for_a_gpu() -> None:
    for name in workloads.names():
        small, large = (workloads.load(name, size=size) for size in workloads.SIZES)
        assert small == workloads.load(name) != large


def test_an_unknown_name_is_answered_with_the_known_ones() -> None:
    with pytest.raises(
        workloads.UnknownWorkload,
        match=r"there is no workload 'yolo': choose one of dcgan, denoiser, digits, gpt,",
    ):
        workloads.load("yolo")
    assert issubclass(workloads.UnknownWorkload, ValueError)


def test_an_unknown_option_is_answered_with_the_known_ones() -> None:
    with pytest.raises(
        workloads.BadOption,
        match=r"'ssd' has no option 'width': its options are mean_over, inputs,",
    ):
        workloads.load("ssd", width=3)


def test_an_unknown_value_is_answered_with_the_known_ones() -> None:
    with pytest.raises(
        workloads.BadOption, match=r"'denoiser' has no size 'huge': choose one of small, large"
    ):
        workloads.load("denoiser", size="huge")
    with pytest.raises(workloads.BadOption, match="choose one of boxes, matched"):
        workloads.load("ssd", mean_over="anchors")
    with pytest.raises(workloads.BadOption, match="choose one of 3, 5"):
        workloads.load("translation", layers=4)


def test_importing_the_registry_is_cheap() -> None:
    heavy = "{'torch', 'numpy', 'sklearn'}"
    code = f"import sys, mpdiag.workloads as w; w.names(); print({heavy} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
