"""Scripts in processes of their own, without waiting for torch each time.

A fork server imports torch once and then forks a child for each command: plain Python for a script, or
the ``mpdiag`` command. Tests of how a process starts and ends use real ones instead.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

SCRIPTS = Path(__file__).parent / "scripts"
FORK_SERVER = Path(__file__).parent / "launching" / "fork_server.py"

TRAIN = """
import sys, torch
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), 0.01)
for _ in range(3):
    optimizer.zero_grad()
    model(torch.randn(8, 4)).square().mean().backward()
    optimizer.step()
"""
"""A script of three steps, to which a test may add what comes after them."""


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


class ForkServer:
    """Runs ``python WORDS`` or ``mpdiag WORDS`` in forked processes."""

    def __init__(self, folder):
        self.folder = folder
        self.process = subprocess.Popen(
            [sys.executable, FORK_SERVER],
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
