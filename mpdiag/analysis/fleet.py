"""Ranks of one training beside each other: who stopped, and who went another way."""

from __future__ import annotations

from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

import numpy as np

from mpdiag.analysis.findings import Finding

if TYPE_CHECKING:
    from collections.abc import Mapping

    from mpdiag.columns import Records
    from mpdiag.runs import Run

LIVE_SECONDS = 120.0
"""A rank that wrote within this time may be at work still."""


def about_ranks(run: Run) -> list[Finding]:
    """Ranks that stopped before the others, that left no word, or whose copies differ."""
    world = int(run.meta.get("world_size") or 1)
    if world < 2:
        return []
    metas = run.rank_metas()
    found = [*_stopped(run, metas, world), *_disagreeing(run.records)]
    silent = [r for r in range(world) if r not in metas]
    if silent:
        found.append(
            Finding(
                "warning",
                "rank-missing",
                f"{_ranks(silent)} of {world} left no record",
                {"ranks": silent, "world_size": world},
                "see whether they trained at all, and whether they could write to the run folder",
            )
        )
    return found


def _stopped(run: Run, metas: Mapping[int, Mapping[str, Any]], world: int) -> list[Finding]:
    """Ranks that never came to an end, while others did, or that ended earlier than others."""
    if all(m.get("state") == "recording" for m in metas.values()) and _is_live(metas):
        return []
    records = run.records
    steps = {}
    for rank, meta in metas.items():
        rows = records.step[records.rank == rank]
        last = int(rows.max()) + 1 if len(rows) else 0
        steps[rank] = max(last, int(meta.get("steps_seen") or 0))
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
                "warning",
                "rank-stopped",
                f"rank {rank} of {world} {how} after {steps[rank]} steps (its last word is of "
                f"{updated}){went_on}",
                evidence,
                "look into that rank's log; what all ranks recorded until then is sound",
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


def _disagreeing(records: Records) -> list[Finding]:
    """Copies of one weight that are not the same on every rank."""
    words = records.words
    if "weight" not in words["kind"] or "replicated" not in words["placement"]:
        return []
    kind = words["kind"].index("weight")
    placement = words["placement"].index("replicated")
    rows = np.flatnonzero((records.kind == kind) & (records.placement == placement))
    order = rows[np.lexsort((records.rank[rows], records.name[rows], records.step[rows]))]
    first: dict[tuple[int, int], int] = {}
    differing: dict[int, tuple[int, set[int]]] = {}  # by name: first step, ranks
    for row in order.tolist():
        key = (int(records.step[row]), int(records.name[row]))
        reference = first.setdefault(key, row)
        if not _same(records, reference, row):
            step, ranks = differing.setdefault(key[1], (key[0], set()))
            if step == key[0]:
                ranks.add(int(records.rank[row]))
    if not differing:
        return []
    name, (step, ranks) = min(differing.items(), key=lambda item: (item[1][0], item[0]))
    return [
        Finding(
            "warning",
            "ranks-disagree",
            f"{_ranks(sorted(ranks))} and rank 0 hold different copies of {words['name'][name]} at "
            f"step {step}, and of {len(differing) - 1} other parameters",
            {
                "parameters": sorted(words["name"][n] for n in differing),
                "first_step": step,
                "ranks": sorted(ranks),
            },
            "give every rank the same initial weights and the same steps: seed before the model is "
            "made, and let DDP wrap what the optimizer holds",
        )
    ]


def _same(records: Records, a: int, b: int) -> bool:
    """Whether two rows count the same values, as far as histograms tell."""
    scalars = ("numel", "zeros", "infs", "nans", "absmax", "absmin", "first_exponent")
    for name in scalars:
        column = getattr(records, name)
        if column[a] != column[b]:
            return False
    o = records.offsets
    return np.array_equal(records.counts[o[a] : o[a + 1]], records.counts[o[b] : o[b + 1]])


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
