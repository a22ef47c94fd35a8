"""When an operation may be emulated in one piece, and how torch is told.

One product of a model, with its gradients, is some fifteen small operations, most of them views and
casts. In a small model intercepting one costs more than running it. ``linear`` and ``attention`` write
products out in one function each, with the same roundings.

They do so where nothing else looks on: another dispatch mode, hooks on saved tensors, functorch and
forward-mode differentiation find the operations as they are.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.autograd import forward_ad
from torch.library import Library

from mpdiag.emulation.mode import alone
from mpdiag.tracing.uncompiled import CAN_HIDE, compiler_looks_on, hide, unseen

if TYPE_CHECKING:
    from collections.abc import Callable

    from mpdiag.emulation.mode import Emulation

_KINDS = frozenset({Tensor, torch.nn.Parameter})
_KEY = "AutogradCPU"
_held: weakref.WeakValueDictionary[tuple[str, ...], Library] = weakref.WeakValueDictionary()


def emulating(*tensors: Tensor) -> Emulation | None:
    """The emulation in which an operation on these may run in one piece, if there is one."""
    mode = alone()
    if mode is None or forward_ad._current_level >= 0:
        return None
    device = tensors[0].device
    for t in tensors:
        if type(t) not in _KINDS or t.dtype is not torch.float16 or t.device != device:
            return None
    return None if torch._C._are_functorch_transforms_active() else mode


def wants_gradient(*tensors: Tensor | None) -> bool:
    """Whether a function of these must be differentiable."""
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


def is_watched() -> bool:
    """Whether a backward pass must be made of operations: others see them, or differentiate them."""
    return torch.is_grad_enabled() or (torch._C._len_torch_dispatch_stack() > 0 and alone() is None)


def held(**pieces: Callable[..., Tensor | None]) -> Library:
    """What holds the kernels of some operations of torch's that are made of others.

    They are in force, in the whole process, until nobody holds it.

    Args:
        pieces: By the operation's name, what takes its arguments and returns its result, or None
            where torch must make it.
    """
    key = tuple(pieces)
    library = _held.get(key)
    if library is None:
        library = _held[key] = Library("aten", "IMPL")
        for name, piece in pieces.items():
            library.impl(name, _kernel(name, piece), _KEY)
    return library


def _kernel(name: str, piece: Callable[..., Tensor | None]) -> Callable[..., Any]:
    # Not ``decompose``, as with an LSTM.
    torchs = getattr(torch.ops.aten, name).default._op_dk
    composite = torch._C.DispatchKey.CompositeImplicitAutograd

    def kernel(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        # What all models of the process compute in FP32 comes here, too.
        if x.dtype is torch.float16:
            made = (
                unseen(piece, x, *args, **kwargs)
                if compiler_looks_on()
                else piece(x, *args, **kwargs)
            )
            if made is not None:
                return made
        return torchs(composite, x, *args, **kwargs)

    hide(kernel)
    return kernel if CAN_HIDE else _disable_dynamo(kernel)
