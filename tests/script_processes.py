"""Scripts in processes of their own, without waiting for torch each time.

A fork server imports torch once and then forks a child for each command: Python with a script,
``-m MODULE`` or ``-c CODE``, or the ``mpdiag`` command; or several at once, as the ranks of a
distributed training. Tests of how a process starts and ends use real ones instead.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

SCRIPTS = Path(__file__).parent / "scripts"
FORK_SERVER = Path(__file__).with_name("fork_server.py")


def scripts(test_file: str) -> dict[str, str]:
    """The scripts that stand beside a test file in a ``.txt``, by name: each below ``### NAME``."""
    text = Path(test_file).with_suffix(".txt").read_text(encoding="utf-8")
    _, *parts = re.split(r"^### (.+)\n", text, flags=re.MULTILINE)
    return dict(zip(parts[::2], parts[1::2], strict=True))


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


class Forked:
    """A process of the fork server that may still be running."""

    def __init__(self, server: ForkServer, pid: int) -> None:
        self.server, self.pid = server, pid
        self.code: int | None = None
        self.out = self.err = ""

    def look(self) -> None:
        """Learn what it has printed, and whether it has ended."""
        if self.code is None:
            ((self.code, out, err),) = self.server.order(look=[self.pid])
            self.out += out
            self.err += err

    def wait_for(self, text: str, seconds: float = 60) -> None:
        self._until(lambda: text in self.out or self.code is not None, seconds)
        assert text in self.out, self.err

    def signal(self, number: int) -> None:
        if self.code is None:
            os.kill(self.pid, number)

    def ends_within(self, seconds: float) -> bool:
        return self._until(lambda: self.code is not None, seconds)

    def end(self, seconds: float = 120) -> Done:
        if not self.ends_within(seconds):
            self.signal(signal.SIGKILL)
            self.ends_within(seconds)
        return Done(self.code, self.out, self.err)

    def _until(self, reached, seconds) -> bool:
        end = time.monotonic() + seconds
        while True:
            self.look()
            if reached():
                return True
            if time.monotonic() > end:
                return False
            time.sleep(0.005)


class ForkServer:
    """Runs ``python WORDS`` or ``mpdiag WORDS`` in forked processes.

    Args:
        modules: Imported once, before any child, where they are installed.
    """

    def __init__(self, *modules: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, FORK_SERVER, *modules],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment(),
        )

    def __call__(self, program, *words, cwd, env=None, timeout=120) -> Done:
        return self.start(program, *words, cwd=cwd, env=env).end(timeout)

    def start(self, program, *words, cwd, env=None) -> Forked:
        """One process, which a test may watch and signal."""
        (child,) = self._start(program, words, cwd, [env or {}])
        return child

    def ranks(self, program, *words, cwd, world=2, env=None, timeout=120) -> list[Done]:
        """As many processes as a launcher would start, to their ends."""
        started = self.start_ranks(program, *words, cwd=cwd, world=world, env=env)
        return [child.end(timeout) for child in started]

    def start_ranks(self, program, *words, cwd, world=2, env=None) -> list[Forked]:
        """As many processes as a launcher would start, with the variables it would set."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        meeting = {"WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        own = [{"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(world)]
        environments = [{**meeting, **one, **(env or {})} for one in own]
        return self._start(program, words, cwd, environments)

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait(30)
        self.process.stdout.close()

    def order(self, **order):
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def _start(self, program, words, cwd, environments) -> list[Forked]:
        jobs = [
            {"program": program, "words": [str(w) for w in words], "cwd": str(cwd), "env": env}
            for env in environments
        ]
        return [Forked(self, pid) for pid in self.order(start=jobs)]
