"""The table of all families: verdicts, words and the what-if behind them."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from rich.console import Console
from row_buffer import write_rows

from mpdiag.analysis.analyzer import analyze
from mpdiag.plan import Fp32Choice, PrecisionPlan
from mpdiag.reports import terminal
from mpdiag.runs.run import open_run
from studies import family_table
from studies.family_table import Family, Underflow, WayResult, compare_way
from tests.analysis.test_analyzer import gradients


def row(**changes):
    reference = (0.90, 0.92, 0.91)
    sides = {
        "fp32": WayResult(reference, 0, 300),
        "fp16-no-scale": compare_way(reference, (0.1, 0.2, 0.15), 0.02, skipped=0, steps=300),
        "fp16-plan": compare_way(reference, (0.9, 0.921, 0.911), 0.02, skipped=3, steps=300),
        "bf16": compare_way(reference, (math.nan,) * 3, 0.02, skipped=0, steps=300),
    }
    given = {
        "workload": "ssd", "family": "detection", "metric": "mAP@0.5", "higher_is_better": True,
        "margin": 0.02, "steps": 100, "seeds": (0, 1, 2), "sides": sides, "need": "needed",
        "method": "constant", "recommended": 128.0, "lower": 16.0, "upper": 131072.0,
        "paper_scale": 8.0, "worst_lost": 0.29, "onset": 1,
        "underflow": {"fp16-no-scale": Underflow(0.5, 0.61), "fp16-plan": Underflow(0.01, None)},
        "in_fp32": (), "master_weights": True, "swallowed": 0.4,
    }  # fmt: skip
    return Family(**{**given, **changes})


def test_each_way_has_its_verdict():
    made = row()
    verdicts = {way: side.verdict for way, side in made.sides.items()}
    assert verdicts == {
        "fp32": "", "fp16-no-scale": "different", "fp16-plan": "equivalent", "bf16": "different",
    }  # fmt: skip
    assert made.sides["fp16-no-scale"].difference == pytest.approx(-0.76)


def test_cells_tell_mean_spread_and_verdict():
    made = row()
    assert family_table.way_text(made, "fp32") == "0.91 ± 0.01"
    assert family_table.way_text(made, "fp16-no-scale") == "0.15 ± 0.05 ≠"
    assert family_table.way_text(made, "fp16-plan").endswith("=")
    assert family_table.way_text(made, "bf16") == "not finite ≠"
    assert family_table.way_text(made, "fp16-paper") == "–"
    assert family_table.scale_text(made) == "128 (16 to 2^17)"
    assert family_table.scale_text(row(method="none", lower=1.0, upper=None)) == "none (1 to ∞)"
    assert family_table.underflow_text(made, "fp16-no-scale") == "50.0 % / 61.0 %"
    assert family_table.underflow_text(made, "fp16-plan") == "1.0 % / –"


def test_one_seed_decides_nothing():
    assert compare_way((0.9,), (0.1,), 0.02, skipped=0, steps=1).verdict == "inconclusive"


def test_seeds_that_are_not_done_yet_are_left_out_of_the_reference():
    side = compare_way((1.0, 2.0, 9.0), (1.0, 2.0), 0.5, skipped=0, steps=1)
    assert (side.verdict, side.difference) == ("equivalent", 0.0)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, "A scale is needed: the worst layer loses 29.00 %"),
        ({"need": "not needed", "onset": 512, "worst_lost": 1e-4},
         "0.01 % of its gradients' sum at scale 1; with 512 times as many elements in the loss's mean"),
        ({"need": "not needed", "onset": None}, "no larger mean would change that"),
        ({"need": "advisable", "onset": 2}, "A scale is recommended"),
    ],
)  # fmt: skip
def test_each_row_explains_itself(changes, words):
    assert words in family_table.explain(row(**changes))


def test_markdown_has_a_cell_for_every_heading():
    lines = family_table.families_markdown([row(), row(workload="vgg")]).splitlines()
    widths = {line.count("|") for line in lines if line.startswith("|")}
    assert widths == {len(family_table.HEADINGS) + 1}
    assert lines[2].startswith("| ssd | mAP@0.5 | 0.91 ± 0.01 |")


@pytest.mark.parametrize("width", [80, 120])
def test_what_decides_stands_on_one_line_a_workload(width):
    names = ("ssd", "language_model")
    made = [
        row(workload=name, metric="bits per character", higher_is_better=False) for name in names
    ]
    console = Console(width=width, color_system=None)
    with console.capture() as capture:
        console.print(family_table.families_text(made))
    lines = capture.get().splitlines()
    assert max(map(len, lines)) <= width
    for name in names:
        (line,) = (line for line in lines if line.lstrip().startswith(name))
        for words in ("bits per character ↓", "0.91", "0.15 ≠", "0.9107 =", "128"):
            assert words in line
    text = " ".join(capture.get().split())
    assert "not finite ≠" in text or width == 80
    assert "A scale is needed" not in text
    with console.capture() as capture:
        console.print(family_table.families_text(made, verbose=True))
    whole = " ".join(capture.get().split())
    for words in (*family_table.HEADINGS[2:], "0.15 ± 0.05 ≠", "A scale is needed"):
        assert words in whole


def test_the_json_is_plain_and_explains(capsys):
    document = json.loads(json.dumps(row().to_json(), allow_nan=False))
    assert document["sides"]["bf16"]["values"] == [None] * 3
    assert document["underflow"]["fp16-no-scale"] == {"predicted": 0.5, "observed": 0.61}
    assert document["explanation"].startswith("A scale is needed")
    terminal.show(family_table.families_text([row()]))
    assert "equivalent to FP32 within the margin" in capsys.readouterr().out


def test_what_a_plan_keeps_in_fp32_is_named_once():
    choices = (Fp32Choice("", "head"), Fp32Choice("exp", ""), Fp32Choice("", "head"))
    assert family_table.in_fp32(PrecisionPlan(fp32_operations=choices)) == (
        "head", "the model (exp)",
    )  # fmt: skip


def test_the_onset_is_where_the_gradients_would_have_to_move(tmp_path):
    def run(name, exponent):
        rows = [(s, "activation_grad", "layer", gradients(exponent, seed=s)) for s in range(30)]
        return analyze(write_rows(tmp_path / name, rows))

    high, low = run("high", -20.0), run("low", -34.0)
    assert family_table.onset(low) == 1
    k = family_table.onset(high)
    moved, almost = run("moved", -20.0 - math.log2(k)), run("almost", -21.0 - math.log2(k) + 2)
    assert moved.plan.loss_scale.need == "needed"
    assert almost.plan.loss_scale.need != "needed"


def test_underflow_predicted_and_observed(tmp_path):
    rng = np.random.default_rng(0)
    wide = [np.exp2(rng.uniform(-30, -10, 1000)).astype(np.float32) for _ in range(4)]
    rows = [(s, "activation_grad", "a", g) for s, g in enumerate(wide)]
    fp32 = open_run(write_rows(tmp_path / "fp32", rows))
    narrow = [(s, k, n, np.float32(np.float16(g * 4))) for s, k, n, g in rows]
    extra = (0, "activation_grad", "b", np.ones(10, np.float32))  # FP32 did not record it
    fp16 = open_run(write_rows(tmp_path / "fp16", [*narrow, extra]))
    found = family_table.underflow(fp32, fp16, 4.0)
    truth = np.mean(np.concatenate([n[3] for n in narrow]) == 0)
    assert found.predicted == pytest.approx(truth)
    assert found.observed == pytest.approx(truth)
    assert family_table.underflow(fp32, None, 4.0) == Underflow(found.predicted, None)
