"""Find what trains: the models and optimizers of an unmodified script.

torch's global hooks show when a module is called by the script itself and when an optimizer steps;
the optimizers' base class shows when one is made. Models are then found among all living objects:
a *root* is a module that holds parameters of an optimizer and is no other module's child. Wrappers
(DDP, ``torch.compile``) are looked through, so that names are those of the plain model.
"""

import functools
import gc
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import FrameType, ModuleType
from typing import Any, Protocol

import torch
from torch import nn
from torch.autograd.function import FunctionCtx
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from mpdiag.tracing.dispatch import in_backward, is_dynamo_tracing, is_traced
from mpdiag.tracing.uncompiled import (
    apart,
    compiler_looks_on,
    constant_when_traced,
    hide,
    unseen,
    watch_calls,
)

MAX_MODELS = 32
"""Models adopted in one process; a search that makes hundreds must not keep them all alive."""
_PATIENCE = 3  # calls of a module, with gradients there, until a loop is taken to have no optimizer
_SAMPLE = 64  # parameters, and values of each, that show whether a loop changes weights itself
_MAX_HELD = 64  # larger containers are not searched for models


_tracing: list[Callable[[], None]] = []
"""Called as a compiler traces a module's call."""


def _look_while_tracing() -> None:
    for call in _tracing:
        call()


constant_when_traced(_look_while_tracing)


@dataclass(frozen=True, eq=False)
class Root:
    """A model that trains.

    Attributes:
        model: The model itself.
        wrapper: What the script calls: DDP or a compiled module around it, or the model.
    """

    model: nn.Module
    wrapper: nn.Module


@dataclass(frozen=True, eq=False)
class Discovered:
    """Something new that trains.

    Attributes:
        roots: Models.
        optimizers: Optimizers.
        called: The module being called, if any.
        missed: Updates that were seen before it was known that they were a training's.
    """

    roots: tuple[Root, ...]
    optimizers: tuple[Optimizer, ...]
    called: nn.Module | None
    missed: int = 0


class Listener(Protocol):
    """What a discovery reports to."""

    def found(self, found: Discovered) -> None:
        """Something new is about to train."""

    def made(self, optimizer: Optimizer) -> None:
        """An optimizer is being made; its parameters are there."""

    def called(self, module: nn.Module, args: Any) -> Any:
        """The script calls a module of a known model itself; returns other arguments, or None.

        In a backward pass too, where checkpointing calls again what it called in the forward pass.
        """

    def trouble(self, error: Exception) -> None:
        """The search for models failed."""


class _CallDepth(threading.local):
    """How deep in modules' calls a thread is."""

    depth = 0


