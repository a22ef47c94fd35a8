"""What all tests share, those of studies and benchmarks too."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings
from script_processes import Done, ForkServer, environment

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator

# Threads that wait sleep: spinning, they would starve each other where cores are few or busy, and a
# training takes five times as long. Read when torch is first imported; child processes inherit it.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# Child processes keep what they compile, whatever the environment says: each saves a second.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
# Workers side by side: one thread each, or they would take the cores from one another. Their output
# goes through a pipe, though xdist describes a terminal.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    for name in ("COLUMNS", "LINES"):
        os.environ.pop(name, None)

# No deadline: a first call compiles, and a busy machine is no failure. On a checkout that is being
# judged, examples are the same each time; elsewhere each run tries others.
settings.register_profile("mpdiag", deadline=None, derandomize="CI" in os.environ)
settings.load_profile("mpdiag")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What is imported and collected lives to the end: from here on it is passed over.

    Nearly a million objects, through which every recording looks for optimizers and scalers.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        _pass_over_what_lives()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(
    item: pytest.Item, nextitem: pytest.Item | None
) -> Generator[None, object, object]:
    """So is what the tests of a file have imported, once they have ended."""
    done = yield
    if nextitem is None or nextitem.path != item.path:
        _pass_over_what_lives()
    return done


def _pass_over_what_lives() -> None:
    gc.collect()
    gc.freeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long files come first, so that no worker is left with one while the others idle.

    What needs a GPU is skipped where there is none; torch is only asked if a test needs to know.
    """
    long = {item.path for item in items if item.get_closest_marker("long")}
    items.sort(key=lambda item: item.path not in long and item.nodeid.startswith("tests/"))
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device; torch finds none here"))


@pytest.fixture(autouse=True)
def _nothing_compiled() -> Iterator[None]:
    """What a test compiles is in use no longer when the next one asks whether anything is."""
    yield
    compiler = sys.modules.get("torch._dynamo.eval_frame")
    # Under None stands what only keeps the compiler away, as each training does.
    if compiler is not None and any(b is not None for b in compiler.cached_backends.values()):
        sys.modules["torch._dynamo"].reset()


@pytest.fixture(scope="session")
def root() -> Path:
    """The checkout."""
    return Path(__file__).resolve().parent


@pytest.fixture(scope="session")
def fork_server() -> Iterator[ForkServer]:
    """Runs scripts and commands in processes that need not import torch again."""
    if not hasattr(os, "fork"):
        pytest.skip("this system cannot fork")
    made = ForkServer()
    yield made
    made.close()


@pytest.fixture(scope="session")
def real() -> Callable[..., Done]:
    """Runs Python in a process of its own, from its start to its end."""

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
