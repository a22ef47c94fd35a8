"""The list of runs as a table, from ``meta.json`` alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pandas as pd

from mpdiag.reports.picture import View

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mpdiag.runs.run import Listing

_COLUMNS = ("run", "what", "state", "model", "steps", "recorded", "device", "created")


def runs_frame(listings: Sequence[Listing], states: Sequence[str]) -> pd.DataFrame:
    """A row for each run; what a ``meta.json`` does not say, or says otherwise, is empty.

    Args:
        listings: The runs.
        states: Each one's state in words.
    """
    rows = [_row(item, state) for item, state in zip(listings, states, strict=True)]
    frame = pd.DataFrame(rows, columns=list(_COLUMNS))
    frame["created"] = pd.to_datetime(frame["created"], errors="coerce", utc=True)
    for name in ("steps", "recorded"):
        frame[name] = pd.to_numeric(frame[name], errors="coerce").astype("Int64")
    return frame


def _row(listing: Listing, state: str) -> dict[str, Any]:
    name = listing.folder.resolve().name
    if listing.run is None:
        return {"run": name, "state": "unreadable"}
    meta = listing.run.meta
    training = meta.get("training")
    what = "FP32 recording"
    if isinstance(training, dict):
        what = f"training in {training.get('dtype')}, level {training.get('level')}"
    elif meta.get("profile_only"):
        what = "profile, generated" if meta.get("generated") else "profile"
    return {
        "run": name,
        "what": what,
        "state": state,
        "model": _inside(meta, "model", "type"),
        "steps": meta.get("steps_seen"),
        "recorded": meta.get("steps_recorded"),
        "device": _inside(meta, "device", "type"),
        "created": str(meta.get("created") or ""),
    }


def _inside(meta: Any, name: str, field: str) -> str:
    part = meta.get(name)
    return str(part.get(field) or "") if isinstance(part, dict) else ""


VIEW = View("runs", "Runs", "list")
