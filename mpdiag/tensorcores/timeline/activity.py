"""What a GPU did and when, in order, each piece with the moment the host launched it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import islice
from typing import NamedTuple

from mpdiag.tensorcores.causes import is_collective
from mpdiag.tensorcores.collected import PORTION, Collected
from mpdiag.tensorcores.kernels.classification import classify

COPY, COLLECTIVE = "copy", "collective"
"""Kinds of activity besides the verdicts of kernels."""


class Activity(NamedTuple):
    """A kernel or a copy on the GPU.

    Attributes:
        start_us, end_us: On the GPU.
        launched_us: When the host launched it; NaN where the trace does not tell.
        stream: Its stream.
        kind: A kernel's verdict by name, ``"collective"`` or ``"copy"``.
        name: Of the kernel; "" for a copy.
    """

    start_us: float
    end_us: float
    launched_us: float
    stream: int | str | None
    kind: str
    name: str


def activities(trace: Collected, device: int | str | None) -> Iterator[Activity]:
    """What a device did, by start; nothing where the trace does not say when.

    Args:
        trace: All of it.
        device: As kernels name it.
    """
    if not trace.timed:
        return
    names, places = trace.names.values, trace.places.values
    kinds = [COPY, *(kind_of(name) for name in names[1:])]
    here = {number for number, place in enumerate(places) if place[0] == device}
    works = trace.work.in_order()
    while portion := list(islice(works, PORTION)):
        launches = trace.launches_of({work[1] for work in portion})
        for start, correlation, spent, name, place, _ in portion:
            if place in here:
                launch = launches.get(correlation)
                at = math.nan if launch is None else launch[0]
                stream, kind = places[place][1], kinds[name]
                yield Activity(start, start + spent, at, stream, kind, names[name])


def kind_of(name: str) -> str:
    """The kind of a kernel: its verdict by name, or ``"collective"``."""
    verdict = classify(name).verdict
    return COLLECTIVE if verdict == "other" and is_collective(name) else verdict
