"""A handful of each fault of ``studies/faults.py``, by real processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest


@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are forked")
def test_a_handful_of_each(root, tmp_path):
    command = [
        sys.executable,
        root / "studies" / "faults.py",
        "--quick",
        "--json",
        tmp_path / "f",
    ]
    done = subprocess.run(
        [str(word) for word in command], capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    promises = {p["name"]: p for p in json.loads((tmp_path / "f").read_text())["promises"]}
    assert len(promises) == 18
    assert all(p["tried"] and not p["broken"] for p in promises.values()), done.stdout
