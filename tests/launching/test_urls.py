"""``--out URL``: runs of scripts on any file system that fsspec knows."""

from __future__ import annotations

from script_processes import TRAIN

from mpdiag.runs.run import open_run

# What lies in memory is gone with its process: all commands run in one.
IN_MEMORY = """
import sys
from mpdiag.cli import app
from mpdiag.files.paths import place
from mpdiag.runs.run import open_run

URL = "memory:///fleet/one"

def say(*words):
    print(words[0], "exit", app(list(words), standalone_mode=False) or 0, flush=True)

say("record", "--out", URL, "--every", "1", "--", "train.py")
run = open_run(place(URL))
print(run.meta["state"], run.meta["steps_recorded"], run.meta["operations"]["steps"])
print(sorted({o.phase for o in run.operations()}), len(run.frame()) > 0)
say("analyze", URL, "-o", "plan.json")
say("record", "--out", URL, "--", "train.py")
say("train", "--plan", "plan.json", "--out", URL + "-fp16", "--", "train.py")
say("compare", URL, URL + "-fp16")
print(open_run(place(URL + "-fp16")).meta["training"]["dtype"])
"""


def test_a_run_in_memory(fork_server, tmp_path):
    (tmp_path / "train.py").write_text(TRAIN + 'print("trained")')
    (tmp_path / "commands.py").write_text(IN_MEMORY)
    done = fork_server("python", "commands.py", cwd=tmp_path)
    assert done.code == 0, done.err
    lines = done.out.splitlines()
    assert lines[:2] == ["trained", "record exit 0"], done.err
    assert lines[2:4] == ["complete 3 [0]", "['backward', 'forward'] True"]
    ends = [line for line in lines if " exit " in line][1:]
    assert ends == ["analyze exit 0", "record exit 2", "train exit 0", "compare exit 0"]
    assert any(
        line.startswith("memory:///fleet/one-fp16 against memory:///fleet/one:") for line in lines
    )
    assert lines[-1] == "fp16"
    assert "next: mpdiag analyze memory:///fleet/one -o plan.json" in done.err.splitlines()
    assert "memory:///fleet/one already holds a run" in done.err
    assert (
        "next: mpdiag compare memory:///fleet/one memory:///fleet/one-fp16" in done.err.splitlines()
    )
    assert not (tmp_path / "runs").exists()


def test_a_file_url_is_a_folder(fork_server, tmp_path):
    (tmp_path / "train.py").write_text(TRAIN)
    url = f"file://{tmp_path}/here/one"
    done = fork_server("mpdiag", "record", "--out", url, "--", "train.py", cwd=tmp_path)
    assert done.code == 0, done.err
    assert done.err == "next: mpdiag analyze here/one -o plan.json\n"
    assert open_run(tmp_path / "here" / "one").meta["steps_recorded"] == 3


def test_a_file_system_that_nobody_knows(fork_server, tmp_path):
    (tmp_path / "train.py").write_text(TRAIN)
    done = fork_server("mpdiag", "record", "--out", "nosuch://a/b", "--", "train.py", cwd=tmp_path)
    assert (done.code, done.out) == (2, "")
    assert "nosuch://a/b is on no file system that fsspec knows" in done.err
