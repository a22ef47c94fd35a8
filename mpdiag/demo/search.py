"""``mpdiag search``: the smallest FP32 set of a workload, with a progress line."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.text import Text
from torch import Tensor, nn
from torch.optim import Optimizer

from mpdiag import workloads
from mpdiag.analysis.analyzer import analyze
from mpdiag.display.wording import counted, layer_name
from mpdiag.files.atomic import atomic_path
from mpdiag.numerics.block_recipes import EMULATED
from mpdiag.plan import PrecisionPlan
from mpdiag.recording.recorder import record
from mpdiag.reports import terminal
from mpdiag.reports.text.tables import Fitted
from mpdiag.runs.results import add_to_meta
from mpdiag.runs.run import META
from mpdiag.sensitivity.fp32_search import OnProgress, SearchResult, Train, search_fp32
from mpdiag.sensitivity.measurement import measure_sensitivity
from mpdiag.training.trainer import MixedPrecision
from mpdiag.workloads.protocol import Workload, mixed_step, start


def run_search(
    name: str,
    run: Path,
    *,
    plan: Path | None = None,
    budget: float = math.inf,
    seeds: int = 5,
    steps: int | None = None,
    lists: bool = True,
) -> SearchResult:
    """Search a workload; the plan is written into the run.

    Args:
        name: A built-in workload, or a file that defines one.
        run: A folder that keeps the search, so that it can be resumed, and ``plan.json``.
        plan: The plan whose level, format and loss scale are used; default: record and analyze first.
        budget: Minutes.
        seeds: Of FP32.
        steps: Of each training of a workload; default: its own number.
        lists: Whether the operation policy's lists are applied.

    Raises:
        UnknownWorkload: If there is no such workload.
        DamagedWorkload: If its file cannot be used.
    """
    subject = _Subject(workloads.load(name), steps)
    given = given_plan(plan) if plan is not None else _recorded(subject, run)
    with progress_line() as tell:
        result = search_fp32(
            subject.build,
            given,
            budget=budget,
            run=run,
            seeds=range(seeds),
            probe_seeds=min(2, seeds),
            higher_is_better=subject.workload.higher_is_better,
            lists=lists,
            on_progress=tell,
        )
    keep_plan(result, run)
    return result


@contextmanager
def progress_line() -> Iterator[OnProgress]:
    """A line on stderr that says what is being trained; what shows it is told so."""
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("searching", total=None)

        def tell(what: str, probes: int, best: int) -> None:
            progress.update(
                task, description=f"{what}; {probes} sets tried, best so far {best} in FP32"
            )

        yield tell


def keep_plan(result: SearchResult, run: Path) -> None:
    """Write a search's plan into its run."""
    with atomic_path(run / "plan.json") as path:
        result.plan.save(path)


@dataclass(frozen=True)
class _Subject:
    """A workload in the form that the search expects."""

    workload: Workload
    steps: int | None

    def build(self, seed: int) -> tuple[nn.Module, Optimizer, Train]:
        """A new training: the model, its optimizer, and a function that trains and evaluates them."""
        session = start(self.workload, seed=seed, steps=self.steps)

        def train(mp: MixedPrecision) -> float:
            session.run(take_step=mixed_step(mp))
            model = self.workload.model()  # in FP32, whatever the level made of the trained one
            model.load_state_dict(mp.fp32_state_dict(session.model))
            return self.workload.evaluate(model)

        return session.model, session.optimizer, train

    def step(self, model: nn.Module) -> Callable[[], Tensor]:
        """One forward pass on the first batch, as often as it is called."""
        batch = next(self.workload.batches(1, 0))
        return lambda: next(self.workload.losses(model, batch))


def given_plan(path: Path) -> PrecisionPlan:
    """Load the plan to search by, and say that a block format is emulated."""
    plan = PrecisionPlan.load(path)
    if plan.blocks is not None:
        terminal.remark(f"{plan.blocks.recipe.label} {EMULATED}")
    return plan


def _recorded(subject: _Subject, run: Path) -> PrecisionPlan:
    """The plan of an FP32 recording, which is made now unless the run has one.

    The recording, the sensitivities measured at its end and the search share a run folder, so that
    the dashboard shows them together.
    """
    if not (run / META).is_file():
        model, optimizer, train = subject.build(0)
        with (
            record(model, optimizer, run),
            MixedPrecision(model, optimizer, PrecisionPlan(), level="O0") as mp,
        ):
            train(mp)
        add_to_meta(run, made_for="search")
        plan = analyze(run).plan
        scale = plan.loss_scale.recommended
        measure_sensitivity(model, subject.step(model), run, fmt=plan.target, scale=scale)
        return plan
    return analyze(run).plan


def search_text(result: SearchResult) -> Any:
    """The answer, its evidence and its cost."""
    spread = result.spread
    style = {"none": "bold green", "found": "bold green"}.get(result.answer, "bold yellow")
    parts: list[Any] = [Text(answer_sentence(result), style=style)]
    if result.fp32:
        table = Fitted(("module", "operation", "why"), sentences=frozenset({"why"}))
        for c in (*result.plan.fp32_operations, *result.plan.fp32_modules):
            table.add_row(layer_name(c.module), c.op or "all", Text(c.reason))
        parts.append(table)
    if spread is not None:
        figures = ", ".join(f"{m:.4g}" for m in spread.metrics)
        alike = len(set(spread.metrics)) == 1
        why = "1 % away, because they are alike" if alike else "1 % of FP32's seeds would miss it"
        parts.append(Text(f"FP32's seeds reach {figures}; the limit is {spread.bound:.4g} ({why})"))
    ran = (
        f"{counted(result.references, 'FP32 training')} of {result.seeds}, "
        f"{counted(result.trainings, 'training')} of {counted(len(result.probes), 'set')}, "
        f"{result.seconds:.0f} s"
    )
    parts.append(Text(ran, "dim"))
    return Group(*parts)


def answer_sentence(result: SearchResult) -> str:
    """What trainings have shown, and where none was run, that nothing is known."""
    size, of = len(result.fp32), len(result.candidates)
    failed = counted(sum(not probe.good for probe in result.probes), "set")
    again = "run the same command again to continue."
    if result.answer == "none":
        return "Nothing needs to stay in FP32: training works without any operation there."
    if result.answer == "found":
        return f"{counted(size, 'operation')} of {of} must stay in FP32."
    if result.answer == "impossible":
        every = f"all {of} operations in FP32" if of else "no operation that could be in FP32"
        return (
            f"Training fails even with {every}: the cause is the weights, the inputs or the level; "
            "try O1 or BF16."
        )
    if result.sufficient:
        return f"Out of time: {size} of {of} operations in FP32 are known to suffice; {again}"
    if not result.probes:
        return f"Out of time before any set was tried: nothing is known yet; {again}"
    return f"Out of time: {failed} tried, and none of them suffices; {again}"


def show_search(result: SearchResult, *, as_json: bool) -> None:
    """Print a result to stdout."""
    if as_json:
        terminal.show_json(result.to_json())
    else:
        terminal.show(search_text(result))
