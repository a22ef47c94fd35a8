"""Methods that no compiler looks into: steps and casts hold state that a graph cannot."""

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, ContextDecorator
from typing import Any, TypeVar

import torch
from torch._compile import _disable_dynamo
from torch.nn.modules import module as torch_modules
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.hooks import RemovableHandle

from mpdiag.tracing.dispatch import (
    compiler_in_use,
    in_backward,
    is_dynamo_tracing,
    is_hidden,
    is_traced,
)

try:
    from torch._C._dynamo.eval_frame import (
        _FrameAction,
        _FrameExecStrategy,
        get_eval_frame_callback,
        set_code_exec_strategy,
        set_eval_frame,
    )

    CAN_HIDE = True
    """Whether ``compiler_looks_on`` costs next to nothing in this version of torch."""
except ImportError:  # torch 2.6
    from torch._C._dynamo.eval_frame import set_eval_frame, skip_code  # type: ignore[attr-defined]

    CAN_HIDE = False

Class = TypeVar("Class", bound=type)

_waiting: list[tuple[type, str]] = []


def uncompiled(*names: str) -> Callable[[Class], Class]:
    """Decorate a class whose methods of these names run as they are where a compiler meets them.

    ``torch.compiler.disable`` does it, applied by ``prepare``: loading the compiler takes seconds.
    What they call may be compiled for itself.
    """

    def note(owner: Class) -> Class:
        _waiting.extend((owner, name) for name in names)
        return owner

    return note


def prepare() -> None:
    """Make the methods ready to be met by a compiler; a second call does nothing."""
    while _waiting:
        owner, name = _waiting.pop()
        setattr(owner, name, torch.compiler.disable(vars(owner)[name]))


@uncompiled("__enter__", "__exit__")
class UncompiledContext(ContextDecorator):
    """A context whose beginning and end no compiler looks into; what runs inside may be compiled.

    Args:
        make: Makes the context, anew each time it is entered.
    """

    def __init__(self, make: Callable[[], AbstractContextManager[object]]) -> None:
        self._make = make
        self._entered: list[AbstractContextManager[object]] = []

    def __enter__(self) -> None:
        """Enter it."""
        context = self._make()
        context.__enter__()
        self._entered.append(context)

    def __exit__(self, *exception: object) -> bool | None:
        """Leave it."""
        leave: Callable[..., bool | None] = self._entered.pop().__exit__
        return leave(*exception)


_SETTINGS = (
    ("torch._dynamo.config", "skip_nnmodule_hook_guards", False),  # hooks tell graphs apart
    # As it is where nothing is compiled.
    ("torch._functorch.config", "backward_pass_autocast", "off"),
    # Its keys know no operation policy.
    ("torch._functorch.config", "enable_autograd_cache", False),
)
_WITH_REGIONS = ("torch._dynamo.config", "optimize_ddp", False)  # DDP's buckets would cut them
_changed: list[tuple[Any, str, Any]] = []  # as it was, the oldest first
_holders = [0]


def hold_compiler(*, regions: bool) -> Callable[[], None]:
    """Let graphs follow the casts of a training; those made before or after are made anew.

    Args:
        regions: Whether parts of a graph are cast otherwise than the rest.

    Returns:
        What ends it. The compiler's settings are as before once all trainings have ended.
    """
    wanted = (*_SETTINGS, _WITH_REGIONS) if regions else _SETTINGS
    found = [(sys.modules[m], n, v) for m, n, v in wanted if hasattr(sys.modules.get(m), n)]
    _holders[0] += 1
    _changed.extend((config, name, getattr(config, name)) for config, name, _ in found)
    _set_all(found)

    def release() -> None:
        _holders[0] -= 1
        if not _holders[0]:
            _set_all([_changed.pop() for _ in range(len(_changed))])

    return release


def _set_all(settings: list[tuple[Any, str, Any]]) -> None:
    for config, name, value in settings:
        setattr(config, name, value)
    if compiler_in_use():
        _reset.append(True)
        torch._dynamo.reset()


_reset: list[bool] = []  # torch forgets with its graphs that the compiler was used


