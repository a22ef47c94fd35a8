"""The sample runs are complete, and today's code finds in them what is stored."""

import json
from pathlib import Path

import pytest

from mpdiag import workloads
from mpdiag.analysis.analyzer import analyze
from mpdiag.plan import PrecisionPlan
from mpdiag.runs.run import open_run
from mpdiag.runs.training_log import read_log
from mpdiag.tensorcores.trace_analysis import profile_trace

SAMPLES = Path(__file__).parent.parent / "sample_runs"
RECORDED = sorted(path.parent.name for path in SAMPLES.glob("*/stats"))
TRAINED = sorted(path.parent.name for path in SAMPLES.glob("*/training.jsonl"))


def test_there_are_recordings_of_several_families():
    families = {"digits", "vgg", "ssd", "translation", "language_model", "dcgan"}
    assert families <= set(RECORDED)


@pytest.mark.parametrize("name", RECORDED)
def test_the_stored_analysis_is_todays(name):
    stored = PrecisionPlan.load(SAMPLES / name / "plan.json").to_json()
    assert_close(analyze(SAMPLES / name).plan.to_json(), stored)


def assert_close(found, stored, where="plan"):
    """Equal, floats to nine digits: sums come out a little different on another processor."""
    assert type(found) is type(stored), where
    if isinstance(found, dict):
        assert found.keys() == stored.keys(), where
        for key in found:
            assert_close(found[key], stored[key], f"{where}.{key}")
    elif isinstance(found, list):
        assert len(found) == len(stored), where
        for i, (a, b) in enumerate(zip(found, stored, strict=True)):
            assert_close(a, b, f"{where}[{i}]")
    elif isinstance(found, float):
        assert found == pytest.approx(stored, rel=1e-9, abs=1e-300), where
    else:
        assert found == stored, where


@pytest.mark.parametrize("name", TRAINED)
def test_every_training_ended_and_was_measured(name):
    run, log = open_run(SAMPLES / name), read_log(SAMPLES / name)
    assert run.meta["state"] == "complete"
    assert log.metrics
    assert [s.step for s in log.steps] == list(range(len(log.steps)))
    workload = workloads.load(name.split("-")[0])
    assert log.metric(workload.metric) is not None


def test_they_are_small_and_tell_nothing_of_the_machine():
    files = [path for path in SAMPLES.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < 12 * 2**20
    for path in SAMPLES.glob("*/meta.json"):
        argv = json.loads(path.read_text())["argv"]
        assert not any(word.startswith("/") for word in argv)


def test_the_trace_of_a_gpu_is_read_as_it_was():
    found = profile_trace(SAMPLES / "h200" / "trace.json.gz").to_json()
    stored = json.loads((SAMPLES / "h200" / "profile.json").read_text())
    assert found["device"]["name"] == "NVIDIA H200"
    assert found["linked_fraction"] == pytest.approx(1.0)
    assert found["unknown_fraction"] == 0.0
    for key in ("kernel_time_us", "tensor_core_fraction", "matrix_cuda_core_fraction"):
        assert found[key] == pytest.approx(stored[key])
    assert [cause["cause"] for cause in found["causes"]] == [c["cause"] for c in stored["causes"]]
