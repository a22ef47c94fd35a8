"""``mpdiag doctor``: for a person, and as JSON."""

from __future__ import annotations

import json
import sys

from calls import run

from mpdiag.errors import ExitCode
from mpdiag.version import __version__


def test_doctor_prints_one_json_document():
    result = run("doctor", "--json")
    assert result.exit_code == ExitCode.OK
    assert json.loads(result.stdout)["mpdiag"] == __version__


def test_doctor_for_a_person():
    result = run("doctor")
    words = " ".join(result.stdout.split())
    assert f"python {sys.version.split()[0]}" in words
    assert result.stderr == "next: mpdiag demo\n"
