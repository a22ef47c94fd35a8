"""Sizes in a CPU's profile that Tensor Cores could not read at full width.

A CPU hardly minds them: oneDNN pads what it packs. They matter where the model is to be trained on a
GPU, so they are judged by the rule of 16-bit formats there, as sizes in a GPU's trace are: a size has
one padded size, wherever it occurs.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

from mpdiag.hardware.alignment import Fault, padded
from mpdiag.tensorcores.causes import TILE, misaligned

if TYPE_CHECKING:
    from collections.abc import Iterable

    from mpdiag.tensorcores.work.traced_operation import MatrixWork

_FORMAT = "fp16"


def paddings(works: Iterable[MatrixWork | None]) -> dict[MatrixWork, tuple[Fault, ...]]:
    """What to pad in each product, so that none contradicts another; empty for those that fit.

    Products of one vector, depthwise convolutions and products of a single tile are left out:
    alignment is not what keeps these from Tensor Cores. So are those for which padding costs too much.
    """
    alone = {
        work: misaligned(work, _FORMAT, None)
        for work in works
        if work is not None and _counts(work)
    }
    multiples: dict[int, int] = {}
    for faults in alone.values():
        for fault in faults:
            multiples[fault.size] = math.lcm(multiples.get(fault.size, 1), fault.multiple)
    found = {}
    for work, faults in alone.items():
        each = (
            replace(f, multiple=multiples[f.size], padded=padded(f.size, multiples[f.size]))
            for f in faults
        )
        worth = tuple(f for f in each if f.worth_padding)
        if worth or not faults:
            found[work] = worth
    return found


def _counts(work: MatrixWork) -> bool:
    if work.depthwise or min(work.m, work.n) <= 1:
        return False
    return work.batch * math.ceil(work.m / TILE) * math.ceil(work.n / TILE) > 1
