"""A stored plan against a later recording: what a change broke, and nothing else."""

from __future__ import annotations

import json
from dataclasses import replace

import made_runs as hand
import pytest
from typer.testing import CliRunner

from mpdiag.analysis.analyzer import analyze
from mpdiag.analysis.plan_check import check_plan
from mpdiag.cli import app
from mpdiag.errors import UsageError
from mpdiag.plan import Fp32Choice, LossScalePlan, MasterWeightsPlan, PrecisionPlan


def scaled(method="constant", recommended=128.0, lower=16.0, upper=2.0**17, **more):
    more = {"need": "needed", "min_scale": 1.0, "max_scale": 2.0**24, **more}
    scale = LossScalePlan(method=method, recommended=recommended, lower=lower, upper=upper, **more)
    return PrecisionPlan(loss_scale=scale)


NO_SCALE = scaled("none", 1.0, 1.0, need="not needed")


def codes(plan, now):
    check = check_plan(plan, now)
    assert check.holds == (not check.findings)
    return [(f.severity, f.code) for f in check.findings]


@pytest.mark.parametrize(
    ("plan", "now", "expected"),
    [
        (scaled(), scaled(), []),  # it always needed a scale, and has one
        (scaled(), scaled(recommended=64.0, lower=128.0), []),
        (scaled(), NO_SCALE, []),  # more than it needs is no fault
        (NO_SCALE, scaled(), [("error", "plan-scale-too-small")]),
        (NO_SCALE, scaled(need="advisable"), [("warning", "plan-scale-too-small")]),
        (NO_SCALE, scaled(need="not needed"), []),
        (scaled(), scaled(upper=64.0), [("error", "plan-scale-too-large")]),
        (scaled("backoff"), scaled(upper=64.0), []),  # it backs off
        (scaled("backoff"), scaled(lower=2.0**25), [("error", "plan-scale-too-small")]),
        (scaled(), scaled(upper=None), []),
    ],
)
def test_loss_scales(plan, now, expected):
    assert codes(plan, now) == expected


def choice(line, code="x.masked_fill(m, -1e9)", policy=False, module="attention"):
    evidence = {"rule": "mask-fill", "line": line, "code": code, "policy": policy, "fix": "-inf"}
    return Fp32Choice("masked_fill", module, "it fills in -1e9", evidence)


@pytest.mark.parametrize(
    ("kept", "needed", "missing"),
    [
        ([choice("a.py:3")], [choice("a.py:30")], 0),  # the same, further down
        ([choice("a.py:3")], [choice("a.py:3"), choice("a.py:9")], 1),  # once more
        ([], [choice("a.py:3")], 1),
        ([], [choice("a.py:3", policy=True)], 0),
        ([choice("a.py:3")], [choice("a.py:3", code="y.masked_fill(m, -1e9)")], 1),
        ([choice("a.py:3")], [], 0),
    ],
)
def test_operations(kept, needed, missing):
    plan = replace(scaled(), fp32_operations=tuple(kept))
    now = replace(scaled(), fp32_operations=tuple(needed))
    assert codes(plan, now) == [("error", "plan-lacks-operation")] * missing


def test_a_module_kept_as_a_whole_keeps_what_is_in_it():
    plan = replace(scaled(), fp32_modules=(Fp32Choice("", "attention"),))
    assert codes(plan, replace(scaled(), fp32_operations=(choice("a.py:3"),))) == []


def test_masters_and_formats():
    now = replace(scaled(), master_weights=MasterWeightsPlan(needed=True))
    assert codes(replace(scaled(), level="O3"), now) == [("error", "plan-lacks-masters")]
    assert codes(replace(scaled(), level="O2"), now) == []
    with pytest.raises(UsageError, match="--target bf16"):
        check_plan(replace(scaled(), target="bf16"), now)


def test_strict_asks_for_what_changed_alone(tmp_path):
    run = hand.write_run(tmp_path / "run")
    plan = analyze(run).plan
    plan.save(tmp_path / "plan.json")
    call = ["analyze", str(run), "--strict", "--json", "--against"]
    same = CliRunner().invoke(app, [*call, str(tmp_path / "plan.json")])
    assert same.exit_code == 0
    assert json.loads(same.stdout)["against"] == {
        "verdict": "The plan still holds.",
        "holds": True,
        "findings": [],
    }
    broken = replace(plan, loss_scale=LossScalePlan(method="constant", recommended=2.0**120))
    broken.save(tmp_path / "plan.json")
    changed = CliRunner().invoke(app, [*call, str(tmp_path / "plan.json")])
    assert changed.exit_code == 1
    assert not json.loads(changed.stdout)["against"]["holds"]
    told = CliRunner().invoke(app, ["analyze", str(run), "--against", str(tmp_path / "plan.json")])
    assert told.exit_code == 0
    assert told.stdout.startswith("The plan no longer holds.")
    assert "[plan-scale-too-large]" in told.stdout
