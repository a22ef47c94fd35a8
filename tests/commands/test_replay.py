"""``mpdiag replay``: the options of each scaler."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from mpdiag.cli import app
from mpdiag.errors import ExitCode


@pytest.mark.parametrize(
    ("words", "code", "sentence"),
    [
        (
            ("--scaler", "constant", "--growth-interval", "5"),
            2,
            "constant scaler has no --growth-i",
        ),
        (("--scaler", "constant", "--init-scale", "8"), 0, ""),
        (
            ("--init-scale", "1e9"),
            2,
            "init_scale 1,000,000,000 must lie between 1 (min_scale) and 16,777,216 (max_scale)",
        ),
        (("--init-scale", "1e9", "--max-scale", "1e10"), 0, ""),
    ],
)
def test_an_option_that_the_scaler_lacks_is_refused(trained, words, code, sentence):
    done = CliRunner().invoke(app, ["replay", str(trained / "first run"), *words])
    assert done.exit_code == ExitCode(code)
    assert sentence in done.stderr
