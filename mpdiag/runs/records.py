"""The rows of a recording as numpy columns: what the analysis reads and merges.

A run of some hundred thousand rows has many millions of bins, so columns keep the width they have
on disk, counts the smallest that holds them, and rows are merged a portion at a time. All sums are
of integers: neither the portions nor the order of rows, parts or ranks changes a result.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from mpdiag.files.arrow_columns import lists, numbers, octets, one_array, present, texts
from mpdiag.numerics.formats import FORMATS, FP16
from mpdiag.numerics.histograms import BINS, MAX_EXPONENT, MIN_EXPONENT, ExponentHistogram
from mpdiag.runs.schema import FACTS, FLOATS, INTEGERS, KINDS, SAMPLED, TEXT, UPDATE_INTEGERS, Kind

if TYPE_CHECKING:
    import pyarrow as pa


PORTION = 16_384
"""Rows merged at a time: temporaries stay at some ten MB."""
LARGEST = 1 << 53
"""The largest count that can be true: sums of counts stay within int64."""
_RATIO_LIMIT = 500  # exponents of |w|/|Δw|; FP32 spans 2^-277 … 2^277
_BESIDE_BINS = ("zeros", "subnormals", "infs", "nans")
"""What is counted beside the bins."""


@dataclass(frozen=True, eq=False)
class Bins:
    """Histograms of n rows, each from its first occupied bin to its last, one row after another.

    Attributes:
        first_exponent: int16 (n,).
        offsets: int64 (n + 1), row i's bins are ``counts[offsets[i]:offsets[i+1]]``.
        counts: uint32 or int64.
        means: uint8, of each bin: its mean |x| is 2^e * (1 + byte / 255); empty where it is not known.
    """

    first_exponent: NDArray[np.int16]
    offsets: NDArray[np.int64]
    counts: NDArray[Any]
    means: NDArray[np.uint8]

    @classmethod
    def from_columns(cls, first: Any, counts: Any, means: Any = None) -> Bins:
        """The columns of a table; a null is an empty histogram.

        Raises:
            ValueError: If counts and means differ in length.
        """
        lengths, values = lists(counts)
        if values.size == 0 or (values.min() >= 0 and values.max() < 2**32):
            values = values.astype(np.uint32)
        sizes, means_ = (lengths, np.zeros(0, np.uint8)) if means is None else octets(means)
        if not np.array_equal(lengths, sizes):
            raise ValueError("counts and means differ in length")
        return cls(numbers(first, np.int16), _offsets(lengths), values, means_)

    @classmethod
    def concatenate(cls, parts: Sequence[Bins]) -> Bins:
        """The rows of several parts, in order."""
        lengths = np.concatenate([np.diff(part.offsets) for part in parts])
        first, counts, means = (
            np.concatenate([getattr(part, name) for part in parts])
            for name in ("first_exponent", "counts", "means")
        )
        return cls(first, _offsets(lengths), counts, means)

    def select(self, rows: NDArray[np.int64]) -> Bins:
        """The histograms at some positions."""
        lengths = np.diff(self.offsets)[rows]
        offsets = _offsets(lengths)
        take = np.repeat(self.offsets[rows] - offsets[:-1], lengths) + np.arange(offsets[-1])
        means = self.means[take] if len(self.means) else self.means
        return Bins(self.first_exponent[rows], offsets, self.counts[take], means)

    def check(self, kind: str, low: int, high: int) -> None:
        """Raise a ``ValueError`` if there is no such count, or a bin outside of some exponents.

        Args:
            kind: What the columns' names begin with.
            low: The lowest exponent.
            high: The highest.
        """
        counts, lengths = self.counts, np.diff(self.offsets)
        if counts.dtype != np.uint32 and (counts.min() < 0 or counts.max() > LARGEST):
            _refuse(f"{kind}counts holds a value that is not a count")
        first = self.first_exponent.astype(np.int64)
        if ((lengths > 0) & ((first < low) | (first + lengths - 1 > high))).any():
            _refuse(f"{kind}first_exponent lies outside what FP32 holds")

    def totals(self) -> NDArray[np.int64]:
        """The sum of each row's counts."""
        sums = np.zeros(len(self.offsets) - 1, np.int64)
        some = np.diff(self.offsets) > 0  # reduceat cannot sum an empty row
        sums[some] = np.add.reduceat(self.counts, self.offsets[:-1][some], dtype=np.int64)
        return sums


