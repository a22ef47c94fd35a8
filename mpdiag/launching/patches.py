"""Functions of torch that a training step of a script calls, replaced and restored.

A script written for FP32 calls ``loss.backward()``, which scales nothing; one written for mixed
precision has an ``autocast`` and a ``GradScaler`` of its own, which must not scale a second time.

Its hooks on gradients are called with true ones. During a backward pass gradients carry the loss scale.
A hook that clips, logs or normalises must not see it: each hook gets FP32 tensors without the scale (in
native FP16 they would underflow again), and what it returns is scaled. A hook that replaces a gradient
could hide that it was not finite, so that is noted before.

An ``autograd.Function`` of the script is code of the same kind: its ``backward`` may clip or normalise.
"""

import copy
import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch._guards import TracingContext
from torch.autograd import function as autograd_function
from torch.nn.modules import module as torch_modules

from mpdiag.launching.gradient_calls import GradientCalls
from mpdiag.tracing.precision import HALF
from mpdiag.tracing.uncompiled import prepare
from mpdiag.training.casting import widened
from mpdiag.training.judgement import divided
from mpdiag.training.weights.given import same

_INSIDE = ("torch", "mpdiag")


class Patches:
    """The functions that are replaced; ``detach`` restores them."""

    def __init__(
        self,
        handler: GradientCalls,
        compiled: Callable[[Callable[..., Any], Callable[..., Any]], Any],
    ) -> None:
        self._handler, self._compiled = handler, compiled
        self._undo: list[tuple[Any, str, Any]] = []

    def attach(self) -> None:
        """Replace the functions listed below."""
        autograd, scaler, autocast = torch.autograd, torch.amp.GradScaler, torch.amp.autocast
        self._replace(autograd, "backward", self._backward, _outside_graphs)
        self._replace(autograd, "grad", self._grad, _outside_graphs)
        self._replace(torch.Tensor, "retain_grad", self._retain_grad)
        self._replace_hooks()
        self._replace(scaler, "__init__", self._make_scaler)
        self._replace(scaler, "get_scale", self._get_scale)
        self._replace(autocast, "__init__", self._make_autocast)
        self._replace(autocast, "__enter__", self._enter_autocast)
        self._replace(autocast, "__exit__", self._leave_autocast)
        self._replace(torch.amp, "_enter_autocast", self._enter_in_graph)
        self._replace(torch, "compile", self._compile)
        self._replace(torch.nn.Module, "__getstate__", _without_our_hooks)

    def detach(self) -> None:
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

    def _replace_hooks(self) -> None:
        """Replace every function of torch by which a script registers a hook on gradients."""
        replace, state = self._replace, self._handler
        tensor, module, everywhere = torch.Tensor, torch.nn.Module, torch_modules

        def registering(at: int, replaces: int | None) -> Callable[..., Any]:
            return functools.partial(_register, state, at, replaces)

        replace(tensor, "register_hook", registering(1, 0))
        replace(tensor, "register_post_accumulate_grad_hook", functools.partial(_accumulate, state))
        replace(torch.autograd.graph, "register_multi_grad_hook", registering(1, None))
        for name in ("full_backward_hook", "full_backward_pre_hook", "backward_hook"):
            replace(module, f"register_{name}", registering(1, 1))
            replace(everywhere, f"register_module_{name}", registering(0, 1))
        model = torch.nn.parallel.DistributedDataParallel
        replace(model, "register_comm_hook", functools.partial(_reduce, state))
        # ``Node.register_hook`` and ``register_prehook`` of every kind of node end here.
        mixin, node = autograd_function._HookMixin, autograd_function.BackwardCFunction
        replace(mixin, "_register_hook", registering(1, 0), staticmethod)
        replace(node, "apply", functools.partial(call_backward, state))
        if "apply_boxed" in vars(node):
            replace(node, "apply_boxed", functools.partial(call_backward, state))
        replace(node, "saved_tensors", functools.partial(_saved_tensors, state), property)

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

    def _enter_in_graph(
        self, plain: Any, device: str, dtype: Any, enabled: bool, cache: Any
    ) -> Any:
        """In compiled code, too, an autocast of the script leaves the casts as they are."""
        if not enabled:
            return plain(device, dtype, enabled, cache)
        self._handler.note_own_precision("an autocast")
        now = torch.is_autocast_enabled(device), torch.is_autocast_cache_enabled()
        return plain(device, torch.get_autocast_dtype(device), *now)

    def _leave_autocast(self, plain: Any, context: Any, *exception: Any) -> Any:
        self._handler.casts_off -= getattr(context, "_mpdiag_off", False)
        transparent = getattr(context, "_mpdiag_transparent", False)
        return False if transparent else plain(context, *exception)

    def _compile(self, plain: Any, model: Any = None, **options: Any) -> Any:
        """Let the graph of a compiled function end where it calls a model: casts begin there."""
        inside = from_inside(3)
        prepare()

        def compiled(what: Any) -> Any:
            in_place = getattr(what, "__name__", "") == "_call_impl"  # called by model.compile()
            if not in_place and (inside or isinstance(what, torch.nn.Module)):
                return plain(what, **options)
            made = plain(what, **(options | {"fullgraph": False}))
            if in_place:
                return made

            @functools.wraps(what)
            def call(*args: Any, **kwargs: Any) -> Any:
                eager = functools.partial(what, *args, **kwargs)
                return self._compiled(eager, functools.partial(made, *args, **kwargs))

            return call

        return compiled if model is None else compiled(model)


