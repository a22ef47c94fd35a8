"""``profile.json``: the document that ``mpdiag profile --json`` prints, kept in a run folder."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mpdiag.errors import DamagedRun, NewerSchema, RunNotFound
from mpdiag.files.documents import read_document

if TYPE_CHECKING:
    from collections.abc import Mapping

    from mpdiag.files.paths import AnyPath

FILE = "profile.json"
SCHEMA_VERSION = 1
_TEXTS = (
    *("name", "verdict", "instruction", "dtype", "op", "module", "cause", "fix"),
    *("kernel", "phase"),
)


def read_profile(folder: AnyPath) -> dict[str, Any]:
    """Read a run's ``profile.json``.

    Raises:
        RunNotFound: If the run has none.
        DamagedRun: If it cannot be read.
        NewerSchema: If a newer version wrote it.
    """
    path = folder / FILE
    try:
        if path.exists() and not path.is_file():
            message = "it is not a file"
            raise ValueError(message)
        document = read_document(path)
    except FileNotFoundError:
        message = f"{folder} has no {FILE}: write one with mpdiag profile --json > {path}"
        raise RunNotFound(message) from None
    except (OSError, ValueError, RecursionError) as error:
        message = f"{path} is damaged ({str(error).splitlines()[0]}): profile again"
        raise DamagedRun(message) from error
    lists = isinstance(document, dict) and all(
        isinstance(rows := document.get(name, []), list)
        and all(isinstance(row, dict) and _has_texts(row) for row in rows)
        for name in ("kernels", "operations", "findings")
    )
    if not lists:
        message = f"{path} is not a profile: profile again with mpdiag profile --json"
        raise DamagedRun(message)
    version = document.get("schema_version")
    if isinstance(version, int) and version > SCHEMA_VERSION:
        message = f"{path} was written by a newer mpdiag (schema {version}): upgrade to read it"
        raise NewerSchema(message)
    return dict(document)


def _has_texts(row: Mapping[str, Any]) -> bool:
    return all(isinstance(row.get(name), str | None) for name in _TEXTS)
