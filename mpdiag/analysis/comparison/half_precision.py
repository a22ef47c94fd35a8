"""Whether trainings that claim half precision ran in it, before they are compared."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mpdiag.errors import InputError
from mpdiag.files.paths import place
from mpdiag.runs.run import META, list_runs, open_run

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping


def refuse_unused_precision(path: str | os.PathLike[str]) -> None:
    """Refuse a run that was trained by a plan for half precision, and of which nothing ran in it.

    FP32 against FP32 stays a fair question: a recording, or a training at O0, claims nothing.

    Args:
        path: A run folder, a folder of runs, or a baseline file, which is not looked at.

    Raises:
        InputError: Naming the run.
    """
    where = place(path)
    if where.is_file():
        return
    if (where / META).is_file():
        runs = [open_run(where)]
    else:
        runs = [item.run for item in list_runs(where) if item.run is not None]
    for run in runs:
        unused = unused_precision(run.meta)
        if unused:
            message = (
                f"{run.folder} {unused}, so this would compare FP32 with FP32: train it again, with the "
                "model's computation where mpdiag train or mp.autocast() can cast it"
            )
            raise InputError(message)


def unused_precision(meta: Mapping[str, Any]) -> str:
    """That a run claims half precision, and that nothing of it ran in it; empty if neither is known.

    Args:
        meta: The run's ``meta.json``.
    """
    claimed = _claimed(meta)
    if not claimed or meta.get("half_precision_flops") != 0:
        return ""
    return f"claims {claimed}, and none of its matrix products ran in it"


def _claimed(meta: Mapping[str, Any]) -> str:
    """The half precision that a training's plan asked for; empty if it asked for none."""
    training = meta.get("training")
    if not isinstance(training, dict) or training.get("level") == "O0":
        return ""
    return str(training.get("dtype") or "")
