"""Processes that tests run scripts in."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from script_processes import Done, ForkServer, environment


@pytest.fixture(scope="session")
def fork_server(tmp_path_factory):
    if not hasattr(os, "fork"):
        pytest.skip("this system cannot fork")
    made = ForkServer(tmp_path_factory.mktemp("fork_server"))
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
