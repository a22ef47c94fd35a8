"""The verdict's three levels: what each needs, what it rests on, and what stays open."""

import json
import math
import re
from dataclasses import replace

import made_runs as hand
import pytest
from calls import run
from judged_runs import parameter, record
from made_runs import write_log

from mpdiag.analysis.analyzer import analyze
from mpdiag.analysis.comparison.compare import compare
from mpdiag.analysis.operations.rules import OperationFinding
from mpdiag.analysis.plan_check import check_plan
from mpdiag.analysis.verdict.probe import Probe, probe_findings, with_probe
from mpdiag.analysis.verdict.trained import keep_comparison
from mpdiag.plan import LossScalePlan, PrecisionPlan, Verdict
from mpdiag.runs.results import COMPARISON, StoredComparison, read_comparison, write_comparison
from mpdiag.runs.training_log import FILE, RECORDED
from mpdiag.runs.writer import RunWriter


def compared(folder, verdict, plan):
    stored = StoredComparison("run-plan", plan.digest(), verdict, ("accuracy .99 beside .98",), 3)
    write_comparison(folder, stored)
    return analyze(folder).verdict


# -- levels ----------------------------------------------------------------------------------------


def test_a_recording_alone_gives_an_expectation_with_what_was_not_looked_at(tmp_path):
    verdict = analyze(record(tmp_path / "run", steps_seen=400)).verdict
    assert verdict.level == "expected"
    assert verdict.text.endswith(" (30 of 400 steps recorded)")
    assert verdict.evidence[0] == "30 of 400 steps recorded, from step 0 to step 29"
    assert "370 of 400 steps" in verdict.not_examined
    assert "an actual FP16 training" in verdict.not_examined
    assert "accumulated rounding error" in verdict.not_examined
    assert "the later half of the training (no step recorded)" in verdict.not_examined
    document = json.loads(json.dumps(analyze(tmp_path / "run").to_json(), allow_nan=False))
    assert set(document["verdict"]) == {"level", "text", "evidence", "not_examined"}
    assert document["plan"]["verdict"] == document["verdict"]


@pytest.mark.parametrize(
    ("found", "level", "words"),
    [
        ("equivalent", "shown", "Shown by training: "),
        ("inconclusive", "expected", "ended inconclusive: accuracy .99 beside .98."),
        ("different", "cannot", "FP16 does not work with this plan"),
    ],
)
def test_only_a_comparison_of_this_plan_shows_anything(tmp_path, found, level, words):
    plan = analyze(record(tmp_path / "run")).plan
    verdict = compared(tmp_path / "run", found, plan)
    assert (verdict.level, words in verdict.text) == (level, True)
    assert "accuracy .99 beside .98" in verdict.text
    assert not any("actual FP16 training" in clause for clause in verdict.not_examined)
    other = compared(tmp_path / "run", found, PrecisionPlan(target="bf16"))
    assert other.level == "expected"
    assert any("followed another plan" in clause for clause in other.not_examined)


