"""What a probe of a few steps says, and what it does not."""

from __future__ import annotations

import json
import math

import pytest

from mpdiag.analysis.verdict.probe import Probe, probe_findings, with_probe
from mpdiag.plan import Verdict

FP32 = tuple(1.0 - 0.01 * i + 0.02 * (i % 2) for i in range(40))
EXPECTED = Verdict("expected", "Expected.", ("30 steps",), ("a training by this plan", "the rest"))


@pytest.mark.parametrize(
    ("by_plan", "skipped", "outcome", "level", "code"),
    [
        (FP32, 0, "agrees", "expected", []),
        (tuple(x + 0.3 for x in FP32), 0, "differs", "expected", ["probe-differs"]),
        ((*FP32[:30], *[math.nan] * 10), 0, "diverges", "cannot", ["probe-diverges"]),
        (FP32, 30, "diverges", "cannot", ["probe-diverges"]),
    ],
)
def test_a_probe_refutes_or_agrees_and_never_shows(by_plan, skipped, outcome, level, code):
    probe = Probe(FP32, by_plan, skipped, 40)
    told = with_probe(EXPECTED, probe)
    assert (probe.outcome, told.level) == (outcome, level)
    assert [f.code for f in probe_findings(probe)] == code
    assert told.evidence[0].startswith("a probe of the first 40 steps")
    assert told.not_examined == ("a training by this plan beyond its first 40 steps", "the rest")
    json.dumps(probe.to_json(), allow_nan=False)


def test_an_fp32_side_that_diverges_says_nothing():
    probe = Probe((1.0, math.nan), (1.0, math.nan), 0, 2)
    told = with_probe(EXPECTED, probe)
    assert (told.level, tuple(probe_findings(probe))) == ("expected", ())
    assert "says nothing" in told.text


def test_no_probe_makes_a_refused_recording_a_good_one():
    refused = Verdict("cannot", "No gradients were recorded.")
    told = with_probe(refused, Probe(FP32, FP32, 0, 40))
    assert (told.level, told.text) == ("cannot", refused.text)
