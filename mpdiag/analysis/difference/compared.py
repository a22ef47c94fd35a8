"""``mpdiag.diff``: two recordings with traces, or a recording and a fingerprint."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from mpdiag.analysis.difference.diff import RunDifference, difference
from mpdiag.analysis.difference.fingerprint import read_fingerprint, traced
from mpdiag.analysis.difference.pieces import shared
from mpdiag.analysis.difference.sides import steps_of
from mpdiag.display.wording import counted
from mpdiag.errors import InputError
from mpdiag.files.paths import place
from mpdiag.runs.run import open_run
from mpdiag.runs.trace import TraceRow
from mpdiag.tracing.fingerprint import without_wrappers

_KERNELS = ("foreach", "fused", "capturable", "differentiable")  # how, and not what, is computed
_TOLD = ("torch", "python", "numpy")
"""Versions that are named where they differ."""


def diff(a: str | os.PathLike[str], b: str | os.PathLike[str]) -> RunDifference:
    """Where two runs part beyond rounding.

    Args:
        a: A run folder recorded with ``trace``, or a file that ``mpdiag fingerprint`` wrote.
        b: Another one.

    Raises:
        InputError: If one has no trace, or they share no traced step.
        DamagedRun: If one cannot be read.
    """
    (ours, meta_a), (theirs, meta_b) = (_read(side) for side in (a, b))
    if not {row.step for row in ours} & {row.step for row in theirs}:
        raise InputError(
            f"{a} and {b} have no traced step in common: record both with the same --trace-steps"
        )
    found = difference(steps_of(ours), steps_of(theirs))
    missing = [*_missing(a, ours, meta_a), *_missing(b, theirs, meta_b)]
    pairs = [(j.pair.a, j.pair.b) for j in found.judged if j.apart.ratio <= 1.0]
    laid = [(x, y) for x, y in pairs if len(x.pieces) == len(y.pieces) and x.shape != y.shape]
    if some := sum(not shared(x.pieces[0], y.pieces[0])[0][0].size for x, y in laid):
        missing.append(f"values of {counted(some, 'tensor')} in another layout: their norms agree")
    if some := len({id(j.pair.a) for j in found.judged if j.passed}):
        differ = counted(some, "tensor that differs", "tensors that differ")
        missing.append(
            f"{differ}, without effect on what is made of {'it' if some == 1 else 'them'}"
        )
    environment = _environment(meta_a, meta_b)
    other = {j.pair.b.name for j in found.judged if j.pair.b.kind == "weight" and j.apart.ratio > 1}
    if other and found.first is not None and found.first.kind != "weight":
        environment.append(f"different initial values of {counted(len(other), 'parameter')}")
    for side, rows in (("A", ours), ("B", theirs)):
        formats = sorted({row.operand_format.upper() for row in rows} - {""})
        environment += [f"FP32 products of {side} may use {name}" for name in formats]
    settings = _settings(meta_a, meta_b)
    return replace(found, missing=missing, environment=environment, settings=settings)


def _read(side: str | os.PathLike[str]) -> tuple[Sequence[TraceRow], Mapping[str, Any]]:
    path = place(side)
    if path.is_file():
        return read_fingerprint(path)
    run = open_run(path)
    return traced(run), run.meta


def _missing(name: object, rows: Sequence[TraceRow], meta: Mapping[str, Any]) -> list[str]:
    """What a side does not tell, and why."""
    found = []
    if not any(row.kind == "operation" for row in rows):
        # Without its ``fix``: to compare compiled code is what was asked for.
        reason = (meta.get("operations") or {}).get("reason") or "none were recorded"
        found.append(f"operations of {name}: {reason}")
    reason = (meta.get("trace") or {}).get("reason")
    if reason:
        found.append(f"rounding of {name} by its own twin: {reason}")
    return found


def _settings(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[str]:
    """Which settings of optimizers are others for the same parameters."""
    ours, theirs = (
        {name: settings for names, settings in groups for name in without_wrappers(names)}
        for groups in ((meta.get("trace") or {}).get("settings", ()) for meta in (a, b))
    )
    both = [(ours[name], theirs[name]) for name in ours if name in theirs]
    found = Counter(
        f"{k} is {x[k]} in A and {y[k]} in B"
        for x, y in both
        for k in x
        if k not in _KERNELS and x[k] != y.get(k, x[k])
    )
    return [f"{said}, for {counted(times, 'parameter')}" for said, times in found.items()]


def _environment(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[str]:
    """What is not the same of both sides: versions, the device, the seed."""
    ours, theirs = (one.get("versions") or {} for one in (a, b))
    found = [
        f"{name} {ours[name]} and {theirs[name]}"
        for name in _TOLD
        if name in ours and name in theirs and ours[name] != theirs[name]
    ]
    named = {"device": "devices", "seeds": "seeds", "world_size": "numbers of ranks"}
    return found + [f"different {named[key]}" for key in named if a.get(key) != b.get(key)]
