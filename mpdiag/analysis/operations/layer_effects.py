"""What rounding a layer's output to a format did to a recorded step, by its operations' effects.

The recorder measures what rounding an operation's operands and results does (``step_effects.py``). The
output of a layer is the result of one operation and an operand of others. Rounding the output alone does
no more than rounding all that one of them reads and stores, so the smaller effect is taken: that of the
operation that makes it, or those of all that read it. What only moves values has no effect of its own
and is looked through.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from mpdiag.analysis.operations.gradient_rules import GRADIENT, MOVES, effect, matters
from mpdiag.analysis.operations.graph import StepGraph, split, stored_low
from mpdiag.analysis.operations.loss_change import NO_CURVE, LossCurve
from mpdiag.analysis.operations.rules import OperationFinding, called
from mpdiag.numerics.autocast_lists import MOVES as MOVERS
from mpdiag.numerics.formats import FP8_E4M3, HALVES, FloatFormat
from mpdiag.numerics.histograms import ExponentHistogram
from mpdiag.plan import Fp32Choice
from mpdiag.runs.operations import NONE, Operation

OF_END = 0.25
"""Change of the loss, beside the loss at the end of the training, from which a format is too coarse.

For FP8 by itself, for 16 bits where gradients and steps feel it, too. Set by the open sets: see
studies/cases/README.md.
"""
STILL_FALLS = 0.25
"""Share of the loss's fall that may follow the step in which FP8 was measured."""
_DEPTH = 6
"""Operations without an effect of their own that are looked through, one after another."""


class Rounded(NamedTuple):
    """What rounding operations did to a step, as it was measured: alone, or with others of a group.

    Attributes:
        gradients: ‖Δg‖ / ‖g‖; infinite where the step no longer ran to finite values.
        loss: |ΔL|; infinite there, too.
    """

    gradients: float
    loss: float


Effects = frozenset[Rounded]


@dataclass(frozen=True, eq=False)
class LayerEffects:
    """The effects of rounding layers' outputs, and the gradients with respect to them.

    Attributes:
        graph: The last recorded step that shows any; None where none does.
    """

    graph: StepGraph | None

    @classmethod
    def of(cls, graphs: Sequence[StepGraph], target: FloatFormat) -> "LayerEffects":
        """From the last of some recorded steps in which roundings to a format were measured."""
        showing = (g for g in reversed(graphs) if any(effect(op, target) for op in g.operations))
        return cls(next(showing, None))

    def of_layer(self, name: str, target: FloatFormat) -> Effects | None:
        """Their sum bounds the effect of rounding a layer ("" is the model); None if unmeasured."""
        if self.graph is None:
            return None
        found: set[Rounded] = set()
        made = self.made(name)
        for op in made:
            sides = [self._making(op, target, _DEPTH), self._reading(op, target, _DEPTH)]
            known = [s for s in sides if s is not None]
            if not known:
                return None
            found |= min(known, key=_size)
        return frozenset(found) if made else None

    def makers(self, name: str) -> list[Operation]:
        """The operations that computed a layer's output: what only moves values is looked through."""
        return [m for op in self.made(name) for m in self._computing(op, _DEPTH)]

    def made(self, name: str) -> list[Operation]:
        """The operations whose results leave a layer."""
        return [op for op in self._inside.get(name, ()) if self._leaves(op, name)]

    @cached_property
    def _inside(self) -> Mapping[str, Sequence[Operation]]:
        """The forward operations in each layer, and in the layers inside it."""
        found: dict[str, list[Operation]] = defaultdict(list)
        for op in self.graph.operations if self.graph else ():
            if op.node or op.module is None or not any(t.counted for t in op.outputs):
                continue
            parts = op.module.split(".") if op.module else []
            for n in range(len(parts) + 1):
                found[".".join(parts[:n])].append(op)
        return found

    def _leaves(self, op: Operation, name: str) -> bool:
        assert self.graph is not None
        readers = self.graph.readers.get(op.index, [])
        return not readers or any(not within(r.module, name) for r in readers)

    def _computing(self, op: Operation, depth: int) -> Iterator[Operation]:
        before = self._before(op) if op.op in MOVERS and depth else []
        if not before:
            yield op
        for one in before:
            yield from self._computing(one, depth - 1)

    def _before(self, op: Operation) -> list[Operation]:
        assert self.graph is not None
        return [self.graph.operations[t.producer] for t in op.inputs if t.producer != NONE]

    def _making(self, op: Operation, target: FloatFormat, depth: int) -> Effects | None:
        own = _own(op, target)
        if own is not None or op.op not in MOVERS or not depth:
            return own
        found: set[Rounded] = set()
        for one in self._before(op):
            part = self._making(one, target, depth - 1)
            if part is None:
                return None
            found |= part
        return frozenset(found) or None

    def _reading(self, op: Operation, target: FloatFormat, depth: int) -> Effects | None:
        assert self.graph is not None
        found: set[Rounded] = set()
        readers = self.graph.readers.get(op.index, [])
        for reader in readers:
            part = _own(reader, target)
            if part is None and reader.op in MOVERS and depth:
                part = self._reading(reader, target, depth - 1)
            if part is None:
                return None
            found |= part
        return frozenset(found) if readers else None


def _own(op: Operation, target: FloatFormat) -> Effects | None:
    measured = None if op.op in MOVERS else effect(op, target)
    return None if measured is None else frozenset({Rounded(*measured)})


def _size(effects: Iterable[Rounded]) -> tuple[float, float]:
    effects = list(effects)
    return sum(e.loss for e in effects), sum(e.gradients for e in effects)


def within(module: str | None, name: str) -> bool:
    """Whether an operation of a module belongs to a layer, or to one inside it."""
    return module is not None and (not name or module == name or module.startswith(f"{name}."))


