"""Half-precision tensors whose gradient is FP32, which torch allows no tensor of its own.

Tensors become this by their ``__class__``: a parameter while its gradient has moved to its master, a
tensor inside a graph for which a script retains a gradient without the loss scale.
"""

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from mpdiag.training.judgement import divided

_own: Any = torch._C.TensorBase.grad


class _Held(Tensor):
    """Half precision; ``.grad`` is what a backward pass has left here, or else another tensor's."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    _master: Any
    """Holds the FP32 gradient as its ``grad``."""

    def _gradient(self) -> Tensor | None:
        own: Tensor | None = _own.__get__(self)
        master: Tensor | None = self._master.grad
        return master if own is None else own

    @property
    def grad(self) -> Tensor | None:
        """Its own gradient, or else its master's."""
        return self._gradient()

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        if value is not None and value.dtype == self.dtype and self._master.grad is None:
            _own.__set__(self, value)
            return
        _own.__set__(self, None)
        self._master.grad = None if value is None else value.float()

    @grad.deleter
    def grad(self) -> None:
        self.grad = None


class HeldTensor(_Held):
    """A tensor of a graph that retains an FP32 gradient."""

    def gather_wide(self, scale: float) -> None:
        """Move what a backward pass at this scale has left in half precision; gradients add up."""
        own = own_gradient(self)
        if own is not None:
            gather_gradient(self, divided(own.float(), scale), self._master)


class HeldParameter(_Held, nn.Parameter):
    """A half-precision parameter whose gradient has moved to its master.

    So ``clip_grad_norm_(model.parameters())`` after ``unscale`` clips what the optimizer will use. What
    another backward pass has left is added before anyone sees a part of the sum.
    """

    def _gradient(self) -> Tensor | None:
        own = own_gradient(self)
        if own is not None and self._master.grad is not None:
            gather_gradient(self, own, self._master)
        return super()._gradient()

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        """A plain parameter."""
        if id(self) not in memo:
            memo[id(self)] = nn.Parameter(self.data.clone(), self.requires_grad)
        copied: nn.Parameter = memo[id(self)]
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickled as a plain parameter."""
        return nn.Parameter(self.data, self.requires_grad).__reduce_ex__(protocol)


def own_gradient(parameter: Tensor) -> Tensor | None:
    """The gradient that a backward pass has left on a tensor itself."""
    gradient: Tensor | None = _own.__get__(parameter)
    return gradient


def gather_gradient(tensor: Tensor, gradient: Tensor, holder: Any) -> None:
    """Add a gradient, in FP32, to that of what holds a tensor's; the tensor has none of its own then."""
    gradient, before = gradient.detach(), holder.grad
    holder.grad = gradient.float() if before is None else before.detach() + gradient
    _own.__set__(tensor, None)


def put_back_gradient(tensor: Tensor, holder: Any) -> None:
    """Move the sum of both gradients to a tensor itself, in its own precision."""
    if holder.grad is not None:
        own = own_gradient(tensor)
        total = holder.grad if own is None else holder.grad + own
        _own.__set__(tensor, total.to(tensor.dtype))
        holder.grad = None


def drop_own_gradient(parameter: Tensor) -> None:
    """Forget it; a master's gradient stays."""
    _own.__set__(parameter, None)


def hold(parameter: Tensor, master: Tensor) -> bool:
    """Let a parameter's ``.grad`` be its master's; returns whether it could be done.

    A parameter of a class of its own stays as it is.
    """
    if type(parameter) is not nn.Parameter:
        return False
    parameter._master = master  # type: ignore[attr-defined]
    parameter.__class__ = HeldParameter
    return True


def let_go(parameter: Tensor) -> None:
    """Make it a plain parameter again."""
    if type(parameter) is HeldParameter:
        parameter.__class__ = nn.Parameter  # type: ignore[assignment]
        del parameter._master


def hold_wide(tensor: Tensor) -> None:
    """Let a half-precision tensor of a graph retain its gradient in FP32."""
    if type(tensor) is Tensor:
        tensor._master = SimpleNamespace(grad=None)  # type: ignore[attr-defined]
        tensor.__class__ = HeldTensor
