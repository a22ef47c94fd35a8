"""``mpdiag report``: which files it writes."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from mpdiag.cli import app
from mpdiag.errors import ExitCode


@pytest.mark.parametrize("name", ["r.pdf", "r.json", "r.png", "r.HTMLX"])
def test_a_name_of_another_kind_is_refused(root, tmp_path, name):
    words = ["report", str(root / "sample_runs" / "digits"), "-o", str(tmp_path / name)]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == ExitCode.USAGE
    assert "a report is written as .html or .htm or .md, not as ." in done.stderr
    assert list(tmp_path.iterdir()) == []
