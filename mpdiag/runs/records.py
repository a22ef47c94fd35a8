"""The rows of a recording as numpy columns: what the analysis reads and merges.

A run of some hundred thousand rows has many millions of bins, so columns keep the width they have
on disk, counts the smallest that holds them, and rows are merged a portion at a time. All sums are
of integers: neither the portions nor the order of rows, parts or ranks changes a result.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from mpdiag.files.arrow_columns import lists, numbers, octets, places_of, present
from mpdiag.numerics.formats import FORMATS, FP16
from mpdiag.numerics.histograms import BINS, MAX_EXPONENT, MIN_EXPONENT, ExponentHistogram
from mpdiag.runs.row_validation import refuse_nonsense
from mpdiag.runs.schema import FACTS, FLOATS, INTEGERS, SAMPLED, TEXT, UPDATE_INTEGERS

if TYPE_CHECKING:
    from collections.abc import Mapping

    import pyarrow as pa
    from numpy.typing import NDArray

    from mpdiag.runs.schema import Kind

PORTION = 16_384
"""Rows merged at a time: temporaries stay at some ten MB."""


@dataclass(frozen=True, eq=False)
class Records:
    """Rows as numpy columns of length n, histograms kept sparse.

    Text columns are codes into a tuple of words: ``kind_words[kind[i]]``. Integers have the width
    of the file's schema.

    Attributes:
        step, micro, rank, tensors: Integers, see docs/run-folder.md for the columns.
        kind, name, dtype, placement, stage: int32 codes, -1 where a row says nothing.
        words: For each text column, its words.
        scale: float64, the loss scale the values carry (1 where none).
        skipped: bool, the optimizer did not apply this step.
        numel, zeros, subnormals, infs, nans: int64.
        absmax, absmin: float64.
        first_exponent: int16.
        offsets: int64 (n + 1), row i's bins are ``counts[offsets[i]:offsets[i+1]]``.
        counts: uint32 or int64, all rows' bins, one after another.
        means: uint8, of each bin: its mean |x| is 2^e * (1 + byte / 255).
        changed, ratio_zeros: int64, 0 where the row is no update.
        ratio_first_exponent: int16.
        sampled_from: int64, elements of the parameter where an update holds some of them, else 0.
        ratio_offsets, ratio_counts: like ``offsets`` and ``counts``.
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
    first_exponent: NDArray[np.int16]
    offsets: NDArray[np.int64]
    counts: NDArray[Any]
    means: NDArray[np.uint8]
    changed: NDArray[np.int64]
    ratio_zeros: NDArray[np.int64]
    ratio_first_exponent: NDArray[np.int16]
    sampled_from: NDArray[np.int64]
    ratio_offsets: NDArray[np.int64]
    ratio_counts: NDArray[Any]
    facts: Mapping[tuple[str, str], NDArray[np.int64]]

    # -- making ------------------------------------------------------------------------------------

    @classmethod
    def from_table(cls, table: pa.Table) -> Records:
        """Read an Arrow table with ``schema()``; text columns may be encoded or plain.

        Raises:
            KeyError: If a column is missing.
            ValueError: If a histogram's columns contradict one another.
        """
        columns: dict[str, Any] = {}
        words: dict[str, tuple[str, ...]] = {}
        for name in TEXT:
            column = table.column(name)
            if not hasattr(column.type, "value_type"):
                column = column.dictionary_encode()
            merged = _one_array(column.unify_dictionaries())
            columns[name] = numbers(merged.indices, np.int32, -1)
            words[name] = tuple(merged.dictionary.to_pylist())
        for name, kind in (*INTEGERS.items(), *UPDATE_INTEGERS.items()):
            columns[name] = numbers(table.column(name), kind)
        columns[SAMPLED] = numbers(table.column(SAMPLED), np.int64)
        for name in FLOATS:
            columns[name] = numbers(table.column(name), np.float64, math.nan)
        columns["skipped"] = numbers(table.column("skipped"), np.bool_)
        columns["offsets"], columns["counts"] = _lists(table.column("counts"))
        columns["ratio_offsets"], columns["ratio_counts"] = _lists(table.column("ratio_counts"))
        columns["facts"] = _facts(table.column("formats"))
        lengths, columns["means"] = octets(table.column("means"))
        if not np.array_equal(lengths, np.diff(columns["offsets"])):
            message = "counts and means differ in length"
            raise ValueError(message)
        refuse_nonsense(columns, words)
        return cls(words=words, **columns)

    @classmethod
    def concatenate(cls, parts: list[Records]) -> Records:
        """The rows of several parts, in order; each part may have words of its own.

        The list is emptied: each column of the parts is let go as soon as it is joined, so that a
        long run never lies in memory twice.
        """
        if len(parts) == 1:
            return parts.pop()
        vocabularies = [part.words for part in parts]
        words = {name: _union(own[name] for own in vocabularies) for name in TEXT}
        known = dict.fromkeys(key for part in parts for key in part.facts)
        facts = {key: np.concatenate([part.fact(*key) for part in parts]) for key in known}
        apart = {f.name: [getattr(part, f.name) for part in parts] for f in fields(cls)}
        parts.clear()
        del apart["words"], apart["facts"]
        columns: dict[str, Any] = {"facts": facts}
        for name in list(apart):
            pieces = apart.pop(name)
            if name in TEXT:
                codes = {word: i for i, word in enumerate(words[name])}
                tables = [[*(codes[w] for w in own[name]), -1] for own in vocabularies]
                pieces = [np.array(t, np.int32)[p] for t, p in zip(tables, pieces, strict=True)]
            elif name in ("offsets", "ratio_offsets"):
                pieces = [np.zeros(1, np.int64), np.cumsum(np.concatenate([*map(np.diff, pieces)]))]
            columns[name] = np.concatenate(pieces)
        return cls(words=words, **columns)

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

    def select(self, rows: NDArray[Any]) -> Records:
        """The rows under a mask or an array of positions."""
        positions = np.flatnonzero(rows) if rows.dtype == np.bool_ else np.asarray(rows)
        changes: dict[str, Any] = {}
        for field in fields(self):
            if field.name not in _NOT_PER_ROW:
                changes[field.name] = getattr(self, field.name)[positions]
        for offsets, flat in (
            ("offsets", ("counts", "means")),
            ("ratio_offsets", ("ratio_counts",)),
        ):
            old = getattr(self, offsets)
            starts, lengths = old[positions], np.diff(old)[positions]
            new = np.concatenate([[0], np.cumsum(lengths)])
            take = np.repeat(starts - new[:-1], lengths) + np.arange(new[-1])
            changes[offsets] = new
            changes.update({name: getattr(self, name)[take] for name in flat})
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
        h = ExponentHistogram.empty(groups, first=-2 * BINS, bins=4 * BINS)
        lengths = np.diff(rows.ratio_offsets)
        row = np.repeat(np.arange(len(rows)), lengths)
        within = np.arange(len(rows.ratio_counts)) - np.repeat(rows.ratio_offsets[:-1], lengths)
        column = within + rows.ratio_first_exponent[row] - h.first
        np.add.at(h.counts, (group[row], column), rows.ratio_counts.astype(np.int64))
        np.add.at(h.zeros, group, rows.ratio_zeros)
        return h