def _outside_graphs(replaced: Callable[..., Any]) -> Callable[..., Any]:
    """No compiler looks in, and a compiler's own passes are left alone."""
    outside: Callable[..., Any] = _disable_dynamo(replaced)
    plain = replaced.__wrapped__  # type: ignore[attr-defined]

    @functools.wraps(replaced)
    def call(*args: Any, **kwargs: Any) -> Any:
        return (outside if TracingContext.try_get() is None else plain)(*args, **kwargs)

    return call


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
    return str(getattr(hook, "__module__", "")).partition(".")[0] == "mpdiag"


# -- hooks on gradients ----------------------------------------------------------------------------


class TrueGradients:
    """A hook of the script that is called with true gradients.

    Pickled, it is the hook alone: a saved model must not need this package.

    Args:
        hook: The script's.
        state: The backward pass.
        replaces: Which of its arguments the hook's result replaces; None: its result has no effect.
    """

    def __init__(
        self, hook: Callable[..., Any], state: GradientCalls, replaces: int | None = 0
    ) -> None:
        functools.update_wrapper(self, hook)
        self.hook, self.state, self.replaces = hook, state, replaces

    def __call__(self, *args: Any) -> Any:
        """Call the hook; its result is scaled as what it replaces."""
        state = self.state
        if not state.computing_gradients:
            return self.hook(*args)
        scale = state.loss_scale
        shown = _shown(args, scale)
        versions = [t._version for t in _tensors(shown)]
        with state.script_code():
            result = self.hook(*shown)
        at = self.replaces
        replaced = [] if at is None else _tensors(shown[at])
        pairs = list(zip(_tensors(args), _tensors(shown), versions, strict=True))
        differs = [(s, _differs(o, s, version, scale)) for o, s, version in pairs]
        if any(known and all(s is not r for r in replaced) for s, known in differs):
            state.refuse("a hook changes a gradient in place; let it return the new one")
        edited = any(known is not False and s is r for s, known in differs for r in replaced)
        if at is None or (result is None and not edited):
            return result
        for gradient in _tensors(args[at]):
            state.note_seen(gradient)
        return _scaled(shown[at] if result is None else result, args[at], shown[at], scale)

    def __reduce__(self) -> Any:
        """Pickled, a hook is what the script wrote."""
        return copy.copy, (self.hook,)

    def __deepcopy__(self, memo: dict[int, Any]) -> "TrueGradients":
        """A copied model's hook sees true gradients, too."""
        return type(self)(copy.deepcopy(self.hook, memo), self.state, self.replaces)


class TrueAccumulated(TrueGradients):
    """A hook that runs after a gradient was added to a parameter, and looks at ``parameter.grad``."""

    def __call__(self, parameter: Tensor) -> Any:
        """Call the hook while ``parameter.grad`` carries no scale."""
        state = self.state
        if not state.computing_gradients:
            return self.hook(parameter)
        if parameter.grad is not None:
            state.note_seen(parameter.grad)
        if state.accumulated_are_true:
            with state.script_code():
                return self.hook(parameter)
        scale = state.loss_scale
        _multiply(parameter, 1.0 / scale)
        try:
            with state.script_code():
                return self.hook(parameter)
        finally:
            _multiply(parameter, scale)


def _register(
    state: GradientCalls, at: int, replaces: int | None, plain: Any, *args: Any, **options: Any
) -> Any:
    """Register a hook, which is the argument ``at``."""
    if from_inside(3):
        return plain(*args, **options)
    if len(args) > at:
        hook = TrueGradients(args[at], state, replaces)
        return plain(*args[:at], hook, *args[at + 1 :], **options)
    name = "fn" if "fn" in options else "hook"
    options[name] = TrueGradients(options[name], state, replaces)
    return plain(*args, **options)


def _accumulate(state: GradientCalls, plain: Any, tensor: Tensor, hook: Any) -> Any:
    return plain(tensor, hook if from_inside(3) else TrueAccumulated(hook, state))


def _reduce(state: GradientCalls, plain: Any, model: Any, own_state: Any, hook: Any) -> Any:
    """Refuse a DDP hook of the script's own: without the scale, sums in FP16 would underflow."""
    if not _is_inside(str(getattr(hook, "__module__", ""))):
        state.refuse(
            "its own communication hook would reduce gradients multiplied by the loss scale; use "
            "one of torch.distributed.algorithms.ddp_comm_hooks"
        )
    return plain(model, own_state, hook)


def _saved_tensors(state: GradientCalls, plain: Any, node: Any) -> Any:
    """What such a function has saved is FP32 there, as its gradients are."""
    saved = plain.__get__(node)
    return widened(saved) if state.in_script_code else saved


