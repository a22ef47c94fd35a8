"""The verdict's three levels: what each needs, what it rests on, and what stays open."""

import json
import math
from dataclasses import replace
from pathlib import Path

import made_runs as hand
import pytest
from calls import run
from goldens import assert_as_kept
from judged_runs import parameter, record
from made_runs import write_log

from mpdiag.analysis.analyzer import analyze
from mpdiag.analysis.comparison.compare import compare
from mpdiag.analysis.operations.rules import OperationFinding
from mpdiag.analysis.plan_check import check_plan
from mpdiag.analysis.verdict.evidence import SAME_BITS
from mpdiag.analysis.verdict.probe import Probe, probe_findings, with_probe
from mpdiag.analysis.verdict.trained import keep_comparison
from mpdiag.plan import LossScalePlan, PrecisionPlan, Verdict
from mpdiag.runs.results import COMPARISON, StoredComparison, read_comparison, write_comparison
from mpdiag.runs.training_log import FILE, RECORDED
from mpdiag.runs.writer import RunWriter


def compared(folder, verdict, plan, *, alone=False):
    if alone:
        (folder / COMPARISON).unlink(missing_ok=True)
    stored = StoredComparison("run-plan", plan.digest(), verdict, ("accuracy .99 beside .98",), 3)
    write_comparison(folder, stored)
    return analyze(folder).verdict


# -- levels ----------------------------------------------------------------------------------------


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


def test_a_comparison_by_another_plan_does_not_hide_the_one_before(tmp_path):
    folder = record(tmp_path / "run")
    fp16, bf16 = (analyze(folder, target).plan for target in ("fp16", "bf16"))
    assert compared(folder, "equivalent", fp16).level == "shown"
    assert compared(folder, "different", bf16).level == "shown"
    assert analyze(folder, "bf16").verdict.level == "cannot"
    assert read_comparison(folder) == read_comparison(folder, bf16.digest())
    assert compared(folder, "different", fp16).level == "cannot"  # the newest of one plan counts
    assert len(json.loads((folder / COMPARISON).read_text())["earlier"]) == 1
    assert read_comparison(folder, "of no plan") is None


@pytest.mark.parametrize("earlier", ["", 1, [1, {}], {"a": 1}])
def test_earlier_comparisons_that_cannot_be_read_do_not_hide_the_last(tmp_path, earlier):
    last = StoredComparison("b", "d", "equivalent", answer="equivalent")
    write_comparison(tmp_path, last)
    document = json.loads((tmp_path / COMPARISON).read_text())
    (tmp_path / COMPARISON).write_text(json.dumps({**document, "earlier": earlier}))
    assert read_comparison(tmp_path) == last


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

RECORDINGS = {
    "thirty steps of four hundred": {"steps_seen": 400},
    "no optimizer": {"optimizers": []},
    "autocast": AUTOCAST,
    "half precision": {"precision": HALVES},
    "autocast off": {"precision": HALVES | {"autocast_off": True, "half_parameters": 0}},
    "failed": FAILED,
    "failed early": FAILED | {"steps": 3},
    "script failed": FAILED | {"failures": []},
    "script failed early": FAILED | {"failures": [], "steps": 3, "steps_seen": 3},
    "not ended": {"state": "recording"},
    "an optimizer that was not seen": {"optimizers": [SEEN, MISSED], "steps_seen": 301},
    "an optimizer that searches": {"optimizers": [SEEN, SEARCHING]},
    "closures without a search": {"optimizers": [ONCE, ONCE | {"type": "SAM", "evaluations": 60}]},
    "lost layers": {"modules": MODULES, "coverage": {"not_recorded": LOST}},
    "stated counts": {"modules": MODULES[2:3], "coverage": {"seen": STATED}},
    **{f"{n} steps": {"steps": n} for n in (2, 19, 20)},
}


def told(verdict):
    lines = [f"{verdict.level}: {verdict.text}", *(f"+ {words}" for words in verdict.evidence)]
    return "\n".join([*lines, *(f"- {words}" for words in verdict.not_examined)])