@dataclass(frozen=True, eq=False)
class LayerEvidence:
    """What a recording shows of rounding layers to formats.

    Attributes:
        effects: By the format's name.
        kept: What the plan keeps in FP32, and what findings are about, as (operation, module); a whole
            module has the operation "".
        curve: The losses of the training.
        last: The last recorded step with operations; None where none was.
    """

    effects: Mapping[str, LayerEffects] = field(default_factory=dict)
    kept: frozenset[tuple[str, str]] = frozenset()
    curve: LossCurve = NO_CURVE
    last: StepGraph | None = None

    def of_the_loss(self, name: str) -> Sequence[ExponentHistogram]:
        """The loss's own gradients with respect to a layer's output, where other passes hide them.

        A loss may be made of derivatives, as one of a differential equation is. Their backward passes go
        through the same layers, and a layer's histogram of gradients holds both: the loss's own may be
        smaller by any factor. Empty where there is one backward pass alone, or nothing was recorded.
        """
        graph = self.last
        if graph is None or not graph.loss_change.among_others:
            return ()
        found = (graph.loss_change.gradient(op) for op in self._seen.made(name))
        return [t.histogram for t in found if t is not None and t.counted]

    @cached_property
    def _seen(self) -> LayerEffects:
        return LayerEffects(self.last)

    def of(self, name: str, target: FloatFormat) -> Effects | None:
        """As ``LayerEffects.of_layer``; None of a format that was not measured.

        FP8 counts as measured only where most of what the loss falls by it had fallen by then: a step in
        the middle does not show what a fine fit at the end bears.
        """
        effects = self.effects.get(target.name)
        if effects is None or (target.needs_tensor_scale and not self._fell_before(effects.graph)):
            return None
        return effects.of_layer(name, target)

    def _fell_before(self, graph: StepGraph | None) -> bool:
        after = None if graph is None else self.curve.fall_after(graph.operations[0].step)
        return after is None or after <= STILL_FALLS

    def keeper(self, name: str) -> str:
        """Why the plan keeps a layer's output in FP32, as a clause; "" where it does not.

        It keeps an operation that computes the output, or one whose result the output is as wide as.
        """
        for layers, widened in self._kept_tensors:
            for op in layers.makers(name):
                if self._is_kept(op):
                    return f"the plan keeps its {called(op)} in FP32"
            outputs = (t.tensor for op in layers.made(name) for t in op.outputs)
            if not widened.isdisjoint(outputs):
                return "it reads FP32 values, because the plan keeps an operation before it in FP32"
        return ""

    def _is_kept(self, op: Operation) -> bool:
        whole = any(not o and within(op.module, m) for o, m in self.kept)
        return whole or (called(op), op.module or "") in self.kept

    @cached_property
    def _kept_tensors(self) -> list[tuple[LayerEffects, frozenset[int]]]:
        """Recorded steps, and the tensors of each that are FP32 by the plan's choices alone."""
        steps = {e.graph.operations[0].step: e for e in self.effects.values() if e.graph}
        if self.last is not None:
            steps[self.last.operations[0].step] = self._seen
        found = []
        for layers in steps.values():
            graph = layers.graph
            assert graph is not None
            fp32 = frozenset(o.index for o in graph.operations if not o.node and self._is_kept(o))
            low = stored_low(graph, policy=True)
            kept = stored_low(graph, policy=True, fp32=fp32)
            found.append(
                (layers, frozenset(t for t, is_low in low.items() if is_low and not kept[t]))
            )
        return found

    def step(self) -> int | None:
        """The step that was run again; None where none was."""
        steps = [e.graph.operations[0].step for e in self.effects.values() if e.graph is not None]
        return max(steps, default=None)

    def harmful(self, chosen: Iterable[tuple[FloatFormat, Effects]]) -> bool:
        """Whether roundings that are all applied at once do more than a training bears.

        Errors of gradients add as independent ones do; changes of the loss add up whole. What an effect
        was measured for together counts once. The loss at the end of the training must be left, too:
        what a format adds to one step's it adds to each, and a fine fit is lost. Of 16 bits that counts
        where the gradients and the steps feel it, of FP8 always.
        """
        effects = {(fmt.name, e) for fmt, part in chosen for e in part}
        coarse = sum(e.loss for name, e in effects if name == FP8_E4M3.name)
        gradients = math.hypot(*(e.gradients for _, e in effects))
        if not math.isfinite(gradients):
            return True
        step, loss = self.step(), sum(e.loss for _, e in effects)
        moves, start, end = self.curve.movement(step or 0), self.curve.start, self.curve.end
        if moves is None or start is None or end is None:
            return gradients >= GRADIENT
        felt = gradients >= GRADIENT and loss >= MOVES * moves
        return (
            matters(gradients, loss / moves, loss / start)
            or (loss if felt else coarse) >= OF_END * end
        )


def layer_evidence(
    recorded: Sequence[Operation],
    kept: Iterable[Fp32Choice],
    curve: LossCurve,
    findings: Iterable[OperationFinding] = (),
) -> LayerEvidence:
    """From the operations of a recording, the plan's choices and all findings about operations.

    A finding that the plan need not act on, as the operation reads FP32 there, still says that a format
    does not hold its result.
    """
    graphs = sorted(split(recorded, curve), key=lambda g: g.operations[0].step)
    choices = {("" if c.evidence.get("type") else c.op, c.module) for c in kept}
    return LayerEvidence(
        {fmt.name: LayerEffects.of(graphs, fmt) for fmt in (*HALVES, FP8_E4M3)},
        frozenset(choices.union((f.op, f.module or "") for f in findings)),
        curve,
        graphs[-1] if graphs else None,
    )
