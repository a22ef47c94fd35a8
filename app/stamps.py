"""What tells that a run, or a folder of runs, has changed since it was read."""

from collections.abc import Iterable
from pathlib import Path

from mpdiag.runs.results import COMPARISON, PROBE, PROFILE, SEARCH, SENSITIVITY
from mpdiag.runs.run import META
from mpdiag.runs.training_log import FILE

Stamp = tuple[tuple[str, int, int], ...]

_MADE = ("plan.json", PROFILE, SENSITIVITY, SEARCH, COMPARISON, PROBE)
_PARTS = ("stats/*.parquet", "operations/*.parquet", "modules/*.parquet", "ranks/*.json")


def stamp_of_run(run: Path) -> Stamp:
    """What changes when a file of a run does: what was recorded, and what was made of it since."""
    parts = [path for pattern in _PARTS for path in sorted(run.glob(pattern))]
    return _stamp_of([run / META, run / FILE, *(run / name for name in _MADE), *parts])


def stamp_of_list(root: Path) -> Stamp:
    """What changes when ``list_runs`` of a folder would give another list."""
    return _stamp_of(sorted(root.glob(f"*/{META}")))


def _stamp_of(files: Iterable[Path]) -> Stamp:
    """Each file that is there: its path, its time of change (nanoseconds) and its size (bytes)."""
    stamps = []
    for file in files:
        try:
            status = file.stat()
        except OSError:  # not there, or gone since it was listed
            continue
        stamps.append((str(file), status.st_mtime_ns, status.st_size))
    return tuple(stamps)