class Discovery:
    """Watches a process for training.

    A loop without an optimizer is known by what it does: it changes weights, which have gradients, or
    changes them again and again. Calls of a model before its optimizer is made (a check of shapes, a
    warm-up) do not.

    Args:
        listener: What the discovery reports to.
        patient: Whether gradients alone never make a loop one that trains, however often they come.
        early: Whether to look for the models of an optimizer at the first call without gradients, too.
    """

    def __init__(self, listener: Listener, *, patient: bool = False, early: bool = False) -> None:
        self._listener = listener
        self._patient = patient
        self._early = early
        self._calls = _CallDepth()
        self._known: dict[int, nn.Module] = {}  # every module of the roots, kept alive
        self._roots = 0
        self._optimizers: dict[int, Optimizer] = {}
        self._fresh: list[weakref.ref[Optimizer]] = []  # made, and not yet looked at
        self._alone: weakref.WeakKeyDictionary[nn.Module, _Watched] = weakref.WeakKeyDictionary()
        self._handles: list[Any] = []
        self._make = Optimizer.__init__

    def attach(self) -> None:
        """Place the hooks on modules and optimizers."""
        self._handles = [
            *watch_calls(self._before_forward, self._after_forward),
            register_optimizer_step_pre_hook(self.stepping),
        ]
        if not self._patient:
            _tracing.append(self.tracing)  # a training cannot begin there: its graphs are cast
        make, fresh, listener = self._make, self._fresh, self._listener

        @functools.wraps(make)
        def made(optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
            make(optimizer, *args, **kwargs)
            fresh.append(weakref.ref(optimizer))
            listener.made(optimizer)

        Optimizer.__init__ = made  # type: ignore[assignment, method-assign]

    def detach(self) -> None:
        """Remove the hooks; a second call does nothing."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        _tracing.clear()
        self._watch_none()
        Optimizer.__init__ = self._make  # type: ignore[method-assign]

    # -- hooks -------------------------------------------------------------------------------------

    def _before_forward(self, module: nn.Module, args: Any) -> Any:
        if is_traced():
            if is_dynamo_tracing():
                _look_while_tracing()
            return None
        if compiler_looks_on():
            return unseen(self._called, module, args)
        return self._called(module, args)

    def _called(self, module: nn.Module, args: Any) -> Any:
        self._calls.depth += 1
        if self._calls.depth > 1 or in_transform():
            return None
        known = id(module) in self._known
        looking = (self._fresh or not known) and not in_backward()
        if looking and (
            torch.is_grad_enabled() or (self._fresh and (self._early or _in_function()))
        ):
            self._guarded(self._look_from, module)
            known = id(module) in self._known
        return self._listener.called(module, args) if known else None

    hide(_before_forward)

    def _after_forward(self, _module: nn.Module, _args: Any, _output: Any) -> None:
        if is_traced():
            return
        self._calls.depth = max(0, self._calls.depth - 1)

    hide(_after_forward)

    def stepping(self, optimizer: Optimizer, *_call: Any) -> None:
        """An optimizer is about to step: look for its models, unless it is known."""
        apart(self._step_begins, optimizer)

    def _step_begins(self, optimizer: Optimizer) -> None:
        if id(optimizer) not in self._optimizers:
            self._guarded(self._look, [optimizer], None)

    def computing(self) -> None:
        """The script computes with a parameter outside its modules: look at what was made since."""
        if torch.is_grad_enabled() and not in_backward() and not in_transform():
            self.tracing()

    def _guarded(self, look: Any, *args: Any) -> None:
        try:
            with torch._C.DisableTorchFunctionSubclass():
                look(*args)
        except Exception as error:  # noqa: BLE001 - the script goes on
            self._listener.trouble(error)

    def tracing(self) -> None:
        """The compiler traces a call of a module: look for what was made, before that is compiled."""
        made = [optimizer for one in self._fresh if (optimizer := one()) is not None]
        if made:
            self._fresh.clear()
            self._guarded(self._look, [o for o in made if id(o) not in self._optimizers], None)

    # -- looking -----------------------------------------------------------------------------------

    def _look_from(self, module: nn.Module) -> None:
        """Look for models when the script calls a module with gradients on."""
        trains = any(self._early or p.requires_grad for p in module.parameters())
        if id(module) not in self._known and not trains:
            return
        if not self._fresh and self._roots:
            return
        if self._fresh:
            gc.collect()  # what a script has dropped, but not yet lost, does not train any more
        made = [optimizer for one in self._fresh if (optimizer := one()) is not None]
        self._fresh.clear()
        optimizers = [o for o in made if id(o) not in self._optimizers]
        if optimizers:
            self._look(optimizers, module)
        if id(module) in self._known or self._roots:
            return
        watched = self._alone.get(module)
        if watched is None:
            watched = self._alone[module] = _Watched(_sample(module))
            watched.listen(module)
        if watched.trains(module, gradients_suffice=not self._patient):
            self._look([], module, max(watched.changes, watched.gradients))

    def _look(self, optimizers: list[Optimizer], called: nn.Module | None, missed: int = 0) -> None:
        """Find the models of some optimizers, or, without any, the one that is called."""
        optimizers = [o for o in optimizers if not _wraps(o)]
        wanted = {
            id(p)
            for o in optimizers
            for g in o.param_groups
            for p in g["params"]
            if p.requires_grad
        }
        if not optimizers and called is not None:
            wanted = {id(p) for p in called.parameters() if p.requires_grad}
        tops = [m for m in top_modules() if id(m) not in self._known]
        roots = tuple(_chosen(tops, wanted, called))[: MAX_MODELS - self._roots]
        if self._roots >= MAX_MODELS or not (optimizers or roots):
            return
        if roots:
            self._roots += len(roots)
            self._watch_none()
        self._optimizers.update((id(o), o) for o in optimizers)
        for root in roots:
            self._known.update((id(m), m) for m in root.wrapper.modules())
        self._listener.found(Discovered(roots, tuple(optimizers), called, missed))

    def _watch_none(self) -> None:
        """Take our hooks off the parameters of modules that were watched."""
        for watched in self._alone.values():
            watched.ignore()
        self._alone.clear()


@dataclass(eq=False)
class _Watched:
    """A module that no known optimizer steps: what its calls have shown.

    Attributes:
        weights: A sample of its weights at the last call.
        changes: How many calls found them changed.
        gradients: How many calls found gradients, or that some had arrived since the last one.
        arrived: Whether some have, also if they are cleared already.
    """

    weights: list[torch.Tensor]
    changes: int = 0
    gradients: int = 0
    arrived: bool = False
    handles: list[Any] = field(default_factory=list)

    def listen(self, module: nn.Module) -> None:
        """Note gradients that arrive; of many parameters, at some."""
        leaves = [p for p in module.parameters() if p.requires_grad and p.is_leaf]

        def note(_parameter: torch.Tensor) -> None:
            self.arrived = True

        self.handles = [
            p.register_post_accumulate_grad_hook(note)
            for p in leaves[:: max(1, len(leaves) // _SAMPLE)]
        ]

    def ignore(self) -> None:
        """Note none any more."""
        for handle in self.handles:
            handle.remove()

    def trains(self, module: nn.Module, *, gradients_suffice: bool) -> bool:
        """Whether a loop without an optimizer is at work, as this call shows."""
        gradients = self.arrived or any(p.grad is not None for p in module.parameters())
        self.arrived = False
        now = _sample(module)
        changed = not all(map(torch.equal, now, self.weights)) or len(now) != len(self.weights)
        self.weights = now
        self.changes += changed
        self.gradients += gradients
        if self.changes > 1 or (self.changes and gradients):
            return True
        return gradients_suffice and self.gradients >= _PATIENCE


def _sample(module: nn.Module) -> list[torch.Tensor]:
    """Copies of some values of some parameters, on their devices."""
    plain = [
        p.detach()
        for p in module.parameters()
        if p.requires_grad
        and type(p.data) is torch.Tensor
        and p.layout == torch.strided
        and not p.is_meta
        and p.numel() > 0
    ]
    chosen = plain[:: max(1, len(plain) // _SAMPLE)]
    return [p[(0,) * (p.dim() - 1)][:_SAMPLE].clone() if p.dim() else p.clone() for p in chosen]


def _in_function() -> bool:
    """Whether an ``autograd.Function`` of the script is computed, which switches gradients off."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        names = frame.f_code.co_varnames[: frame.f_code.co_argcount]
        if names and isinstance(frame.f_locals.get(names[0]), FunctionCtx):
            return True
        frame = frame.f_back
    return False


def in_transform() -> bool:
    """Whether ``torch.func`` is at work, which calls modules with other parameters than theirs."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def _wraps(optimizer: Optimizer) -> bool:
    """Whether an optimizer only passes on to another (Accelerate's, Lightning's)."""
    held = vars(optimizer).values()
    return any(isinstance(o, Optimizer) and o is not optimizer for o in held)


def top_modules() -> list[nn.Module]:
    """Every living module that is no other's child."""
    # ``type`` and not ``isinstance``, which would wake lazy proxies.
    living = [m for m in gc.get_objects() if issubclass(type(m), nn.Module)]
    inside = {id(child) for m in living for child in _children(m)}
    return [m for m in living if id(m) not in inside and "_modules" in vars(m)]


def _children(module: nn.Module) -> Iterable[nn.Module]:
    held = vars(module).get("_modules")  # missing while a module is being made
    return [c for c in held.values() if c is not None] if isinstance(held, dict) else []


def _chosen(tops: list[nn.Module], wanted: set[int], called: nn.Module | None) -> list[Root]:
    """Roots that hold what is wanted: the one being called first, then those that hold most."""
    owned = {}
    for top in tops:
        mine = {id(p) for p in top.parameters()} & wanted
        if mine:
            owned[top] = mine

    def order(top: nn.Module) -> tuple[bool, int]:
        calls = called is not None and any(m is called for m in top.modules())
        return not calls, -len(owned[top])

    covered: set[int] = set()
    roots = []
    for top in sorted(owned, key=order):
        if owned[top] - covered:
            covered |= owned[top]
            roots.append(Root(unwrapped(top), top))
    return roots


def unwrapped(module: nn.Module) -> nn.Module:
    """A model without DDP and ``torch.compile`` around it."""
    while True:
        inner: Any = None
        if isinstance(module, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
            inner = module.module
        elif "_orig_mod" in vars(module).get("_modules", {}):
            inner = module._orig_mod
        if not isinstance(inner, nn.Module):
            return module
        module = inner


def script_names(things: Sequence[Sequence[Any]]) -> list[str]:
    """Names of the variables that hold some objects: the script's globals first, then locals.

    An object held as an attribute (``self.generator``) gets the attribute's name, one in a dictionary
    its key.

    Args:
        things: Sequences of objects; a variable may hold any object of a sequence (a model, or a
            wrapper around it).

    Returns:
        A name for each sequence, all different; the class's name in lower case if there is no variable.
    """
    owner = {id(one): i for i, group in enumerate(things) for one in group}
    found: dict[int, str] = {}
    main = vars(sys.modules["__main__"])
    scopes: list[Mapping[str, Any]] = [main, *(f.f_locals for f in _frames())]
    for scope in scopes:
        for name, value in [*scope.items()]:
            if name.startswith("_"):
                continue
            for full, held in _held(name, value, owner):
                found.setdefault(owner[id(held)], full)
    names: list[str] = []
    for i, group in enumerate(things):
        base = name = found.get(i, type(group[0]).__name__.lower())
        number = 2
        while name in names:
            name, number = f"{base}{number}", number + 1
        names.append(name)
    return names


def _frames() -> Iterator[FrameType]:
    """Frames of the script and its libraries, the outermost first, without torch's and ours."""
    frames = []
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        module = str(frame.f_globals.get("__name__", ""))
        if module.partition(".")[0] not in ("torch", "mpdiag", "typer", "click"):
            frames.append(frame)
        frame = frame.f_back
    yield from reversed(frames)


def _held(name: str, value: Any, owner: Mapping[int, int]) -> Iterator[tuple[str, Any]]:
    """What a variable holds, with names: the object itself, its entries or its attributes."""
    if id(value) in owner:
        yield name, value
        return
    yield from _entries(name, value, owner)
    if issubclass(type(value), (type, ModuleType)):
        return
    try:
        attributes = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return
    if type(attributes) is dict and "_modules" not in attributes:
        for key, held in [*attributes.items()]:
            if id(held) in owner:
                yield key.lstrip("_"), held
            else:
                yield from _entries(key, held, owner)


def _entries(name: str, value: Any, owner: Mapping[int, int]) -> Iterator[tuple[str, Any]]:
    # ``type`` instead of ``isinstance``, which would resolve lazy proxies.
    kind = type(value)
    if kind not in (dict, list, tuple) or len(value) > _MAX_HELD:
        return
    if kind is dict:
        yield from ((k, v) for k, v in value.items() if isinstance(k, str) and id(v) in owner)
    else:
        yield from ((f"{name}{i}", v) for i, v in enumerate(value) if id(v) in owner)
