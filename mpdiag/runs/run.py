"""The run folder: one copyable folder of plain files, readable without this package.

::

    run/
        meta.json                     what was recorded, by whom, in which state; all a listing reads
        ranks/rank00001.json          the same, of every other rank
        modules/rank00000.parquet     the modules and parameters, one row each
        stats/rank00000-000001.parquet  the statistics, one row for each step × tensor
        operations/rank00000-000001.parquet  the operations of a few steps, one row each
        blocks/rank00000-000001.parquet  operands of their matrix products, if asked for
        plan.json …                   once made

``writer`` writes it; this module reads it. Every file appears whole, so a kill leaves whole files or
none. Ranks write files of their own and never wait for each other. The folder may be a URL of any file
system that fsspec knows, see ``files/paths.py``; there a file is sent whole.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from difflib import get_close_matches
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, overload

from mpdiag.errors import DamagedRun, MpdiagError, NewerSchema, RunNotFound
from mpdiag.files.documents import read_document
from mpdiag.files.paths import AnyPath, Copies, is_remote, place, shown_name
from mpdiag.files.recognition import named_instead
from mpdiag.files.secrets import HIDDEN
from mpdiag.runs.answers import HalfPrecision, half_precision, half_products
from mpdiag.runs.meta_validation import refuse_odd_meta, refuse_odd_modules
from mpdiag.runs.precision import PrecisionFacts, read_precision
from mpdiag.runs.reader import damaged, part_of, records_of, tables_of
from mpdiag.tracing.conditions import TrainingConditions
from mpdiag.tracing.fingerprint import ModelFingerprint, fingerprint

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa

    from mpdiag.runs.block_operands import BlockOperand
    from mpdiag.runs.operations import Operation
    from mpdiag.runs.records import Records
    from mpdiag.runs.schema import Kind
    from mpdiag.runs.trace import TraceRow
    from mpdiag.runs.training_log import TrainingStep

_Row = TypeVar("_Row")

SCHEMA_VERSION = 2
META = "meta.json"
WIDENED, IN_BACKWARD = "widened_parameters", "in_backward"
"""What ``meta.json`` calls weights that ``--fp32`` made FP32, and steps in a backward pass."""
MOST_READ = 2 << 20
"""Bytes of a log above which a notebook names no loss: a card may not keep anybody waiting."""
_PART = re.compile(r"rank(\d{5})-(\d{6})\.parquet")


def now() -> str:
    """The present time in UTC, in ISO 8601, as every file of a run writes it."""
    return datetime.now(timezone.utc).isoformat(timespec="milliseconds")


def modules_schema() -> pa.Schema:
    """The Arrow schema of ``modules/*.parquet``, schema version 1."""
    import pyarrow as pa

    return pa.schema(
        [
            ("name", pa.string()),
            ("what", pa.string()),  # module | parameter
            ("type", pa.string()),
            ("aliases", pa.list_(pa.string())),
            ("shape", pa.list_(pa.int64())),
            ("numel", pa.int64()),
            ("dtype", pa.string()),
            ("recorded", pa.bool_()),
            ("reason", pa.string()),
            ("script_name", pa.string()),
            ("input_shapes", pa.string()),  # JSON, of the first recorded call
            ("output_shapes", pa.string()),
            ("settings", pa.string()),  # JSON: what a shape rule needs beside the shapes
        ]
    )


@dataclass(frozen=True)
class Run:
    """A run folder, opened for reading. Files other than ``meta.json`` are read when needed.

    Attributes:
        folder: The run folder.
        meta: The content of ``meta.json``.
    """

    folder: AnyPath
    meta: Mapping[str, Any]

    @property
    def name(self) -> str:
        """The folder's name."""
        return shown_name(self.folder.resolve())

    def __repr__(self) -> str:
        return f"<Run {str(self.folder)!r}, {self.meta.get('state')}>"

    def _repr_html_(self) -> str:
        """The run in a notebook: its loss, what ``meta.json`` says, the next step."""
        from mpdiag.display import notebook

        meta = self.meta
        model = meta.get("model")
        kind = model.get("type") if isinstance(model, dict) else None
        seen = meta.get("steps_seen", "?")
        rows = [
            ("State", meta.get("state")),
            ("Model", kind),
            (
                "Steps recorded",
                f"{meta['steps_recorded']} of {seen}" if "steps_recorded" in meta else None,
            ),
            ("Loss", self._loss_words()),
            ("Ranks", meta.get("world_size")),
            ("Created", meta.get("created")),
            ("Last written", meta.get("updated")),
        ]
        trouble = meta.get("state") == "failed" or bool(meta.get("failures"))
        mood = "warning" if trouble else "good"
        call = f"mpdiag.analyze({str(self.folder)!r})" if self.parts() else ""
        return notebook.card(
            self.name,
            notebook.facts(rows),
            notebook.note(str(self.folder)),
            notebook.next_step(call),
            mood=mood,
        )

    def _loss_words(self) -> str:
        """The first and the last loss of its log; "" without one, or where it cannot be read."""
        from mpdiag.runs.training_log import FILE, read_log

        path = self.folder / FILE
        try:
            if is_remote(self.folder) or not path.is_file() or path.stat().st_size > MOST_READ:
                return ""
            losses = [s.loss for s in read_log(self.folder).steps if s.loss is not None]
        except (MpdiagError, OSError):
            return ""
        if len(losses) < 2:
            return ""
        return f"{losses[0]:.4g} at first, {losses[-1]:.4g} at the last of {len(losses):,} steps"

    @property
    def script_words(self) -> tuple[str, ...]:
        """The words of the script that ``mpdiag record`` ran; () if unknown, or not known in full.

        Of several processes they are known where ``launcher`` says what started them.
        """
        script, argv = self.meta.get("script"), self.meta.get("argv")
        if not isinstance(script, str) or not script or not isinstance(argv, list):
            return ()
        words = tuple(map(str, argv[1:]))
        alone = self.meta.get("world_size") == 1
        if not (alone or self.meta.get("launcher")) or any(HIDDEN in word for word in words):
            return ()
        module = script.removeprefix("-m ")
        return (script, *words) if module == script else ("-m", module, *words)

    @property
    def command_words(self) -> tuple[str, ...]:
        """What to write after ``--``: the script, behind what started it on several processes."""
        script = self.script_words
        return (*(self.meta.get("launcher") or ()), *script) if script else ()

    @property
    def is_refused(self) -> bool:
        """Whether ``mpdiag train`` is known to refuse the recorded script, whatever the plan."""
        rows = self.modules()
        dtypes = {row["dtype"] for row in rows if row["what"] == "parameter"}
        kinds = {row["type"] for row in rows}
        optimizers = self.meta.get("optimizers") or ()
        return bool(
            (self.meta.get("precision") or {}).get(WIDENED)
            or dtypes & {"float16", "bfloat16", "float64"}
            or "RecursiveScriptModule" in kinds
            or any(one.get(IN_BACKWARD) for one in optimizers)
        )

    def parts(self) -> list[AnyPath]:
        """The parts of statistics, all ranks', in order."""
        return self._parts_in("stats")

    def _parts_in(self, name: str) -> list[AnyPath]:
        files = _files(self.folder / name, "rank*.parquet")
        return [path for path in files if _PART.fullmatch(path.name)]

    @cached_property
    def _copies(self) -> Copies:
        """Of the parts: one at a URL is transferred once, however often its rows are read."""
        return Copies()

    def table(self) -> pa.Table:
        """Every row of statistics as an Arrow table; see docs/run-folder.md for the columns.

        Raises:
            DamagedRun: If a part cannot be read, lacks a column, or there are no rows at all.
        """
        import pyarrow as pa

        tables = [table for path in self.parts() for table in tables_of(path, self._copies)]
        rows = sum(t.num_rows for t in tables)
        if rows == 0:
            raise DamagedRun(self._why_empty())
        return pa.concat_tables(tables).unify_dictionaries().combine_chunks()

    @cached_property
    def records(self) -> Records:
        """Every row of statistics as numpy columns; read once, a part at a time.

        Raises:
            DamagedRun: As ``table``.
        """
        from mpdiag.runs.records import Records

        return Records.concatenate(list(self.pieces()))

    def rows(self) -> int:
        """How many rows of statistics there are; reads the parts' footers alone.

        Raises:
            DamagedRun: If one cannot be read.
        """
        rows = 0
        for path in self.parts():
            with part_of(path, self._copies) as part:
                rows += part.metadata.num_rows
        return rows

    def pieces(
        self,
        *,
        histograms: bool = True,
        parts: Sequence[AnyPath] | None = None,
        only: tuple[Kind, Collection[str]] | None = None,
    ) -> Iterator[Records]:
        """The rows some at a time, in order, for runs that outgrow memory.

        Args:
            histograms: False leaves out the bins and what was counted for formats: several times faster.
            parts: Some of ``parts()``, to read the same ones again while the run goes on.
            only: A kind and names: the other rows are left out.

        Raises:
            DamagedRun: If a part cannot be read, or the run has no rows at all.
        """
        empty = only is None
        paths = self.parts() if parts is None else parts
        for piece in records_of(paths, self._copies, histograms=histograms, only=only):
            empty = empty and len(piece) == 0
            yield piece
        if empty:
            raise DamagedRun(self._why_empty())

    def frame(self) -> pd.DataFrame:
        """Every row of statistics as a pandas DataFrame."""
        frame: pd.DataFrame = self.table().to_pandas()
        return frame

    def operations(self) -> list[Operation]:
        """The recorded operations, by rank and step in their order; [] if none were recorded.

        Read once: the operations are the same objects each time.

        Raises:
            DamagedRun: If a part cannot be read or lacks a column.
        """
        return self._operations

    @cached_property
    def _operations(self) -> list[Operation]:
        from mpdiag.runs.operations import decode

        return self._rows_in("operations", decode)

    def block_operands(self) -> list[BlockOperand]:
        """What ``record --blocks`` counted: one for each step × product × operand; [] without.

        ``runs.block_operands.merged`` adds them over steps and ranks.

        Raises:
            DamagedRun: If a part cannot be read or lacks a column.
        """
        from mpdiag.runs.block_operands import decode

        return self._rows_in("blocks", decode)

    def trace(self) -> list[TraceRow]:
        """What was traced, by rank and step in its order; [] if nothing was.

        Raises:
            DamagedRun: If a part cannot be read or lacks a column.
        """
        from mpdiag.runs.trace import decode

        return self._rows_in("trace", decode)

    def _rows_in(self, name: str, decode: Callable[[pa.Table], Iterable[_Row]]) -> list[_Row]:
        """The rows of all parts in one of the run's folders, in the order of ``_parts_in``."""
        rows: list[_Row] = []
        for path in self._parts_in(name):
            with part_of(path, self._copies) as part:
                rows += decode(part.read())
        return rows

    @cached_property
    def half_precision(self) -> HalfPrecision:
        """What of the recorded training is in half precision.

        Raises:
            DamagedRun: If a part cannot be read.
        """
        products = set(half_products(self.operations()).values())
        return half_precision(self.meta, self.modules(), self.readable_precision, products)

    @cached_property
    def precision(self) -> PrecisionFacts | None:
        """What ``precision.json`` holds; None where there is none.

        Raises:
            DamagedRun: If it cannot be read.
            NewerSchema: If a newer version wrote it.
        """
        return read_precision(self.folder)

    @property
    def readable_precision(self) -> PrecisionFacts | None:
        """The same; None of a damaged one: the audit says so, and all else is as good as before."""
        with contextlib.suppress(MpdiagError):
            return self.precision
        return None

    def recorded_steps(self) -> tuple[TrainingStep, ...]:
        """The steps that a recording logged; () where a trainer wrote the log, or there is none.

        Read once.

        Raises:
            DamagedRun: If a line cannot be read.
        """
        return self._recorded_steps

    @cached_property
    def _recorded_steps(self) -> tuple[TrainingStep, ...]:
        from mpdiag.runs.training_log import read_recorded

        return read_recorded(self.folder)

    def modules(self) -> list[dict[str, Any]]:
        """The table of modules and parameters of the lowest rank, a dict a row; [] if none.

        Read once: the rows are the same objects each time.

        Raises:
            DamagedRun: If it cannot be read.
        """
        return self._modules

    @cached_property
    def _modules(self) -> list[dict[str, Any]]:
        import pyarrow as pa

        paths = _files(self.folder / "modules", "rank*.parquet")
        if not paths:
            return []
        with part_of(paths[0], self._copies) as part:
            table = part.read()
            expected = modules_schema()
            for field in expected:
                if field.name not in table.column_names:  # an earlier version did not write it
                    table = table.append_column(field, pa.nulls(len(table), field.type))
            table = table.select(expected.names)
            if not table.schema.equals(expected):
                table = table.cast(expected)
            rows: list[dict[str, Any]] = table.to_pylist()
            refuse_odd_modules(rows)
        return rows

    def model_fingerprint(self) -> ModelFingerprint | None:
        """The parameters of the model that was recorded, or of the plan it was trained by.

        None where neither is known: a training by a plan of an earlier version.

        Raises:
            DamagedRun: If the table of modules cannot be read.
        """
        rows = [row for row in self.modules() if row["what"] == "parameter"]
        if rows:
            cadence = self.meta.get("cadence") or {}
            chosen = cadence.get("include") or cadence.get("exclude")
            return fingerprint(((r["name"], r["shape"]) for r in rows), complete=not chosen)
        try:
            return ModelFingerprint.from_json(read_document(self.folder / "plan.json")["model"])
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return None

    def conditions(self) -> TrainingConditions:
        """How the training that was recorded was set up.

        Raises:
            DamagedRun: If the table of modules cannot be read.
        """
        return TrainingConditions.from_run(self.meta, self.modules())

    def rank_metas(self) -> dict[int, Mapping[str, Any]]:
        """The ``meta.json`` of each rank; ranks whose file is missing or damaged are left out."""
        found = {int(self.meta.get("rank") or 0): self.meta}
        for path in _files(self.folder / "ranks", "rank*.json"):
            try:
                meta = read_document(path)
                refuse_odd_meta(meta)
                found[int(meta["rank"])] = meta
            except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):  # noqa: PERF203
                continue  # as if the rank had written nothing
        return found

    def _why_empty(self) -> str:
        state = self.meta.get("state")
        if self.meta.get("training"):
            return (
                f"{self.folder} holds a training by a plan, which records no statistics: analyze the "
                f"FP32 recording, or compare the two with mpdiag compare FP32-RUN {self.folder}"
            )
        if self.meta.get("profile_only"):
            return (
                f"{self.folder} holds only a profile, no gradients: the dashboard shows it "
                "under Tensor Cores"
            )
        if state == "recording":
            return (
                f"{self.folder} holds no statistics yet: the training is still in its first steps, "
                "or it was killed there; record again if it no longer runs"
            )
        return (
            f"{self.folder} holds no statistics: no step was recorded; check that the loop called "
            "backward and optimizer.step() inside the recorder"
        )


def open_run(folder: str | os.PathLike[str]) -> Run:
    """Open a run folder.

    Raises:
        RunNotFound: If there is no such folder, or no ``meta.json`` in it.
        DamagedRun: If ``meta.json`` cannot be read.
        NewerSchema: If the run was written by a newer version.
    """
    path = place(folder)
    meta_path = path / META
    if not path.is_dir() or not meta_path.is_file():
        raise RunNotFound(_no_run_in(path) if path.is_dir() else _no_run_at(path))
    try:
        meta = read_document(meta_path, parse_constant=_refuse_constant)
    except (OSError, ValueError, RecursionError) as error:
        remedy = "mpdiag cannot read a run without it: restore it, or record again"
        raise DamagedRun(damaged(meta_path, error, remedy)) from error
    version = meta.get("schema_version") if isinstance(meta, dict) else None
    if not isinstance(version, int) or isinstance(version, bool) or version < 1:
        raise DamagedRun(f"{meta_path} is damaged: it has no schema_version")
    if version > SCHEMA_VERSION:
        raise NewerSchema(
            f"{path} was written by a newer mpdiag (schema {version}, this one reads up to "
            f"{SCHEMA_VERSION}): upgrade mpdiag to read it"
        )
    try:
        refuse_odd_meta(meta)
    except ValueError as error:
        message = f"{meta_path} is damaged ({error}): remove that field to read the rest"
        raise DamagedRun(message) from error
    return Run(path, meta)


@dataclass(frozen=True)
class Listing:
    """One line of a list of runs: an opened run, or why it could not be opened."""

    folder: AnyPath
    run: Run | None
    problem: str | None


def list_runs(folder: str | os.PathLike[str]) -> list[Listing]:
    """The runs directly in a folder, newest first, damaged ones last; reads ``meta.json`` alone.

    Raises:
        RunNotFound: If the folder does not exist.
    """
    root = place(folder)
    if not root.is_dir():
        message = f"there is no folder {root}: give the folder that holds your runs"
        if root.exists():
            message = named_instead(root, "folder of runs") or (
                f"{root} is a file: give the folder that holds your runs"
            )
        raise RunNotFound(message)
    listings = []
    children: list[AnyPath] = [*root.iterdir()]
    for child in sorted(children, key=lambda path: path.name):
        if not (child / META).is_file():
            continue
        try:
            listings.append(Listing(child, open_run(child), None))
        except (DamagedRun, NewerSchema, RunNotFound) as error:
            listings.append(Listing(child, None, str(error)))
    created = [str(item.run.meta.get("created", "")) if item.run else "" for item in listings]
    return [listings[i] for i in sorted(range(len(created)), key=created.__getitem__, reverse=True)]


@overload
def free_name(folder: Path, stem: str) -> Path: ...
@overload
def free_name(folder: AnyPath, stem: str) -> AnyPath: ...
def free_name(folder: AnyPath, stem: str) -> AnyPath:
    """The first of ``stem``, ``stem-2``, ``stem-3`` … that does not exist in ``folder``."""
    path, number = folder / stem, 2
    while path.exists():
        path, number = folder / f"{stem}-{number}", number + 1
    return path


def _no_run_at(path: AnyPath) -> str:
    """The sentence for a path that is no folder."""
    if not is_remote(path) and path.exists():
        other = f"{path} is a file, and a run is a folder: give one, as `mpdiag runs` lists them"
        return named_instead(path, "run") or other
    return f"there is no run at {path}: {_nearby(path)}"


def _nearby(path: AnyPath) -> str:
    """A hint at what may have been meant, where there is no run."""
    if not is_remote(path):
        folders = [path.parent, *(f for f in (path.parent / "runs",) if path.parent.name != "runs")]
        for folder in folders:
            close = get_close_matches(path.name, _names_of_runs(folder), cutoff=0.5)
            if close:
                return f"did you mean {' or '.join(str(folder / name) for name in close)}?"
    return "give a run folder, as `mpdiag runs` lists them"


def _no_run_in(folder: AnyPath) -> str:
    """That a folder is no run, and which of the runs in it can be opened: the newest with any step."""
    if not _names_of_runs(folder):
        return f"{folder} is not a run folder: it has no {META}"
    runs = [item.run for item in list_runs(folder) if item.run is not None]
    best = max(runs, key=lambda run: bool(run.meta.get("steps_recorded")), default=None)
    advice = ": none of them can be read" if best is None else f": name one, such as {best.folder}"
    return f"{folder} is a folder of runs, not a run{advice}"


def _names_of_runs(folder: AnyPath) -> list[str]:
    """The names of the folders in it that look like runs; [] if it cannot be read."""
    try:
        return sorted(path.parent.name for path in folder.glob(f"*/{META}"))
    except OSError:
        return []


def _files(folder: AnyPath, pattern: str) -> list[AnyPath]:
    """The files that match, in order, without pipes: opening one would wait without end."""
    return sorted(p for p in folder.glob(pattern) if is_remote(p) or p.is_file())


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")
