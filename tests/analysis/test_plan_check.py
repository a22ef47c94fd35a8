"""A stored plan against a later recording: what a change broke, and nothing else."""

import json
from dataclasses import replace

import made_runs as hand
import pytest
from calls import run

from mpdiag.analysis.analyzer import analyze
from mpdiag.analysis.plan_check import check_plan
from mpdiag.errors import InputError, UsageError
from mpdiag.plan import Fp32Choice, LossScalePlan, MasterWeightsPlan, PrecisionPlan
from mpdiag.tracing.conditions import OptimizerSettings, TrainingConditions
from mpdiag.tracing.fingerprint import fingerprint

MODEL = fingerprint([("attention.weight", (8, 8)), ("head.weight", (2, 8))])


def scaled(method="constant", recommended=128.0, lower=16.0, upper=2.0**17, **more):
    more = {"need": "needed", "min_scale": 1.0, "max_scale": 2.0**24, **more}
    scale = LossScalePlan(method=method, recommended=recommended, lower=lower, upper=upper, **more)
    return PrecisionPlan(loss_scale=scale, model=MODEL)


MASTERS = replace(scaled(), master_weights=MasterWeightsPlan(needed=True))
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
        (replace(scaled(), level="O3"), MASTERS, [("error", "plan-lacks-masters")]),
        (replace(scaled(), level="O2"), MASTERS, []),
    ],
)
def test_loss_scales_and_masters(plan, now, expected):
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


def test_a_plan_in_another_format_is_refused():
    with pytest.raises(UsageError, match="--target bf16"):
        check_plan(replace(scaled(), target="bf16"), scaled())


def test_strict_asks_for_what_changed_alone(tmp_path):
    folder, plan_path = hand.write_run(tmp_path / "run"), tmp_path / "plan.json"
    plan = analyze(folder).plan
    plan.save(plan_path)
    call = ("analyze", folder, "--against", plan_path)
    same = run(*call, "--strict", "--json")
    document = json.loads(same.stdout)["against"]
    assert document["verdict"] == "The plan still holds, if it is a plan of this model."
    assert (same.exit_code, document["holds"], document["of_this_model"]) == (0, True, None)
    assert [f["code"] for f in document["findings"]] == ["plan-model-unknown"]
    replace(plan, loss_scale=LossScalePlan(method="constant", recommended=2.0**120)).save(plan_path)
    changed = run(*call, "--strict", "--json")
    assert (changed.exit_code, json.loads(changed.stdout)["against"]["holds"]) == (1, False)
    told = run(*call)
    assert told.exit_code == 0
    assert told.stdout.startswith("The plan no longer holds.")
    assert "[plan-scale-too-large]" in told.stdout


EDITED = fingerprint([("attention.weight", (9, 8)), ("head.weight", (2, 8)), ("new.weight", (1,))])
OTHER = fingerprint([("conv.weight", (8, 3, 3, 3)), ("norm.weight", (8,))])


def test_an_edited_model_does_not_break_the_gate_and_its_layers_are_named():
    check = check_plan(scaled(), replace(scaled(), model=EDITED))
    assert (check.holds, check.verdict) == (True, "The plan still holds.")
    (finding,) = check.findings
    assert (finding.severity, finding.code) == ("info", "plan-model-differs")
    assert "changed: attention; new: new" in finding.message
    broken = check_plan(scaled(), replace(scaled(upper=64.0), model=EDITED))
    assert [f.severity for f in broken.findings] == ["error", "info"]


def test_the_plan_of_another_model_is_refused_in_one_sentence(trained, tmp_path):
    with pytest.raises(InputError, match="the plan is for another model: no layer of"):
        check_plan(scaled(), replace(scaled(), model=OTHER))
    replace(scaled(), model=OTHER).save(tmp_path / "plan.json")
    done = run("analyze", trained / "first run", "--strict", "--against", tmp_path / "plan.json")
    assert (done.exit_code, done.stdout) == (3, "")
    assert done.stderr.startswith("error: the plan is for another model")


def test_what_changed_since_the_recording_is_a_note_and_names_the_answers():
    before = TrainingConditions((OptimizerSettings("SGD", 0.1),), (32, 8), "2.13.0")
    later = replace(before, optimizers=(OptimizerSettings("SGD", 0.2),), torch="2.14.0")
    plan, now = (replace(scaled(), conditions=c) for c in (before, later))
    assert not check_plan(plan, plan).findings
    assert not check_plan(scaled(), now).findings  # an earlier plan does not say
    check = check_plan(plan, now)
    assert check.holds
    assert [f.code for f in check.findings] == ["plan-training-differs"] * 2
    rate, torch = check.findings
    assert rate.message == "the learning rate is 0.2, but was 0.1 in the plan's recording"
    assert rate.fix.endswith("the loss scale and the need for master weights")
    assert torch.evidence == {
        "what": "torch", "before": "2.13.0", "now": "2.14.0",
        "touches": "the operations that stay in FP32",
    }  # fmt: skip


@pytest.mark.parametrize("known", [True, False])
def test_a_plan_of_an_earlier_version_is_a_note(trained, tmp_path, known):
    document = analyze(trained / "first run").plan.to_json()
    assert document["model"]["parameters"]["0.weight"] == "4x1x3x3"
    if not known:
        del document["model"]
    (tmp_path / "plan.json").write_text(json.dumps(document))
    words = ("--strict", "--json", "--against", tmp_path / "plan.json")
    done = run("analyze", trained / "first run", *words)
    assert done.exit_code == 0
    found = json.loads(done.stdout)["against"]["findings"]
    assert [f["code"] for f in found] == ["plan-model-unknown"] * (not known)
