"""Lines on stderr: the same with rich and without, which a short command need not import."""

from __future__ import annotations

import subprocess
import sys

import pytest
from rich.text import Text

from mpdiag.reports import terminal
from mpdiag.reports.console import Terminal

WORDS = [
    "a run",
    "runs/[bold]x[/]",
    "tab\there",
    "é 你好\u202e",
    "\x1b[31mred",
    ":smile: " + 300 * "w ",
]


@pytest.mark.parametrize("word", WORDS)
def test_a_line_is_as_rich_prints_it_where_there_is_no_terminal(word, capsys) -> None:
    for label, tell in (("note: ", terminal.remark), ("error: ", terminal.complain)):
        tell(word)
        plain = capsys.readouterr().err
        Terminal(stderr=True).print(Text.assemble((label, "red"), word), soft_wrap=True)
        assert plain == capsys.readouterr().err


def test_colours_are_kept_where_they_are_asked_for(capsys, monkeypatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    terminal.complain("wrong")
    assert "\x1b[" in capsys.readouterr().err


def test_a_line_needs_no_rich() -> None:
    code = (
        "import sys; from mpdiag.reports import terminal; terminal.name_next('a b', 'c');"
        "print('rich' in sys.modules)"
    )
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (child.stdout, child.stderr) == ("False\n", "next: 'a b' c\n")
