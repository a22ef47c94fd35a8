"""Whether optimizers step the weights that they were given, and what moves that none of them steps.

An optimizer may keep parameters elsewhere than in ``param_groups``: in optimizers inside it, or in a
list of its own. At O2 these are tensors that masters replaced, and its steps train nothing.

Motion does not tell, for a step may rightly move nothing: a warm-up from 0, updates below half an ulp,
gradients that the optimizer adds up itself. Identity does. The first steps of each optimizer are
watched: version counters show what was written, and the list of parameters of each group notes that it
was read, for fused kernels and ``.data`` go round version counters. An optimizer that has moved a
weight is not watched any more.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mpdiag.analysis.findings import Finding, warning
from mpdiag.display.wording import some_of
from mpdiag.errors import UsageError
from mpdiag.tracing.precision import HALF
from mpdiag.training.judgement import any_nonzero
from mpdiag.training.scaling import parameters_of
from mpdiag.training.weights.given import bits_of
from mpdiag.training.weights.masters import Masters
from mpdiag.training.weights.wrapping import Wrapped

UNREAD_STEPS = 4
"""Steps without motion before the warning, for an optimizer that did not look at its weights."""
READ_STEPS = 64
"""The same for one that did: it may add up gradients itself."""
LOOK_EVERY, LOOKS = 200, 4
"""Averages are looked for in the first few of so many steps."""
_DEPTH = 12
"""How deep containers and objects inside an optimizer are looked through."""


class _Parameters(list[Tensor]):
    """A group's parameters, which note that somebody went through them."""

    read = False

    def __iter__(self) -> Iterator[Tensor]:
        self.read = True
        return super().__iter__()

    def __getitem__(self, place: Any) -> Any:
        self.read = True
        return super().__getitem__(place)


class _Group:
    """A group of an optimizer during a step that is watched."""

    def __init__(self, group: dict[str, Any]) -> None:
        self._group = group
        self.parameters: list[Tensor] = group["params"]
        self.trained = [p for p in self.parameters if p.grad is not None]
        self._gradients = [p.grad for p in self.trained]
        self._versions = [p._version for p in self.trained]
        self._listed = group["params"] = _Parameters(self.parameters)

    def put_back(self) -> None:
        """The list of before, with what the step has added."""
        if self._group["params"] is self._listed:
            self.parameters[:] = list.copy(self._listed)
            self._group["params"] = self.parameters

    @property
    def was_read(self) -> bool:
        """Whether the step went through the group's parameters."""
        return self._listed.read

    @property
    def was_written(self) -> bool:
        """Whether a version counter shows it."""
        return any(p._version != v for p, v in zip(self.trained, self._versions, strict=True))

    @property
    def should_move(self) -> bool:
        """Whether learning rate and gradients are not zero; waits for the device."""
        moves = bool(self._group.get("lr", 1.0) != 0)
        return moves and any_nonzero(g for g in self._gradients if g is not None)


@dataclass
class _Still:
    """An optimizer that has moved no weight yet.

    Attributes:
        steps: How often it should have.
        bits: Sums over the bits of its weights after its last step.
    """

    steps: int = 0
    bits: Tensor | None = None


