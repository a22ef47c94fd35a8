"""A run on a team's board: TensorBoard, Weights & Biases, MLflow or lines of JSON.

The series are those that a live recording sends, see ``series``; beside them stand the loss, scale and
skips of a training by a plan. TensorBoard and W&B get histograms, too. These are over log2 |x|, one bin
for each power of two, as recorded: on the axis of the values themselves all but the largest bin would be
one bar.
"""

import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpdiag.analysis.layers import countable_rows, share
from mpdiag.errors import RunNotFound, UsageError
from mpdiag.installation.extras import EXTRAS
from mpdiag.integrations.series import figures, json_lines, state_figures, tensorboard
from mpdiag.numerics.formats import FP16
from mpdiag.runs.records import Records
from mpdiag.runs.run import Run, open_run
from mpdiag.runs.training_log import read_log

_SCALARS = ("loss", "scale", "gradient_norm", "seconds")


@dataclass(frozen=True, eq=False)
class BoardHistogram:
    """One tensor's histogram at one step.

    Attributes:
        tag: Kind and name, as ``activation_grad/layer.0``.
        step: The step.
        edges: float64 (n + 1,), exponents: bin i holds log2 |x| from edges[i] to edges[i + 1].
        counts: int64 (n,).
        scalars: Figures of the same tensor: ``absmax``, ``zeros``, ``fp16_underflow``,
            ``fp16_overflow``; shares but for the first.
    """

    tag: str
    step: int
    edges: NDArray[np.float64]
    counts: NDArray[np.int64]
    scalars: dict[str, float]


def histograms(run: Run) -> Iterator[BoardHistogram]:
    """Every tensor's histogram, step by step, ranks and micro-batches merged."""
    records = run.records
    keep = countable_rows(records)
    for step in np.unique(records.step[keep]).tolist():
        yield from _of_step(records.select(keep & (records.step == step)), step)


def _of_step(rows: Records, step: int) -> Iterator[BoardHistogram]:
    width = len(rows.words["name"])
    keys, group = np.unique(rows.kind.astype(np.int64) * width + rows.name, return_inverse=True)
    merged = rows.merged(group.reshape(-1), keys.size)
    scalars = {
        "absmax": merged.absmax,
        "zeros": share(merged.zeros, merged.numel),
        "fp16_underflow": share(merged.lost_to_zero(FP16).value, merged.nonzero),
        "fp16_overflow": share(merged.overflow(FP16).value, merged.finite),
    }
    for i, key in enumerate(keys.tolist()):
        name = rows.words["name"][key % width] or "model"
        occupied = np.flatnonzero(merged.counts[i])
        first, last = (occupied[0], occupied[-1] + 1) if occupied.size else (0, 0)
        yield BoardHistogram(
            tag=f"{rows.words['kind'][key // width]}/{name}",
            step=step,
            edges=np.arange(first, last + 1, dtype=np.float64) + merged.first,
            counts=merged.counts[i, first:last],
            scalars={label: float(values[i]) for label, values in scalars.items()},
        )


def scalars(run: Run) -> Iterator[tuple[str, float, int]]:
    """Tag, value and step of the series of a recording, and of a training by a plan."""
    for step, row in figures(run.records) if run.parts() else ():
        yield from ((tag, value, step) for tag, value in row.items())
    facts = run.precision
    if facts is not None:
        yield from ((tag, value, facts.step) for tag, value in state_figures(facts).items())
    yield from training_scalars(run)


def training_scalars(run: Run) -> Iterator[tuple[str, float, int]]:
    """Tag, value and step of a training by a plan; nothing where the run has no log."""
    try:
        log = read_log(run.folder)
    except RunNotFound:
        return
    for entry in log.steps:
        yield "training/skipped", float(entry.skipped), entry.step
        for name in _SCALARS:
            value = getattr(entry, name)
            if value is not None:
                yield f"training/{name}", float(value), entry.step
    last = log.steps[-1].step if log.steps else 0
    for metric in log.metrics:
        yield f"metric/{metric.metric}", metric.value, last


# -- TensorBoard -----------------------------------------------------------------------------------


def to_tensorboard(run: str | os.PathLike[str] | Run, folder: str | os.PathLike[str]) -> int:
    """Write a run into a TensorBoard folder.

    Args:
        run: The run.
        folder: The folder for ``tensorboard --logdir``.

    Returns:
        The number of histograms and scalars written.

    Raises:
        InputError: If the run cannot be read.
        MissingExtra: If tensorboard is not installed.
    """
    with EXTRAS["tensorboard"].imports("writing for TensorBoard"):
        from torch.utils.tensorboard import SummaryWriter
    opened = run if isinstance(run, Run) else open_run(run)
    writer: Any = SummaryWriter(str(folder))
    written = 0
    try:
        for h in _recorded(opened):
            _add_histogram(writer, h)
            for label, value in h.scalars.items():
                writer.add_scalar(f"{h.tag}/{label}", value, h.step)
            written += 1 + len(h.scalars)
        written += _send(opened, tensorboard(writer).send)
        writer.add_text("mpdiag/run", f"`{opened.folder}`, {opened.meta.get('state')}")
    finally:
        writer.close()
    return written


