"""Policies that a training does not have, from what was read and what was recorded."""

from dataclasses import replace

import pytest

from mpdiag.precision.policies import policy_findings
from mpdiag.runs.precision import Observed, ParameterPrecision, PrecisionFacts, summary

ASKED, NOT = "FSDP2's MixedPrecisionPolicy", "precision-policy-not-applied"
P = ParameterPrecision("w", 4, True, "AdamW", "float32", "float32", set_by=ASKED)


@pytest.mark.parametrize(
    ("asked", "found", "autocast", "said", "line"),
    [
        (P, {"forward": "bfloat16", "set_by": "autocast"}, ["bfloat16"], [NOT], "in BF16"),
        (P, {}, [], [], "in FP32"),
        (replace(P, set_by="autocast", forward=None), {"forward": "bfloat16"}, [], [], "weights"),
        (replace(P, forward="bfloat16"), {}, ["bfloat16"], [], "Policy computes in BF16"),
        (
            replace(P, stored="bfloat16", forward="bfloat16"),
            {},
            [],
            ["precision-policy-without-masters"],
            "in BF16",
        ),
        (
            replace(P, stored="bfloat16", forward="bfloat16", master="float32"),
            {},
            [],
            [],
            "in BF16",
        ),
        (replace(P, stored="bfloat16", set_by="default", forward=None), {}, [], [], "masters"),
    ],
)
def test_a_policy_is_compared_with_what_ran(asked, found, autocast, said, line):
    parameters = [replace(asked, **found)]
    findings = list(policy_findings(PrecisionFacts(0, (asked,)), parameters))
    assert [f.code for f in findings] == said
    assert summary([asked], autocast).endswith(line)


def test_a_policy_that_nothing_applies_is_said_with_what_the_model_computes_in():
    made = Observed("policy-not-applied", ("MixedPrecisionPolicy(…) at a.py:3",), 0, 0, 0.0)
    plain = replace(P, set_by="default", forward=None)
    facts = PrecisionFacts(0, (plain,), observed=(made,))
    (finding,) = policy_findings(facts, [replace(plain, forward="float32")])
    assert finding.code == NOT
    assert finding.message.endswith("; the model computes in FP32")
