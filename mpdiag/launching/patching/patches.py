"""Functions of torch that a training step of a script calls, replaced and restored.

A script written for FP32 calls ``loss.backward()``, which scales nothing; one written for mixed
precision has an ``autocast`` and a ``GradScaler`` of its own, which must not scale a second time.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from mpdiag.launching.patching.gradient_hooks import from_inside, replace_hooks

if TYPE_CHECKING:
    from mpdiag.launching.patching.gradient_calls import GradientCalls

_OURS = "mpdiag"


class Patches:
    """The functions that are replaced; ``release`` restores them."""

    def __init__(self, handler: GradientCalls) -> None:
        self._handler = handler
        self._undo: list[tuple[Any, str, Any]] = []

    def install(self) -> None:
        """Replace the functions listed below."""
        autograd, scaler, autocast = torch.autograd, torch.amp.GradScaler, torch.amp.autocast
        self._replace(autograd, "backward", self._backward)
        self._replace(autograd, "grad", self._grad)
        self._replace(torch.Tensor, "retain_grad", self._retain_grad)
        replace_hooks(self._replace, self._handler)
        self._replace(scaler, "__init__", self._make_scaler)
        self._replace(scaler, "get_scale", self._get_scale)
        self._replace(autocast, "__init__", self._make_autocast)
        self._replace(autocast, "__enter__", self._enter_autocast)
        self._replace(autocast, "__exit__", self._leave_autocast)
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
        call: Callable[..., Any],
        kind: Callable[[Any], Any] | None = None,
    ) -> None:
        """Replace a function by one that is given it first.

        ``kind`` is what a class holds it as, if not as a method.
        """
        before = getattr(owner, name)
        self._undo.append((owner, name, vars(owner).get(name)))

        @functools.wraps(before)
        def replaced(*args: Any, **kwargs: Any) -> Any:
            return call(before, *args, **kwargs)

        setattr(owner, name, replaced if kind is None else kind(replaced))

    # -- gradients ---------------------------------------------------------------------------------

    def _backward(
        self, plain: Any, tensors: Any, grad_tensors: Any = None, *rest: Any, **options: Any
    ) -> None:
        names = ("retain_graph", "create_graph", "grad_variables", "inputs")
        options |= dict(zip(names, rest, strict=False))
        if grad_tensors is not None:
            options["grad_tensors"] = grad_tensors
        given = (tensors,) if isinstance(tensors, torch.Tensor) else tuple(tensors)
        self._handler.backward(plain, given, options)

    def _grad(self, plain: Any, outputs: Any, inputs: Any, *rest: Any, **options: Any) -> Any:
        names = ("grad_outputs", "retain_graph", "create_graph", "only_inputs")
        options |= dict(zip(names, rest, strict=False)) | {"inputs": inputs}
        if len(rest) > len(names):
            return plain(outputs, inputs, *rest)
        given = (outputs,) if isinstance(outputs, torch.Tensor) else tuple(outputs)
        return self._handler.grad(plain, given, options)

    def _retain_grad(self, plain: Any, tensor: torch.Tensor) -> Any:
        self._handler.retain(tensor)
        return plain(tensor)

    # -- a script's own mixed precision ------------------------------------------------------------

    def _make_scaler(self, plain: Any, scaler: Any, *args: Any, **kwargs: Any) -> None:
        """Switch a GradScaler off; its ``get_scale`` returns the plan's scale."""
        enabled = args[5] if len(args) > 5 else kwargs.pop("enabled", True)
        plain(scaler, *args[:5], **kwargs, enabled=False)
        scaler._mpdiag_asked = bool(enabled)
        if enabled:
            self._handler.note_own_precision("a GradScaler")

    def _get_scale(self, plain: Any, scaler: Any) -> float:
        if getattr(scaler, "_mpdiag_asked", False):
            return self._handler.loss_scale
        return float(plain(scaler))

    def _make_autocast(self, plain: Any, context: Any, *args: Any, **kwargs: Any) -> None:
        """Switch the script's autocasts off; a context with ``enabled=False`` keeps its effect."""
        foreign = not from_inside(3)
        plain(context, *args, **kwargs)
        context._mpdiag_off = foreign and not context._enabled
        if foreign and context._enabled:
            context._mpdiag_transparent = True
            self._handler.note_own_precision("an autocast")

    def _enter_autocast(self, plain: Any, context: Any) -> Any:
        self._handler.casts_off += getattr(context, "_mpdiag_off", False)
        return context if getattr(context, "_mpdiag_transparent", False) else plain(context)

    def _leave_autocast(self, plain: Any, context: Any, *exception: Any) -> Any:
        self._handler.casts_off -= getattr(context, "_mpdiag_off", False)
        transparent = getattr(context, "_mpdiag_transparent", False)
        return False if transparent else plain(context, *exception)

    def _compile(self, plain: Any, model: Any = None, **options: Any) -> Any:
        """Leave functions uncompiled: in compiled code no operation can be cast from outside."""
        inside = from_inside(3)

        def compiled(what: Any) -> Any:
            if inside or isinstance(what, torch.nn.Module):
                return plain(what, **options)
            self._handler.note_own_precision("a compiled function")
            return what

        return compiled if model is None else compiled(model)


def _without_our_hooks(plain: Any, module: torch.nn.Module) -> dict[str, Any]:
    """A module's state as it is saved or copied, without hooks that only this package can load."""
    state: dict[str, Any] = plain(module)
    for name in ("_forward_pre_hooks", "_forward_hooks"):
        ours = {k for k, hook in state.get(name, {}).items() if _is_ours(hook)}
        for group in (name, f"{name}_with_kwargs", f"{name}_always_called") if ours else ():
            if group in state:
                kept = [(k, v) for k, v in state[group].items() if k not in ours]
                state[group] = type(state[group])(kept)
    return state


def _is_ours(hook: Any) -> bool:
    return str(getattr(hook, "__module__", "")).partition(".")[0] == _OURS
