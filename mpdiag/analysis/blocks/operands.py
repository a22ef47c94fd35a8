"""What a block recipe makes of each recorded operand: SQNR beside its par, and what explains it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import reduce
from operator import add
from typing import Any, Literal

from mpdiag.files.documents import finite
from mpdiag.numerics.block_formats import BLOCK_FORMATS
from mpdiag.numerics.block_recipes import BlockRecipe, OperandFormat
from mpdiag.numerics.block_statistics import BlockError
from mpdiag.numerics.distributions import t_quantile
from mpdiag.runs.block_operands import BlockOperand, merged

CONFIDENCE = 0.9
"""Of the intervals of SQNR."""
AT_PAR = 1.0
"""dB below its par from which an operand is said to be worse than Gaussian values."""
HELPS = 0.5
"""dB that a rotation must gain to be said to help."""
LOST = 0.01
"""Share of blocks that a scale cannot hold from which it is said to underflow."""
CLUSTERED = 0.5
"""Share of all values in one eighth of the top octave from which they are said to cluster there."""

Shape = Literal[
    "at par",
    "outliers",
    "scale underflows",
    "clusters in the top bucket",
    "no values",
    "not measured",
]


@dataclass(frozen=True)
class OperandError:
    """An operand in the format that a recipe gives it.

    Attributes:
        operand: As it was recorded, all steps added.
        format: How the recipe quantises it.
        sqnr_db: 10·log10(Σx² / Σ(q - x)²); infinite without error, NaN without values.
        low_db, high_db: An interval of 90 % for that of the whole operand; equal where it was measured
            whole, NaN where the samples are too few to say.
        zeros: Share of the values other than 0 that become 0; exact for MX formats without rotation.
        clipped: Share of the values beyond the largest value of the format; None where it is not known.
        rotation_db: What a rotation adds to the SQNR, where both were measured.
        shape: What explains the SQNR.
        measured: Whether the format was measured as it is; else its SQNR follows from that of
            another rounding by their pars.
    """

    operand: BlockOperand
    format: OperandFormat
    sqnr_db: float
    low_db: float
    high_db: float
    zeros: float
    clipped: float | None
    rotation_db: float | None
    shape: Shape
    measured: bool

    @property
    def finding(self) -> str:
        """What explains the SQNR, in words: ``outliers: rotation helps``."""
        if self.shape != "outliers" or self.rotation_db is None:
            return self.shape
        return f"outliers: rotation {'helps' if self.rotation_db >= HELPS else 'does not help'}"

    def to_json(self, keep: str, reason: str) -> dict[str, Any]:
        """An entry of ``blocks`` in ``mpdiag analyze --json``.

        Args:
            keep: What the plan computes the product in.
            reason: Why.
        """
        one = self.operand
        return dict(
            finite(
                {
                    "module": one.module,
                    "product": one.product,
                    "call": one.call,
                    "expert": one.expert,
                    "gemm": one.gemm,
                    "operand": one.operand,
                    **vars(self.format),
                    "sqnr_db": self.sqnr_db,
                    "sqnr_low_db": self.low_db,
                    "sqnr_high_db": self.high_db,
                    "par_db": self.format.par_db,
                    "zeros": self.zeros,
                    "clipped": self.clipped,
                    "rotation_db": self.rotation_db,
                    "finding": self.finding,
                    "sampled": one.sampled or self.low_db != self.high_db,
                    "measured": self.measured,
                    "keep": keep,
                    "reason": reason,
                }
            )
        )


def operand_errors(rows: Sequence[BlockOperand], recipe: BlockRecipe) -> list[OperandError]:
    """Every operand in its format of a recipe, in the order of their first appearance.

    Args:
        rows: One for each step × rank × operand.
        recipe: The recipe.
    """
    parts: dict[tuple[Any, ...], list[BlockOperand]] = {}
    for row in rows:
        parts.setdefault(row.key, []).append(row)
    return [
        operand_error(few, recipe.operand(few[0].gemm, few[0].operand)) for few in parts.values()
    ]


def operand_error(rows: Sequence[BlockOperand], fmt: OperandFormat) -> OperandError:
    """One operand in a format, from its rows of each step and rank."""
    (one,) = merged(rows)
    tiles, like = tiles_of(rows, fmt)
    off = fmt.par_db - like.par_db
    share = sum(t.values for row in tiles for t in row) / sum(row.elements for row in rows)
    low, middle, high = (db + off for db in sqnr_interval(tiles, share))
    zeros, clipped = _shares(one, fmt, reduce(add, (t for row in tiles for t in row), _NOTHING))
    turned = None if fmt.rotated else _rotation_gain(rows, like)
    found = OperandError(
        operand=one,
        format=fmt,
        sqnr_db=middle,
        low_db=low,
        high_db=high,
        zeros=zeros,
        clipped=clipped,
        rotation_db=turned,
        shape="at par",
        measured=bool(tiles) and like == fmt,
    )
    return replace(found, shape=_shape(found) if tiles else "not measured")


_NOTHING = BlockError(0, 0, 0.0, 0.0, 0.0, 0.0)
_Tiles = list[tuple[BlockError, ...]]


def tiles_of(rows: Sequence[BlockOperand], fmt: OperandFormat) -> tuple[_Tiles, OperandFormat]:
    """The samples of each row in a format, and the format they were measured in.

    Where it was not measured: with values rounded to nearest, and then without a rotation.
    """
    for rounding, rotated in (
        (fmt.rounding, fmt.rotated),
        ("nearest", fmt.rotated),
        (fmt.rounding, False),
        ("nearest", False),
    ):
        like = OperandFormat(fmt.format, fmt.block, rounding, rotated)
        variant = (like.format, like.block, like.rounding, like.rotated)
        found = [e.tiles for row in rows for e in row.errors if e.variant == variant]
        if found:
            return found, like
    return [], fmt


def sqnr_interval(tiles: _Tiles, share: float) -> tuple[float, float, float]:
    """SQNR of an operand by its samples: the lower end, the estimate, the upper end, in dB.

    Groups are added over steps, which often sample the same places. The error of the
    ratio is that of a ratio of sums (Cochran, *Sampling Techniques*, section 6.4), taken on dB.

    Args:
        tiles: Of each step.
        share: Of the operand's values in them; from 1 on the SQNR is exact.
    """
    total = reduce(add, (tile for row in tiles for tile in row), _NOTHING)
    middle = total.sqnr_db
    if share >= 1 or not math.isfinite(middle):
        return middle, middle, middle
    count = min(len(row) for row in tiles)
    places = [reduce(add, (row[i] for row in tiles), _NOTHING) for i in range(count)]
    if count < 2:
        return math.nan, middle, math.nan
    ratio, signal = total.error / total.signal, sum(p.signal for p in places) / count
    spread = sum((p.error - ratio * p.signal) ** 2 for p in places) / (count - 1)
    error = math.sqrt((1 - share) * spread / count) / signal  # of places drawn without replacement
    reach = t_quantile((1 + CONFIDENCE) / 2, count - 1) * error / ratio * 10 / math.log(10)
    return middle - reach, middle, middle + reach


def _shares(one: BlockOperand, fmt: OperandFormat, total: BlockError) -> tuple[float, float | None]:
    """Shares that become 0 and that are clipped."""
    depths, known = one.depths, BLOCK_FORMATS[fmt.format]
    nonzero = int(depths.counts.sum()) + depths.tiny
    clipped = None if known.scale == "e4m3" else 0.0
    if (
        known.scale_rounding is not None
        and not fmt.rotated
        and fmt.rounding == "nearest"
        and nonzero
    ):
        lost = depths.zeroed(known.element, known.scale_rounding)[1]
        over = depths.clipped(known.element, known.scale_rounding)[1]
        return lost / nonzero, over / nonzero
    shown = nonzero / depths.values if depths.values else 0.0
    return (total.zeros / (total.values * shown) if total.values and shown else 0.0), clipped


def _rotation_gain(rows: Sequence[BlockOperand], like: OperandFormat) -> float | None:
    turned, found = tiles_of(rows, replace(like, block="", rotated=True))
    plain, beside = tiles_of(rows, replace(like, block=""))
    if not (turned and found.rotated and plain) or found.rounding != beside.rounding:
        return None
    gain = sqnr_interval(turned, 1.0)[1] - sqnr_interval(plain, 1.0)[1]
    return gain if math.isfinite(gain) else None


def _shape(found: OperandError) -> Shape:
    """What explains an operand's SQNR."""
    one = found.operand
    if math.isnan(found.sqnr_db):
        return "no values"
    if _lost_blocks(one, found.format) >= LOST:
        return "scale underflows"
    top = max(found.sqnr_db, found.high_db) if math.isfinite(found.high_db) else found.sqnr_db
    if top >= found.format.par_db - AT_PAR:
        return "at par"
    nonzero = int(one.depths.counts.sum())
    eighths = one.depths.counts[:, :8].sum(0)
    if nonzero and not found.format.rotated and eighths.max() >= CLUSTERED * nonzero:
        return "clusters in the top bucket"
    return "outliers"


def _lost_blocks(one: BlockOperand, fmt: OperandFormat) -> float:
    """Share of the blocks of 32 that lie below what scales reach, beside the tensor's largest value.

    With one scale a tensor, what is smaller than the element's smallest value beside its largest is
    lost; with E4M3 scales, a block is coarser than its format below 2^-6 of the largest scale, 448.
    """
    known = BLOCK_FORMATS[fmt.format]
    if known.block == "tensor":
        least = one.absmax * 2.0**known.element.zero_exponent / known.element.max
    elif known.scale == "e4m3":
        least = one.absmax * 2.0**-6 / 448
    else:
        return 0.0
    blocks = sum(one.maxima)
    low = sum(n for e, n in enumerate(one.maxima, one.maxima_first) if 2.0 ** (e + 1) <= least)
    return low / blocks if blocks else 0.0