class Merger:
    """Sums of rows by group, over any number of ``Records``; what it adds are integers."""

    def __init__(self, groups: int) -> None:
        self._h = ExponentHistogram.empty(groups)
        self._weighted = np.zeros_like(self._h.counts)  # Σ count * mean byte: exact in any order

    def grow(self, groups: int) -> None:
        """Make room for more groups."""
        more = ExponentHistogram.empty(groups - len(self._h.zeros))
        per_group = ("counts", "sums", "absmax", "absmin", *_COUNTED)
        joined: dict[str, Any] = {
            n: np.concatenate([getattr(self._h, n), getattr(more, n)]) for n in per_group
        }
        self._h = replace(self._h, **joined)
        self._weighted = np.concatenate([self._weighted, np.zeros_like(more.counts)])

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
        starts = records.offsets[some]
        lengths = records.offsets[some + 1] - starts
        whole = int(lengths.sum())
        begins = np.cumsum(lengths) - lengths  # of each row among the bins taken here
        if some[-1] - some[0] + 1 == len(some):  # neighbours: no need to pick one bin after another
            bins: Any = slice(int(starts[0]), int(starts[0]) + whole)
        else:
            bins = np.arange(whole) + np.repeat(starts - begins, lengths)
        number = records.counts[bins].astype(np.int64)
        first = records.first_exponent[some] - np.rint(np.log2(records.scale[some])).astype(
            np.int64
        )
        flat = np.arange(whole)
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
        np.add.at(self._weighted.reshape(-1), flat, number * records.means[bins])

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


_COUNTED = ("zeros", "subnormals", "infs", "nans", "fp16_overflow")
_NOT_PER_ROW = {"words", "offsets", "counts", "means", "ratio_offsets", "ratio_counts", "facts"}


def _one_array(column: Any) -> Any:
    """A chunked column as one array, whatever the version of Arrow makes of it."""
    merged = column.combine_chunks()
    if not hasattr(merged, "chunks"):
        return merged
    import pyarrow as pa

    return merged.chunk(0) if merged.num_chunks else pa.nulls(0, column.type)


def _union(vocabularies: Any) -> tuple[str, ...]:
    """Every word once, in order of first appearance."""
    return tuple(dict.fromkeys(word for words in vocabularies for word in words))


def _lists(column: Any) -> tuple[NDArray[np.int64], NDArray[Any]]:
    """Offsets and flat values of a list column, as narrow as fits; a null is an empty list."""
    lengths, values = lists(column)
    if values.size == 0 or (values.min() >= 0 and values.max() < 2**32):
        values = values.astype(np.uint32)
    return np.concatenate([[0], np.cumsum(lengths)]), values


def _facts(column: Any) -> dict[tuple[str, str], NDArray[np.int64]]:
    """The column ``formats`` as one column for each fact of a format that this package knows.

    Raises:
        ValueError: If a row names a format twice.
    """
    array = _one_array(column)
    offsets = numbers(array.offsets, np.int64)
    first, length = int(offsets[0]), int(offsets[-1] - offsets[0])
    keys = array.keys.slice(first, length)
    rows = np.repeat(np.arange(len(array)), np.diff(offsets))
    columns = dict(zip(FACTS, array.items.slice(first, length).flatten(), strict=True))
    values = {fact: (present(c), numbers(c, np.int64)) for fact, c in columns.items()}
    found: dict[tuple[str, str], NDArray[np.int64]] = {}
    for name in FORMATS:
        mine = places_of(keys, name)
        if (np.diff(rows[mine]) == 0).any():
            message = f"formats names {name} twice in a row"
            raise ValueError(message)
        for fact, (known, counted) in values.items():
            if known[mine].any():
                found[fact, name] = np.zeros(len(array), np.int64)
                found[fact, name][rows[mine]] = counted[mine]
    return found