def lets_compile() -> bool:
    """Whether what is compiled in this process stays so under a dispatch mode: not in torch 2.6."""
    able = hasattr(TorchDispatchMode, "ignore_compile_internals")
    return able or not (compiler_in_use() or _reset)


def hide(function: Any) -> None:
    """Let a compiler that meets a function run it as it is; what it calls is not hidden."""
    if CAN_HIDE:
        strategy = _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.DEFAULT)
        set_code_exec_strategy(function.__code__, strategy)
    else:
        skip_code(function.__code__)


def constant_when_traced(function: Any) -> None:
    """Let the compiler call a function as it traces, and take what it returns for a constant."""
    function._dynamo_marked_constant = True


# Where the compiler meets one of these that nothing traced calls, it would compile it, and it says yes.
for _question in (in_backward, is_traced, is_dynamo_tracing, is_hidden):
    hide(_question)


def compiler_looks_on() -> bool:
    """Whether Python functions that are called now would be compiled; call it in hidden ones."""
    if CAN_HIDE:
        return get_eval_frame_callback() is not None
    callback = set_eval_frame(None)
    set_eval_frame(callback)
    return callable(callback)


hide(compiler_looks_on)


@_disable_dynamo
def unseen(function: Callable[..., Any], *args: Any) -> Any:
    """Call a function so that no compiler sees it, nor what it calls."""
    return function(*args)


def apart(function: Callable[..., Any], *args: Any) -> Any:
    """Call a function that no compiler can trace, out of a hook that it may meet.

    Where the caller is being compiled, its graph ends here and goes on after the call. If it must be
    one graph (``fullgraph``), the function is not called.
    """
    if torch.compiler.is_dynamo_compiling():
        return unseen(function, *args) if _graph_may_end() else None
    return unseen(function, *args) if compiler_looks_on() else function(*args)


hide(apart)


def _graph_may_end() -> bool:
    """Asked while a compiler traces: whether it may cut what it traces into several graphs."""
    tracer = sys.modules["torch._dynamo.symbolic_convert"].InstructionTranslator.current_tx()
    return not (tracer.one_graph or getattr(tracer, "error_on_graph_break", False))  # torch 2.9


constant_when_traced(_graph_may_end)


def watch_calls(before: Callable[..., Any], after: Callable[..., Any]) -> list[RemovableHandle]:
    """Place a pair of torch's global hooks on the calls of all modules.

    torch warns of global hooks whenever a compiled model is called, and a script may make warnings
    errors. The warning is of their calls for the wrapper around the model, which ours expect; it goes
    on to come for hooks of others.
    """
    if hasattr(torch_modules, "_has_any_global_hook"):  # torch 2.11
        torch_modules._has_any_global_hook = _others_have_hooks
    return [
        torch_modules.register_module_forward_pre_hook(before),
        torch_modules.register_module_forward_hook(after, always_call=True),
    ]


def _others_have_hooks() -> bool:
    kinds = ("backward_pre", "backward", "forward_pre", "forward")
    placed = [hook for k in kinds for hook in vars(torch_modules)[f"_global_{k}_hooks"].values()]
    return not all(str(getattr(hook, "__module__", "")).startswith("mpdiag.") for hook in placed)


constant_when_traced(_others_have_hooks)


def keeps_casts_apart() -> bool:
    """Whether parts of a graph can be cast otherwise than the rest, backward, too: not in torch 2.6."""
    return hasattr(sys.modules.get("torch._functorch.config", torch), "backward_pass_autocast")


class Eagerly:
    """A context in which nothing is compiled, and what is compiled runs as if it were not.

    Attributes:
        matters: Whether what runs inside would have been compiled.
    """

    def __enter__(self) -> None:
        self._callback = set_eval_frame(None)
        self.matters = callable(self._callback)
        self._stance = torch.compiler.set_stance("force_eager")

    def __exit__(self, *_exception: object) -> None:
        self._stance.__exit__(None, None, None)
        set_eval_frame(self._callback)


hide(Eagerly.__enter__)
hide(Eagerly.__exit__)
