"""The sample of a GPU: what the study writes, labelled as generated wherever it shows."""

from __future__ import annotations

import gzip
import json

import pytest
from typer.testing import CliRunner

from mpdiag.cli import app
from mpdiag.tensorcores.trace_analysis import profile_trace
from studies import gpu_sample

SAMPLE = gpu_sample.FOLDER


@pytest.fixture(scope="module")
def profile():
    return profile_trace(SAMPLE / "trace.json.gz")


def test_the_sample_is_what_the_study_writes():
    stored = json.loads(gzip.decompress((SAMPLE / "trace.json.gz").read_bytes()))
    assert stored == gpu_sample.document()
    sizes = [path.stat().st_size for path in SAMPLE.iterdir()]
    assert sum(sizes) < 500_000


def test_the_stored_profile_is_todays(profile):
    stored = json.loads((SAMPLE / "profile.json").read_text())
    todays = profile.to_json()
    assert {k["name"]: k["verdict"] for k in stored["kernels"]} == {
        k["name"]: k["verdict"] for k in todays["kernels"]
    }
    assert (stored["summary"], stored["causes"]) == (todays["summary"], todays["causes"])


def test_it_holds_what_is_good_bad_and_unknown(profile):
    causes = {judged.cause for judged in profile.operations}
    assert {"none", "alignment", "tf32_off", "layout", "outside", "unknown"} <= causes
    codes = {finding["code"] for finding in profile.findings}
    assert {"older-generation", "misaligned"} <= codes
    assert "rate-above-peak" not in codes
    assert len(profile.timeline.steps) == len(gpu_sample.STEPS)
    gaps = profile.timeline.whole.gaps
    assert gaps["loader"] > 0
    assert gaps["wait"] > 0


def test_it_says_that_it_was_generated(profile):
    words = "generated, not measured"
    assert words in profile.to_json()["generated"]
    text = CliRunner().invoke(app, ["profile", str(SAMPLE / "trace.json.gz")]).stdout
    assert words in " ".join(text.split())
    assert words in json.loads((SAMPLE / "meta.json").read_text())["generated"]
    assert words in (SAMPLE.parent / "README.md").read_text().replace("*", "").replace("\n", " ")
