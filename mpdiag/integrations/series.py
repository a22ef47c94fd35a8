"""A training in a few figures a step, and the boards that they go to.

::

    mpdiag/underflow        share of the activation gradients that FP16 rounds to 0 at the loss scale
    mpdiag/largest          largest |x| of activations and their gradients, times the loss scale
    mpdiag/update_ratio     mean |update| of the weights over their mean |x|
    mpdiag/stalled_weights  share of the weights with a gradient that did not change, at least
    mpdiag/stalled_states   a half-precision state over the same in FP32, median: 1 is right
    mpdiag/loss_scale       the loss scale

A live recording sends them between two steps to what the process reports to already. Nothing is opened
for them, and no call waits: W&B and TensorBoard have queues, MLflow is asked for its own.
"""

import gc
import json
import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from mpdiag.analysis.layers import countable_rows
from mpdiag.errors import UsageError
from mpdiag.numerics.formats import FP16
from mpdiag.precision.movement import standstill
from mpdiag.runs import provenance
from mpdiag.runs.precision import PrecisionFacts
from mpdiag.runs.records import Records
from mpdiag.runs.schema import KINDS


@dataclass(frozen=True)
class Destination:
    """What takes the figures of a step.

    Attributes:
        name: What people call it.
        send: Is given the step and its figures.
    """

    name: str
    send: Callable[[int, Mapping[str, float]], None]


@dataclass(frozen=True)
class Pieces:
    """Rows that are read like those of a run, and what is said of them."""

    records: Records
    meta: Mapping[str, Any] = field(default_factory=dict)

    def pieces(self, *, histograms: bool = True) -> Iterator[Records]:
        """The rows, in one piece."""
        del histograms
        yield self.records


def figures(rows: Records) -> Iterator[tuple[int, dict[str, float]]]:
    """The figures of each step, ranks and micro-batches merged; without what a step does not show."""
    keep = countable_rows(rows)
    for step in np.unique(rows.step[keep]).tolist():
        yield step, _of_step(rows.select(keep & (rows.step == step)))


def _of_step(rows: Records) -> dict[str, float]:
    updates = rows.of_kind("update") & (rows.sampled_from == 0)
    weights = rows.of_kind("weight") & np.isin(rows.name, rows.name[updates])
    gradients = rows.of_kind("activation_grad")
    inside = gradients | rows.of_kind("activation")
    kinds = np.array([KINDS.index(word) for word in rows.words["kind"]])
    merged = rows.merged(np.where(updates | weights | inside, kinds[rows.kind], -1), len(KINDS))
    h = {kind: merged[i] for i, kind in enumerate(KINDS)}
    scale = float(rows.scale[gradients].max(initial=1.0))
    found = {"loss_scale": scale}
    if gradients.any() and h["activation_grad"].nonzero:
        lost = h["activation_grad"].lost_to_zero(FP16, round(math.log2(scale)))
        found["underflow"] = float(lost.value) / float(h["activation_grad"].nonzero)
    if inside.any():
        found["largest"] = float(rows.absmax[inside].max())
    whole = float(h["weight"].abs_sum().value)
    if whole > 0 and updates.any():
        per_weight = whole / float(h["weight"].numel)
        found["update_ratio"] = float(h["update"].abs_sum().value) / float(h["update"].numel)
        found["update_ratio"] /= per_weight
    still = standstill(Pieces(rows), {rows.words["name"][i] for i in rows.name[updates]})
    if still.elements:
        found["stalled_weights"] = still.share
    return {f"mpdiag/{name}": value for name, value in found.items()}


def state_figures(facts: PrecisionFacts) -> dict[str, float]:
    """The figures of states that were followed beside FP32's, as they were read last."""
    found = {s.state: s.median for s in facts.shadows}
    return {f"mpdiag/stalled_states/{state}": value for state, value in found.items()}


def json_lines(path: Path) -> Destination:
    """A line of JSON for each step, appended to a file; further ranks have files beside it."""
    if rank := provenance.ranks()[0]:
        path = path.with_name(f"{path.stem}.rank{rank:05d}{path.suffix}")

    def send(step: int, row: Mapping[str, float]) -> None:
        known = {name: value if math.isfinite(value) else None for name, value in row.items()}
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step, **known}) + "\n")

    return Destination(path.name, send)


def tensorboard(writer: Any) -> Destination:
    """A ``SummaryWriter``; one that was closed opens a further file for them."""

    def send(step: int, row: Mapping[str, float]) -> None:
        closed = getattr(writer, "file_writer", writer) is None
        for tag, value in row.items():
            writer.add_scalar(tag, value, step)
        if closed:
            writer.flush()  # nothing else would

    return Destination("TensorBoard", send)


def wandb(run: Any) -> Destination:
    """A run of W&B, with a step of their own for the figures.

    They join the row that the loop logs next. A row of ours would advance the run's own step, and W&B
    drops what a loop then logs with a smaller ``step=``.
    """
    run.define_metric("mpdiag/*", step_metric="mpdiag/step")

    def send(step: int, row: Mapping[str, float]) -> None:
        run.log({**row, "mpdiag/step": step}, commit=False)

    return Destination("W&B", send)


def mlflow(module: Any, run_id: str) -> Destination:
    """A run of MLflow, which sends from a thread of its own."""

    def send(step: int, row: Mapping[str, float]) -> None:
        module.log_metrics(dict(row), step=step, run_id=run_id, synchronous=False)

    return Destination("MLflow", send)


def active() -> list[Destination]:
    """What this process reports to: W&B's run, MLflow's run, TensorBoard's writers."""
    found = []
    run = getattr(sys.modules.get("wandb"), "run", None)
    if run is not None:
        found.append(wandb(run))
    module: Any = sys.modules.get("mlflow")
    current = module.active_run() if hasattr(module, "active_run") else None
    if current is not None:
        found.append(mlflow(module, current.info.run_id))
    return [*found, *map(tensorboard, _open_writers())]


def _open_writers() -> list[Any]:
    loaded = ("torch.utils.tensorboard", "tensorboardX")
    found = (getattr(sys.modules.get(name), "SummaryWriter", None) for name in loaded)
    kinds = tuple(kind for kind in found if kind is not None)
    writers = [one for one in gc.get_objects() if type(one) in kinds] if kinds else []
    return [one for one in writers if getattr(one, "file_writer", None) is not None]


def destination(target: Any) -> Destination:
    """What a caller names: a path of JSON lines, a ``SummaryWriter``, a run of W&B.

    Raises:
        UsageError: If it is none of these.
    """
    if isinstance(target, (str, os.PathLike)) and str(target).endswith(".jsonl"):
        return json_lines(Path(target))
    if hasattr(target, "add_scalar"):
        return tensorboard(target)
    if hasattr(target, "define_metric"):
        return wandb(target)
    raise UsageError(
        f"report_to cannot take {target!r}: give a path that ends in .jsonl, a SummaryWriter or a "
        "W&B run"
    )
