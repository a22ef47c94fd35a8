"""Processes that tests run scripts in."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from running import Done, Zygote, environment


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
