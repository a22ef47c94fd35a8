"""What the terminal prints: names out of a run are text, whatever rich would read in them."""

from __future__ import annotations

import made_runs as hand
import pytest
from rich.console import Console

from mpdiag.analysis.analyzer import analyze
from mpdiag.reports import text
from mpdiag.reports.words import in_markdown, percent

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
    said = printed(text.analysis_text(analysis))
    limiting = analysis.loss_scale.limiting_layer
    assert limiting in NAMES, "the run shows nothing"
    assert f"({limiting or 'the model'} overflows beyond)" in said
    for name in NAMES[1:]:
        assert name in said


@pytest.mark.parametrize(
    ("share", "words"),
    [(0.0, "0 %"), (1e-5, "< 0.01 %"), (0.1234, "12.34 %"), (1.0, "100.00 %"), (float("nan"), "–")],
)
def test_shares(share, words):
    assert percent(share) == words


def test_no_line_ends_inside_a_cell_of_markdown():
    assert in_markdown("a\r\nb|c\rd") == "a  b\\|c d"