@dataclass(frozen=True, eq=False)
class Records:
    """Rows as numpy columns of length n, histograms kept sparse.

    Text columns are codes into a tuple of words: ``words["kind"][kind[i]]``. Integers have the width
    of the file's schema.

    Attributes:
        step, micro, rank, tensors: Integers, see docs/run-folder.md for the columns.
        kind, name, dtype, placement, stage: int32 codes, -1 where a row says nothing.
        words: For each text column, its words.
        scale: float64, the loss scale the values carry (1 where none).
        skipped: bool, the optimizer did not apply this step.
        numel, zeros, subnormals, infs, nans: int64.
        absmax, absmin: float64.
        bins: The histograms of |x|.
        changed, ratio_zeros: int64, 0 where the row is no update.
        sampled_from: int64, elements of the parameter where an update holds some of them, else 0.
        ratio_bins: The histograms of |w|/|Δw|, empty where the row is no update.
        facts: What was counted for a format, by fact and name of the format; see ``fact``.
    """

    step: NDArray[np.int32]
    micro: NDArray[np.int16]
    rank: NDArray[np.int16]
    tensors: NDArray[np.int32]
    kind: NDArray[np.int32]
    name: NDArray[np.int32]
    dtype: NDArray[np.int32]
    placement: NDArray[np.int32]
    stage: NDArray[np.int32]
    words: Mapping[str, tuple[str, ...]]
    scale: NDArray[np.float64]
    skipped: NDArray[np.bool_]
    numel: NDArray[np.int64]
    zeros: NDArray[np.int64]
    subnormals: NDArray[np.int64]
    infs: NDArray[np.int64]
    nans: NDArray[np.int64]
    absmax: NDArray[np.float64]
    absmin: NDArray[np.float64]
    bins: Bins
    changed: NDArray[np.int64]
    ratio_zeros: NDArray[np.int64]
    sampled_from: NDArray[np.int64]
    ratio_bins: Bins
    facts: Mapping[tuple[str, str], NDArray[np.int64]]

    @classmethod
    def from_table(cls, table: pa.Table) -> Records:
        """Read an Arrow table with ``schema()``; text columns may be encoded or plain.

        Raises:
            KeyError: If a column is missing.
            ValueError: If columns contradict one another, or hold what no recorder writes.
        """
        column = table.column
        words: dict[str, tuple[str, ...]] = {}
        columns: dict[str, Any] = {}
        for name in TEXT:
            columns[name], words[name] = texts(column(name))
        for name, kind in {**INTEGERS, **UPDATE_INTEGERS, SAMPLED: "int64"}.items():
            if name in _ROW:
                columns[name] = numbers(column(name), kind)
        for name in FLOATS:
            columns[name] = numbers(column(name), np.float64, math.nan)
        records = cls(
            words=words,
            skipped=numbers(column("skipped"), np.bool_),
            bins=Bins.from_columns(column("first_exponent"), column("counts"), column("means")),
            ratio_bins=Bins.from_columns(column("ratio_first_exponent"), column("ratio_counts")),
            facts=_facts(column("formats")),
            **columns,
        )
        _check(records)
        return records

    @classmethod
    def concatenate(cls, parts: list[Records]) -> Records:
        """The rows of several parts, in order; each part may have words of its own.

        The list is emptied: each column of the parts is let go as soon as it is joined, so that a
        long run never lies in memory twice.
        """
        if len(parts) == 1:
            return parts.pop()
        vocabularies = [part.words for part in parts]
        words = {
            name: tuple(dict.fromkeys(word for own in vocabularies for word in own[name]))
            for name in TEXT
        }
        known = dict.fromkeys(key for part in parts for key in part.facts)
        facts = {key: np.concatenate([part.fact(*key) for part in parts]) for key in known}
        apart = {name: [getattr(part, name) for part in parts] for name in (*_ROW, *_BINS)}
        parts.clear()
        columns: dict[str, Any] = {}
        for name in list(apart):
            pieces = apart.pop(name)
            if name in TEXT:
                codes = {word: i for i, word in enumerate(words[name])}
                tables = [[*(codes[w] for w in own[name]), -1] for own in vocabularies]
                pieces = [np.array(t, np.int32)[p] for t, p in zip(tables, pieces, strict=True)]
            join = Bins.concatenate if name in _BINS else np.concatenate
            columns[name] = join(pieces)
        return cls(words=words, facts=facts, **columns)

    # -- reading -----------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self.step)

    def texts(self, column: str) -> NDArray[np.object_]:
        """A text column as strings, length n."""
        words = np.array([*self.words[column], ""], dtype=object)
        result: NDArray[np.object_] = words[getattr(self, column)]
        return result

    def fact(self, fact: str, fmt: str) -> NDArray[np.int64]:
        """What was counted for a format in each row, int64 of length n; 0 where nothing was.

        Args:
            fact: One of ``schema.FACTS``.
            fmt: Name of the format.
        """
        known = self.facts.get((fact, fmt))
        return np.zeros(len(self), np.int64) if known is None else known

    @property
    def fp16_overflow(self) -> NDArray[np.int64]:
        """Finite values that overflow in FP16, as recorded, int64 of length n."""
        return self.fact("overflow", FP16.name)

    def code(self, column: str, word: str) -> int:
        """The code of a word in a text column; -2, which no row has, if there is no such word."""
        words = self.words[column]
        return words.index(word) if word in words else -2

    def of_kind(self, kind: Kind) -> NDArray[np.bool_]:
        """Mask of the rows of one kind."""
        result: NDArray[np.bool_] = self.kind == self.code("kind", kind)
        return result

    def with_names(self, names: Collection[str]) -> NDArray[np.bool_]:
        """Mask of the rows of some names."""
        names = frozenset(names)
        return np.array([*map(names.__contains__, self.words["name"]), False])[self.name]

    def select(self, rows: NDArray[Any]) -> Records:
        """The rows under a mask or an array of positions."""
        positions = np.flatnonzero(rows) if rows.dtype == np.bool_ else np.asarray(rows)
        changes: dict[str, Any] = {name: getattr(self, name)[positions] for name in _ROW}
        changes |= {name: getattr(self, name).select(positions) for name in _BINS}
        changes["facts"] = {key: values[positions] for key, values in self.facts.items()}
        return replace(self, **changes)

    # -- merging -----------------------------------------------------------------------------------

    def merged(
        self, group: NDArray[np.int64], groups: int, portion: int = PORTION
    ) -> ExponentHistogram:
        """Merge rows by group: a stack of batch shape (groups,), free of the recorded loss scale.

        A scale that is no power of two is taken as the nearest one.

        Args:
            group: Group of each row, 0 to groups - 1; rows with a negative group are left out.
            groups: How many there are.
            portion: Rows merged at a time; changes the memory it takes, never the result.

        ``fp16_overflow`` is as recorded, which is the count at scale 1 for rows recorded without a
        loss scale, and a count of overflow in the scaled values for the others.
        """
        merger = Merger(groups)
        merger.add(self, group, portion)
        return merger.result()

    def histograms(self) -> ExponentHistogram:
        """Each row's own histogram: a dense stack of batch shape (n,), 4 KiB a row."""
        return self.merged(np.arange(len(self)), len(self))

    def ratios(self, group: NDArray[np.int64], groups: int) -> ExponentHistogram:
        """Histograms of |w|/|Δw| by group; only counts and zeros are known, means are not."""
        keep = group >= 0
        rows = self if keep.all() else self.select(keep)
        group = group[keep]
        h, bins = ExponentHistogram.empty(groups, first=-2 * BINS, bins=4 * BINS), rows.ratio_bins
        lengths = np.diff(bins.offsets)
        row = np.repeat(np.arange(len(rows)), lengths)
        within = np.arange(len(bins.counts)) - np.repeat(bins.offsets[:-1], lengths)
        column = within + bins.first_exponent[row] - h.first
        np.add.at(h.counts, (group[row], column), bins.counts.astype(np.int64))
        np.add.at(h.zeros, group, rows.ratio_zeros)
        return h


