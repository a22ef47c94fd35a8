"""Scripts in processes of their own, without waiting for torch each time.

A *zygote* imports torch once and then forks a child for each command: plain Python for a script, or
the ``mpdiag`` command. Tests of how a process starts and ends use real ones instead.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[1] / "scripts"
ZYGOTE = Path(__file__).with_name("zygote.py")


@dataclass(frozen=True)
class Done:
    """How a process ended."""

    code: int
    out: str
    err: str

    @property
    def digest(self) -> str:
        return self._after("digest")

    @property
    def metric(self) -> float:
        return float(self._after("metric"))

    def _after(self, word):
        words = self.out.split()
        assert word in words, self.err
        return words[words.index(word) + 1]


def environment():
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(SCRIPTS.parents[1])}
    if sys.platform == "linux":
        env["GLOO_SOCKET_IFNAME"] = "lo"
    return env


class Zygote:
    """Runs ``python WORDS`` or ``mpdiag WORDS`` in forked processes."""

    def __init__(self, folder):
        self.folder = folder
        self.process = subprocess.Popen(
            [sys.executable, ZYGOTE],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment(),
        )

    def __call__(self, program, *words, cwd) -> Done:
        out, err = self.folder / "out", self.folder / "err"
        job = {"program": program, "words": [str(w) for w in words], "cwd": str(cwd)}
        self.process.stdin.write(json.dumps({**job, "out": str(out), "err": str(err)}) + "\n")
        self.process.stdin.flush()
        code = int(self.process.stdout.readline())
        return Done(code, out.read_text(), err.read_text())


@pytest.fixture(scope="session")
def zygote(tmp_path_factory):
    if not hasattr(os, "fork"):
        pytest.skip("this system cannot fork")
    made = Zygote(tmp_path_factory.mktemp("zygote"))
    yield made
    made.process.stdin.close()
    made.process.wait(30)
    made.process.stdout.close()


@pytest.fixture(scope="session")
def real():
    """Real processes."""

    def run(*words, cwd, env=None, timeout=120) -> Done:
        child = subprocess.run(
            [sys.executable, *map(str, words)],
            cwd=cwd,
            env={**environment(), **(env or {})},
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
        return Done(child.returncode, child.stdout, child.stderr)

    return run
