"""``mpdiag train``: what it says of a plan that is none."""

from __future__ import annotations

from typer.testing import CliRunner

from mpdiag.cli import app
from mpdiag.errors import ExitCode


def test_a_folder_without_a_plan_is_named(trained):
    done = CliRunner().invoke(app, ["train", "--plan", str(trained), "--", __file__])
    assert done.exit_code == ExitCode.INPUT
    assert f"{trained} is a folder without a plan.json" in " ".join(done.stderr.split())
