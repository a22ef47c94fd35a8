"""The main job as a user does it: the demo in a real process, then every command on its run."""

from types import SimpleNamespace
from typing import Any

import pytest

from mpdiag.demo.workflow import Outcome, judge
from mpdiag.plan import LossScalePlan, PrecisionPlan


@pytest.fixture(scope="module")
def mpdiag(fork_server):
    def run(*words, cwd):
        return fork_server("mpdiag", *words, cwd=cwd, timeout=900)  # a busy machine is no failure

    return run


@pytest.fixture(scope="module")
def demo(tmp_path_factory, mpdiag):
    folder = tmp_path_factory.mktemp("demo")
    done = mpdiag("demo", "digits", "--steps", "100", cwd=folder)
    assert done.code == 0, done.err
    return folder, done


def test_the_demo_prints_a_verdict_and_names_the_next_command(demo, mpdiag):
    folder, done = demo
    assert done.out.startswith("FP16 should work without a loss scale. ")
    assert "steps recorded)" in " ".join(done.out.split())
    assert "scale 1 ·" in done.out
    assert "next: mpdiag compare runs/digits runs/digits-fp16-plan" in done.err
    assert (folder / "runs" / "digits" / "plan.json").is_file()


def test_the_demo_trains_three_ways_and_compares(demo, mpdiag):
    folder, done = demo
    assert "Trained from the same seed" in done.out
    assert "FP16 loses nothing here" in done.out
    for name in ("digits", "digits-fp16-no-scale", "digits-fp16-plan"):
        log = (folder / "runs" / name / "training.jsonl").read_text().splitlines()
        closing = name != "digits"  # of a training by a plan: what ran in half precision
        assert len(log) == 101 + closing, name  # a line a step, and the metric
    compared = mpdiag("compare", "runs/digits", "runs/digits-fp16-plan", cwd=folder)
    assert compared.code == 0
    assert "accuracy" in compared.out
    assert "accuracy from the run" in " ".join(compared.out.split())  # the workload's margin


@pytest.mark.parametrize(
    "words",
    [
        ("why", "runs/digits", "stem.weight"),
        ("replay", "runs/digits", "--scaler", "lognormal", "--json"),
        ("compare", "runs/digits", "runs/digits-fp16-no-scale", "--json"),
        ("runs", "--json"),
        ("analyze", "runs/digits", "--target", "fp8_e4m3"),
        ("analyze", "runs/digits", "--strict"),  # a healthy run passes
    ],
    ids=" ".join,
)
def test_every_command_works_on_the_run(demo, mpdiag, words):
    done = mpdiag(*words, cwd=demo[0])
    assert done.code == 0, done.err
    assert done.out
    assert "Traceback" not in done.err


@pytest.mark.parametrize(
    ("without", "by_plan", "margins", "words", "style"),
    [
        (0.2, 0.849, {"mAP": 0.005}, "The plan restores it: 0.849.", "bold green"),
        (0.849, 0.849, {"mAP": 0.005}, "with a loss scale or without", "bold yellow"),
        (0.2, 0.3, {"mAP": 0.005}, "FP16 loses with the plan as well", "bold yellow"),
        (0.849, 0.3, {"mAP": 0.005}, "but not by the plan: 0.3.", "bold yellow"),
        (float("nan"), 0.86, {"mAP": 0.005}, "The plan restores it: 0.86.", "bold green"),
        (None, 0.85, {}, "The plan restores it", "bold green"),
        # 0.84 lies within 2 % of 0.85, and two of the run's margins away.
        (
            0.2,
            0.84,
            {"mAP": 0.005},
            "One seed does not decide: mAP 0.2 against 0.85",
            "bold yellow",
        ),
        (0.84, 0.85, {"mAP": 0.005}, "0.85 by the plan. Train several", "bold yellow"),
        (0.2, 0.84, {"mAP": 0.02}, "The plan restores it", "bold green"),
        (0.2, 0.84, {}, "One seed does not decide", "bold yellow"),  # a score's 0.005
    ],
)
def test_the_demos_verdict_goes_by_the_margin_that_compare_uses(
    without, by_plan, margins, words, style
):
    outcomes = [Outcome("", None, metric, 0.1, 0, 10, 1.0) for metric in (0.85, without, by_plan)]
    analysis: Any = SimpleNamespace(
        run=SimpleNamespace(meta={"margins": margins}),
        plan=PrecisionPlan(loss_scale=LossScalePlan(need="needed")),
    )
    sentence, told = judge("mAP", True, outcomes, analysis)
    assert words in sentence
    assert told == style
