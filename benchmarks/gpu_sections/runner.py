"""Starts a part's child process, waits for it no longer than it may take, and reads its report."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpu_sections import forks
from gpu_sections.document import FINISHED

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from gpu_sections.parts import Part

BENCHMARKS = Path(__file__).resolve().parent.parent
TAIL = 15
"""Lines of a failed part's output that are kept."""
WARM_SECONDS = 600
"""Compiling takes a minute or two, and is no part's time."""
GRACE = 5.0
"""Seconds beyond its own limit after which a part is ended."""
STOPPED = "stopped"
"""How a part ended that Ctrl-C broke off."""


def has(package: str) -> bool:
    """Whether a package is there to be imported; it is not imported."""
    try:
        return importlib.util.find_spec(package) is not None
    except (ImportError, ValueError, AttributeError):
        return False


def missing(parts: Iterable[Part]) -> dict[str, list[str]]:
    """By package that is not installed, the parts that need or want it."""
    found: dict[str, list[str]] = {}
    for part in parts:
        for package in (*part.needs, *part.wants):
            if not has(package):
                found.setdefault(package, []).append(part.key)
    return found


def environment(part: Part | None, cache: Path, device: str) -> dict[str, str]:
    """The environment of a part: this checkout's package, and caches that outlive no pass."""
    path = [str(BENCHMARKS.parent), str(BENCHMARKS)]
    path += [p for p in [os.environ.get("PYTHONPATH", "")] if p]
    made = {
        "PYTHONPATH": os.pathsep.join(path),
        "PYTHONUNBUFFERED": "1",
        "PYTHONFAULTHANDLER": "1",
        "TRITON_CACHE_DIR": str(cache / "triton"),
        "TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor"),
        "COLUMNS": "120",
    }
    if device == "cpu":
        # Two parts at a time, and perhaps others beside them: one thread each, which sleeps while it
        # waits. Triton's own functions are interpreted only if it is imported that way.
        made |= {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "TRITON_INTERPRET": "1"}
    if part is not None and part.deterministic:
        made["CUBLAS_WORKSPACE_CONFIG"] = ":16:8"  # the one that cuBLAS and cuDNN's LSTM both take
    return {**os.environ, **made}


def warm(device: str, cache: Path) -> str:
    """Compile what parts use into the caches of a pass; returns what is to be said of it."""
    words = [sys.executable, "-m", "gpu_sections.warm", device]
    made = environment(None, cache, device)
    try:
        child = subprocess.run(
            words, capture_output=True, text=True, check=False, env=made, timeout=WARM_SECONDS
        )
    except subprocess.TimeoutExpired:
        return f"did not end within {WARM_SECONDS} s"
    lines = (child.stdout if child.returncode == 0 else child.stderr).strip().splitlines()
    return lines[-1] if lines else f"ended with exit code {child.returncode}"


def command(part: Part, device: str, pace: str, seconds: float, report: Path, keep: Path) -> list:
    """The words that start a part."""
    words = [sys.executable, "-m", "gpu_sections.child", part.key, device, pace, f"{seconds:.0f}"]
    return [*words, str(report), str(keep)]


def run(
    part: Part,
    *,
    device: str,
    quick: bool,
    seconds: float,
    keep: Path,
    cache: Path,
    words: Sequence[str] | None = None,
    server: str | None = None,
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Run a part to its end, its failure or its limit.

    Args:
        part: What to run.
        device: ``cpu`` or ``cuda``.
        quick: Whether to do less.
        seconds: Its limit.
        keep: Takes files that outlive the pass.
        cache: Takes compiled kernels.
        words: What to start instead of the part's own process.
        server: The socket of a process to copy; without one, the part's process starts anew.

    Returns:
        How it ended, and the lines of its report; see ``document.enter``. After Ctrl-C the part is
        ``stopped``: what it had reported is kept, and it is run again with ``--resume``.
    """
    lacking = [p for p in part.needs if not has(p)]
    ended: dict[str, Any] = {"state": FINISHED, "seconds": 0.0, "limit": seconds}
    if lacking:
        reason = f"needs {', '.join(lacking)}, which this Python lacks"
        return ended | {"state": "not run", "reason": reason}, []
    with tempfile.TemporaryDirectory(prefix="mpdiag-gpu-", ignore_cleanup_errors=True) as name:
        report, output = Path(name) / "report.jsonl", Path(name) / "output.txt"
        pace = "quick" if quick else "full"
        started = words or command(part, device, pace, seconds, report, keep)
        started = [word.replace("REPORT", str(report)) for word in started]
        began = time.monotonic()
        try:
            child = _start(started, environment(part, cache, device), output, server)
            ended |= _ended(_wait(child, seconds + GRACE), seconds)
        except KeyboardInterrupt:
            ended |= {"state": STOPPED, "reason": "was stopped"}
        ended["seconds"] = round(time.monotonic() - began, 1)
        if ended["state"] != FINISHED:
            ended["tail"] = tail(output)
        return ended, lines(report)


Process = subprocess.Popen[bytes] | forks.Fork


def _start(words: list[str], made: dict[str, str], output: Path, server: str | None) -> Process:
    """A process in a group of its own, whose output goes to a file."""
    folder = output.parent
    if server is not None:
        order = {"words": words[2:], "environment": {**made, forks.SOCKET: server}, "group": 0}
        places = {"folder": str(folder), "out": str(output), "err": str(output)}
        return forks.Fork(server, {**order, **places})
    with output.open("wb") as file:
        return subprocess.Popen(
            words,
            stdout=file,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env=made,
            cwd=folder,
            start_new_session=True,
        )


def _wait(child: Process, seconds: float) -> int | None:
    """The exit code; None if the child, and whatever it started, was ended at the limit."""
    try:
        return child.wait(seconds)
    except (subprocess.TimeoutExpired, TimeoutError):
        return None
    finally:
        _end_group(child)


def _end_group(child: Process) -> None:
    """End what is left of the group that the child began."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def _ended(code: int | None, seconds: float) -> dict[str, Any]:
    if code == 0:
        return {}
    if code is None:
        return {"state": "timed out", "reason": f"was ended at its limit of {seconds:.0f} s"}
    if code < 0:
        return {"state": "crashed", "reason": f"was ended by {signal.Signals(-code).name}"}
    return {"state": "crashed", "reason": f"ended with exit code {code}"}


def tail(output: Path) -> list[str]:
    """The last lines of a part's output, each cut to a width that can be read."""
    text = output.read_bytes()[-20_000:].decode("utf-8", "replace")
    text = text.replace(str(BENCHMARKS.parent) + os.sep, "")
    return [line[:300] for line in text.splitlines() if line.strip()][-TAIL:]


def lines(report: Path) -> list[dict[str, Any]]:
    """The whole lines of a report; the last may be cut off."""
    if not report.exists():
        return []
    found = []
    for line in report.read_text(encoding="utf-8").splitlines():
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return [line for line in found if isinstance(line, dict)]
