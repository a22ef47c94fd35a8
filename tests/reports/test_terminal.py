"""Lines on stderr: text as it is, in one line, with what a terminal would obey made visible."""

import io
import sys

import pytest

from mpdiag.analysis.analyzer import analyze
from mpdiag.display.wording import shown
from mpdiag.numerics.formats import FP16
from mpdiag.reports import terminal
from mpdiag.reports.text.charts import Histogram

WORDS = [
    "a run",
    "runs/[bold]x[/]",
    "tab\there",
    "é 你好\u202e",
    "\x1b[31mred",
    ":smile: " + 300 * "w ",
]


@pytest.mark.parametrize("word", WORDS)
def test_a_line_is_text_in_one_line(word, capsys) -> None:
    for label, tell in (("note: ", terminal.remark), ("error: ", terminal.complain)):
        tell(word)
        assert capsys.readouterr().err == shown(f"{label}{word}".expandtabs(8)) + "\n"


def test_colours_are_kept_where_they_are_asked_for(capsys, monkeypatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    terminal.complain("wrong")
    assert "\x1b[" in capsys.readouterr().err


def test_the_next_command_is_quoted_and_no_console_is_no_error(capsys, monkeypatch) -> None:
    terminal.name_next("a b", "c")
    assert capsys.readouterr() == ("", "next: 'a b' c\n")
    monkeypatch.setattr(sys, "stderr", None)
    terminal.name_next("a b", "c")


@pytest.mark.parametrize(("encoding", "bars"), [("utf-8", True), ("ascii", False)])
def test_figures_are_ascii_where_the_encoding_has_no_more(root, encoding, bars) -> None:
    h = analyze(root / "sample_runs" / "ssd").layers.of_kind("activation_grad").histograms[1]
    out = io.TextIOWrapper(io.BytesIO(), encoding)
    terminal.Terminal(file=out, width=80).print(Histogram(h, FP16, 64.0))
    out.flush()
    drawn = out.buffer.getvalue().decode()
    assert ("█" in drawn, "▒" in drawn, "━" in drawn) == (bars,) * 3
    assert bars or all(mark in drawn for mark in ("###", "....", "====", "x64"))
