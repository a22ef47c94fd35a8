"""Trains a case in one arithmetic: the ways that its truth is made of.

Nothing here knows the analyzer or its plans. FP16 and BF16 are emulated (``mpdiag.emulation``: what a
Tensor Core would store, computed in FP32), so that every machine finds the same.
"""

from __future__ import annotations

import dataclasses
import math
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch.utils._pytree import tree_map

from mpdiag.emulation import policy
from mpdiag.emulation.mode import Emulation
from mpdiag.tracing.operation_calls import OUTSIDE, Site, Sites, floats

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

    from cases.case import Case, Training

Operation = tuple[str, str]
"""A module's name, "" outside of all submodules, and an operation of it as a plan names it."""

PERTURBATION = 2.0**-17
"""Relative change of the initial weights that must not matter."""
SMALLEST_SCALE, FIRST_SCALE, GROWTH_INTERVAL = 2.0**-40, 2.0**16, 2000
_GIVES_UP, _HOPELESS = 60, 8
"""Steps skipped in a row that end a training; and losses that are not finite, which no scale mends."""
_LOW = (torch.float16, torch.bfloat16)


class Arithmetic(Protocol):
    """How the passes of a step are computed."""

    def forward(self, step: int) -> AbstractContextManager[None]:
        """Context of a forward pass and its loss."""

    def backward(self) -> AbstractContextManager[None]:
        """Context of a backward pass."""


class Fp32:
    """Plain FP32."""

    @contextmanager
    def forward(self, step: int) -> Iterator[None]:  # noqa: ARG002
        yield

    @contextmanager
    def backward(self) -> Iterator[None]:
        yield


class Autocast:
    """What ``torch.autocast`` does on a GPU, emulated; weights are FP32."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._policy = policy.Policy(dtype)
        self._emulation = Emulation()
        policy.install("cpu")

    @contextmanager
    def forward(self, step: int) -> Iterator[None]:  # noqa: ARG002
        with ExitStack() as stack:
            stack.enter_context(self._emulation)
            stack.enter_context(policy.in_force(self._policy))
            stack.enter_context(torch.autocast("cpu", self._policy.dtype))
            yield

    @contextmanager
    def backward(self) -> Iterator[None]:
        with self._emulation, policy.in_force(self._policy):
            yield


class Observed(Autocast):
    """Autocast in FP16 that notes which operations read or store FP16 in the first steps."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__(torch.float16)
        self._notes = FirstSteps(model)

    @property
    def operations(self) -> list[Operation]:
        """Each once, in the order of the forward pass."""
        return list(self._notes.found)

    @contextmanager
    def forward(self, step: int) -> Iterator[None]:
        with super().forward(step), ExitStack() as stack:
            if step < FirstSteps.COUNT:
                stack.enter_context(self._notes.forward())
            yield


class FirstSteps(Sites):
    """Notes which operations read or store FP16."""

    COUNT = 6

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__(model)
        self.found: dict[Operation, None] = {}

    def forward_operation(self, site: Site, func: Any, args: Any, kwargs: Any) -> Any:
        result = func(*args, **kwargs)
        for x in torch.utils._pytree.tree_leaves((args, kwargs, result)):
            if isinstance(x, torch.Tensor) and x.dtype in _LOW:
                self.found.setdefault(operation_of(site))
        return result


def operation_of(site: Site) -> Operation:
    """The operation a call belongs to."""
    return ("" if site.module == OUTSIDE else site.module, site.op)


class Narrow(Sites):
    """FP32 but for some operations, which read and store FP16, in their backward passes, too."""

    def __init__(self, model: torch.nn.Module, chosen: frozenset[Operation]) -> None:
        super().__init__(model)
        self._chosen = chosen

    def forward(self, step: int = 0) -> AbstractContextManager[None]:  # noqa: ARG002
        return super().forward()

    @contextmanager
    def backward(self) -> Iterator[None]:
        with self:
            yield

    def forward_operation(self, site: Site, func: Any, args: Any, kwargs: Any) -> Any:
        if operation_of(site) in self._chosen:
            return _narrow(func, args, kwargs)
        return func(*args, **kwargs)

    def recomputed_operation(self, site: Site, func: Any, args: Any, kwargs: Any) -> Any:
        return self.forward_operation(site, func, args, kwargs)

    def backward_operation(self, site: Site | None, func: Any, args: Any, kwargs: Any) -> Any:
        if site is not None and operation_of(site) in self._chosen:
            return _narrow(func, args, kwargs)
        return func(*args, **kwargs)


_COMPARISONS = frozenset("ge gt le lt eq ne".split())
"""They convert a number to the dtype of the tensor beside it; ``add`` and its kind do not."""


def _narrow(func: Any, args: Any, kwargs: Any) -> Any:
    """Run one operation on rounded values, and round what it stores."""
    compares = func.overloadpacket.__name__ in _COMPARISONS

    def rounded(x: Any) -> Any:
        if isinstance(x, torch.Tensor) and x.dtype == torch.float32:
            return x.half().float()
        if compares and isinstance(x, float):
            return float(torch.tensor(x).half())
        return x

    if func._schema.is_mutable:  # what it writes to must stay the same tensor
        result = func(*args, **kwargs)
        for x in floats(result):
            x.copy_(x.half())
        return result
    return tree_map(rounded, func(*tree_map(rounded, args), **tree_map(rounded, kwargs)))


