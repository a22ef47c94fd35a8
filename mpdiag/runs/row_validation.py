"""Whether rows can be what a recorder wrote: a file may be damaged, or made to mislead.

They are checked once, where columns are read, so that nothing that computes with them has to check.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from mpdiag.numerics.histograms import MAX_EXPONENT, MIN_EXPONENT
from mpdiag.runs.schema import KINDS, SAMPLED

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

LARGEST = 1 << 53
"""The largest count that can be true: sums of counts stay within int64."""
_COUNTED = ("zeros", "subnormals", "infs", "nans")
_RATIO_LIMIT = 500  # exponents of |w|/|Δw|; FP32 spans 2^-277 … 2^277


def refuse_nonsense(columns: Mapping[str, Any], words: Mapping[str, Sequence[str | None]]) -> None:
    """Check rows as columns; see ``records.Records`` for their names.

    Raises:
        ValueError: If they contradict one another, or hold what no tensor can give.
    """
    _check_words(columns, words)
    numbers = ("step", "rank", "tensors", "numel", *_COUNTED, "changed", "ratio_zeros", SAMPLED)
    counts = {name: columns[name] for name in numbers}
    counts |= {f"{fact} of {fmt}": found for (fact, fmt), found in columns["facts"].items()}
    for name, values in counts.items():
        if (values < 0).any() or (values > LARGEST).any():
            _refuse(f"{name} holds what is no count")
    _check_values(columns)
    _check_bins(columns, "", MIN_EXPONENT, MAX_EXPONENT)
    _check_bins(columns, "ratio_", -_RATIO_LIMIT, _RATIO_LIMIT)
    if len(columns["counts"]):  # otherwise the bins were not read
        some = np.diff(columns["offsets"]) > 0  # reduceat cannot sum an empty row
        inside = np.zeros(len(some), np.int64)
        inside[some] = np.add.reduceat(
            columns["counts"], columns["offsets"][:-1][some], dtype=np.int64
        )
        if not np.array_equal(inside + sum(columns[n] for n in _COUNTED), columns["numel"]):
            _refuse("counts do not add up to numel")


def _check_words(
    columns: Mapping[str, NDArray[Any]], words: Mapping[str, Sequence[str | None]]
) -> None:
    for name, what in words.items():
        if any(word is None for word in what) or (columns[name] >= len(what)).any():
            _refuse(f"a word of {name} is missing")
    unknown = sorted(set(map(str, words["kind"])) - set(KINDS))
    if unknown:
        _refuse(f"there is no kind {unknown[0][:40]!r}")
    for name in ("kind", "name"):
        if (columns[name] < 0).any():
            _refuse(f"a row states no {name}")


def _check_values(columns: Mapping[str, NDArray[Any]]) -> None:
    scale, top, low = (columns[name] for name in ("scale", "absmax", "absmin"))
    if not (np.isfinite(scale) & (scale > 0)).all():
        _refuse("scale holds what is no loss scale")
    if not (np.isfinite(top) & (top >= 0)).all():
        _refuse("absmax holds what is no magnitude")
    if not (low > 0).all():
        _refuse("absmin holds what is no magnitude")
    if ((top > 0) & (low > top)).any():
        _refuse("absmin is larger than absmax")


def _check_bins(columns: Mapping[str, NDArray[Any]], kind: str, low: int, high: int) -> None:
    counts, lengths = columns[kind + "counts"], np.diff(columns[kind + "offsets"])
    if len(counts) and (counts.min() < 0 or counts.max() > LARGEST):
        _refuse(f"{kind}counts holds what is no count")
    first = columns[kind + "first_exponent"].astype(np.int64)
    if ((lengths > 0) & ((first < low) | (first + lengths - 1 > high))).any():
        _refuse(f"{kind}first_exponent lies outside what FP32 holds")


def _refuse(message: str) -> None:
    raise ValueError(message)
