"""The files that outlive a pass beside its results: a trace, and recorded runs in one archive."""

from __future__ import annotations

import shutil
import zipfile
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

MOST_FILES = 8
MOST_BYTES = 10_000_000
RESULT_FILES, RESULT_BYTES = 2, 1_000_000
"""Kept free for the JSON document and its Markdown."""


def publish(keep: Path, stem: Path) -> list[str]:
    """Copy what parts kept to its place, within the limits of files and bytes.

    Folders in ``keep/runs`` become one archive. What does not fit is left out, largest first.

    Args:
        keep: The folder the parts wrote into.
        stem: The results' path without its ending; names begin with it.

    Returns:
        The names of all files of this pass, and of each that was left out the reason.
    """
    stem.parent.mkdir(parents=True, exist_ok=True)
    runs = keep / "runs"
    if runs.is_dir() and any(runs.iterdir()):
        _archive(runs, keep / "runs.zip")
    found = sorted((p for p in keep.iterdir() if p.is_file()), key=lambda p: p.stat().st_size)
    said, room = [], MOST_BYTES - RESULT_BYTES
    for i, path in enumerate(found):
        size = path.stat().st_size
        if i >= MOST_FILES - RESULT_FILES or size > room:
            said.append(f"{path.name} left out: {size:,} bytes are too much")
            continue
        room -= size
        target = stem.with_name(f"{stem.name}-{path.name}")
        shutil.copyfile(path, target)
        said.append(target.name)
    # A quick pass, and a card whose name begins alike, have results of their own.
    others = [p.stem for p in stem.parent.glob(f"{stem.name}-*.json")]
    earlier = [p.name for p in stem.parent.glob(f"{stem.name}-*") if p.is_file()]
    own = (name for name in earlier if not any(name.startswith(other) for other in others))
    return sorted({*said, *own})


def _archive(folder: Path, target: Path) -> None:
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive:
        for path in sorted(p for p in folder.rglob("*") if p.is_file()):
            archive.write(path, path.relative_to(folder))
