"""How much of the weights stood still although their gradients were not zero: a bound, by counting.

An element that did not change had an update that rounding removed, or none. Where its gradient is not
zero, an optimizer of torch has an update for it. Which elements these are is not recorded, how many of
each is: of n elements, if u did not change and z have a gradient of zero, at least u − z stood still
with a gradient.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from mpdiag.runs.records import Records
from mpdiag.runs.schema import TOTAL, Kind


class Recorded(Protocol):
    """What has rows: a run, or those of a recording in progress."""

    @property
    def meta(self) -> Mapping[str, Any]:
        """What ``meta.json`` says."""

    def pieces(self, *, histograms: bool = True) -> Iterable[Records]:
        """The rows some at a time."""


@dataclass(frozen=True)
class Standstill:
    """Elements of parameters that did not change, over the recorded steps.

    Attributes:
        elements: Elements × steps in which they could have changed.
        still: Of these at least, those with a gradient that did not change.
        steps: Recorded steps.
        unmoved: Parameters of which no element ever changed, though some had a gradient.
    """

    elements: int
    still: int
    steps: int
    unmoved: tuple[str, ...] = ()

    @property
    def share(self) -> float:
        """The least share that stood still with a gradient."""
        return self.still / self.elements if self.elements else 0.0


def standstill(run: Recorded, names: Collection[str]) -> Standstill:
    """How much of some parameters stood still, in steps whose updates were recorded whole.

    Raises:
        DamagedRun: If the statistics cannot be read.
    """
    updates: dict[tuple[int, int, str], tuple[int, int]] = {}
    zeros: dict[tuple[int, int, str], int] = defaultdict(int)
    for rows in run.pieces(histograms=False):
        chosen = rows.with_names(names) & (rows.micro == TOTAL) & ~rows.skipped
        kinds: tuple[Kind, ...] = ("update", "weight_grad")
        for kind in kinds:
            part = rows.select(chosen & rows.of_kind(kind))
            keys = zip(part.rank.tolist(), part.step.tolist(), part.texts("name"), strict=True)
            for key, numel, zero, changed, sampled in zip(
                keys,
                part.numel.tolist(),
                part.zeros.tolist(),
                part.changed.tolist(),
                part.sampled_from.tolist(),
                strict=True,
            ):
                if kind == "weight_grad":
                    zeros[key] += zero
                elif sampled <= 0:
                    updates[key] = (numel, numel - changed)
    known = [key for key in updates if key in zeros]
    still = sum(max(0, updates[key][1] - zeros[key]) for key in known)
    elements = sum(max(0, updates[key][0] - zeros[key]) for key in known)
    tried = {key[2] for key in known if updates[key][0] > zeros[key]}
    moved = {key[2] for key in known if updates[key][1] < updates[key][0]}
    steps = len(np.unique([key[1] for key in known]))
    return Standstill(elements, still, steps, tuple(sorted(tried - moved)))


def not_finite(run: Recorded, names: Collection[str]) -> dict[str, int]:
    """Infinite and NaN elements of the parameters that had any in the first recorded step.

    Raises:
        DamagedRun: If the statistics cannot be read.
    """
    found: dict[str, int] = defaultdict(int)
    first: int | None = None
    for rows in run.pieces(histograms=False):
        first = int(rows.step.min()) if first is None and len(rows) else first
        copies = (rows.rank > 0) & (rows.placement == rows.code("placement", "replicated"))
        weights = rows.of_kind("weight") & rows.with_names(names)
        part = rows.select(weights & (rows.step == first) & ~copies)
        for name, lost in zip(part.texts("name"), (part.infs + part.nans).tolist(), strict=True):
            found[name] += lost
    return {name: lost for name, lost in found.items() if lost}
