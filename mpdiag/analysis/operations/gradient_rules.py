"""Rules by what rounding an operation did to a step's loss and gradients, where that was measured.

In the recorded steps after the first the recorder runs the step again with one operation of one module
rounded, forward and backward, and all else in FP32 (``emulation/step_effects.py``). So an operation
needs no rule of its own: products before an inverse, differences of their results, recurrences and what
is raised to powers all show.

* ``gradient-error``: rounding an operation changes the gradients by a third and more, and the loss by
  more than twice what a step does, and by more than a fiftieth of the loss at the start. The last tells
  what matters from what is left of a loss that has already become small. The gradients' error times the
  loss's counts, too: an error of a direction matters as far as what it leads to.
  Or that the loss or a gradient is no longer finite, where the operation is a product.
* ``harmless``: what another rule suspects hardly changes the gradients, and the loss by less than a step
  does: the suspicion is dropped. Gradients alone do not show it: one of many parameters, with a large
  gradient, hides the others'.

Errors matter more as a loss falls, and differ between batches. So any step from ``SETTLED`` on decides.
If none was measured, the last step decides; for ``harmless`` it always does.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

from mpdiag.analysis.operations import rules
from mpdiag.analysis.operations.graph import StepGraph, StoredStep
from mpdiag.analysis.operations.sources import is_product
from mpdiag.display.wording import percent
from mpdiag.numerics.formats import FloatFormat
from mpdiag.runs.operations import Operation

Site = tuple[str, str | None, str]
"""An operation's name as a plan has it, its module and its line."""

GRADIENT = 0.3
"""Change of the gradients, as a share of them, from which it counts."""
MOVES = 2.0
"""Change of the loss from which it counts, beside what a step changes."""
OF_START = 0.02
"""The same beside the loss at the start.

Trainings in FP16, each against its FP32 twin (``studies/cases``, all open sets): see
studies/cases/README.md. Between a hundredth and a twentieth all answer alike.
"""
BLOWN_UP = 100
"""How many times of anything are still told apart."""
TOGETHER = 0.1
"""The change of the gradients, as a share of them, times that of the loss, as a share of its start."""
HARMLESS = 0.1
"""Change of the gradients up to which a suspicion of another rule is dropped."""
UNFELT = 1.0
"""Change of the loss, beside what a step changes, up to which it is: as ``rules.FELT``."""
SETTLED = 100
"""The first step that shows what training has made of the weights."""
SUSPICIONS = frozenset({"imprecise", "indistinct", "cancellation", "swallowed"})
"""Rules about precision that go by an operation alone, and not by what follows from it."""


def gradient_errors(step: StoredStep) -> Iterator[rules.OperationFinding]:
    """Find operations whose rounding changes gradients and loss by more than a training bears."""
    target, curve = step.target, step.graph.loss_change.curve
    for op in step.forward:
        measured = effect(op, target)
        if measured is None or not _is_rounded(op, step.low):
            continue
        error, change = measured
        if error == math.inf:
            if is_product(op):  # of others the rules of range and of division tell more
                yield _breaking(op, target)
            continue
        moves, start = curve.movement(op.step), curve.start
        if moves is None or start is None:
            continue
        beside, of_start = change / moves, change / start
        if not matters(error, beside, of_start):
            continue
        yield rules.finding_of(
            op,
            "gradient-error",
            f"its rounding to {target.label} changes the gradients by {_times(error)}, and the loss "
            f"{_number(beside)} times as much as a training step does",
            "",
            "rounding errors drive the training",
            {"gradient_error": error, "loss_moves": beside, "of_first_loss": of_start},
        )


def matters(error: float, beside: float, of_start: float) -> bool:
    """Whether a training does not bear a rounding.

    Args:
        error: Change of the gradients, as a share of them.
        beside: Change of the loss, beside what a step changes.
        of_start: Change of the loss, beside the loss at the start.
    """
    felt = error >= GRADIENT and beside >= MOVES and of_start >= OF_START
    return felt and error * of_start >= TOGETHER


def _breaking(op: Operation, target: FloatFormat) -> rules.OperationFinding:
    return rules.finding_of(
        op,
        "gradient-error",
        f"its rounding to {target.label} makes the loss or a gradient infinite or NaN, although its "
        "values stay in range",
        "",
        "the training stops, or skips these steps",
        {"breaks": True},
    )


def effect(op: Operation, target: FloatFormat) -> tuple[float, float] | None:
    """‖Δg‖ / ‖g‖ and |ΔL| of rounding an operation of a module.

    Infinite where the loss or a gradient was; None where nothing was measured.
    """
    if op.facts.get(f"step_breaks_{target.name}"):
        return math.inf, math.inf
    error = op.facts.get(f"gradient_error_{target.name}")
    change = op.facts.get(f"loss_change_{target.name}")
    return None if error is None or change is None else (float(error), float(change))


def harmless(graphs: Sequence[StepGraph], target: FloatFormat) -> frozenset[Site]:
    """The operations whose rounding hardly changed gradients and loss in the last step that shows it."""
    last: dict[Site, bool] = {}
    for graph in graphs:
        now: dict[Site, bool] = {}
        for op in graph.operations:
            measured = None if op.node else effect(op, target)
            if measured is not None:
                now[site(op)] = now.get(site(op), True) and _is_harmless(graph, op, *measured)
        last |= now
    return frozenset(s for s, is_so in last.items() if is_so)


def _is_harmless(graph: StepGraph, op: Operation, error: float, change: float) -> bool:
    moves = graph.loss_change.curve.movement(op.step)
    return error < HARMLESS and (moves is None or change < UNFELT * moves)


def decisive(graphs: Sequence[StepGraph], target: FloatFormat) -> dict[Site, frozenset[int]]:
    """The steps by which each operation's effect is judged, as places among some steps.

    Those from ``SETTLED`` on in which it was measured, or the last one where none was.
    """
    measured: dict[Site, dict[int, int]] = {}
    for number, graph in enumerate(graphs):
        for op in graph.operations:
            if not op.node and effect(op, target) is not None:
                measured.setdefault(site(op), {})[number] = op.step
    return {
        place: frozenset(n for n, step in steps.items() if step >= SETTLED)
        or frozenset({max(steps)})
        for place, steps in measured.items()
    }


def run_again(operations: Iterable[Operation], target: FloatFormat) -> tuple[int, ...] | None:
    """The recorded steps of which the effect of rounding was measured; None where none was recorded."""
    steps = [(op.step, effect(op, target) is not None) for op in operations]
    return tuple(sorted({step for step, measured in steps if measured})) if steps else None


def site(op: Operation) -> Site:
    """An operation's place as findings state it."""
    return rules.called(op), op.module, op.where


def _is_rounded(op: Operation, low: Mapping[int, bool]) -> bool:
    """Whether an operation reads or stores the format under the policy."""
    if any(low[t.tensor] for t in op.outputs):
        return True
    return not is_product(op) and any(low[t.tensor] for t in op.inputs)


def _times(error: float) -> str:
    return percent(error, 0) if error < 2 else f"{_number(error)} times their size"


def _number(times: float) -> str:
    return f"{times:.2g}" if times < BLOWN_UP else f"more than {BLOWN_UP:,}"