def test_what_no_plan_can_keep_in_fp32_is_said(tmp_path, monkeypatch):
    places = {"op": "mul_", "aten": "mul_", "where": "train.py:7", "text": "x *= y"}
    told = {"reason": "its result reaches 1e+06", "instead": "multiply x and y", "without": "NaN"}
    found = OperationFinding("overflow", module=None, **places, **told)
    find = "mpdiag.analysis.operations.detection.find_operations"
    monkeypatch.setattr(find, lambda *_, **__: (found,))
    verdict = analyze(record(tmp_path / "run")).verdict
    assert verdict.level == "cannot"
    assert verdict.text == (
        "FP16 does not work with this code, and no plan can change that: mul_ at train.py:7: "
        "its result reaches 1e+06. Keep mul_ in FP32, or multiply x and y."
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


AUTOCAST = {"precision": {"autocast": ["float16"], "autocast_off": False}}
HALVES = {"autocast": [], "half_parameters": 9, "half_parameter_count_total": 9}
FAILURE = {"where": "writing", "error": "OSError: [Errno 28] No space left"}
FAILED = {"state": "failed", "failures": [{"step": 7, **FAILURE}], "steps_seen": 99}
SEEN = {"type": "Adam", "steps_taken": 300, "steps_recorded": 30}
MISSED = {"type": "LBFGS", "steps_taken": 1, "steps_recorded": 0, "evaluations": 1}
SEARCHING = {"type": "LBFGS", "steps_taken": 3, "steps_recorded": 3, "evaluations": 61}
ONCE = {"type": "SGD", "steps_taken": 30, "steps_recorded": 30, "evaluations": 30}
REASON = "it got no gradient in a recorded step"
MODULES = [
    *({"name": n, "what": "module", "type": "Linear", "recorded": True} for n in ("layer", "lost")),
    parameter("layer.weight", 300),
    parameter("lost.weight", 100, REASON),
    parameter("still.weight", 600, "frozen: it has neither gradient nor update"),
]
LOST = [
    {"name": "lost.weight", "what": "parameter", "reason": REASON},
    {"name": "lost", "what": "activation_grad", "reason": "no gradient reached its output"},
]
COUNTS = {"parameters": 400, "gradients": 400, "modules": 4, "activation_gradients": 1}
# Those that the run states go before its table.
STATED = COUNTS | {f"{name}_seen": 100 if count == 400 else 1 for name, count in COUNTS.items()}

# name: the recording, the level, what the text says, what was not examined
RECORDINGS = {
    "no optimizer": ({"optimizers": []}, "cannot", "has no optimizer", ""),
    "autocast": (AUTOCAST, "cannot", "autocast in float16", ""),
    "half precision": ({"precision": HALVES}, "cannot", "half precision", ""),
    "autocast off": ({"precision": HALVES | {"autocast_off": True, "half_parameters": 0}},
                     "expected", "", ""),
    "failed": (FAILED, "expected", r"^The recording failed at step 7 \(OSError.*[ (]30 of 99 steps", ""),
    "failed early": (FAILED | {"steps": 3}, "cannot",
                     r"^The recording failed at step 7 \(OSError.*[ (]3 of 99 steps", ""),
    "not ended": ({"state": "recording"}, "expected", "^The recording has not ended", ""),
    "an optimizer that was not seen": (
        {"optimizers": [SEEN, MISSED], "steps_seen": 301}, "cannot",
        r"No step of LBFGS was recorded \(1 step of 301\)", r"^1 step of LBFGS \(none recorded\)$",
    ),
    "an optimizer that searches": (
        {"optimizers": [SEEN, SEARCHING]}, "cannot",
        "LBFGS compares 61 evaluations of its loss",
        "^where the search of LBFGS ends in FP16$",
    ),
    "closures without a search": (
        {"optimizers": [ONCE, ONCE | {"type": "SAM", "evaluations": 60}]}, "expected", "", "",
    ),
    "lost layers": (
        {"modules": MODULES, "coverage": {"not_recorded": LOST}}, "expected",
        "the gradients of 75.00 % of the trained parameters and the output gradients of 1 of 2 modules",
        f"25.00 % of the trained parameters.*1 of 2 modules.*{REASON}",
    ),
    "stated counts": (
        {"modules": MODULES[2:3], "coverage": {"seen": STATED}}, "expected",
        "25.00 % of the trained parameters", "",
    ),
    "two steps": ({"steps": 2}, "expected",
                  r"^FP16 should work.* up to 77.64 % of all steps, with 95 % confidence\)$", ""),
    "19 steps": ({"steps": 19}, "expected",
                 r"^FP16 should work.* up to 14.59 % of all steps, with 95 % confidence\)$", ""),
    "20 steps": ({"steps": 20}, "expected", "^FP16 should work((?!confidence).)*$", ""),
}  # fmt: skip


@pytest.mark.parametrize("case", RECORDINGS)
def test_what_a_recording_is_and_lacks_bounds_its_verdict(tmp_path, case):
    meta, level, text, clause = RECORDINGS[case]
    folder = record(tmp_path / "run", **meta)
    analysis = analyze(folder)
    verdict = analysis.verdict
    assert verdict.level == level
    assert re.search(text, verdict.text)
    assert not clause or any(re.search(clause, one) for one in verdict.not_examined)
    assert case != "autocast off" or "whether the script used autocast" not in (
        verdict.not_examined
    )
    # No gate passes by what was not seen; what was recorded of a search is held against a plan.
    assert ("No step of LBFGS" in analysis.unanswered) == (MISSED in meta.get("optimizers", []))
    searches = SEARCHING in meta.get("optimizers", [])
    assert ("optimizer-searches" in {f.code for f in analysis.findings}) == searches
    if searches:
        assert not analysis.unanswered
    if len(meta.get("optimizers", [])) == 2:
        assert compared(folder, "equivalent", analysis.plan).level == "shown"


@pytest.mark.parametrize("case", ["no optimizer", "autocast", "half precision"])
def test_what_is_no_recording_of_an_fp32_training_passes_no_gate(tmp_path, case):
    meta, _, words, _ = RECORDINGS[case]
    analysis = analyze(record(tmp_path / "run", **meta))
    found = check_plan(PrecisionPlan(), analysis.plan, analysis.unanswered).findings
    (finding,) = (f for f in found if f.severity != "info")
    assert (finding.severity, finding.code) == ("error", "plan-not-checked")
    assert words in finding.message
    PrecisionPlan().save(tmp_path / "plan.json")
    call = ("analyze", tmp_path / "run", "--strict", "--against", tmp_path / "plan.json")
    assert run(*call).exit_code == 1
    if "precision" in meta:  # its advice would be circular
        assert analysis.plan.loss_scale.need == "unknown"
        assert not check_plan(PrecisionPlan(), analysis.plan).holds


def test_a_loss_that_was_not_finite_between_recorded_steps_is_a_divergence(tmp_path):
    folder = record(tmp_path / "run", steps_seen=60)
    lines = ({"step": s, "loss": "nan" if s > 40 else 1.0, "scale": 1.0} for s in range(60))
    write_log(folder, RECORDED, *lines)
    analysis = analyze(folder)
    assert analysis.verdict.level == "cannot"
    assert "diverges in FP32" in analysis.verdict.text
    finding = next(f for f in analysis.findings if f.code == "non-finite-losses")
    assert finding.evidence == {"steps": 19, "first": 41}


FP32 = tuple(1.0 - 0.01 * i + 0.02 * (i % 2) for i in range(40))
EXPECTED = Verdict("expected", "Expected.", ("30 steps",), ("an actual FP16 training", "the rest"))


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
    assert told.evidence[0].startswith("probe of the first 40 steps")
    assert told.not_examined == ("an actual FP16 training beyond its first 40 steps", "the rest")
    json.dumps(probe.to_json(), allow_nan=False)


def test_an_fp32_side_that_diverges_says_nothing():
    probe = Probe((1.0, math.nan), (1.0, math.nan), 0, 2)
    told = with_probe(EXPECTED, probe)
    assert (told.level, tuple(probe_findings(probe))) == ("expected", ())
    assert "shows nothing" in told.text


def test_no_probe_makes_a_refused_recording_a_good_one():
    refused = Verdict("cannot", "No gradients were recorded.")
    told = with_probe(refused, Probe(FP32, FP32, 0, 40))
    assert (told.level, told.text) == ("cannot", refused.text)


# -- a comparison counts for the plan that was trained ---------------------------------------------


def log(folder, metric, *head):
    lines = [*head, *({"step": s, "loss": 1.0, "scale": 1.0} for s in range(30))]
    lines.append({"metric": "accuracy", "value": metric, "higher_is_better": True})
    hand.write_log(folder, *lines)


@pytest.fixture
def sides(tmp_path):
    """Three seeds recorded in FP32, and three trained by the plan of the first."""
    for seed, metric in enumerate((0.990, 0.991, 0.992)):
        folder = record(tmp_path / "fp32" / f"seed{seed}", seeds={"torch": seed})
        log(folder, metric, RECORDED)
        plan = analyze(tmp_path / "fp32" / "seed0").plan
        trained = tmp_path / "plan" / f"seed{seed}"
        meta = {"state": "complete", "training": {"level": "O1"}, "seeds": {"torch": seed}}
        RunWriter(trained).write_meta(meta)
        plan.save(trained / "plan.json")
        log(trained, metric - 0.0001)
    return tmp_path / "fp32", tmp_path / "plan"


def keep(sides):
    return keep_comparison(compare(*sides, margin=0.01), *sides)


def test_what_was_shown_by_training_is_said_so(sides):
    assert analyze(sides[0] / "seed1").verdict.level == "expected"
    assert len(keep(sides)) == 3
    verdict = analyze(sides[0] / "seed1").verdict
    assert verdict.level == "shown"
    assert "plan (3 seeds) ended with accuracy 0.9909 beside FP32's 0.991" in verdict.text


@pytest.mark.parametrize(
    "change", ["plans differ", "nothing ran in half precision", "no plan", "another scale"]
)
def test_what_was_not_trained_by_one_plan_shows_nothing(sides, change):
    folder = sides[1] / "seed2"
    if change == "plans differ":
        plan = json.loads((folder / "plan.json").read_text())
        (folder / "plan.json").write_text(json.dumps(plan | {"level": "O2"}))
    elif change == "no plan":
        (folder / "plan.json").unlink()
    elif change == "another scale":  # as the demo's training without one: its plan did not decide
        log = (folder / FILE).read_text().splitlines()
        first = json.dumps(json.loads(log[0]) | {"scale": 4096.0})
        (folder / FILE).write_text("\n".join([first, *log[1:]]))
    else:
        meta = json.loads((folder / "meta.json").read_text())
        (folder / "meta.json").write_text(json.dumps(meta | {"half_precision_flops": 0.0}))
    assert keep(sides) == ()
    assert not list(sides[0].rglob(COMPARISON))


def test_sample_runs_are_left_as_they_are(root):
    sides = root / "sample_runs" / "digits", root / "sample_runs" / "digits-fp16-plan"
    assert keep_comparison(compare(*sides), *sides) == ()
