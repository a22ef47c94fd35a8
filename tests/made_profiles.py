"""A profile in the shape of ``mpdiag profile --json``, small enough to add up by hand."""

import json
from copy import deepcopy
from pathlib import Path

MADE = json.loads((Path(__file__).parent / "data" / "made_profile.json").read_text("utf-8"))
PEAKS = MADE["peaks"]
"""Rates of a device that is easy to reckon with."""


def _with_rows(document: dict[str, object], more: str) -> dict[str, object]:
    rows = zip(document["operations"], deepcopy(MADE[more]), strict=True)
    return document | {"operations": [row | added for row, added in rows]}


def profile() -> dict[str, object]:
    """600 µs on Tensor Cores, 200 on CUDA cores, 150 of layout changes, 50 unknown."""
    return deepcopy(MADE["plain"])


def profile_with_work(**device: object) -> dict[str, object]:
    """Body: 10 calls of 4 GFLOP over 10 MB in 600 µs; head: 1 of 2 MFLOP over 1 MB in 200 µs."""
    made = _with_rows(profile(), "work")
    return made | {"device": {"name": "H100", "peaks": PEAKS, **device}}


def profile_with_use() -> dict[str, object]:
    """Who could have used Tensor Cores, a group of causes, and two steps of 100 µs."""
    made = _with_rows(profile_with_work(), "use")
    return made | {key: deepcopy(MADE[key]) for key in ("summary", "causes", "timeline")}
