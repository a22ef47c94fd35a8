"""What ``analyze`` prints: whole sentences at any width, and names that are text."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import made_runs as hand
import pytest
from calls import printed

from mpdiag.analysis.analyzer import analyze
from mpdiag.analysis.scaling.loss_scale import nothing_stored
from mpdiag.plan import Fp32Choice
from mpdiag.reports.documents.markdown import findings_list
from mpdiag.reports.documents.run_report import reasons
from mpdiag.reports.text.analysis import (
    FINDINGS,
    analysis_text,
    settling_command,
    summary_text,
)
from mpdiag.reports.text.tables import finding_lines
from mpdiag.reports.views.verdict import UNKNOWN, facts

NAMES = ("", "[red]a", "b[/c]", "[link=x]")
_RUNS = ("ssd", "gpt", "digits", "speech", "dcgan", "translation")


@pytest.mark.parametrize("name", _RUNS)
def test_every_sentence_is_whole_at_any_width(root: Path, name: str):
    """Findings and fixes of 100 characters at most, each word of them in order; ``-v`` has the rest."""
    analysis = analyze(root / "sample_runs" / name)
    told = [words for f in analysis.findings[:FINDINGS] for words in (f.headline, f.fix)]
    assert max(map(len, told), default=0) <= 100
    told += [analysis.verdict.text, *analysis.verdict.not_examined]
    told += [analysis.plan.master_weights.reason.partition("; ")[0]]
    verbose = "".join(printed(analysis_text(analysis)).split())
    assert all("".join(f.message.split()) in verbose for f in analysis.findings)
    for width in (24, 40, 60, 80, 100, 120, 300):
        text = printed(*summary_text(analysis), width=width)
        assert max(map(len, text.splitlines())) <= width
        assert "…" not in text
        letters = "".join(text.split())
        assert all("".join(words.split()) in letters for words in told)


@pytest.mark.parametrize(
    ("words", "folder", "workload"),
    [
        ([], "ssd", "ssd"),
        (["digits"], "digits-2", "digits"),
        (["--seed", "1", "digits"], "digits", "digits"),
        (["digits"], "renamed", "digits"),
        (["--seed", "1"], "ssd-3", "ssd"),
    ],
)
def test_the_check_that_settles_a_demo_names_its_workload(words, folder, workload):
    run = SimpleNamespace(folder=Path("runs") / folder, meta={"argv": ["mpdiag", "demo", *words]})
    analysis = SimpleNamespace(run=run, rounded_to=None)
    assert settling_command(analysis) == ("mpdiag", "search", workload)


def test_a_finding_without_a_fix_has_no_arrow(root: Path):
    analysis = analyze(root / "sample_runs" / "ssd")
    bare = replace(analysis.findings[0], fix="", code="shapes-left-alone")
    shown = replace(analysis, findings=(bare,))
    console = [printed(*summary_text(shown)), printed(*finding_lines([bare]))]
    texts = [*console, findings_list([bare.to_json()])]
    for text in texts:
        assert "→" not in text
        assert "shapes-left-alone" in text


def test_a_recording_that_allows_no_answer_gets_no_decision_of_a_plan(root: Path):
    """What its plan says of the scale and the masters would stand below a verdict that denies it."""
    analysis = replace(analyze(root / "sample_runs" / "ssd"), unanswered="Its weights are halves.")
    for text in (printed(*summary_text(analysis)), printed(analysis_text(analysis))):
        assert not re.search(r"^(Loss scale|Master weights|Stay in FP32)\b", text, re.MULTILINE)
        assert "works" not in text
    assert {fact.value for fact in facts(analysis)} == {UNKNOWN}
    assert {fact.note for fact in facts(analysis)} == {UNKNOWN}
    assert reasons(analysis) == []
    answered = replace(analysis, unanswered="")
    assert "Loss scale" in printed(*summary_text(answered))
    assert "Loss scale" in printed(analysis_text(answered))
    assert [title for title, _ in reasons(answered)] == ["Loss scale", "Master weights"]


def test_a_module_without_which_no_scale_fits_is_said_to_stay_in_fp32(root: Path):
    analysis = analyze(root / "sample_runs" / "ssd")
    plan = replace(analysis.plan, fp32_modules=(Fp32Choice("", "head.a"),), fp32_operations=())
    said = printed(*summary_text(replace(analysis, plan=plan)), width=200)
    assert "Stay in FP32    1 module: head.a" in said
    assert "Stay in FP32    1 module" in printed(analysis_text(replace(analysis, plan=plan)))


def test_gradients_that_stay_fp32_lose_nothing(root: Path):
    analysis = analyze(root / "sample_runs" / "ssd")
    assert re.search("Lost to zero +[0-9.]+ % of all", printed(analysis_text(analysis)))
    none = nothing_stored(analysis.loss_scale, analysis.target)
    fp32 = replace(analysis, loss_scale=none, figures=none.figures)
    said = printed(analysis_text(fp32), width=200)
    assert "Lost to zero    nothing: no recorded gradient is FP16" in said


def test_no_name_is_markup(tmp_path, monkeypatch):
    monkeypatch.setattr(hand, "NAMES", NAMES)
    analysis = analyze(hand.write_run(tmp_path / "run"))
    said = printed(analysis_text(analysis), width=200)
    limiting = analysis.loss_scale.limiting_layer
    assert limiting in NAMES, "the run shows nothing"
    assert f"(above: {limiting or 'the model'} overflows)" in said
    for name in NAMES[1:]:
        assert name in said
