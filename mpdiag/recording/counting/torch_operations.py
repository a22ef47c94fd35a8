"""Counting on an accelerator by torch operations alone: on every device, and the second opinion."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from mpdiag.recording.counting import layout

NO_LOWEST = 0x7FF0000000000000
"""The smallest magnitude of a row that has none: infinity, as float64."""

PORTION = 1 << 24
"""Values are copied and compared in portions, so that temporaries stay small."""


@dataclass(frozen=True)
class Counter:
    """How tensors are counted into rows of a device.

    All add to what the rows hold, wait for nothing, and leave zeros out: those are what remains.
    Tensors are flat, dense, of any floating type, and hold a value or more.

    Attributes:
        name: What counts.
        values: Count a tensor into its row of counts and its row of extremes.
        many: Count tensors into these rows of all counts and all extremes.
        many_updates: Count weights before and after a step; the rows of the weights, which those of
            the updates follow, and of the facts and ratios.
    """

    name: str
    values: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]
    many: Callable[[Sequence[torch.Tensor], Sequence[int], torch.Tensor, torch.Tensor], None]
    many_updates: Callable[
        [
            Sequence[tuple[torch.Tensor, torch.Tensor]],
            Sequence[tuple[int, int]],
            torch.Tensor,
            torch.Tensor,
            torch.Tensor,
            torch.Tensor,
        ],
        None,
    ]


def count_values(values: torch.Tensor, counts: torch.Tensor, extremes: torch.Tensor) -> None:
    """Add values to a raw row.

    Args:
        values: (n,), n > 0, of any floating type.
        counts: int64 (``layout.RAW``,), added to, but for its zeros.
        extremes: int64 (2,), updated: bit patterns, of float64 for such values, else of float32.
    """
    for part in values.split(PORTION):
        _count_portion(part, counts, extremes)


def _count_portion(values: torch.Tensor, counts: torch.Tensor, extremes: torch.Tensor) -> None:
    wide = values.dtype == torch.float64
    exact = values.view(torch.int64) & 0x7FFFFFFFFFFFFFFF if wide else None
    bits = (as_float32(values) if wide else values.float()).view(torch.int32) & layout.MAGNITUDE
    index = ((bits - 1) >> 21) & (layout.TABLE - 1)  # zeros wrap to 1023
    table = torch.zeros(layout.TABLE, dtype=torch.int64, device=values.device)
    table.index_add_(0, index, torch.ones_like(index, dtype=torch.int64))
    infs = (bits == layout.INFINITY).sum()
    counts[: layout.QUARTERS] += table[: layout.QUARTERS]
    counts[layout.QUARTERS - 1] -= infs
    counts[layout.SUBNORMALS] += ((bits > 0) & (bits <= layout.LARGEST_SUBNORMAL)).sum()
    counts[layout.INFS] += infs
    counts[layout.NANS] += (bits > layout.INFINITY).sum()
    finite = bits < layout.INFINITY
    counts[layout.FP16_OVERFLOW] += (finite & (bits >= layout.OVERFLOW)).sum()
    patterns = bits.long() if exact is None else exact
    highest = torch.where(finite, patterns, 0)
    extremes[0] = torch.maximum(extremes[0], highest.max())
    lowest = torch.where(highest > 0, highest, NO_LOWEST)
    extremes[1] = torch.minimum(extremes[1], lowest.min())


def _count_update(
    before: torch.Tensor,
    after: torch.Tensor,
    counts: torch.Tensor,
    extremes: torch.Tensor,
    facts: torch.Tensor,
    ratios: torch.Tensor,
) -> None:
    """Add a weight update to raw rows.

    Args:
        before: (n,), n > 0, the weights the step started from.
        after: (n,), the weights it left.
        counts: int64 (2, ``layout.RAW``), of ``before`` and of after - before in FP32.
        extremes: int64 (2, 2), of the same.
        facts: int64 (``layout.UPDATE``,).
        ratios: int64 (``layout.RATIO_BINS``,), changed weights by |w|/|Δw| in (2^e, 2^(e+1)].
    """
    for start in range(0, before.numel(), PORTION):
        weights = before[start : start + PORTION].float()
        delta = after[start : start + PORTION].float() - weights
        count_values(weights, counts[0], extremes[0])
        count_values(delta, counts[1], extremes[1])
        facts += update_facts(weights, delta)
        _count_ratios(weights, delta, ratios)


def _count_ratios(weights: torch.Tensor, delta: torch.Tensor, ratios: torch.Tensor) -> None:
    # float64, where no quotient of two float32 values rounds onto a power of two it is not.
    w, d = weights.double().abs(), delta.double().abs()
    counted = (w > 0) & (d > 0) & w.isfinite() & d.isfinite()
    mantissa, exponent = torch.frexp(torch.where(counted, w / d, 1.0))
    octave = exponent.long() - torch.where(mantissa == 0.5, 2, 1) - layout.RATIO_FIRST
    table = torch.zeros(layout.RATIO_BINS + 1, dtype=torch.int64, device=weights.device)
    index = torch.where(counted, octave, layout.RATIO_BINS)
    table.index_add_(0, index, torch.ones_like(index))
    ratios += table[: layout.RATIO_BINS]


def count_many(
    values: Sequence[torch.Tensor],
    rows: Sequence[int],
    counts: torch.Tensor,
    extremes: torch.Tensor,
) -> None:
    """Add tensors to these rows, one after another; see ``Counter``."""
    for tensor, row in zip(values, rows, strict=True):
        count_values(tensor, counts[row], extremes[row])


def count_many_updates(
    pairs: Sequence[tuple[torch.Tensor, torch.Tensor]],
    rows: Sequence[tuple[int, int]],
    counts: torch.Tensor,
    extremes: torch.Tensor,
    facts: torch.Tensor,
    ratios: torch.Tensor,
) -> None:
    """Add weight updates to these rows, one after another; see ``Counter``."""
    for (before, after), (row, fact) in zip(pairs, rows, strict=True):
        both = slice(row, row + 2)
        _count_update(before, after, counts[both], extremes[both], facts[fact], ratios[fact])


COUNTER = Counter("torch operations", count_values, count_many, count_many_updates)


def update_facts(weights: torch.Tensor, delta: torch.Tensor) -> torch.Tensor:
    """What FP16 and BF16 weights would make of an update, by torch's own casts.

    Args:
        weights: float32 (n,), before the step.
        delta: float32 (n,), the change.

    Returns:
        int64 (``layout.UPDATE``,), on the same device.
    """
    changed = delta != 0
    w16, d16 = weights.half(), delta.half()
    wb, db = weights.bfloat16(), delta.bfloat16()
    return torch.stack(
        [
            changed.sum(),
            (changed & (w16 + d16 == w16)).sum(),
            (changed & (wb + db == wb)).sum(),
            (changed & (d16 == 0)).sum(),
            (changed & (weights == 0)).sum(),
        ]
    )


def as_float32(values: torch.Tensor) -> torch.Tensor:
    """float64 cut to float32 with every lost bit gathered in the last.

    So no value crosses a power of two; what is too small becomes the smallest subnormal, what is
    too large the largest value.
    """
    bits = values.view(torch.int64) & 0x7FFFFFFFFFFFFFFF
    exponent = (bits >> 52) - 1023
    sticky = ((bits & 0x1FFFFFFF) != 0).to(torch.int64)
    head = ((exponent + 127) << 23) | ((bits & 0x000FFFFFFFFFFFFF) >> 29) | sticky
    head = torch.where(exponent < -126, 1, head)
    head = torch.where(exponent > 127, 0x7F7FFFFF, head)
    head = torch.where(bits == 0, 0, head)
    special = torch.where((bits & 0x000FFFFFFFFFFFFF) != 0, 0x7FC00000, layout.INFINITY)
    head = torch.where(exponent == 1024, special, head)
    return head.to(torch.int32).view(torch.float32)
