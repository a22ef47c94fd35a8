"""The plan that ``analyze`` keeps in the run folder, and the plans that it never replaces."""

from pathlib import Path

from mpdiag.errors import MpdiagError, UsageError
from mpdiag.files.atomic import atomic_path
from mpdiag.files.paths import AnyPath, is_remote
from mpdiag.plan import FILE as PLAN
from mpdiag.plan import PrecisionPlan
from mpdiag.runs.results import SEARCH
from mpdiag.runs.run import META, Run, open_run


def keep_plan(run: Run, plan: PrecisionPlan) -> str | None:
    """Keep a copy of a plan in the run that it was made from, so that the run stands for its plan.

    A plan that is there is never replaced: a training may have followed it, a search may have proved
    it, a person may have edited it. A run that is still being recorded gets none.

    Returns:
        What is worth saying: that another plan is there, or that the folder cannot be written.
    """
    folder = run.folder
    meta = run.meta
    if meta.get("state") == "recording" or meta.get("training") or (folder / SEARCH).is_file():
        return None
    place = folder / PLAN
    rewrite = f"mpdiag analyze {folder} --target {plan.aim} -o {place}"
    try:
        if not place.is_file():
            with atomic_path(place) as path:
                plan.save(path)
            return None
        if is_remote(place) or PrecisionPlan.load(place).decisions() == plan.decisions():
            return None
        return f"{place} holds a different plan and was not replaced; to replace it: {rewrite}"
    except OSError as error:
        return (
            f"cannot write the plan into {folder} ({error.strerror}): choose another file with -o"
        )
    except MpdiagError as error:
        return f"{error}; to replace it: {rewrite}"


def trained_by(folder: AnyPath) -> bool:
    """Whether a folder is a run that was trained by the plan in it."""
    try:
        return (folder / META).is_file() and bool(open_run(folder).meta.get("training"))
    except MpdiagError:
        return False


def refuse_trained(output: Path) -> None:
    """Refuse to write over the plan that a run was trained by.

    Raises:
        UsageError: With the reason.
    """
    if output.name == PLAN and output.exists() and trained_by(output.parent):
        message = f"{output.parent} was trained by the plan in it: choose another file with -o"
        raise UsageError(message)
