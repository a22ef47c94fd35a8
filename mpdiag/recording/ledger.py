"""From counted tensors to rows of the run folder.

Counting leaves raw rows on each device. The ledger remembers which row belongs to which tensor of
the step, turns many raw rows at once into Arrow rows, and writes parts. Nothing here waits for a
device, or for the disk, except ``drain`` and ``flush``.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from mpdiag.files.arrow_columns import array_from, array_of, numbers
from mpdiag.recording.counting import layout
from mpdiag.recording.counting.host import rows_on
from mpdiag.recording.counting.rows import RawRows, Rows
from mpdiag.recording.counting.tensors import Countable
from mpdiag.runs.schema import TOTAL, Kind, Placement, Stage, UpdateStack, encode

if TYPE_CHECKING:
    import pyarrow as pa

    from mpdiag.recording.growth import LayerGrowth
    from mpdiag.runs.writer import RunWriter

_DRAIN_ROWS = 1024
_EARLY_STEPS = (1, 5, 20)
"""A part is written after these recorded steps: a script that is killed early leaves most of them."""
_FLUSH_ROWS = 20_000
_FLUSH_SECONDS = 30.0
MOST_ENCODED = 20_000
"""The latest rows are kept for a live view, no more than so many: one that never reads must not cost
memory."""


class RowKey(NamedTuple):
    """What a row of a step is about; raw rows of one key are merged."""

    kind: Kind
    name: str
    micro: int
    dtype: str
    placement: Placement
    stage: Stage
    device: torch.device


class Count(NamedTuple):
    """A raw row on a device."""

    device: torch.device
    row: int


@dataclass(slots=True)
class _Entry:
    key: RowKey
    rows: list[int]
    facts: list[int]
    elements: int = 0  # of the parameter of an update
    sampled: bool = False  # whether the rows hold some of them
    step: int = 0
    scale: Any = 1.0  # a float, or a tensor on the device that is read when drained
    skipped: Any = False


@dataclass(frozen=True)
class _Books:
    """What is not on disk yet, and how much is.

    Ctrl-C may fall between any two instructions. So the books are replaced as a whole, by one
    assignment: whatever is interrupted, a row is either here or on disk, never in both.
    """

    part: int = 1  # number of the part that will be written next
    closed: tuple[_Entry, ...] = ()
    chunks: tuple[pa.Table, ...] = ()
    rows_written: int = 0
    steps_written: int = 0

    @property
    def waiting(self) -> int:
        encoded: int = sum(chunk.num_rows for chunk in self.chunks)
        return len(self.closed) + encoded


class ParameterUpdate(NamedTuple):
    """A parameter before and after a step.

    Attributes:
        name: The parameter's.
        before: Its values before the step.
        after: Its values after it.
        stage: Before or after the reduction over ranks.
        sampled_from: Elements of the parameter where the values are some of them; their updates are
            noted then, but not these weights.
    """

    name: str
    before: Countable
    after: Countable
    stage: Stage
    sampled_from: int = 0


def _by_device(tensors: Sequence[Countable]) -> dict[torch.device, list[int]]:
    """The places of the tensors that lie on each device."""
    found: dict[torch.device, list[int]] = {}
    for i, tensor in enumerate(tensors):
        found.setdefault(tensor.values.device, []).append(i)
    return found


class Ledger:
    """Gathers one rank's rows and writes them.

    Args:
        writer: Where parts go.
        growth: Is told layers' largest outputs as soon as that waits for no device.

    Attributes:
        steps_closed: Steps so far that have rows, written or not.
    """

    def __init__(self, writer: RunWriter, growth: LayerGrowth | None = None) -> None:
        self.steps_closed = 0
        self._growth = growth
        self._writer = writer
        self._encoded: list[pa.Table] | None = None  # since they were taken; None if nobody does
        self._rows: dict[torch.device, Rows] = {}
        self._open: dict[RowKey, _Entry] = {}
        self._books = _Books()
        self._raw = 0
        self._flushed_at = time.monotonic()

    def prepare(self, devices: Iterable[torch.device]) -> None:
        """Load what counts on the host before a step waits for it."""
        if any(device.type == "cpu" for device in devices):
            self._on(torch.device("cpu"))

    # -- during a step -----------------------------------------------------------------------------

    def count(self, tensor: Countable) -> Count:
        """Count a tensor on its device."""
        device = tensor.values.device
        row = self._on(device).count(tensor.values, tensor.repeat, tensor.zeros)
        self._raw += 1
        return Count(device, row)

    def count_many(self, tensors: Sequence[Countable]) -> list[Count]:
        """Count tensors, on each device together."""
        found: dict[int, Count] = {}
        for device, places in _by_device(tensors).items():
            some = [(tensors[i].values, tensors[i].repeat, tensors[i].zeros) for i in places]
            rows = self._on(device).count_many(some)
            found |= {i: Count(device, row) for i, row in zip(places, rows, strict=True)}
        self._raw += len(tensors)
        return [found[i] for i in range(len(tensors))]

    def note(
        self,
        kind: Kind,
        name: str,
        micro: int,
        tensor: Countable,
        count: Count,
        stage: Stage = "local",
        *,
        supersede: bool = False,
    ) -> None:
        """Note what a counted tensor was, or in place of what was noted under this name."""
        key = RowKey(kind, name, micro, tensor.dtype, tensor.placement, stage, count.device)
        rows = self._entry(key).rows
        if supersede:
            rows.clear()
        rows.append(count.row)

    def note_updates(self, updates: Sequence[ParameterUpdate]) -> None:
        """Count parameters before and after a step: weights, updates, and what was swallowed."""
        for device, places in _by_device([update.before for update in updates]).items():
            pairs = [(updates[i].before.values, updates[i].after.values) for i in places]
            counted = self._on(device).count_many_updates(pairs)
            self._raw += 2 * len(places)
            for i, rows in zip(places, counted, strict=True):
                self._note_update(updates[i], device, *rows)

    def _note_update(
        self, update: ParameterUpdate, device: torch.device, weight: int, change: int, fact: int
    ) -> None:
        before = update.before
        what = update.name, TOTAL, before.dtype, before.placement, update.stage, device
        if not update.sampled_from:
            self._entry(RowKey("weight", *what)).rows.append(weight)
        entry = self._entry(RowKey("update", *what))
        entry.rows.append(change)
        entry.facts.append(fact)
        entry.elements += update.sampled_from or before.values.numel()
        entry.sampled = entry.sampled or update.sampled_from > 0

    def has(self, kind: Kind) -> bool:
        """Whether the open step holds a row of this kind."""
        return any(key.kind == kind for key in self._open)

    def close_step(self, step: int, scale: Any, skipped: Any) -> int:
        """End the open step; returns its number of rows.

        Args:
            step: Its number.
            scale: Loss scale carried by gradients of activations, a float or a device tensor; a
                weight gradient was unscaled before the optimizer saw it.
            skipped: Whether the optimizer did not apply it, a bool or a device tensor.

        Forward passes that no backward followed (an evaluation that left gradients on) were no part
        of training and are dropped, as long as any backward ran.
        """
        trained = {s.micro for s in self._open if s.kind == "activation_grad"}
        kept: list[_Entry] = []
        put_out: list[_Entry] = []
        for key, entry in self._open.items():
            if key.kind == "activation":
                if trained and key.micro not in trained:
                    continue
                put_out.append(entry)
            scaled = key.kind == "activation_grad" or (
                key.kind == "weight_grad" and key.micro != TOTAL
            )
            entry.step, entry.skipped = step, skipped
            entry.scale = scale if scaled else entry.scale
            kept.append(entry)
        self._books = replace(self._books, closed=(*self._books.closed, *kept))
        self._open = {}
        self.steps_closed += bool(kept)
        for device, rows in self._rows.items():
            if device.type == "cpu":
                self._note_growth(step, rows.read(), [e for e in put_out if e.key.device == device])
        return len(kept)

    def _note_growth(self, step: int, raw: RawRows, outputs: Sequence[_Entry]) -> None:
        """Tell the largest outputs of a step's layers, how many there are and how many are 0."""
        if self._growth is None or not outputs:
            return
        rows = [row for e in outputs for row in e.rows]
        names, counts = [e.key.name for e in outputs for _ in e.rows], raw.counts[rows]
        for what, sizes in (
            ("largest", raw.extremes[rows, 0]),
            ("values", counts[:, : layout.FP16_OVERFLOW].sum(1)),
            ("zeros", counts[:, layout.ZEROS]),
        ):
            named = ((f"{what} {name}", float(n)) for name, n in zip(names, sizes, strict=True))
            self._growth.note(step, named)

    def drop_step(self) -> None:
        """Forget all rows of the open step."""
        self._open = {}

    def forget(self) -> None:
        """Forget all rows that are not on disk."""
        self._open = {}
        self._books = replace(self._books, closed=(), chunks=())

    @property
    def on_host(self) -> bool:
        """Whether all counting is done by the host, which then waits for it."""
        return all(device.type == "cpu" for device in self._rows)

    def set_scale(self, kind: Kind, scale: Any) -> None:
        """Say that the open step's totals of this kind carry a loss scale (fused optimizers)."""
        for key, entry in self._open.items():
            if key.kind == kind and key.micro == TOTAL:
                entry.scale = scale

    @property
    def rows_written(self) -> int:
        """How many rows are on disk."""
        return self._books.rows_written

    @property
    def steps_written(self) -> int:
        """How many steps are on disk."""
        return self._books.steps_written

    # -- to the disk -------------------------------------------------------------------------------

    @property
    def due(self) -> bool:
        """Whether it is time to write a part: the first steps early, later ones in batches."""
        waiting, written = self._books.waiting, self._books.steps_written
        early = any(written < steps <= self.steps_closed for steps in _EARLY_STEPS)
        if waiting and (early or waiting >= _FLUSH_ROWS):
            return True
        return waiting > 0 and time.monotonic() - self._flushed_at >= _FLUSH_SECONDS

    def drain(self, at_least: int = _DRAIN_ROWS) -> None:
        """Read raw rows back and encode them, if there are so many; the open step must be empty."""
        if self._raw < at_least:
            return
        books, tables = self._books, []
        for device, rows in self._rows.items():
            entries = [e for e in books.closed if e.key.device == device]
            if not entries:
                continue
            raw = rows.read()
            if device.type != "cpu":
                outputs = [e for e in entries if e.key.kind == "activation"]
                for step, some in groupby(outputs, key=attrgetter("step")):
                    self._note_growth(step, raw, list(some))
            # Some at a time: what a step of thousands of layers is unpacked into stays in cache.
            tables += [
                self._table(raw, entries[start : start + _DRAIN_ROWS])
                for start in range(0, len(entries), _DRAIN_ROWS)
            ]
        self._books = replace(books, closed=(), chunks=(*books.chunks, *tables))
        if self._encoded is not None:
            self._encoded += tables
            held = sum(table.num_rows for table in self._encoded)
            while len(self._encoded) > 1 and held - self._encoded[0].num_rows >= MOST_ENCODED:
                held -= self._encoded.pop(0).num_rows
        self._raw = 0
        for rows in self._rows.values():
            rows.clear()

    def take_encoded(self) -> list[pa.Table]:
        """The latest rows encoded since the last call, for a live view; the first call begins it."""
        encoded, self._encoded = self._encoded, []
        return encoded or []

    def flush(self) -> None:
        """Write everything closed so far as one part."""
        self.drain(at_least=1)
        self.write()

    def write(self) -> None:
        """Write what was read from the devices so far as one part."""
        import pyarrow as pa

        books = self._books
        if books.chunks:
            table = pa.concat_tables(books.chunks).unify_dictionaries().combine_chunks()
            self._writer.append(table, books.part)
            self._books = _Books(
                part=books.part + 1,
                rows_written=books.rows_written + table.num_rows,
                steps_written=books.steps_written + len(set(numbers(table["step"], np.int64))),
            )
        self._flushed_at = time.monotonic()

    def _table(self, raw: RawRows, entries: list[_Entry]) -> pa.Table:
        updates = [(i, e.facts) for i, e in enumerate(entries) if e.facts]
        stack = None
        if updates:
            held = np.array([fact for _, facts in updates for fact in facts], np.int64)
            starts = np.cumsum([0, *(len(facts) for _, facts in updates)])[:-1]
            stack = UpdateStack(
                rows=np.array([i for i, _ in updates], np.int64),
                facts=np.add.reduceat(raw.facts[held], starts),
                ratio_first=layout.RATIO_FIRST,
                ratios=np.add.reduceat(raw.ratios[held], starts),
            )
        histograms = raw.merged([e.rows for e in entries])
        return encode(histograms, self._labels(entries), stack)

    def _labels(self, entries: list[_Entry]) -> dict[str, Any]:
        keys = [e.key for e in entries]
        scales: dict[int, float] = {}  # one device tensor serves a whole step: read it once
        for e in entries:
            if id(e.scale) not in scales:
                scale = float(e.scale)  # 1 in place of one that is impossible (0, infinite, NaN)
                scales[id(e.scale)] = scale if 0.0 < scale < float("inf") else 1.0
        return {
            "step": np.array([e.step for e in entries]),
            "micro": np.array([k.micro for k in keys]),
            "rank": np.full(len(entries), self._writer.rank),
            "tensors": np.array([len(e.rows) for e in entries]),
            "kind": _words([k.kind for k in keys]),
            "name": _words([k.name for k in keys]),
            "dtype": _words([k.dtype for k in keys]),
            "placement": _words([k.placement for k in keys]),
            "stage": _words([k.stage for k in keys]),
            "scale": np.array([scales[id(e.scale)] for e in entries]),
            "skipped": np.array([bool(e.skipped) for e in entries]),
            "sampled_from": array_of(
                np.array([e.elements for e in entries], np.int64),
                mask=np.array([not e.sampled for e in entries]),
            ),
        }

    def _entry(self, key: RowKey) -> _Entry:
        entry = self._open.get(key)
        if entry is None:
            entry = self._open[key] = _Entry(key, [], [])
        return entry

    def _on(self, device: torch.device) -> Rows:
        rows = self._rows.get(device)
        if rows is None:
            rows = self._rows[device] = rows_on(device)
        return rows


def _words(values: list[str]) -> Any:
    """A column of words that repeat, as the schema has it."""
    import pyarrow as pa

    codes: dict[str, int] = {}
    found = np.array([codes.setdefault(value, len(codes)) for value in values], np.int32)
    return pa.DictionaryArray.from_arrays(array_of(found), array_from(list(codes), pa.string()))
