"""A run on a team's board: TensorBoard, Weights & Biases, MLflow or lines of JSON.

The series are those that a live recording sends, see ``series``; beside them stand the loss, scale and
skips of a training by a plan.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from mpdiag.errors import RunNotFound, UsageError
from mpdiag.installation.extras import EXTRAS
from mpdiag.integrations.series import figures, json_lines, state_figures, tensorboard
from mpdiag.runs.run import Run
from mpdiag.runs.training_log import read_log

_SCALARS = ("loss", "scale", "gradient_norm", "seconds")


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


def to_tensorboard(run: Run, folder: str) -> int:
    """Write a run into a folder for ``tensorboard --logdir``; returns the number of scalars.

    Raises:
        InputError: If the run cannot be read.
        MissingExtra: If tensorboard is not installed.
    """
    with EXTRAS["tensorboard"].imports("writing for TensorBoard"):
        from torch.utils.tensorboard import SummaryWriter
    writer: Any = SummaryWriter(folder)
    try:
        written = _send(run, tensorboard(writer).send)
        writer.add_text("mpdiag/run", f"`{run.folder}`, {run.meta.get('state')}")
    finally:
        writer.close()
    return written


def to_wandb(run: Run, project: str) -> int:
    """Log a run's scalars to a project of Weights & Biases; returns their number.

    Raises:
        InputError: If the run cannot be read.
        MissingExtra: If wandb is not installed.
    """
    with EXTRAS["wandb"].imports("logging to W&B"):
        import wandb
    wanted = ("model", "optimizers", "device", "seeds", "cadence", "state", "argv")
    config = {key: run.meta[key] for key in wanted if key in run.meta}
    with wandb.init(project=project, name=run.name, config=config) as board:
        return _send(run, lambda step, row: board.log(dict(row), step=step))


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
        The number of scalars, and where they are.

    Raises:
        UsageError: If the board is unknown.
    """
    safe = re.sub(r"[^\w.-]", "_", run.name) or "run"
    if kind == "tensorboard":
        folder = str(Path(where or "boards") / safe)
        return to_tensorboard(run, folder), folder
    if kind == "wandb":
        project = where or "mpdiag"
        return to_wandb(run, project), f"W&B, project {project}"
    if kind == "mlflow":
        experiment = where or "mpdiag"
        return to_mlflow(run, experiment), f"MLflow, experiment {experiment}"
    if kind == "jsonl":
        path = Path(where or f"boards/{safe}.jsonl")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("")
        return _send(run, json_lines(path).send), str(path)
    raise UsageError(f"there is no board {kind!r}: choose one of {', '.join(BOARDS)}")
