"""``mpdiag analyze``: what it says of a run that is not one, and what it names next."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from mpdiag.cli import app
from mpdiag.errors import ExitCode


def said(*words):
    """The exit code, and what went to stderr, on one line."""
    done = CliRunner().invoke(app, [str(word) for word in words])
    return done.exit_code, " ".join(done.stderr.split())


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("analyze", "{0}"), "holds runs and is none itself: name one, such as {0}/first run"),
        (("analyze", "{0}/frist run"), "did you mean {0}/first run?"),
        (("analyze", "{0}/../first run"), "did you mean {0}/../runs/first run?"),
        (("analyze", "{0}/second"), "holds a training by a plan, which records no statistics"),
    ],
)
def test_a_mistyped_name_gets_the_one_that_was_meant(trained, words, sentence):
    code, text = said(*(word.format(trained) for word in words))
    assert code == ExitCode.INPUT
    assert sentence.format(trained) in text


def test_the_next_command_can_be_copied_into_a_shell(trained):
    done = CliRunner().invoke(app, ["analyze", str(trained / "first run")])
    line = next(x for x in done.stderr.splitlines() if x.startswith("next: "))
    assert shlex.split(line)[:4] == ["next:", "mpdiag", "why", str(trained / "first run")]


def test_a_locale_without_our_letters_is_no_reason_to_fail(root):
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    command = [sys.executable, "-m", "mpdiag", "analyze", str(root / "sample_runs" / "digits")]
    child = subprocess.run(command, capture_output=True, env=environment, check=True)
    assert child.stdout.isascii()
    assert b"this trains in FP16" in child.stdout
