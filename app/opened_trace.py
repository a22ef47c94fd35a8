"""A trace that was opened in the browser, or several of one run: everything that its page draws.

The same readers and the same document as ``mpdiag profile``.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mpdiag.tensorcores.timeline.ranks import compare_ranks
from mpdiag.tensorcores.trace_analysis import NOT_TRACES, profile_trace

ENDINGS = (
    *("json", "gz", "sqlite", "db", "csv", "pb", "txt", "jsonl", "jsonlines", "pt"),
    *("nsys-rep", "ncu-rep"),
)
"""How names of traces end; of the last two kinds the readers say what to export instead."""


@dataclass(frozen=True)
class OpenedTrace:
    """What one or several traces say.

    Attributes:
        name: Of the file; of several ranks, of the one that is shown.
        document: As ``mpdiag profile --json`` prints it.
        ranks: As ``mpdiag profile --json`` prints several ranks; None for one trace.
    """

    name: str
    document: Mapping[str, Any]
    ranks: Mapping[str, Any] | None = None


def open_traces(paths: Sequence[Path]) -> OpenedTrace:
    """Read one trace, or those of several ranks, of which the slowest is shown.

    Raises:
        InputError: If one cannot be read, or they are not of one run.
    """
    profiles = [profile_trace(path) for path in paths]
    ranks, shown = None, 0
    if len(profiles) > 1:
        found = compare_ranks(profiles)
        ranks = found.to_json()
        shown = [p.path for p in profiles].index(found.slowest.trace)
    profile = profiles[shown]
    return OpenedTrace(Path(profile.path).name, profile.to_json(), ranks)


def traces_beside(folder: Path) -> list[Path]:
    """The files in a folder that may be traces, by name; their content decides when one is opened."""
    found = (p for p in folder.iterdir() if p.suffix[1:] in ENDINGS and p.name not in NOT_TRACES)
    return sorted(p for p in found if p.is_file())
