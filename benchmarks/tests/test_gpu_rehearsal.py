"""The whole command for GPUs, rehearsed without one; and the copies of a process that it is made of."""

from __future__ import annotations

import os
import sys
import time
from contextlib import nullcontext
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
if str(BENCHMARKS) not in sys.path:
    sys.path.append(str(BENCHMARKS))

from gpu_sections import command, document, forks, parts, programs, runner  # noqa: E402

PART = parts.PARTS[0]
NEEDS_A_GPU = {"a-launches", "d-graphs", *(f"c-{x}-ssd" for x in ("histograms", "predicted"))}
NEEDS_A_GPU |= {"c-curves-ssd", "c-plan-ssd", "g-memory-cnn", "g-batch-cnn"}
NEEDS_A_GPU |= {f"d-{x}-lstm" for x in ("equal-fp16", "equal-bf16", "ratio-fp16", "ratio-bf16")}
NEEDS_A_GPU |= {"d-levels-lstm", *(f"i-{x}" for x in ("language_model", "ssd", "digits", "vit"))}
NEEDS_TRITON = {"a-triton", "h-hardware"}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """A process with torch imported, which parts are copies of."""
    if not hasattr(os, "fork"):
        pytest.skip("this system cannot fork")
    folder = tmp_path_factory.mktemp("forks")
    with forks.serving(runner.environment(None, folder, "cpu")) as path:
        assert path is not None
        yield path


@pytest.fixture(scope="module")
def rehearsal(server, tmp_path_factory):
    """The exit code and the results of ``gpu.py --device cpu``."""
    out = tmp_path_factory.mktemp("rehearsal")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(forks, "serving", lambda *_: nullcontext(server))
        code = command.main(["--device", "cpu", "--out", str(out)])
    return code, document.load(out / "gpu-rehearsal.json")


def test_the_whole_command_is_rehearsed(rehearsal):
    """Every line that prepares, compares and reports, so that no minute on a card is lost to one."""
    code, result = rehearsal
    ends = {key: (part["state"], part.get("tail")) for key, part in result["parts"].items()}
    assert ends == {part.key: (document.FINISHED, None) for part in parts.PARTS}
    failed = {k: p["reason"] for k, p in result["promises"].items() if p["rehearsal"] == "failed"}
    assert not failed
    assert code == 0


def test_a_rehearsal_says_why_a_check_did_not_run(rehearsal):
    _, result = rehearsal
    left = {k: p["reason"] for k, p in result["promises"].items() if p["rehearsal"] == "not run"}
    assert set(left) - NEEDS_TRITON == NEEDS_A_GPU
    assert all(left.values())


# -- copies of a process that has torch ------------------------------------------------------------


def copied(server, tmp_path, *words, seconds: float = 60.0):
    part_words = [sys.executable, "-m", *words]
    places = {"keep": tmp_path, "cache": tmp_path / "cache"}
    options = {"device": "cpu", "quick": False, "seconds": seconds}
    return runner.run(PART, words=part_words, server=server, **options, **places)


def test_a_copy_that_raises_is_a_crash_with_its_last_lines(server, tmp_path):
    ended, lines = copied(server, tmp_path, "gpu_sections.child", "no such part")
    assert (ended["state"], ended["reason"]) == ("crashed", "ended with exit code 1")
    assert ended["tail"][-1].startswith("ValueError: not enough values to unpack")
    assert lines == []


def test_a_copy_is_ended_at_its_limit(server, tmp_path, monkeypatch):
    monkeypatch.setattr(runner, "GRACE", 0.0)
    began = time.monotonic()
    words = ("gpu_sections.child", "i-families", "cpu", "full", "60", "REPORT", str(tmp_path))
    ended, _ = copied(server, tmp_path, *words, seconds=0.2)
    assert ended["state"] == "timed out"
    assert time.monotonic() - began < 20


def test_a_program_of_a_copy_is_a_copy(server, tmp_path, monkeypatch):
    monkeypatch.setenv(forks.SOCKET, server)
    ran = programs.run(programs.mpdiag("--version"), 60, tmp_path)
    assert (ran.code, ran.err) == (0, "")
    assert ran.out.startswith("mpdiag ")
    refused = programs.run(programs.mpdiag("demo", "no_such_workload"), 60, tmp_path)
    assert refused.code == 2
    assert "no_such_workload" in refused.err
