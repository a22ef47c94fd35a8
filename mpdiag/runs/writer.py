"""Writing a run folder; see ``runs/run.py`` for what lies in it."""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mpdiag.errors import RunExists
from mpdiag.files.arrow_columns import array_from
from mpdiag.files.atomic import atomic_path, json_text, write_json
from mpdiag.files.paths import AnyPath, is_remote, place
from mpdiag.runs.precision import PRECISION, PrecisionFacts
from mpdiag.runs.results import COMPARISON, PROBE
from mpdiag.runs.run import META, SCHEMA_VERSION, modules_schema
from mpdiag.runs.schema import encodings

if TYPE_CHECKING:
    import pyarrow as pa


_MADE = (
    *("plan.json", "training.jsonl", "profile.json", "sensitivity.json", "search.json"),
    *("report.html", "report.md", COMPARISON, PRECISION, PROBE),
)
"""What is made of a run; once the run is replaced, these files describe another one."""


class RunWriter:
    """Writes one rank's share of a run folder.

    Args:
        folder: The run folder, a path or a URL; made when missing.
        rank: This process's rank.
        world_size: How many ranks there are.
        overwrite: Replace the run that lies there, instead of refusing.

    Raises:
        RunExists: If the folder holds this rank's part of another run already.
        OSError: If the folder cannot be made.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        rank: int = 0,
        world_size: int = 1,
        overwrite: bool = False,
    ) -> None:
        self.folder = place(folder).absolute()  # the program may change its working folder
        self.rank = rank
        self._parts = 0
        self._next_parts: Counter[str] = Counter()  # of what some steps alone have
        self._claimed = False
        meta = self._meta_path
        if meta.exists():
            if not overwrite:
                raise RunExists(
                    f"{self.folder} already holds a run: choose another folder, "
                    "or pass overwrite=True to replace it"
                )
            self._clear(world_size)
        for name in ("stats", "modules", "ranks") if world_size > 1 else ("stats", "modules"):
            (self.folder / name).mkdir(parents=True, exist_ok=True)

    @property
    def _meta_path(self) -> AnyPath:
        if self.rank == 0:
            return self.folder / META
        return self.folder / "ranks" / f"rank{self.rank:05d}.json"

    def _clear(self, world_size: int) -> None:
        """Remove what this rank wrote before, and rank 0 also what ranks beyond the world wrote.

        What a link leads to belongs to another run: the link goes, and nothing behind it.
        """
        for inside in () if is_remote(self.folder) else list(self.folder.iterdir()):
            if inside.is_symlink():
                inside.unlink(missing_ok=True)
        for path in [*self.folder.glob("*/rank*"), *self.folder.glob("*/.rank*")]:
            digits = re.match(r"\.?rank(\d{5})", path.name)
            owner = int(digits.group(1)) if digits else -1
            if owner == self.rank or (self.rank == 0 and owner >= world_size):
                path.unlink(missing_ok=True)
        if self.rank == 0:
            for name in _MADE:
                (self.folder / name).unlink(missing_ok=True)
            for path in self.folder.glob("capsules/step*/*.*"):
                path.unlink(missing_ok=True)
        self._meta_path.unlink(missing_ok=True)

    def write_meta(self, meta: Mapping[str, Any]) -> None:
        """Write this rank's meta file, or replace it.

        Raises:
            RunExists: If another process began a run here since this writer was made.
        """
        document = {"schema_version": SCHEMA_VERSION, **meta}
        if self._claimed or is_remote(self._meta_path):
            write_json(self._meta_path, document)
            return
        with atomic_path(self._meta_path, replace=False) as partial:
            partial.write_text(json_text(document), encoding="utf-8")
        self._claimed = True

    def amend_meta(self, changes: Mapping[str, Any], failures: Sequence[Mapping[str, Any]]) -> None:
        """Say in this rank's meta file how it ended, where a new one could not be written.

        A full disk has room for what is no longer than the file that is there: fewer blanks, and as
        many failures as fit. Where even that fails, or ends halfway, the file stays as it is.
        """
        path = self._meta_path
        if is_remote(path):
            return
        with contextlib.suppress(OSError, ValueError), path.open("r+b", buffering=0) as file:
            text = file.read()
            document = {**json.loads(text), **changes}
            for number in range(len(failures), -1, -1):
                document["failures"] = list(failures[:number])
                amended = json.dumps(document, allow_nan=False).encode()
                if len(amended) <= len(text):
                    file.seek(0)
                    if file.write(amended.ljust(len(text))) < len(text):
                        file.seek(0)
                        file.write(text)
                    return

    def write_modules(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Replace this rank's table of modules and parameters (schema: ``modules_schema``)."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        schema = modules_schema()
        columns = array_from([dict(row) for row in rows], pa.struct(list(schema))).flatten()
        table = pa.Table.from_arrays(columns, schema=schema)
        with (
            atomic_path(self.folder / "modules" / f"rank{self.rank:05d}.parquet") as path,
            path.open("wb") as file,
        ):
            pq.write_table(table, file, compression="zstd")

    def write_precision(self, facts: PrecisionFacts) -> None:
        """Write what is known of precision; the lowest rank's, as of modules, is read."""
        if self.rank == 0:
            write_json(self.folder / PRECISION, facts.to_json())

    def append(self, table: pa.Table, part: int | None = None) -> None:
        """Write one part of statistics; it is whole on disk when this returns.

        Args:
            table: Its rows (schema: ``schema.schema``).
            part: Its number, from 1; default: the next. An earlier part of that number is replaced.
        """
        part = self._parts + 1 if part is None else part
        self._write_part("stats", part, table, **encodings())
        self._parts = part

    def append_part(self, kind: str, table: pa.Table, **options: Any) -> None:
        """Write one step's ``operations`` or ``blocks`` (schema: ``block_operands``) as one part."""
        (self.folder / kind).mkdir(exist_ok=True)
        self._write_part(kind, self._next_parts[kind] + 1, table, **options)
        self._next_parts[kind] += 1

    def append_trace(self, table: pa.Table) -> None:
        """Write the trace of one step as one part (schema: ``trace``)."""
        words = [f.name for f in table.schema if "dictionary" in str(f.type)]
        self.append_part("trace", table, compression_level=1, use_dictionary=words)

    def sweep(self) -> None:
        """Remove the partial files that this process left behind.

        ``atomic_path`` removes them itself, unless Ctrl-C arrives at the first instruction of its
        exit. It often does: Python handles a signal that came during a long write right there.
        """
        if not is_remote(self.folder):
            for path in self.folder.rglob(f".*.{os.getpid()}.part"):
                path.unlink(missing_ok=True)

    def _write_part(self, kind: str, number: int, table: pa.Table, **options: Any) -> None:
        import pyarrow.parquet as pq

        name = f"rank{self.rank:05d}-{number:06d}.parquet"
        # pyarrow opens no path that is not UTF-8.
        with atomic_path(self.folder / kind / name) as path, path.open("wb") as file:
            pq.write_table(
                table,
                file,
                compression="zstd",
                write_statistics=False,
                **{"compression_level": 9, **options},
            )
