"""What a file is, for the message to somebody who named it where something else is needed."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mpdiag.files.paths import AnyPath, is_remote

HEAD = 1 << 16
"""Bytes by which a file is recognised."""
SMALL = 1 << 24
"""Bytes up to which a JSON file is read whole for it."""
_TRACES_IN_JSON = (b'"traceEvents"', b'"rocprofiler-sdk-tool"', b'"CudaEvent"')
_TRACES = (b"Kernel Name", b"Kernel_Name", b"KernelName", b"==PROF==", b"Profiling result")
"""What traces of profilers hold near their beginning."""
_META = "meta.json"
_PARTS = (_META, "training.jsonl", "profile.json", "search.json", "sensitivity.json")
"""Files of a run folder that are good for nothing without it."""


@dataclass(frozen=True)
class FileKind:
    """What a file is.

    Attributes:
        name: ``plan``, ``trace``, ``part of a run`` …
        words: The same in a sentence: ``a plan``.
        use: What it is good for: the command that takes it.
    """

    name: str
    words: str
    use: str


def kind_of(path: AnyPath) -> FileKind | None:
    """What a file is; None if there is none at a local path, or it is nothing that mpdiag knows."""
    if is_remote(path):
        return None
    try:
        if not path.is_file():
            return None
        with path.open("rb") as file:
            head = file.read(HEAD)
        size = path.stat().st_size
    except OSError:
        return None
    run = _run_around(path)
    if run is not None and (path.name in _PARTS or path.suffix == ".parquet"):
        return FileKind("part of a run", "a part of a run", f"it belongs to the run {run}")
    return _by_content(path, head, size)


def named_instead(path: AnyPath, wanted: str) -> str | None:
    """The sentence for a file that is not what was wanted; None if it is not known what it is.

    Args:
        path: What was named.
        wanted: What is needed: ``run``, ``plan``, ``trace``, ``capsule``, ``folder of runs``.
    """
    kind = kind_of(path)
    if kind is None or kind.name == wanted:
        return None
    run = _run_around(path) if wanted == "run" and not is_remote(path) else None
    use = kind.use
    if run is not None:  # a trace is of use where it lies, other files only in their run
        other = f"{use}, or " if kind.name == "trace" else ""
        use = f"{other}give the run's folder, {run}"
    return f"{path} is {kind.words}, not a {wanted}: {use}"


def run_instead(folder: AnyPath, wanted: str) -> str:
    """The sentence for a run folder where something else is needed, with a command that takes this run.

    Args:
        folder: The run's folder.
        wanted: What is needed: ``trace``, ``folder of runs``.
    """
    said = f"{folder} is a run, not a {wanted}"
    parts: list[AnyPath] = [*folder.iterdir()]
    kinds = {path: kind_of(path) for path in sorted(parts, key=lambda path: path.name)}
    traces = [path for path, kind in kinds.items() if kind is not None and kind.name == "trace"]
    if wanted == "trace" and traces:
        return f"{said}: name the trace in it, {traces[0]}"
    recorded = any((folder / "stats").glob("*.parquet"))
    return f"{said}: use mpdiag {'analyze' if recorded else 'dashboard'} {folder}"


def _run_around(path: Path) -> Path | None:
    """The run folder that a file lies in, by the path as it was named."""
    near = path.parents[:2]
    return next((f for f in near if (f / _META).is_file()), None)


def _by_content(path: Path, head: bytes, size: int) -> FileKind | None:
    text = head.removeprefix(b"\xef\xbb\xbf").lstrip()
    if text[:1] == b"{" and not any(mark in head for mark in _TRACES_IN_JSON):
        return _json_kind(path, size)
    if head.startswith((b"SQLite format 3\0", b"\x1f\x8b")):
        return _trace(path)
    if any(mark in head for mark in _TRACES_IN_JSON + _TRACES):
        return _trace(path)
    if text[:64].lower().startswith((b"<!doctype html", b"<html")):
        return FileKind("report", "an HTML page", "open it in a browser")
    if path.suffix == ".md":
        return FileKind("report", "a Markdown text", "open it in an editor")
    if path.suffix == ".py":
        return FileKind("script", "a script", f"to record it, use mpdiag record -- {path}")
    return None


def _trace(path: Path) -> FileKind:
    return FileKind("trace", "a trace", f"use mpdiag profile {path}")


# The keys by which a document is known, what it is, and what it is good for.
_DOCUMENTS: tuple[tuple[set[str], str, str], ...] = (
    ({"findings", "plan", "loss_scale"}, "the output of mpdiag analyze --json", "give the run"),
    ({"kernels", "findings"}, "the output of mpdiag profile --json", "give the trace"),
    ({"probes", "candidates"}, "a part of a search", "give its folder"),
    ({"kind", "trainings"}, "a baseline", "use mpdiag compare {path} RUN"),
)


_PLAN = {"schema_version", "loss_scale"}


def _json_kind(path: Path, size: int) -> FileKind | None:
    if size > SMALL:
        return None
    try:
        raw = path.read_bytes()
        wanted = (_PLAN, *(known for known, _, _ in _DOCUMENTS))
        if not any(all(f'"{key}"'.encode() in raw for key in keys) for keys in wanted):
            return None  # a search takes a hundredth of the time of decoding
        document: Any = json.loads(raw)
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(document, dict):
        return None
    keys = set(document)
    for known, words, use in _DOCUMENTS:
        if known <= keys:
            return FileKind(words, words, use.format(path=path))
    if keys >= _PLAN:
        return FileKind(
            "plan", "a plan", f"train by it with mpdiag train --plan {path} -- SCRIPT ARGS"
        )
    return None
