"""What the terminal prints: names out of a run are text, whatever rich would read in them."""

from __future__ import annotations

import made_runs as hand
import pytest
from rich.console import Console

from mpdiag.analysis.analyzer import analyze
from mpdiag.reports.text.analysis import analysis_text

NAMES = ("", "[red]a", "b[/c]", "[link=x]")


def printed(report):
    console = Console(width=200)
    with console.capture() as capture:
        console.print(report)
    return capture.get()


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.setattr(hand, "NAMES", NAMES)
    return hand.write_run(tmp_path / "run")


def test_no_name_is_markup(run):
    analysis = analyze(run)
    said = printed(analysis_text(analysis))
    limiting = analysis.loss_scale.limiting_layer
    assert limiting in NAMES, "the run shows nothing"
    assert f"(above: {limiting or 'the model'} overflows)" in said
    for name in NAMES[1:]:
        assert name in said
