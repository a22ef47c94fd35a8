"""What Dynamo counted in a process, and which records of a compiled training arrived."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from mpdiag.errors import DamagedRun
from mpdiag.runs.run import open_run

if TYPE_CHECKING:
    from pathlib import Path

Records = Counter[tuple[str, str, int, int, int]]
"""Elements that were counted, by kind, tensor, step, micro-batch and rank."""


def compilations() -> dict[str, int]:
    """What Dynamo counted in this process: ``graphs``, ``breaks`` and ``recompilations``.

    It keeps 64 compilations; ``torch._dynamo.utils.set_compilation_metrics_limit`` asks for more.
    """
    import torch._dynamo.utils as dynamo

    seen = {str(metrics.compile_id) for metrics in dynamo.get_compilation_metrics()}
    return {
        "graphs": dynamo.counters["stats"]["unique_graphs"],
        "breaks": dynamo.counters["graph_break"].total(),
        "recompilations": sum(not compilation.endswith("/0") for compilation in seen),
    }


def records(run: Path, steps: int | None = None) -> Records:
    """What a run counted, or what it counted in its first steps; nothing if it holds no statistics."""
    found: Records = Counter()
    try:
        table = open_run(run).table().select(["kind", "name", "step", "micro", "rank", "numel"])
    except DamagedRun:
        return found
    for row in table.to_pylist():
        if steps is None or row["step"] < steps:
            numel = row.pop("numel")
            if row["name"].endswith("_orig_mod"):
                continue  # the module around it returns the same
            row["name"] = plain_name(row["name"])
            found[tuple(row.values())] += numel
    return found


def arrived(due: Records, came: Records) -> dict[str, Any]:
    """The records of a compiled recording, of those that an eager one says are due.

    A record has arrived if it counted as many elements. ``missing``, ``only_compiled`` and
    ``other_numel`` name kinds and tensors.
    """

    def named(keys: Any) -> list[str]:
        return sorted({f"{kind} {name}" for kind, name, *_ in keys})

    both = due.keys() & came.keys()
    return {
        "due": len(due),
        "arrived": sum(due[key] == came[key] for key in both),
        "missing": named(due.keys() - came.keys()),
        "only_compiled": named(came.keys() - due.keys()),
        "other_numel": named(key for key in both if due[key] != came[key]),
    }


def plain_name(name: str) -> str:
    """A module's name without the level that ``torch.compile`` adds."""
    return name.replace("_orig_mod.", "")


def differences(one: Path, other: Path) -> dict[str, float]:
    """How far the tensors in two files of ``torch.save`` lie apart.

    ``elements`` differ, of ``of``. ``largest`` is the largest distance of two elements in units in the
    last place of the largest element of their tensor.
    """
    import torch
    from torch.utils._pytree import tree_leaves

    pairs = [tree_leaves(torch.load(path, weights_only=False)) for path in (one, other)]
    found = {"elements": 0, "of": 0, "largest": 0.0}
    for a, b in zip(*pairs, strict=True):
        if not isinstance(a, torch.Tensor) or not a.is_floating_point() or not a.numel():
            continue
        distance = (a.double() - b.double()).abs()
        largest = a.abs().max().double()
        unit = torch.finfo(a.dtype).eps * 2.0 ** float(largest.log2().floor())
        found["elements"] += int((distance > 0).sum())
        found["of"] += a.numel()
        found["largest"] = max(found["largest"], round(float(distance.max()) / (unit or 1.0), 1))
    return found
