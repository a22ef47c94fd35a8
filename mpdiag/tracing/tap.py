"""One tap on what a thread runs: its operations, and torch's functions, shown to a listener.

A listener runs what it is shown and returns the result. ``attach`` puts a tap at the *bottom* of the
thread's stack of modes: a user's own mode, entered before or after, can be left as if the tap were not
there, and where one rewrites operations (FP16 emulation), the tap shows those that really run. As a
context a tap lies above the modes that are there already.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode


class OperationListener(Protocol):
    """Is shown operations below autograd."""

    def run(self, func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation; ``types`` are those of the tensors that it is given."""


class FunctionListener(Protocol):
    """Is shown calls of torch's functions."""

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a function."""


class _Stack(NamedTuple):
    """A thread's stack of modes of one kind."""

    depth: Callable[[], int]
    at: Callable[[int], Any]
    pop: Callable[[], Any]
    push: Callable[[Any], None]

    def modes(self) -> list[Any]:
        """The modes, the lowest first."""
        return [self.at(i) for i in range(self.depth())]

    def put_under(self, mode: Any, above: list[Any]) -> None:
        """Put a mode under those at the top."""
        for _ in above:
            self.pop()
        for one in (mode, *above):
            self.push(one)

    def take_off(self, mode: Any) -> None:
        """Take a mode off, wherever it lies."""
        modes = self.modes()
        if mode not in modes:
            return
        above = modes[modes.index(mode) + 1 :]
        for _ in (mode, *above):
            self.pop()
        for one in above:
            self.push(one)


_OPERATIONS = _Stack(
    torch._C._len_torch_dispatch_stack,
    torch._C._get_dispatch_stack_at,
    lambda: torch._C._pop_torch_dispatch_stack(None),
    torch._C._push_on_torch_dispatch_stack,
)
_FUNCTIONS = _Stack(
    torch._C._len_torch_function_stack,
    torch._C._get_function_stack_at,
    torch._C._pop_torch_function_stack,
    torch._C._push_on_torch_function_stack,
)


class OperationTap(TorchDispatchMode):
    """Shows each operation of a thread to a listener, but none that stands for a graph."""

    supports_higher_order_operators = True

    def __init__(self, listener: OperationListener) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.listener = listener

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """See ``TorchDispatchMode``."""
        if isinstance(func, torch._ops.HigherOrderOperator):
            return func(*args, **(kwargs or {}))
        return self.listener.run(func, types, args, kwargs or {})

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let ``torch.compile`` work below: what is compiled stays so, and ``fullgraph`` no error."""
        return True

    def attach(self) -> bool:
        """Lie under all modes of this thread; False where a compiler traces (its modes stay alone)."""
        modes = _OPERATIONS.modes()
        if self in modes:
            return True
        if any(getattr(mode, "_mode_key", None) is not None for mode in modes):
            return False
        _OPERATIONS.put_under(self, modes)
        return True

    def detach(self) -> None:
        """Leave this thread's stack."""
        _OPERATIONS.take_off(self)


class FunctionTap(TorchFunctionMode):
    """Shows each call of a function of torch to a listener."""

    def __init__(self, listener: FunctionListener) -> None:
        super().__init__()
        self.listener = listener

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """See ``TorchFunctionMode``."""
        return self.listener.call(func, args, kwargs or {})

    @property
    def is_attached(self) -> bool:
        """Whether it is on this thread's stack."""
        return self in _FUNCTIONS.modes()

    @property
    def is_topmost(self) -> bool:
        """Whether it is the first to be shown a call."""
        depth = _FUNCTIONS.depth()
        return depth > 0 and _FUNCTIONS.at(depth - 1) is self

    def attach(self) -> None:
        """Lie under all modes of this thread but the default device, which torch keeps at the bottom."""
        modes = _FUNCTIONS.modes()
        if self not in modes:
            default = getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)
            _FUNCTIONS.put_under(self, [mode for mode in modes if mode is not default])

    def detach(self) -> None:
        """Leave this thread's stack."""
        _FUNCTIONS.take_off(self)
