"""Find the folders that travel with the package: in a clone beside it, in an install inside it."""

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
    """Runs that this project recorded: all of them in a clone, a few in an install.

    Raises:
        RunNotFound: If this installation has none.
    """
    return _beside("sample_runs", "README.md")


def studied_workloads() -> Path | None:
    """The workloads of the studies, which only a clone has."""
    folder = _PACKAGE.parent / "studies" / "workloads"
    return folder if (folder / "vgg.py").is_file() else None


def _beside(name: str, witness: str) -> Path:
    for folder in (_PACKAGE / f"_{name}", _PACKAGE.parent / name):
        if (folder / witness).is_file():
            return folder
    raise RunNotFound(f"this installation of mpdiag has no {name}: install it again")
