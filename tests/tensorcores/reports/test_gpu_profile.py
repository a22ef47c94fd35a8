"""A trace in one screen: the verdict, what was eligible, causes with their bounds, then operations."""

from __future__ import annotations

from dataclasses import replace

import pytest
from rich.console import Console

from mpdiag.tensorcores.reports.gpu_profile import profile_text
from mpdiag.tensorcores.trace_analysis import profile_trace


@pytest.fixture(scope="module")
def profile(root):
    return profile_trace(root / "sample_runs" / "gpu-sample" / "trace.json.gz")


def shown(profile, width=80, **more):
    console = Console(width=width, color_system=None)
    with console.capture() as capture:
        console.print(profile_text(profile, **more))
    return capture.get()


def test_one_screen_in_the_order_that_decides(profile):
    text = shown(profile)
    lines = text.splitlines()
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 80
    order = (
        "of kernel time ran on Tensor Cores",
        "generated, not",
        "Eligible for Tensor Cores",
        "4 steps (by ProfilerStep): the first",
        "GPU idle",
        "sizes not aligned to 16 bytes: 3 operations",
        "TF32 off: 1 operation",
        "not matrix work",
        "With -v",
    )
    places = [text.index(words) for words in order]
    assert places == sorted(places)


def test_where_little_is_to_say_the_matrix_operations_are_shown(root, profile, monkeypatch):
    assert "Matrix operations" not in shown(profile)
    monkeypatch.setattr(type(profile), "cause_groups", [])
    text = shown(replace(profile, findings=()))
    assert "Matrix operations" in text
    assert "4 of 155; all with --json" in text


def test_what_a_group_says_is_not_said_again(profile):
    brief, everything = shown(profile, 200), shown(profile, 200, verbose=True)
    codes = [f["code"] for f in profile.findings]
    assert {"misaligned", "older-generation", "matrix-on-cuda-cores"} <= set(codes)
    assert not any(f"[{code}]" in brief for code in codes)
    assert all(f"[{code}]" in everything for code in codes)
    for title in ("Biggest potential speedups", "Kernels by time", "Steps", "Longest gaps"):
        assert title in everything
        assert title not in brief