class Merger:
    """Sums of rows by group, over any number of ``Records``; what it adds are integers."""

    def __init__(self, groups: int) -> None:
        self._h = ExponentHistogram.empty(groups)
        self._weighted = np.zeros_like(self._h.counts)  # Σ count * mean byte: exact in any order

    def add(self, records: Records, group: NDArray[np.int64], portion: int = PORTION) -> None:
        """Add rows; arguments as for ``Records.merged``."""
        rows = np.flatnonzero(np.asarray(group) >= 0)
        for begin in range(0, len(rows), portion):
            some = rows[begin : begin + portion]
            self._add_bins(records, some, group[some])
            self._add_facts(records, some, group[some])

    def _add_bins(self, records: Records, some: NDArray[np.int64], mine: NDArray[np.int64]) -> None:
        """Add the bins of some rows; ``mine`` is each one's group."""
        h = self._h
        starts = records.bins.offsets[some]
        lengths = records.bins.offsets[some + 1] - starts
        size = int(lengths.sum())
        begins = np.cumsum(lengths) - lengths  # of each row among the bins taken here
        if some[-1] - some[0] + 1 == len(some):  # neighbours: no need to pick one bin after another
            bins: Any = slice(int(starts[0]), int(starts[0]) + size)
        else:
            bins = np.arange(size) + np.repeat(starts - begins, lengths)
        number = records.bins.counts[bins].astype(np.int64)
        scale = np.rint(np.log2(records.scale[some])).astype(np.int64)
        first = records.bins.first_exponent[some] - scale
        flat = np.arange(size)
        if ((first < MIN_EXPONENT) | (first + lengths - 1 > MAX_EXPONENT)).any():
            exponent = flat + np.repeat(first - begins, lengths)
            below = exponent < MIN_EXPONENT  # only after unscaling: FP32 subnormals by then
            place = np.repeat(mine, lengths)
            np.add.at(h.subnormals, place[below], number[below])
            number[below] = 0
            exponent = np.clip(exponent, MIN_EXPONENT, MAX_EXPONENT)
            flat = place * BINS + exponent - MIN_EXPONENT
        else:
            flat += np.repeat(mine * BINS + first - MIN_EXPONENT - begins, lengths)
        np.add.at(h.counts.reshape(-1), flat, number)
        np.add.at(self._weighted.reshape(-1), flat, number * records.bins.means[bins])

    def _add_facts(
        self, records: Records, some: NDArray[np.int64], mine: NDArray[np.int64]
    ) -> None:
        """Add what each row says beside its bins."""
        h = self._h
        for name in _COUNTED:
            np.add.at(getattr(h, name), mine, getattr(records, name)[some])
        np.maximum.at(h.absmax, mine, records.absmax[some] / records.scale[some])
        np.minimum.at(h.absmin, mine, records.absmin[some] / records.scale[some])

    def result(self) -> ExponentHistogram:
        """A stack of batch shape (groups,)."""
        scales = np.exp2(np.arange(MIN_EXPONENT, MAX_EXPONENT + 1, dtype=np.float64))
        self._h.sums[:] = (self._h.counts + self._weighted / 255.0) * scales
        return self._h


