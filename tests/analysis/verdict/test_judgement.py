"""The verdict's three levels: what each needs, what it rests on, and what stays open."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from judged_runs import parameter, record
from typer.testing import CliRunner

from mpdiag.analysis.analyzer import analyze
from mpdiag.analysis.operations.rules import OperationFinding
from mpdiag.analysis.plan_check import check_plan
from mpdiag.cli import app
from mpdiag.plan import LossScalePlan, PrecisionPlan
from mpdiag.runs.results import COMPARISON, StoredComparison, read_comparison, write_comparison
from mpdiag.runs.training_log import RECORDED


def compared(folder, verdict, plan):
    stored = StoredComparison("run-plan", plan.digest(), verdict, ("accuracy .99 beside .98",), 3)
    write_comparison(folder, stored)
    return analyze(folder).verdict


# -- levels ----------------------------------------------------------------------------------------


def test_a_recording_alone_gives_an_expectation_with_what_was_not_looked_at(tmp_path):
    verdict = analyze(record(tmp_path / "run", steps_seen=400)).verdict
    assert verdict.level == "expected"
    assert verdict.text.startswith("Expected from the recording of 30 of 400 steps: ")
    assert verdict.evidence[0] == "30 of 400 steps recorded, from step 0 to step 29"
    assert "370 of 400 steps" in verdict.not_examined
    assert "a training by this plan" in verdict.not_examined
    assert any(
        "rounding inside FP16's range" in q and "cannot predict it" in q
        for q in verdict.not_examined
    )
    assert "the later half of the training: no step of it was recorded" in verdict.not_examined
    document = json.loads(json.dumps(analyze(tmp_path / "run").to_json(), allow_nan=False))
    assert set(document["verdict"]) == {"level", "text", "evidence", "not_examined"}
    assert document["plan"]["verdict"] == document["verdict"]


@pytest.mark.parametrize(
    ("found", "level", "words"),
    [
        ("equivalent", "shown", "Shown by training: "),
        ("inconclusive", "expected", "which is inconclusive"),
        ("different", "cannot", "cannot train in FP16 by this plan"),
    ],
)
def test_only_a_comparison_of_this_plan_shows_anything(tmp_path, found, level, words):
    plan = analyze(record(tmp_path / "run")).plan
    verdict = compared(tmp_path / "run", found, plan)
    assert (verdict.level, words in verdict.text) == (level, True)
    assert "accuracy .99 beside .98" in verdict.text
    assert "a training by this plan" not in verdict.not_examined
    other = compared(tmp_path / "run", found, PrecisionPlan(target="bf16"))
    assert other.level == "expected"
    assert any("followed another plan" in clause for clause in other.not_examined)


def test_what_no_plan_can_keep_in_fp32_is_said(tmp_path, monkeypatch):
    places = {"op": "mul_", "aten": "mul_", "where": "train.py:7", "text": "x *= y"}
    told = {"reason": "its result reaches 1e+06", "fix": "multiply in FP32", "without": "NaN"}
    found = OperationFinding("overflow", module=None, **places, **told)
    find = "mpdiag.analysis.operations.detection.find_operations"
    monkeypatch.setattr(find, lambda *_, **__: (found,))
    verdict = analyze(record(tmp_path / "run")).verdict
    assert verdict.level == "cannot"
    assert verdict.text == (
        "This cannot train in FP16 as it is written, and no plan can change that: mul_ at train.py:7: "
        "its result reaches 1e+06. Multiply in FP32."
    )
    in_a_module = replace(found, module="body")
    monkeypatch.setattr(find, lambda *_, **__: (in_a_module,))
    assert analyze(tmp_path / "run").verdict.level == "expected"


def test_what_was_shown_goes_before_what_the_recording_says_and_not_before_its_faults(tmp_path):
    plan = analyze(record(tmp_path / "run", optimizers=[])).plan
    assert compared(tmp_path / "run", "equivalent", plan).level == "cannot"


def test_a_plan_is_what_it_decides_and_not_why():
    scale = LossScalePlan(method="constant", init_scale=8.0)
    plan = PrecisionPlan(loss_scale=scale)
    told = replace(plan, run="other", loss_scale=replace(scale, need="needed", recommended=8.0))
    assert replace(told, loss_scale=replace(told.loss_scale, reason="x")).digest() == plan.digest()
    louder = {"loss_scale": replace(scale, init_scale=16.0)}
    for other in (louder, {"level": "O2"}, {"target": "bf16"}):
        assert replace(plan, **other).digest() != plan.digest()


def test_a_comparison_that_cannot_be_read_is_none(tmp_path):
    assert read_comparison(tmp_path) is None
    for text in ("{", "[]", '{"against": 1}'):
        (tmp_path / COMPARISON).write_text(text)
        assert read_comparison(tmp_path) is None


# -- no positive verdict ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("meta", "words"),
    [
        ({"optimizers": []}, "has no optimizer"),
        ({"precision": {"autocast": ["float16"], "autocast_off": False}}, "autocast in float16"),
        (
            {"precision": {"autocast": [], "half_parameters": 9, "half_parameter_count_total": 9}},
            "half precision",
        ),
    ],
)
def test_what_is_no_recording_of_an_fp32_training_gets_no_positive_verdict(tmp_path, meta, words):
    analysis = analyze(record(tmp_path / "run", **meta))
    assert analysis.verdict.level == "cannot"
    assert words in analysis.verdict.text
    found = check_plan(PrecisionPlan(), analysis.plan, analysis.unanswered).findings
    (finding,) = (f for f in found if f.severity != "info")
    assert (finding.severity, finding.code) == ("error", "plan-not-checked")
    assert words in finding.message
    PrecisionPlan().save(tmp_path / "plan.json")
    call = ["analyze", str(tmp_path / "run"), "--strict", "--against", str(tmp_path / "plan.json")]
    assert CliRunner().invoke(app, call).exit_code == 1
    if "precision" in meta:  # its advice would be circular
        assert analysis.plan.loss_scale.need == "unknown"
        assert not check_plan(PrecisionPlan(), analysis.plan).holds


def test_an_fp32_recording_of_a_script_with_autocast_switched_off_is_one(tmp_path):
    meta = {"precision": {"autocast": [], "autocast_off": True, "half_parameters": 0}}
    verdict = analyze(record(tmp_path / "run", **meta)).verdict
    assert verdict.level == "expected"
    assert "whether the script's own autocast was on" not in verdict.not_examined


def test_a_loss_that_was_not_finite_between_recorded_steps_is_a_divergence(tmp_path):
    folder = record(tmp_path / "run", steps_seen=60)
    lines = [{"step": s, "loss": "nan" if s > 40 else 1.0, "scale": 1.0} for s in range(60)]
    log = "\n".join(json.dumps(line) for line in [RECORDED, *lines])
    (folder / "training.jsonl").write_text(log + "\n")
    analysis = analyze(folder)
    assert analysis.verdict.level == "cannot"
    assert "diverges in FP32" in analysis.verdict.text
    finding = next(f for f in analysis.findings if f.code == "non-finite-losses")
    assert finding.evidence == {"steps": 19, "first": 41}


FAILURE = {"where": "writing", "error": "OSError: [Errno 28] No space left"}


@pytest.mark.parametrize(("steps", "level"), [(3, "cannot"), (30, "expected")])
def test_a_recording_that_failed_or_never_ended_says_so_first(tmp_path, steps, level):
    failed = {"state": "failed", "failures": [{"step": steps, **FAILURE}], "steps_seen": 99}
    verdict = analyze(record(tmp_path / "run", steps, **failed)).verdict
    assert verdict.text.startswith(f"The recording failed at step {steps} (OSError")
    assert verdict.level == level
    assert f"{steps} of 99 steps" in verdict.text
    verdict = analyze(record(tmp_path / "open", steps, state="recording")).verdict
    assert verdict.text.startswith("The recording has not ended")


# -- optimizers ------------------------------------------------------------------------------------

SEEN = {"type": "Adam", "steps_taken": 300, "steps_recorded": 30}
MISSED = {"type": "LBFGS", "steps_taken": 1, "steps_recorded": 0, "evaluations": 1}
SEARCHING = {"type": "LBFGS", "steps_taken": 3, "steps_recorded": 3, "evaluations": 61}
ONCE = {"type": "SGD", "steps_taken": 30, "steps_recorded": 30, "evaluations": 30}
SHARPNESS_AWARE = ONCE | {"type": "SAM", "evaluations": 60}


@pytest.mark.parametrize(
    ("optimizers", "level", "text", "clause", "unanswered"),
    [
        (
            [SEEN, MISSED], "cannot", "No step of LBFGS was recorded (1 step of 301)",
            "1 step of LBFGS: none was recorded", "No step of LBFGS",  # and no gate passes by it
        ),
        (  # what was recorded of it can still be held against a plan
            [SEEN, SEARCHING], "cannot", "LBFGS goes by differences between 61 evaluations",
            "where the search of LBFGS would end in FP16", "",
        ),
        ([ONCE, SHARPNESS_AWARE], "expected", "", "", ""),  # no search
    ],
)  # fmt: skip
def test_what_is_not_known_of_an_optimizer(tmp_path, optimizers, level, text, clause, unanswered):
    folder = record(tmp_path / "run", steps_seen=301, optimizers=optimizers)
    analysis = analyze(folder)
    assert analysis.verdict.level == level
    assert text in analysis.verdict.text
    assert not clause or clause in analysis.verdict.not_examined
    assert bool(analysis.unanswered) == bool(unanswered)
    assert unanswered in analysis.unanswered
    codes = {f.code for f in analysis.findings}
    assert ("optimizer-searches" in codes) == (SEARCHING in optimizers)
    assert compared(folder, "equivalent", analysis.plan).level == "shown"


# -- coverage --------------------------------------------------------------------------------------


def test_what_was_not_seen_of_the_model_bounds_the_verdict(tmp_path):
    modules = [
        {"name": "layer", "what": "module", "type": "Linear", "recorded": True},
        {"name": "lost", "what": "module", "type": "Linear", "recorded": True},
        parameter("layer.weight", 300),
        parameter("lost.weight", 100, "no gradient reached it in a recorded step"),
        parameter("still.weight", 600, "frozen: it has neither gradient nor update"),
    ]
    missing = [
        {"name": "lost.weight", "what": "parameter", "reason": modules[3]["reason"]},
        {"name": "lost", "what": "activation_grad", "reason": "no gradient reached its output"},
    ]
    coverage = {"not_recorded": missing}
    verdict = analyze(record(tmp_path / "run", modules=modules, coverage=coverage)).verdict
    assert (
        "Seen were only the gradients of 75.00 % of the trained parameters and the output gradients "
        "of 1 of 2 modules."
    ) in verdict.text
    clause = next(c for c in verdict.not_examined if "25.00 % of the trained parameters" in c)
    assert "1 of 2 modules" in clause
    assert "no gradient reached it in a recorded step" in clause


def test_a_share_that_the_run_states_goes_before_its_table(tmp_path):
    seen = {"parameters": 400, "parameters_seen": 100, "gradients": 400, "gradients_seen": 100}
    seen |= {"modules": 4, "modules_seen": 1}
    seen |= {"activation_gradients": 1, "activation_gradients_seen": 1}
    run = record(
        tmp_path / "run", modules=[parameter("layer.weight", 100)], coverage={"seen": seen}
    )
    assert "25.00 % of the trained parameters" in analyze(run).verdict.text


@pytest.mark.parametrize(("steps", "share"), [(2, "77.64 %"), (19, "14.59 %"), (20, None)])
def test_what_few_steps_bound_is_said_before_the_expectation(tmp_path, steps, share):
    text = analyze(record(tmp_path / "run", steps=steps)).verdict.text
    before, _, _ = text.partition("this trains in FP16")
    assert ("bounds little" in before) == (share is not None)
    assert share is None or f"up to {share} of all steps (95 % confidence)" in before
