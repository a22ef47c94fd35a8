"""Records a model, applies the advice on its shapes to a new one, and trains that."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

import mpdiag
from mpdiag.analysis.shapes.advice import advise_shapes
from mpdiag.analysis.shapes.solution import Wanted
from studies.shapes.first_half import ROWS, STEPS
from studies.shapes.resizing import resize

if TYPE_CHECKING:
    from pathlib import Path

    from mpdiag.plan import ShapeAdvice
    from mpdiag.runs.run import Run
    from studies.shapes.first_half import Model


@dataclass
class Outcome:
    """What became of the advice on a model.

    Attributes:
        model: Its name.
        worthwhile: Whether only what pays was asked for.
        advice: Of each size: module, dimension, size, padded.
        problems: What went wrong, in words; none where all is well.
        again: Sizes that would still be changed in the padded model.
    """

    model: str
    worthwhile: bool
    advice: list[tuple[str, str, int, int]]
    problems: list[str] = field(default_factory=list)
    again: list[tuple[str, str, int, int]] = field(default_factory=list)


def try_model(kind: type[Model], folder: Path) -> list[Outcome]:
    """Apply all the advice on a model, and only that which pays."""
    torch.manual_seed(0)
    run = record(kind(), folder / "run")
    return [_try(kind, run, folder, worthwhile=worthwhile) for worthwhile in (False, True)]


def record(model: Model, folder: Path, rows: int = ROWS, steps: int = STEPS) -> Run:
    """Record one training step."""
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    with mpdiag.record(model, optimizer, folder):
        model.loss(*model.batch(rows, steps)).backward()
        optimizer.step()
    return mpdiag.open_run(folder)


def _try(kind: type[Model], run: Run, folder: Path, *, worthwhile: bool) -> Outcome:
    advice, _ = advise_shapes(run, Wanted("fp16", worthwhile=worthwhile))
    found = Outcome(kind.__name__, worthwhile, _plain(advice))
    if len({(a.module, a.dimension) for a in advice}) < len(advice):
        found.problems.append("two advices on one size")
    found.problems += [f"{a} is no larger" for a in _plain(advice) if a[2] >= a[3]]
    inputs = {a.dimension: a.padded for a in advice if a.dimension in ("batch", "sequence")}
    model = kind()
    try:
        resize(model, advice)
        padded = record(
            model,
            folder / f"padded-{worthwhile}",
            inputs.get("batch", ROWS),
            inputs.get("sequence", STEPS),
        )
    except (RuntimeError, ValueError, TypeError, AssertionError) as error:
        found.problems.append(f"{type(error).__name__}: {error}")
        return found
    again, _ = advise_shapes(padded, Wanted("fp16", worthwhile=worthwhile))
    found.again = [a for a in _plain(again) if a[1] != "batch"]
    if found.again and not worthwhile:
        found.problems.append("the padded model gets advice again")
    return found


def _plain(advice: tuple[ShapeAdvice, ...]) -> list[tuple[str, str, int, int]]:
    return [(a.module, a.dimension, a.size, a.padded) for a in advice]