def _recorded(run: Run) -> Iterator[BoardHistogram]:
    """The histograms, or none for a run that is a training's log alone."""
    return histograms(run) if run.parts() else iter(())


def _add_histogram(writer: Any, h: BoardHistogram) -> None:
    """One histogram; its sums are those of the bins' middles."""
    count = int(h.counts.sum())
    if not count:
        return
    middles = (h.edges[:-1] + h.edges[1:]) / 2
    # TensorBoard's first bucket begins at minus infinity: an empty one closes it off.
    writer.add_histogram_raw(
        f"{h.tag}/log2",
        min=float(h.edges[0]),
        max=float(h.edges[-1]),
        num=count,
        sum=float((middles * h.counts).sum()),
        sum_squares=float((middles * middles * h.counts).sum()),
        bucket_limits=h.edges.tolist(),
        bucket_counts=[0, *h.counts.tolist()],
        global_step=h.step,
    )


def to_wandb(run: str | os.PathLike[str] | Run, **options: Any) -> int:
    """Log a run to Weights & Biases.

    Args:
        run: The run.
        options: As for ``wandb.init``: ``project``, ``name``, ``dir``, ``mode`` …

    Returns:
        The number of histograms and scalars logged.

    Raises:
        InputError: If the run cannot be read.
        MissingExtra: If wandb is not installed.
    """
    with EXTRAS["wandb"].imports("logging to W&B"):
        import wandb
    opened = run if isinstance(run, Run) else open_run(run)
    steps: dict[int, dict[str, Any]] = {}
    for h in _recorded(opened):
        row = steps.setdefault(h.step, {})
        if h.counts.size:
            row[f"{h.tag}/log2"] = wandb.Histogram(
                np_histogram=(h.counts.tolist(), h.edges.tolist())
            )
        row |= {f"{h.tag}/{label}": value for label, value in h.scalars.items()}
    for tag, value, step in scalars(opened):
        steps.setdefault(step, {})[tag] = value
    with wandb.init(**{"name": opened.name, "config": _config(opened), **options}) as board:
        for step in sorted(steps):
            board.log(steps[step], step=step)
    return sum(map(len, steps.values()))


def _config(run: Run) -> dict[str, Any]:
    """What a board shows beside a run."""
    wanted = ("model", "optimizers", "device", "seeds", "cadence", "state", "argv")
    return {key: run.meta[key] for key in wanted if key in run.meta}


def to_mlflow(run: Run, experiment: str) -> int:
    """Log a run's scalars as a run of an MLflow experiment; returns their number.

    Raises:
        InputError: If the run cannot be read.
        MissingExtra: If mlflow is not installed.
    """
    with EXTRAS["mlflow"].imports("logging to MLflow"):
        import mlflow
    mlflow.set_experiment(experiment)
    with mlflow.start_run(run_name=run.name):
        return _send(run, lambda step, row: mlflow.log_metrics(dict(row), step=step))


def _send(run: Run, send: Callable[[int, Mapping[str, float]], None]) -> int:
    """Send a run's scalars, each step's together; returns their number."""
    steps: dict[int, dict[str, float]] = {}
    for tag, value, step in scalars(run):
        steps.setdefault(step, {})[tag] = value
    for step in sorted(steps):
        send(step, steps[step])
    return sum(map(len, steps.values()))


BOARDS = ("tensorboard", "wandb", "mlflow", "jsonl")


def write_board(run: Run, kind: str, where: str | None = None) -> tuple[int, str]:
    """Write a run to a board by its name.

    Args:
        run: The run.
        kind: One of ``BOARDS``.
        where: TensorBoard's folder, in which the run gets a folder of its name; W&B's project; MLflow's
            experiment; or the file of JSON lines, which is written anew. Default: ``boards``, ``mpdiag``
            for both, or a file of the run's name in ``boards``.

    Returns:
        The number of histograms and scalars, and where they are.

    Raises:
        UsageError: If the board is unknown.
    """
    safe = re.sub(r"[^\w.-]", "_", run.name) or "run"
    if kind == "tensorboard":
        folder = str(Path(where or "boards") / safe)
        return to_tensorboard(run, folder), folder
    if kind == "wandb":
        project = where or "mpdiag"
        return to_wandb(run, project=project), f"W&B, project {project}"
    if kind == "mlflow":
        experiment = where or "mpdiag"
        return to_mlflow(run, experiment), f"MLflow, experiment {experiment}"
    if kind == "jsonl":
        path = Path(where or f"boards/{safe}.jsonl")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("")
        return _send(run, json_lines(path).send), str(path)
    raise UsageError(f"there is no board {kind!r}: choose one of {', '.join(BOARDS)}")