def call_backward(state: GradientCalls, plain: Any, node: Any, *args: Any) -> Any:
    """Run the ``backward`` of a script's ``autograd.Function`` on true gradients.

    One that runs under an autocast of its own (``custom_bwd``) keeps the scale: products inside it are
    in half precision, where an unscaled gradient would underflow.
    """
    ours = not state.computing_gradients or _is_inside(node._forward_cls.__module__)
    if ours or getattr(node, "_fwd_used_autocast", False):
        return plain(node, *args)
    scale = state.loss_scale
    shown = _shown(args, scale)
    try:
        with state.script_code():
            result = plain(node, *shown)
    except (RuntimeError, TypeError, ValueError, AssertionError):
        if not any(t.dtype in HALF for t in _tensors(args)):
            raise
        result = plain(node, *args)  # raises again, unless it was about the dtype
        state.note_half_only(node._forward_cls.__qualname__)
        return result
    for gradient in _tensors(args):
        state.note_seen(gradient)
    handed = {id(s): a for s, a in zip(_tensors(shown), _tensors(args), strict=True)}

    def passed_on(r: Tensor) -> Tensor:
        if id(r) in handed:
            return _kept(handed[id(r)], r, scale)
        return r if scale == 1.0 else r * scale

    return _map(passed_on, result)


# -- tensors in tuples -----------------------------------------------------------------------------


def _map(function: Callable[[Tensor], Any], value: Any) -> Any:
    """Apply a function to every tensor of nested tuples and lists; all else stays."""
    if isinstance(value, Tensor):
        return function(value)
    if type(value) in (tuple, list):
        return type(value)(_map(function, v) for v in value)
    return value


def _tensors(value: Any) -> list[Tensor]:
    found: list[Tensor] = []
    _map(found.append, value)
    return found


def _shown(args: Any, scale: float) -> Any:
    """Gradients as a script may see them: FP32 at least, without the scale."""
    return _map(lambda gradient: _true(gradient, scale), args)


def _true(gradient: Tensor, scale: float) -> Tensor:
    if not (gradient.is_floating_point() or gradient.is_complex()):
        return gradient
    wide = gradient.float() if gradient.dtype in HALF else gradient
    return wide if scale == 1.0 else divided(wide, scale)


def _differs(original: Tensor, shown: Tensor, version: int | None, scale: float) -> bool | None:
    """Whether code of the script has changed a gradient that it was shown a copy of; None: not known.

    Version counters show too little: ``.data`` and fused kernels do not raise them. A CPU compares the
    values; elsewhere the answer would have to be waited for.
    """
    if shown is original:
        return False
    if shown.shape != original.shape or (version is not None and shown._version != version):
        return True
    if shown.device.type != "cpu":
        return None
    now, then = _stored(shown), _stored(_true(original, scale))
    return not torch.equal(now, then) and not bool(same(now, then).all())


def _kept(original: Tensor, shown: Tensor, scale: float) -> Tensor:
    """A gradient that code of the script was shown: what it wrote is scaled, the rest keeps its bits."""
    if _differs(original, shown, None, scale) is False:
        return original
    scaled = (shown if scale == 1.0 else shown * scale).to(original.dtype)
    if shown.layout != torch.strided or shown.shape != original.shape:
        return scaled
    return torch.where(same(shown, _true(original, scale)), original, scaled)


def _stored(tensor: Tensor) -> Tensor:
    return tensor._values() if tensor.is_sparse else tensor


def _scaled(result: Any, original: Any, shown: Any, scale: float) -> Any:
    """What a hook returned, at the scale and in the dtype of what it replaces."""
    if isinstance(result, Tensor):
        if isinstance(original, (tuple, list)):  # a hook may return the only one without its tuple
            original = next(iter(original), None)
            shown = next(iter(shown), None)
        if result is shown and isinstance(original, Tensor):
            return _kept(original, result, scale)
        wide = result if scale == 1.0 else result * scale
        return wide.to(original.dtype) if isinstance(original, Tensor) else wide
    if isinstance(result, (tuple, list)):
        alike = isinstance(original, (tuple, list)) and len(original) == len(result)
        pairs = zip(original, shown, strict=True) if alike else [(None, None)] * len(result)
        return type(result)(
            _scaled(r, o, s, scale) for r, (o, s) in zip(result, pairs, strict=True)
        )
    return result


@torch.no_grad()
def _multiply(parameter: Tensor, factor: float) -> None:
    if parameter.grad is not None and factor != 1.0:
        parameter.grad.mul_(factor)


def from_inside(depth: int) -> bool:
    """Whether torch or this package makes a call; ``torch.cuda.amp.autocast`` counts as the script's."""
    frame = sys._getframe(depth)
    while str(frame.f_globals.get("__name__", "")).endswith(".amp.autocast_mode"):
        if frame.f_back is None:
            return False
        frame = frame.f_back
    return _is_inside(str(frame.f_globals.get("__name__", "")))


def _is_inside(module: str) -> bool:
    return module.partition(".")[0] in _INSIDE
