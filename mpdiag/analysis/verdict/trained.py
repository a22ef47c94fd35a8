"""Keeps what a comparison showed of a plan in the recordings that it was compared with."""

import os
from collections.abc import Iterator

from mpdiag.analysis.comparison.compare import Comparison
from mpdiag.analysis.comparison.comparison_findings import mean_of_finite
from mpdiag.errors import MpdiagError, RunNotFound
from mpdiag.files.paths import AnyPath, is_remote, place
from mpdiag.installation.bundled import sample_runs
from mpdiag.plan import PrecisionPlan
from mpdiag.runs.results import StoredComparison, write_comparison
from mpdiag.runs.run import META, Run, list_runs, open_run
from mpdiag.runs.training_log import read_log


def keep_comparison(
    comparison: Comparison, a: str | os.PathLike[str], b: str | os.PathLike[str]
) -> tuple[AnyPath, ...]:
    """Write ``comparison.json`` into each recording of side A, if side B was trained by one plan.

    Args:
        comparison: Of the two sides.
        a: The reference, in FP32: a run, or a folder of runs.
        b: The candidate: a run, or a folder of runs.

    Returns:
        The folders it was written to; none where A holds no recording, B has no plan or several that
        decide differently, began with another loss scale than its plan's, or computed nothing in half
        precision, or where the sides cannot be compared (other model or length). Runs at a URL and
        the sample runs are left as they are.

    Raises:
        OSError: If a folder cannot be written.
    """
    stored = stored_comparison(comparison, b)
    if stored is None:
        return ()
    kept = tuple(run.folder for run in _runs(place(a)) if takes_results(run))
    for folder in kept:
        write_comparison(folder, stored)
    return kept


def stored_comparison(comparison: Comparison, b: str | os.PathLike[str]) -> StoredComparison | None:
    """What a recording keeps of a comparison with side B; None where it keeps nothing of it."""
    trained = list(_runs(place(b)))
    decisions = {followed_decisions(run) for run in trained}
    if (
        not all(m.comparable for m in comparison.metrics)
        or len(decisions) != 1
        or None in decisions
        or any(run.meta.get("half_precision_flops") == 0 for run in trained)
    ):
        return None
    return StoredComparison(
        against=place(b).resolve().name,
        decisions=str(decisions.pop()),
        verdict=comparison.verdict,
        metrics=tuple(
            f"{m.metric} {mean_of_finite(m.b):.4g} beside FP32's {mean_of_finite(m.a):.4g}"
            for m in comparison.metrics
        ),
        seeds=len(trained),
        answer=comparison.answer,
    )


def takes_results(run: Run) -> bool:
    """Whether a run is a recording to write into what was tried: no sample run, none at a URL."""
    if is_remote(run.folder) or "training" in run.meta or not run.parts():
        return False
    try:
        ours = sample_runs()
    except RunNotFound:  # an installation without them
        return True
    return not run.folder.resolve().is_relative_to(ours.resolve())


def _runs(path: AnyPath) -> Iterator[Run]:
    """The run at a path, or those in the folder."""
    if path.is_file():  # a stored baseline
        return
    if (path / META).is_file():
        yield open_run(path)
    elif path.is_dir():
        yield from (item.run for item in list_runs(path) if item.run is not None)


def followed_decisions(run: Run) -> str | None:
    """What the plan of a trained run decides; None where it has none that can be read.

    None also where it began with another loss scale: it was told not to follow the plan in its folder.
    """
    if "training" not in run.meta:
        return None
    try:
        plan, steps = PrecisionPlan.load(str(run.folder)), read_log(run.folder).steps
    except MpdiagError:
        return None
    other = steps and steps[0].step == 0 and steps[0].scale != plan.loss_scale.init_scale
    return None if other else plan.digest()