class OptimizerWatch:
    """Watches the first steps of optimizers.

    Args:
        masters: Those of level O2, or none.
        names_of: Names of what the optimizers hold.
        note: Told of an optimizer that moves nothing.
    """

    def __init__(
        self,
        masters: Masters,
        names_of: Callable[[Sequence[Tensor]], list[str]],
        note: Callable[[Finding], None],
    ) -> None:
        self._masters = masters
        self._names_of = names_of
        self._note = note
        self._settled: dict[int, int] = {}  # by id of the optimizer: how many groups it had
        self._still: dict[int, _Still] = {}

    def watching(self, optimizer: Optimizer) -> AbstractContextManager[None]:
        """A step of an optimizer.

        Raises:
            UsageError: If it steps tensors that masters replaced; the model is as before the step.
        """
        if self._settled.get(id(optimizer)) == len(optimizer.param_groups):
            return _NOTHING
        return self._watching(optimizer)

    @contextmanager
    def _watching(self, optimizer: Optimizer) -> Iterator[None]:
        groups = [_Group(group) for group in optimizer.param_groups]
        replaced = self._masters.replaced(p for group in groups for p in group.parameters)
        versions = [p._version for p in replaced]
        written: list[Tensor] = []

        def look() -> None:
            """Before the trainer itself writes to them."""
            self._masters.before_giving = _nothing
            pairs = zip(replaced, versions, strict=True)
            written.extend(p for p, version in pairs if p._version != version)

        self._masters.before_giving = look if replaced else _nothing
        try:
            yield
            self._masters.before_giving()
        finally:
            self._masters.before_giving = _nothing
            for group in groups:
                group.put_back()
        outside = _held_outside(optimizer, replaced) if replaced else []
        self._refuse(optimizer, written or self._idle(groups, outside))
        if any(group.was_written for group in groups):
            if not outside:
                self._settle(optimizer)
        elif any(group.should_move for group in groups):
            read = not outside and any(group.was_read for group in groups)
            self._note_still(optimizer, groups, read=read)

    def closure_evaluated(self, optimizer: Optimizer, *, moved: Callable[[], bool]) -> None:
        """A step has evaluated a closure, which writes to the model itself: only motion is known.

        Args:
            optimizer: What has stepped; its parameters hold gradients.
            moved: Whether any weight is another than before the step.

        Raises:
            UsageError: As for ``watching``.
        """
        if self._settled.get(id(optimizer)) == len(optimizer.param_groups):
            return
        groups = [_Group(group) for group in optimizer.param_groups]
        for group in groups:
            group.put_back()
        if moved():
            self._settle(optimizer)
        elif any(group.should_move for group in groups):
            replaced = self._masters.replaced(p for group in groups for p in group.trained)
            self._refuse(optimizer, _held_outside(optimizer, replaced))
            self._note_still(optimizer, groups, read=True)

    def _idle(self, groups: Sequence[_Group], outside: Sequence[Tensor]) -> list[Tensor]:
        """Those of some parameters that a step should have moved: it left their masters alone."""
        if not outside:
            return []
        left = [g for g in groups if not (g.was_written or g.was_read) and g.should_move]
        kept = set(self._masters.replaced(p for group in left for p in group.trained))
        return [p for p in outside if p in kept]

    def _refuse(self, optimizer: Optimizer, stepped: Sequence[Tensor]) -> None:
        if not stepped:
            return
        self._masters.give_weights(parameters_of(optimizer))
        name = self._names_of([self._masters.master(p) for p in stepped])[0]
        raise UsageError(
            f"{type(optimizer).__name__} updates weight {name!r} itself, and not its FP32 master in "
            "param_groups: at level O2 the model would not train; choose level O1, or an optimizer that "
            "updates what its param_groups hold"
        )

    def _settle(self, optimizer: Optimizer) -> None:
        self._settled[id(optimizer)] = len(optimizer.param_groups)
        self._still.pop(id(optimizer), None)

    def _note_still(self, optimizer: Optimizer, groups: Sequence[_Group], *, read: bool) -> None:
        """Count a step that no version counter shows; what the weights hold may show it."""
        weights = [p for group in groups for p in group.parameters]
        still = self._still.setdefault(id(optimizer), _Still())
        before, still.bits = still.bits, bits_of(weights)
        if still.bits is None or (before is not None and not torch.equal(before, still.bits)):
            self._settle(optimizer)
            return
        still.steps += 1
        if still.steps < (READ_STEPS if read else UNREAD_STEPS):
            return
        self._settle(optimizer)
        if read and all(p.dtype in HALF for p in weights):
            return  # such weights stand still where updates are below half an ulp
        self._note(
            warning(
                code="optimizer-moved-nothing",
                message=(
                    f"{type(optimizer).__name__} has moved no weight in {still.steps} steps, though "
                    "its learning rate and the gradients are not zero"
                ),
                evidence={"optimizer": type(optimizer).__name__, "steps": still.steps},
                fix="construct it from this model's parameters, and check what its step() does",
            )
        )


