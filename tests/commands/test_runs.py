"""``mpdiag runs``: which runs it lists, how, and as JSON."""

import json

from calls import run

from mpdiag.errors import ExitCode
from mpdiag.reports import terminal
from mpdiag.reports.text.lists import AROUND


def test_runs_lists_newest_first_and_says_what_cannot_be_read(folder):
    result = run("runs", folder)
    assert result.exit_code == ExitCode.OK
    # A sentence may go on in lines of its own, which begin with any word of it.
    rows = [line.split()[:2] for line in result.stdout.splitlines()]
    states = ("finished", "recording", "unreadable:")
    names = [row[0] for row in rows if len(row) == 2 and row[1] in states]
    assert names == ["[red]new", "old", "damaged", "newer"]
    assert "upgrade mpdiag" in " ".join(result.stdout.split())
    assert result.stderr.startswith("next: mpdiag dashboard ")  # none of them holds statistics


def test_runs_json_is_one_document_and_nothing_else(folder):
    result = run("runs", folder, "--json")
    document = json.loads(result.stdout)
    assert result.stderr == ""
    assert document["schema_version"] == 1
    facts = [(r["name"], r["problem"] is None, r["meta"] is None) for r in document["runs"]]
    assert facts == [
        ("[red]new", True, False),
        ("old", True, False),
        ("damaged", False, True),
        ("newer", False, True),
    ]


def test_no_runs_is_no_error(tmp_path):
    result = run("runs", tmp_path)
    assert result.exit_code == ExitCode.OK
    assert result.stderr == "next: mpdiag demo\n"


def test_a_terminal_shows_the_newest_that_fit(folder, monkeypatch):
    monkeypatch.setattr(terminal, "height", lambda: AROUND + 1)
    shown = run("runs", folder).stdout
    assert "[red]new" in shown
    assert "old " not in shown
    assert "and 3 older, shown with -v" in shown
    assert "older" not in run("runs", folder, "-v").stdout
