"""The command to run next, as words: each is named only where it can succeed.

``terminal.name_next`` prints them; no words, no line. Whatever a next command needs (a recording with
rows, a script that is still there, an optional package) is looked up here, before it is named.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from mpdiag.errors import MpdiagError
from mpdiag.files.paths import AnyPath, is_remote
from mpdiag.installation.extras import EXTRAS
from mpdiag.numerics.formats import BF16, TRAINABLE
from mpdiag.plan import FILE as PLAN
from mpdiag.plan import PrecisionPlan
from mpdiag.runs.results import read_comparison
from mpdiag.runs.run import META, Listing, Run, list_runs, open_run

if TYPE_CHECKING:
    from mpdiag.analysis.analyzer import Analysis
    from mpdiag.exports.registry import Export

Words = tuple[object, ...]
NOTHING: Words = ()
DOCTOR: Words = ("mpdiag", "doctor")
_ENDINGS = {"python": "py", "json": "json", "shell": "sh", "prototxt": "prototxt", "lua": "lua"}


def try_it() -> Words:
    """The demo; a workload without pictures where their package is missing."""
    return ("mpdiag", "demo", *(("gpt",) if EXTRAS["demo"].missing() else ()))


def after_examination() -> Words:
    """What follows for the newest recording in ``runs``; the demo where there is none."""
    try:
        return after_listing(list_runs("runs"))
    except (MpdiagError, OSError):
        return try_it()


def look_at(folder: AnyPath) -> Words:
    """A folder of runs, or one run, in the dashboard; as a list where that cannot be shown."""
    if is_remote(folder) or EXTRAS["app"].missing():
        return ("mpdiag", "runs", folder) if _holds_runs(folder) else NOTHING
    return ("mpdiag", "dashboard", folder) if folder.is_dir() else NOTHING


def hold_against(a: AnyPath, b: AnyPath, *options: str) -> Words:
    """The difference of two runs, or of a fingerprint and the run that it was made of."""
    return "mpdiag", "diff", a, b, *options


def decide(run: AnyPath, target: str) -> Words:
    """The plan for a block recipe, of all layers."""
    return "mpdiag", "analyze", run, "--target", target, "-o", "plan.json"


def look_beside(run: AnyPath) -> Words:
    """A run among those beside it, wherever it lies."""
    if not is_remote(run) and run.resolve() == Path.cwd().resolve():
        return look_at(run)
    return look_at(run if _holds_runs(run) else run.parent)


def analyze_it(run: AnyPath, plan: str | None = PLAN) -> Words:
    """The analysis of a recording, if any step was recorded."""
    words = ("mpdiag", "analyze", run, *(("-o", plan) if plan else ()))
    return words if _has_rows(run) else NOTHING


def go_on(run: AnyPath) -> Words:
    """What follows for a recording, by what was done: analyze, train, compare, look at it.

    Nothing where its plan was kept, no run was trained by it and its script is not here.
    """
    try:
        opened = open_run(run)
        if opened.meta.get("training"):
            return look_beside(run)
        plan = PrecisionPlan.load(str(run))
    except (MpdiagError, OSError):
        return analyze_it(run)
    return after_training(run, plan) or train_by(plan, run, opened)


def after_training(run: AnyPath, plan: PrecisionPlan) -> Words:
    """The comparison of a recording with a training by its plan; once compared, a look at both.

    Nothing where no run beside the recording was trained as long by the decisions of the plan.
    """
    from mpdiag.analysis.verdict.trained import followed_decisions

    if is_remote(run):
        return NOTHING
    decisions = plan.digest()
    if read_comparison(run, decisions) is not None:
        return look_beside(run)
    for item in list_runs(run.resolve().parent):
        if item.run is None or not item.run.meta.get("training"):
            continue
        try:
            followed = PrecisionPlan.load(item.folder)
        except (MpdiagError, OSError):
            continue
        ours = Path(followed.run).name == Path(plan.run).name
        words = compare_them(run, run.parent / item.folder.name)
        if ours and words and followed_decisions(item.run) == decisions and _as_long(run, item):
            return words
    return NOTHING


def after_listing(found: Iterable[Listing]) -> Words:
    """What follows for the newest recording; for trainings alone the dashboard."""
    items = [item for item in found if item.run is not None]
    items.sort(key=lambda item: item.run is not None and "made_for" in item.run.meta)
    recorded = next((item.folder for item in items if _has_rows(item.folder)), None)
    if recorded is not None:
        return go_on(recorded) or ("mpdiag", "analyze", recorded)
    return look_at(items[0].folder.parent) if items else try_it()


def train_by(plan: PrecisionPlan, path: AnyPath, run: Run | None) -> Words:
    """The training of the recorded script by a plan, if it can be called from here.

    Args:
        plan: The plan.
        path: Its file.
        run: The recording, which knows its script.
    """
    script = run.script_words if run is not None and not run.is_refused else ()
    if plan.target not in {fmt.name for fmt in TRAINABLE} or run is None or not script:
        return NOTHING
    if script[0] == "-m":
        there = _module_is_there(script[1]) if len(script) > 1 else False
    else:
        there = Path(script[0]).exists()
    return ("mpdiag", "train", "--plan", path, "--", *run.command_words) if there else NOTHING


def after_check(run: AnyPath, against: Path, target: str, *, trained: bool) -> Words:
    """A new plan in place of one that no longer holds.

    Args:
        run: The recording.
        against: The plan, or the run folder it lies in.
        target: Its format.
        trained: Whether a run was trained by that very file, so that another place is needed.
    """
    file = against / PLAN if against.is_dir() else against
    place = Path(PLAN) if trained else file
    return ("mpdiag", "analyze", run, "--target", target, "-o", place)


def after_export(plan: PrecisionPlan, path: Path, output: Path | None, written: Export) -> Words:
    """The training by the exported plan; where its script is unknown, the file of the export.

    Nothing where that is written: what follows is in the other framework.
    """
    folder = path if path.is_dir() else path.parent
    run = None
    if (folder / META).is_file():
        try:
            run = open_run(folder)
        except MpdiagError:
            run = None
    train = train_by(plan, path, run)
    if train or output is not None:
        return train
    # torch.py beside a script would hide the package that the script imports.
    name = f"plan_{written.framework}.{_ENDINGS[written.language]}"
    return ("mpdiag", "export", path, "--to", written.framework, "-o", name)


def after_profile(path: str, against: Path | None) -> Words:
    """The report of a trace; what came through a pipe is gone."""
    earlier = () if against is None else ("--against", against)
    return ("mpdiag", "report", path, *earlier) if Path(path).is_file() else NOTHING


def after_report(trace: AnyPath) -> Words:
    """The dashboard, where the trace lies in a run or beside runs; else the same trace's figures.

    Nothing for a trace that is gone, whatever lies around its place.
    """
    if not trace.exists():
        return NOTHING
    near = next((folder for folder in trace.resolve().parents[:2] if _holds_runs(folder)), None)
    return ("mpdiag", "profile", trace) if near is None else look_at(near)


def after_search(answer: str, again: Words, folder: AnyPath, script: tuple[str, ...] = ()) -> Words:
    """What a search leads to.

    Args:
        answer: Of ``SearchResult``.
        again: The words of the same search.
        folder: Where it lies, with its plan.
        script: The words of the script that was searched; none for a workload.
    """
    if answer == "unfinished":
        return again
    if answer == "impossible":
        words = ("mpdiag", "analyze", folder, "--target", BF16.name)
        return words if _has_rows(folder) else NOTHING
    if script:
        first = (word.replace("{seed}", "0") for word in script)
        return ("mpdiag", "train", "--plan", folder / PLAN, "--", *first)
    return ("mpdiag", "export", folder / PLAN, "--to", "torch")


def after_layer(analysis: Analysis, run: AnyPath) -> Words:
    """What follows for the run; else the replay of a scaler, where it holds gradients for it."""
    if (run / PLAN).is_file() and (words := go_on(run)):
        return words
    kinds = set(analysis.layers.kinds.tolist())
    return ("mpdiag", "replay", run) if kinds & {"activation_grad", "weight_grad"} else NOTHING


def after_replay(run: AnyPath) -> Words:
    """What follows for the run; else a look at it."""
    return go_on(run) or look_beside(run)


def after_skip(capsule: Path) -> Words:
    """The run that a skipped step belongs to."""
    near = capsule.parents[:3]
    run = next((folder for folder in near if (folder / META).is_file()), None)
    return NOTHING if run is None else look_beside(run)


def after_board(kind: str, where: str) -> Words:
    """TensorBoard's own command, if its program is there; W&B is looked at in a browser.

    It is given the folder around the run's: TensorBoard calls a run by its place below that.
    """
    if kind != "tensorboard" or shutil.which("tensorboard") is None:
        return NOTHING
    return ("tensorboard", "--logdir", Path(where).parent)


def after_seed(run: AnyPath) -> Words:
    """The comparison of a folder of seeds with the folder ``fp32`` beside it; else a list of its runs.

    So are the folders called where ``mpdiag compare`` asks for more seeds.
    """
    a, b = run.parent.parent / "fp32", run.parent
    words = compare_them(a, b) if a != b and _holds_runs(a) else NOTHING
    return words or ("mpdiag", "runs", b)


def compare_them(a: AnyPath, b: AnyPath) -> Words:
    """The comparison of two trainings, or folders of them, if both hold a log."""
    return ("mpdiag", "compare", a, b) if _logged(a) and _logged(b) else NOTHING


def _module_is_there(name: str) -> bool:
    """Whether ``python -m name`` finds something; its package is not run."""
    top = name.partition(".")[0]
    here = Path.cwd()
    return (here / top).is_dir() or (here / f"{top}.py").is_file() or find_spec(top) is not None


def _as_long(recording: AnyPath, training: Listing) -> bool:
    """Whether a training went on for as long as a recording, so that they can be compared."""
    from mpdiag.analysis.comparison.comparison_findings import lengths_apart
    from mpdiag.analysis.comparison.groups import training_alone

    runs = open_run(recording), training.run or open_run(training.folder)
    try:
        return lengths_apart(*map(training_alone, runs)) is None
    except MpdiagError:
        return False


def _has_rows(folder: AnyPath) -> bool:
    try:
        return any(map(len, open_run(folder).pieces(histograms=False)))
    except (MpdiagError, OSError):
        return False


def _holds_runs(folder: AnyPath) -> bool:
    try:
        return bool(list_runs(folder))
    except (MpdiagError, OSError):
        return False


def _logged(folder: AnyPath) -> bool:
    from mpdiag.runs.training_log import FILE, read_log

    try:
        runs = [folder] if (folder / META).is_file() else [r.folder for r in list_runs(folder)]
        logs = [read_log(run) for run in runs if (run / FILE).is_file()]
    except (MpdiagError, OSError):
        return False
    return any(log.steps or log.metrics for log in logs)
