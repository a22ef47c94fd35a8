"""Functions of torch that a training step of a script calls, replaced and restored.

A script written for FP32 calls ``loss.backward()``, which scales nothing; one written for mixed
precision has an ``autocast`` and a ``GradScaler`` of its own, which must not scale a second time.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch

from mpdiag.launching.patching.gradient_hooks import from_inside, replace_hooks

if TYPE_CHECKING:
    from collections.abc import Callable

    from mpdiag.launching.patching.gradient_calls import GradientCalls

_OURS = "mpdiag"


class Patches:
    """The functions that are replaced; ``release`` restores them."""

    def __init__(self, handler: GradientCalls) -> None:
        self._handler = handler
        self._undo: list[tuple[Any, str, Any]] = []

    def install(self) -> None:
        """Replace the functions listed below."""
        self._backward()
        self._hooks()
        self._scaler()
        self._autocast()
        self._replace(torch, "compile", self._compile)
        self._replace(torch.nn.Module, "__getstate__", _without_our_hooks)

    def release(self) -> None:
        """Restore them; a second call does nothing."""
        while self._undo:
            owner, name, before = self._undo.pop()
            if before is None:  # it was inherited
                delattr(owner, name)
            else:
                setattr(owner, name, before)

    def _replace(
        self,
        owner: Any,
        name: str,
        make: Callable[[Any], Any],
        kind: Callable[[Any], Any] | None = None,
    ) -> None:
        """Replace a function; ``kind`` is what a class holds it as, if not as a method."""
        before = getattr(owner, name)
        self._undo.append((owner, name, vars(owner).get(name)))
        made = functools.wraps(before)(make(before))
        setattr(owner, name, made if kind is None else kind(made))

    # -- gradients ---------------------------------------------------------------------------------

    def _backward(self) -> None:
        handler = self._handler

        def backward(plain: Any) -> Any:
            def call(tensors: Any, grad_tensors: Any = None, *rest: Any, **options: Any) -> None:
                names = ("retain_graph", "create_graph", "grad_variables", "inputs")
                options |= dict(zip(names, rest, strict=False))
                if grad_tensors is not None:
                    options["grad_tensors"] = grad_tensors
                given = (tensors,) if isinstance(tensors, torch.Tensor) else tuple(tensors)
                handler.backward(plain, given, options)

            return call

        def grad(plain: Any) -> Any:
            def call(outputs: Any, inputs: Any, *rest: Any, **options: Any) -> Any:
                names = ("grad_outputs", "retain_graph", "create_graph", "only_inputs")
                options |= dict(zip(names, rest, strict=False)) | {"inputs": inputs}
                if len(rest) > len(names):
                    return plain(outputs, inputs, *rest)
                given = (outputs,) if isinstance(outputs, torch.Tensor) else tuple(outputs)
                return handler.grad(plain, given, options)

            return call

        self._replace(torch.autograd, "backward", backward)
        self._replace(torch.autograd, "grad", grad)

    def _hooks(self) -> None:
        """Let hooks of the script see true gradients, and tensors retain them."""
        handler = self._handler

        def retain(plain: Any) -> Any:
            def call(tensor: torch.Tensor) -> Any:
                handler.retain(tensor)
                return plain(tensor)

            return call

        self._replace(torch.Tensor, "retain_grad", retain)
        replace_hooks(self._replace, handler)

    # -- a script's own mixed precision ------------------------------------------------------------

    def _scaler(self) -> None:
        """Switch a GradScaler off; its ``get_scale`` returns the plan's scale."""
        handler = self._handler

        def make(plain: Any) -> Any:
            def init(scaler: Any, *args: Any, **kwargs: Any) -> None:
                enabled = args[5] if len(args) > 5 else kwargs.pop("enabled", True)
                plain(scaler, *args[:5], **kwargs, enabled=False)
                scaler._mpdiag_asked = bool(enabled)
                if enabled:
                    handler.note_own_precision("a GradScaler")

            return init

        def get_scale(plain: Any) -> Any:
            def call(scaler: Any) -> float:
                if getattr(scaler, "_mpdiag_asked", False):
                    return handler.loss_scale
                return float(plain(scaler))

            return call

        self._replace(torch.amp.GradScaler, "__init__", make)
        self._replace(torch.amp.GradScaler, "get_scale", get_scale)

    def _autocast(self) -> None:
        """Switch the script's autocasts off; a context with ``enabled=False`` keeps its effect."""
        handler = self._handler

        def make(plain: Any) -> Any:
            def init(context: Any, *args: Any, **kwargs: Any) -> None:
                foreign = not from_inside(2)
                plain(context, *args, **kwargs)
                context._mpdiag_off = foreign and not context._enabled
                if foreign and context._enabled:
                    context._mpdiag_transparent = True
                    handler.note_own_precision("an autocast")

            return init

        def enter(plain: Any) -> Any:
            def call(context: Any) -> Any:
                handler.casts_off += getattr(context, "_mpdiag_off", False)
                return context if getattr(context, "_mpdiag_transparent", False) else plain(context)

            return call

        def leave(plain: Any) -> Any:
            def call(context: Any, *exception: Any) -> Any:
                handler.casts_off -= getattr(context, "_mpdiag_off", False)
                transparent = getattr(context, "_mpdiag_transparent", False)
                return False if transparent else plain(context, *exception)

            return call

        self._replace(torch.amp.autocast, "__init__", make)
        self._replace(torch.amp.autocast, "__enter__", enter)
        self._replace(torch.amp.autocast, "__exit__", leave)

    def _compile(self, plain: Any) -> Any:
        """Leave functions uncompiled: in compiled code no operation can be cast from outside."""
        handler = self._handler

        def compile_(model: Any = None, **options: Any) -> Any:
            def compiled(what: Any) -> Any:
                if inside or isinstance(what, torch.nn.Module):
                    return plain(what, **options)
                handler.note_own_precision("a compiled function")
                return what

            inside = from_inside(2)
            return compiled if model is None else compiled(model)

        return compile_


def _without_our_hooks(plain: Any) -> Any:
    """A module's state as it is saved or copied, without hooks that only this package can load."""

    def getstate(module: torch.nn.Module) -> dict[str, Any]:
        state: dict[str, Any] = plain(module)
        for name in ("_forward_pre_hooks", "_forward_hooks"):
            ours = {k for k, hook in state.get(name, {}).items() if _is_ours(hook)}
            for group in (name, f"{name}_with_kwargs", f"{name}_always_called") if ours else ():
                if group in state:
                    kept = [(k, v) for k, v in state[group].items() if k not in ours]
                    state[group] = type(state[group])(kept)
        return state

    return getstate


def _is_ours(hook: Any) -> bool:
    return str(getattr(hook, "__module__", "")).partition(".")[0] == _OURS