def _nothing() -> None:
    """Where no step is watched."""


_NOTHING = nullcontext()


def _held_outside(optimizer: Optimizer, wanted: Sequence[Tensor]) -> list[Tensor]:
    """Those of some tensors that an optimizer holds itself or in containers and objects inside it."""
    ids = set(map(id, wanted))
    seen: set[int] = set()
    found: list[Tensor] = []
    level: list[Any] = [vars(optimizer)]
    for _ in range(_DEPTH):
        inside: list[Any] = []
        for value in level:
            if id(value) in seen:
                continue
            seen.add(id(value))
            if id(value) in ids:
                found.append(value)
            elif isinstance(value, Mapping):
                inside += [*value.keys(), *value.values()]
            elif isinstance(value, (list, tuple, set, frozenset)):
                inside += value
            elif not isinstance(value, (Tensor, nn.Module, type, ModuleType, FunctionType)):
                inside.append(getattr(value, "__dict__", ()))
        level = inside
    return found


class AverageWatch:
    """Says once that a loop keeps an average of weights in half precision.

    A momentum encoder inside the model (MoCo, BYOL) is cast with it, and no optimizer holds it, so it
    has no master: rounding swallows the small share of each update that it is given. What is written
    in three steps in a row, and by no optimizer, is taken for one. The watch looks after the first four
    of every 200 steps.

    Args:
        wrapped: Models in half precision, and their optimizers.
        say: Takes the sentence, and the names of the weights.
    """

    def __init__(self, wrapped: Wrapped, say: Callable[[str, list[str]], None]) -> None:
        self._wrapped = wrapped
        self._say: Callable[[str, list[str]], None] | None = say
        self._steps = 0
        self._marks: dict[Tensor, tuple[int, int, int]] = {}  # what each was after the step before
        self._writes: dict[Tensor, int] = {}

    def step_ended(self) -> None:
        """A step is over."""
        place, self._steps = self._steps % LOOK_EVERY, self._steps + 1
        if self._say is None or place >= LOOKS or (place and not self._marks):
            return
        before, self._marks = self._marks, self._look()
        if place == 0:
            self._writes = dict.fromkeys(self._marks, 0)
        else:
            for parameter in self._writes:
                self._writes[parameter] += before.get(parameter) != self._marks.get(parameter)
        found = [p for p, writes in self._writes.items() if writes == LOOKS - 1]
        if found:
            names = self._wrapped.names_of(found)
            half = self._wrapped.precision.format.upper()
            self._say(
                f"the loop writes {some_of(names)} in every step, and no optimizer holds "
                f"{'it' if len(found) == 1 else 'them'}: an average in {half} loses updates below half "
                "an ulp; keep that module in FP32 (fp32_modules), or average a copy.deepcopy of the "
                "model, which is FP32",
                names,
            )
            self._say = None
        if found or place == LOOKS - 1:
            self._marks, self._writes = {}, {}

    def _look(self) -> dict[Tensor, tuple[int, int, int]]:
        """Where each weight is that no optimizer holds, its version, and the sum of its bits."""
        wrapped = self._wrapped
        held = {id(p) for o in wrapped.optimizers for p in parameters_of(o)}
        held |= wrapped.masters.ids()
        free = [p for m in wrapped.models for p in m.parameters() if id(p) not in held]
        found = [p for p in free if p.dtype in HALF]
        bits = bits_of(found) if found else None
        sums = [0] * len(found) if bits is None else bits.tolist()
        return {p: (p.data_ptr(), p._version, n) for p, n in zip(found, sums, strict=True)}
