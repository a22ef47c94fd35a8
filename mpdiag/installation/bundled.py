"""Where the folders beside the package lie: in a clone next to it, in an install inside it."""

from __future__ import annotations

from pathlib import Path

from mpdiag.errors import RunNotFound

_PACKAGE = Path(__file__).resolve().parent.parent


def app_folder() -> Path:
    """The dashboard's folder, with ``main.py`` in it.

    Raises:
        RunNotFound: If this installation has none.
    """
    return _beside("app", "main.py")


def sample_runs() -> Path:
    """The runs this project recorded itself.

    Raises:
        RunNotFound: If this installation has none.
    """
    return _beside("sample_runs", "README.md")


def _beside(name: str, witness: str) -> Path:
    for folder in (_PACKAGE / f"_{name}", _PACKAGE.parent / name):
        if (folder / witness).is_file():
            return folder
    message = f"this installation of mpdiag has no {name}: install it again"
    raise RunNotFound(message)
