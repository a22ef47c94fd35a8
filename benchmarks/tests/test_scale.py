"""The script of large things, at the smallest size: every measure gives its figures."""

from __future__ import annotations

import json
import subprocess
import sys

SIZES = {"layers": 4, "ranks": 4, "trace": 4}


def test_small_things(root, tmp_path):
    command = [sys.executable, root / "benchmarks" / "scale.py", "--only", ",".join(SIZES)]
    command += [word for name, size in SIZES.items() for word in (f"--{name}", size)]
    words = [str(word) for word in (*command, "--json", tmp_path / "scale.json")]
    done = subprocess.run(words, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads((tmp_path / "scale.json").read_text())["results"]
    assert set(results) == set(SIZES)
    assert all([row["size"] for row in rows] == [1, 2, 4] for rows in results.values())
    rows = [row["rows"] for row in results["ranks"]]
    assert rows == [rows[0], 2 * rows[0], 4 * rows[0]]
    assert all(row["recorded step s"] > 0 for row in results["layers"])
