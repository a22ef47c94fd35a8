"""``mpdiag explain``: a page, the list, JSON, and what is said of words that are no findings."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from mpdiag.cli import app, command
from mpdiag.display.explanations import codes
from mpdiag.errors import ExitCode


def run(*words):
    return CliRunner().invoke(app, ["explain", *map(str, words)], env={"COLUMNS": "80"})


@pytest.mark.parametrize("word", ["loss-scale-needed", "[loss-scale-needed]", "Loss-Scale-Needed"])
def test_a_page_has_its_sections(word):
    result = run(word)
    assert result.exit_code == ExitCode.OK
    assert result.stdout.startswith("loss-scale-needed\nwarning · Gradients and loss scale")
    assert "How it was computed" in result.stdout
    assert "[loss-scale-needed]" in result.stdout


def test_without_a_code_all_are_listed():
    result = run()
    assert result.exit_code == ExitCode.OK
    assert [code for code in codes() if code not in result.stdout] == []


def test_json_has_the_page_and_the_list():
    document = json.loads(run("few-steps", "--json").stdout)
    assert document["code"] == "few-steps"
    assert document["severity"] == "info"
    listed = json.loads(run("--json").stdout)["findings"]
    assert {page["code"] for page in listed} == set(codes())


@pytest.mark.parametrize(
    ("word", "sentence"),
    [
        (
            "los-scale-needed",
            "there is no finding los-scale-needed (did you mean loss-scale-needed?)",
        ),
        ("qqqq", "there is no finding qqqq: mpdiag explain lists all of them"),
        ("", "there is no finding '': mpdiag explain lists all of them"),
        ("runs/nowhere", "runs/nowhere is a path, not a finding: mpdiag explain lists"),
    ],
)
def test_a_wrong_code_is_refused_in_one_sentence(word, sentence):
    result = run(word)
    assert result.exit_code == ExitCode.USAGE
    assert result.stderr.startswith(f"error: {sentence}")
    assert result.stderr.count("\n") == 1


def test_a_run_is_told_from_a_finding(tmp_path):
    (tmp_path / "meta.json").write_text("{}")
    result = run(tmp_path)
    assert result.exit_code == ExitCode.USAGE
    assert (
        f"is a run, not a finding: its findings are in mpdiag analyze {tmp_path}" in result.stderr
    )


def test_the_shell_completes_codes():
    (argument,) = [p for p in command("explain").params if p.name == "finding"]
    found = argument.shell_complete(None, "operation-")
    assert {item.value for item in found} == {c for c in codes() if c.startswith("operation-")}