def kept(name, texts):
    path = Path(__file__).with_name(f"{name}.txt")
    assert_as_kept(path, "\n\n".join(f"# {case}\n{text}" for case, text in texts.items()))


def test_what_a_recording_is_and_lacks_bounds_its_verdict(tmp_path):
    """No gate passes by what was not seen; what was recorded of a search is held against a plan."""
    texts = {}
    for case, meta in RECORDINGS.items():
        analysis = analyze(record(tmp_path / case, **meta))
        codes = " ".join(f"{f.severity} {f.code}" for f in analysis.findings)
        texts[case] = f"{told(analysis.verdict)}\nunanswered: {analysis.unanswered}\n{codes}"
        if len(meta.get("optimizers", [])) == 2:
            after = compared(tmp_path / case, "equivalent", analysis.plan)
            texts[f"{case}, and an equivalent training"] = told(after)
    kept("recordings", texts)
    document = json.loads(json.dumps(analysis.to_json(), allow_nan=False))
    assert set(document["verdict"]) == {"level", "text", "evidence", "not_examined"}
    assert document["plan"]["verdict"] == document["verdict"]


def test_only_a_comparison_of_this_plan_shows_anything(tmp_path):
    plan = analyze(record(tmp_path / "run")).plan
    plans = {"this plan": plan, "another plan": PrecisionPlan(target="bf16")}
    kept(
        "compared",
        {
            f"{found} by {whose}": told(compared(tmp_path / "run", found, followed, alone=True))
            for found in ("equivalent", "inconclusive", "different")
            for whose, followed in plans.items()
        },
    )


NO_FP32 = {
    "no optimizer": "has no optimizer and no weight update",
    "autocast": "the recorded training computes in FP16",
    "half precision": "the recorded training computes in half precision",
}


@pytest.mark.parametrize("case", NO_FP32)
def test_what_is_no_recording_of_an_fp32_training_passes_no_gate(tmp_path, case):
    meta = RECORDINGS[case]
    analysis = analyze(record(tmp_path / "run", **meta))
    found = check_plan(PrecisionPlan(), analysis.plan, analysis.unanswered).findings
    (finding,) = (f for f in found if f.severity != "info")
    assert (finding.severity, finding.code) == ("error", "plan-not-checked")
    assert NO_FP32[case] in finding.message
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
UNSEEN = ("an actual FP16 training", f"{SAME_BITS} (--probe compares losses)", "the rest")
EXPECTED = Verdict("expected", "Expected.", ("30 steps",), UNSEEN)


PROBES = {
    "alike": Probe(FP32, FP32, 0, 40),
    "another loss": Probe(FP32, tuple(x + 0.3 for x in FP32), 0, 40),
    "NaN": Probe(FP32, (*FP32[:30], *[math.nan] * 10), 0, 40),
    "skipped steps": Probe(FP32, FP32, 30, 40),
    "compiled, with the same bits": Probe(FP32, FP32, 0, 40, recorder_ulps=(0, 0)),
    "compiled, with other bits": Probe(FP32, FP32, 0, 40, recorder_ulps=(38, 1)),
    "NaN beside BF16": Probe(FP32, (*FP32[:30], *[math.nan] * 10), 0, 40, reference="BF16"),
    "NaN on both sides": Probe((1.0, math.nan), (1.0, math.nan), 0, 2),
}


def test_a_probe_refutes_or_agrees_and_never_shows():
    texts = {}
    for case, probe in PROBES.items():
        findings = [f"{f.severity} {f.code}: {f.message}" for f in probe_findings(probe)]
        texts[case] = "\n".join([probe.outcome, told(with_probe(EXPECTED, probe)), *findings])
        json.dumps(probe.to_json(), allow_nan=False)
    kept("probes", texts)
    refused = Verdict("cannot", "No gradients were recorded.")
    after = with_probe(refused, PROBES["alike"])
    assert (after.level, after.text) == ("cannot", refused.text)


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
