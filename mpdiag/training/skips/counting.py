"""How many steps were skipped in a row, and when that ends a training.

A scale that still falls is searching: from 2^16 to a scale of 8 takes 13 skips, none of which says
that anything is wrong. So skips count at an unchanged scale, or where no scale could help.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from mpdiag.training.results import StepResult


@dataclass(frozen=True)
class SkipCounts:
    """The skips of one optimizer since its last step that was taken.

    Attributes:
        in_a_row: All of them.
        at_scale: Those since the scale last fell.
        at_any_scale: The last ones, whose loss or forward pass was not finite.
    """

    in_a_row: int = 0
    at_scale: int = 0
    at_any_scale: int = 0

    def after(self, result: StepResult) -> SkipCounts:
        """The counts with one more step."""
        if not result.skipped:
            return _NONE
        falling = result.next_scale < result.scale
        return SkipCounts(
            in_a_row=self.in_a_row + 1,
            at_scale=0 if falling else self.at_scale + 1,
            at_any_scale=self.at_any_scale + 1 if result.at_any_scale else 0,
        )

    def end_training(self, limit: int) -> bool:
        """Whether so many skips end it."""
        return max(self.at_scale, self.at_any_scale) >= limit


_NONE = SkipCounts()


class SkipLedger:
    """The counts of each group of optimizers that steps together.

    A generator's good steps must not hide a discriminator that is never stepped.
    """

    def __init__(self) -> None:
        self._counts: dict[tuple[int, ...], SkipCounts] = {}

    @property
    def in_a_row(self) -> int:
        """The most skips in a row of any of them."""
        return max((counts.in_a_row for counts in self._counts.values()), default=0)

    def note(self, stepped: Iterable[int], result: StepResult) -> SkipCounts:
        """Count a step.

        Args:
            stepped: Which optimizers stepped, by their place in the trainer's list.
            result: Whether the step was taken.
        """
        key = tuple(stepped)
        counts = self._counts.get(key, _NONE).after(result)
        self._counts[key] = counts
        return counts

    def in_a_row_of(self, stepped: Iterable[int]) -> int:
        """How often these were skipped in a row."""
        return self._counts.get(tuple(stepped), _NONE).in_a_row

    def to_plain(self) -> list[dict[str, Any]]:
        """The counts as plain values, for a checkpoint."""
        return [
            {"optimizers": list(key), **asdict(counts)}
            for key, counts in self._counts.items()
            if counts.in_a_row
        ]

    def restore(self, plain: Iterable[Mapping[str, Any]]) -> None:
        """Go on from a checkpoint's counts."""
        self._counts = {}
        for row in plain:
            fields = {k: int(v) for k, v in row.items() if k != "optimizers"}
            self._counts[tuple(row["optimizers"])] = replace(SkipCounts(), **fields)