@dataclass
class LossScale:
    """A loss scale.

    Attributes:
        scale: The present one.
        dynamic: Halve it at an overflow and double it after many steps without one.
        checks: Skip steps whose gradients are not finite, as a gradient scaler does.
    """

    scale: float = 1.0
    dynamic: bool = False
    checks: bool = True
    _calm: int = 0

    def note(self, *, overflow: bool) -> None:
        """After each step."""
        self._calm = 0 if overflow else self._calm + 1
        if self.dynamic and (overflow or self._calm == GROWTH_INTERVAL):
            self.scale *= 0.5 if overflow else 2.0
            self._calm = 0


def shortened(case: Case, steps: int) -> Case:
    """The first steps of a case."""
    return dataclasses.replace(case, steps=min(steps, case.steps))


class Diverged(Exception):
    """A training did not stay finite."""


def train(
    case: Case,
    seed: int,
    arithmetic: Callable[[Training], Arithmetic] = lambda _: Fp32(),
    scale: LossScale | None = None,
    *,
    perturbed: bool = False,
    fp16_weights: bool = False,
    tick: Callable[[], None] = lambda: None,
) -> float:
    """Train a case once.

    Args:
        case: The case.
        seed: Of its training.
        arithmetic: From the training to the arithmetic of its passes.
        scale: The loss scale; None: 1, and nothing is checked.
        perturbed: Change the initial weights a little.
        fp16_weights: What the optimizer changes is stored in FP16, and so is what is added to it; the
            optimizer's own arithmetic and state are FP32.
        tick: Called before each step; may raise.

    Returns:
        The metric; NaN if the training did not stay finite, or an operation refused the format.
    """
    torch.manual_seed(seed)
    training = case.build(seed)
    weights = [p for p in training.model.parameters() if p.requires_grad]
    if perturbed:
        _perturb(weights, seed)
    stored = _Fp16Weights(_held(training)) if fp16_weights else None
    passes = arithmetic(training)
    skipped = hopeless = 0
    try:
        for step in range(case.steps):
            tick()
            taken, loss = _step(training, passes, step, scale)
            if stored is not None:
                stored.store()
            skipped = 0 if taken else skipped + 1
            hopeless = 0 if math.isfinite(loss) else hopeless + 1
            if skipped > _GIVES_UP or hopeless > _HOPELESS:
                return math.nan
            if scale is not None and scale.scale < SMALLEST_SCALE:
                return math.nan
    except Diverged:
        return math.nan
    except RuntimeError as error:
        if "without overflow" in str(error):  # a constant that the format cannot hold
            return math.nan
        raise
    if not all(bool(p.isfinite().all()) for p in weights):
        return math.nan
    with torch.no_grad():
        metric = float(training.evaluate())
    return metric if math.isfinite(metric) else math.nan


def _step(
    training: Training, passes: Arithmetic, step: int, scale: LossScale | None
) -> tuple[bool, float]:
    """One step; whether it was taken, and its loss."""
    if training.schedule is not None:
        training.schedule(step)
    training.optimizer.zero_grad()
    with passes.forward(step):
        loss = training.loss(step)
    factor = 1.0 if scale is None else scale.scale
    scaled = loss.float() * factor
    with passes.backward():
        scaled.backward()
    held = [p for g in training.optimizer.param_groups for p in g["params"] if p.grad is not None]
    value = float(loss.detach())
    if scale is None:
        if not math.isfinite(value):
            raise Diverged
    elif scale.checks:
        finite = all(bool(_values(p.grad).isfinite().all()) for p in held)
        scale.note(overflow=not finite)
        if not finite:
            return False, value
    for p in held:
        if factor != 1.0:
            p.grad /= factor
    if training.clip_norm is not None:
        torch.nn.utils.clip_grad_norm_(held, training.clip_norm)
    training.optimizer.step()
    return True, value


def _held(training: Training) -> list[torch.nn.Parameter]:
    """The weights that the optimizer changes."""
    return [p for g in training.optimizer.param_groups for p in g["params"] if p.requires_grad]


def _values(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.coalesce().values() if gradient.is_sparse else gradient


def _perturb(weights: list[torch.nn.Parameter], seed: int) -> None:
    noise = torch.Generator().manual_seed(seed + 99_991)
    with torch.no_grad():
        for p in weights:
            p.mul_(1 + PERTURBATION * torch.randn(p.shape, generator=noise))


class _Fp16Weights:
    """Keeps weights at values that FP16 holds: w16 + fp16(change), rounded."""

    def __init__(self, weights: list[torch.nn.Parameter]) -> None:
        self._weights = weights
        with torch.no_grad():
            for p in weights:
                p.copy_(p.half())
        self._before = [p.detach().clone() for p in weights]

    def store(self) -> None:
        """After a step."""
        with torch.no_grad():
            for p, before in zip(self._weights, self._before, strict=True):
                p.copy_((before + (p - before).half()).half())
                before.copy_(p)