_COUNTED = (*_BESIDE_BINS, "fp16_overflow")
_BINS = ("bins", "ratio_bins")
_ROW = tuple(f.name for f in fields(Records) if f.name not in ("words", "facts", *_BINS))


def _offsets(lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    return np.concatenate([[0], np.cumsum(lengths)])


def _facts(column: Any) -> dict[tuple[str, str], NDArray[np.int64]]:
    """The column ``formats`` as one column for each fact of a format that this package knows.

    Raises:
        ValueError: If a row names a format twice.
    """
    array = one_array(column)
    offsets = numbers(array.offsets, np.int64)
    first, length = int(offsets[0]), int(offsets[-1] - offsets[0])
    codes, names = texts(array.keys.slice(first, length))
    rows = np.repeat(np.arange(len(array)), np.diff(offsets))
    columns = dict(zip(FACTS, array.items.slice(first, length).flatten(), strict=True))
    values = {fact: (present(c), numbers(c, np.int64)) for fact, c in columns.items()}
    found: dict[tuple[str, str], NDArray[np.int64]] = {}
    for code, name in enumerate(names):
        mine = np.flatnonzero(codes == code)
        if name not in FORMATS:
            continue
        if (np.diff(rows[mine]) == 0).any():
            _refuse(f"formats names {name} twice in a row")
        for fact, (known, counted) in values.items():
            if known[mine].any():
                found[fact, name] = np.zeros(len(array), np.int64)
                found[fact, name][rows[mine]] = counted[mine]
    return found


# -- whether rows can be what a recorder wrote: a file may be damaged, or made to mislead ---------


def _check(records: Records) -> None:
    """Check rows once, where they are read, so that nothing that computes with them has to.

    Raises:
        ValueError: If they contradict one another, or hold what no tensor can give.
    """
    _check_words(records)
    counted = ("step", "rank", "tensors", "numel", *_BESIDE_BINS, "changed", "ratio_zeros", SAMPLED)
    counts = {name: getattr(records, name) for name in counted}
    counts |= {f"{fact} of {fmt}": values for (fact, fmt), values in records.facts.items()}
    for name, values in counts.items():
        if len(values) and (values.min() < 0 or values.max() > LARGEST):
            _refuse(f"{name} holds a value that is not a count")
    scale, top, low = records.scale, records.absmax, records.absmin
    if not (np.isfinite(scale) & (scale > 0)).all():
        _refuse("scale holds a value that is not a loss scale")
    if not (np.isfinite(top) & (top >= 0)).all():
        _refuse("absmax holds a value that is not a magnitude")
    if not (low > 0).all():
        _refuse("absmin holds a value that is not a magnitude")
    if ((top > 0) & (low > top)).any():
        _refuse("absmin is larger than absmax")
    records.bins.check("", MIN_EXPONENT, MAX_EXPONENT)
    records.ratio_bins.check("ratio_", -_RATIO_LIMIT, _RATIO_LIMIT)
    beside = sum(getattr(records, name) for name in _BESIDE_BINS)
    if len(records.bins.counts) and (records.bins.totals() + beside != records.numel).any():
        _refuse("counts do not add up to numel")  # unless the bins were not read


def _check_words(records: Records) -> None:
    for name, words in records.words.items():
        if None in words or (getattr(records, name) >= len(words)).any():
            _refuse(f"a word of {name} is missing")
    unknown = sorted(set(records.words["kind"]).difference(KINDS))
    if unknown:
        _refuse(f"there is no kind {unknown[0][:40]!r}")
    for name in ("kind", "name"):
        if (getattr(records, name) < 0).any():
            _refuse(f"a row states no {name}")


def _refuse(message: str) -> None:
    raise ValueError(message)
