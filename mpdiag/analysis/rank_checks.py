"""Compares the ranks of one training: which ones stopped early, and whose weights differ."""

from __future__ import annotations

import hashlib
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

import numpy as np

from mpdiag.analysis.findings import Finding

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from numpy.typing import NDArray

    from mpdiag.runs.records import Records
    from mpdiag.runs.run import Run

LIVE_SECONDS = 120.0
"""A rank that wrote within this time may still be running."""
COMPARED_STEPS = 64
"""Number of steps at which copies are compared in a long run: once different, they stay different."""


def rank_findings(run: Run) -> list[Finding]:
    """Findings about ranks that stopped early, left no recording, or hold different weights."""
    world = int(run.meta.get("world_size") or 1)
    if world < 2:
        return []
    metas = run.rank_metas()
    found = [*_stopped(run, metas, world), *_disagreeing(run)]
    silent = [r for r in range(world) if r not in metas]
    if silent:
        found.append(
            Finding(
                severity="warning",
                code="rank-missing",
                message=f"{_ranks(silent)} of {world} left no recording",
                evidence={"ranks": silent, "world_size": world},
                fix="check that they trained at all, and that they could write to the run folder",
            )
        )
    return found


def _stopped(run: Run, metas: Mapping[int, Mapping[str, Any]], world: int) -> list[Finding]:
    """Ranks that were killed or failed while others continued."""
    if all(m.get("state") == "recording" for m in metas.values()) and _is_live(metas):
        return []
    last: dict[int, int] = {}
    for piece in _pieces(run, histograms=False):
        for rank in np.unique(piece.rank).tolist():
            top = int(piece.step[piece.rank == rank].max())
            last[rank] = max(top, last.get(rank, -1))
    steps = {
        rank: max(last.get(rank, -1) + 1, int(meta.get("steps_seen") or 0))
        for rank, meta in metas.items()
    }
    killed = [r for r, m in metas.items() if m.get("state") == "recording"]
    short = [r for r in metas if r not in killed and steps[r] < max(steps.values())]
    failed = [r for r in short if metas[r].get("state") != "complete"]
    found = []
    for rank in sorted(killed) or sorted(failed):
        others = [steps[r] for r in metas if r != rank]
        went_on = f"; the others went on to step {max(others)}" if others else ""
        how = "was killed" if rank in killed else "failed"
        updated = metas[rank].get("updated")
        evidence = {
            "rank": rank,
            "state": metas[rank].get("state"),
            "steps": steps[rank],
            "updated": updated,
            "steps_of_ranks": {str(r): count for r, count in steps.items()},
        }
        found.append(
            Finding(
                severity="warning",
                code="rank-stopped",
                message=f"rank {rank} of {world} {how} after {steps[rank]} steps (last update "
                f"{updated}){went_on}",
                evidence=evidence,
                fix="check that rank's log; what all ranks recorded until then is sound",
            )
        )
    return found


def _is_live(metas: Mapping[int, Mapping[str, Any]]) -> bool:
    moments = [moment for m in metas.values() if (moment := _moment(m.get("updated"))) is not None]
    aware = [m for m in moments if m.tzinfo is not None]
    if not aware:
        return False
    return (datetime.now(timezone.utc) - max(aware)).total_seconds() < LIVE_SECONDS


def _moment(text: object) -> datetime | None:
    try:
        return datetime.fromisoformat(str(text))
    except ValueError:
        return None


def _pieces(run: Run, *, histograms: bool) -> Iterable[Records]:
    """The rows: all at once if they are in memory already, else part by part."""
    if "records" in vars(run):
        return (run.records,)
    return run.pieces(histograms=histograms)


def _disagreeing(run: Run) -> list[Finding]:
    """Replicated weights that differ between ranks, judging by their histograms."""
    seen: set[int] = set()
    for piece in _pieces(run, histograms=False):
        seen.update(np.unique(piece.step[_copies(piece)]).tolist())
    steps = _spread(sorted(seen))
    held: dict[tuple[int, str], tuple[int, bytes]] = {}  # by step and name: a rank and its copy
    differing: dict[str, tuple[int, set[int]]] = {}  # by name: first step, ranks
    for piece in _pieces(run, histograms=True) if steps else ():
        names = piece.words["name"]
        for row in np.flatnonzero(_copies(piece) & np.isin(piece.step, steps)).tolist():
            step, name = int(piece.step[row]), names[piece.name[row]]
            rank, copy = int(piece.rank[row]), _digest(piece, row)
            other, expected = held.setdefault((step, name), (rank, copy))
            if copy != expected:
                first, ranks = differing.get(name, (step, set()))
                if step < first:
                    first, ranks = step, set()
                if step == first:
                    ranks |= {rank, other}
                differing[name] = first, ranks
    if not differing:
        return []
    name, (step, ranks) = min(differing.items(), key=lambda item: (item[1][0], item[0]))
    others = f", and of {len(differing) - 1} other parameters" if len(differing) > 1 else ""
    return [
        Finding(
            severity="warning",
            code="ranks-disagree",
            message=f"{_ranks(sorted(ranks))} hold different copies of {name} at step {step}{others}",
            evidence={"parameters": sorted(differing), "first_step": step, "ranks": sorted(ranks)},
            fix="give every rank the same initial weights and the same steps: seed before "
            "creating the model, and let DDP wrap the model that the optimizer updates",
        )
    ]


def _copies(piece: Records) -> NDArray[np.bool_]:
    """Which rows are copies of weights."""
    placements = piece.words["placement"]
    if "replicated" not in placements:
        return np.zeros(len(piece.step), np.bool_)
    found: NDArray[np.bool_] = piece.placement == placements.index("replicated")
    return piece.of_kind("weight") & found


def _spread(steps: list[int]) -> list[int]:
    """At most ``COMPARED_STEPS`` of the steps, including the first and the last."""
    if len(steps) <= COMPARED_STEPS:
        return steps
    return [steps[i] for i in np.linspace(0, len(steps) - 1, COMPARED_STEPS).astype(int).tolist()]


def _digest(piece: Records, row: int) -> bytes:
    """A short digest of the histogram in a row."""
    scalars = ("numel", "zeros", "infs", "nans", "absmax", "absmin")
    bins = piece.bins
    start, stop = bins.offsets[row], bins.offsets[row + 1]
    content = repr([getattr(piece, name)[row].item() for name in scalars]).encode()
    content += bins.first_exponent[row].tobytes()
    content += bins.counts[start:stop].astype(np.int64).tobytes()
    return hashlib.blake2b(content, digest_size=8).digest()


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
