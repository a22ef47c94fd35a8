"""Parameters of a model whose gradients an optimizer's FP32 masters hold."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

_own: Any = torch._C.TensorBase.grad


class HeldParameter(nn.Parameter):
    """A half-precision parameter whose gradient has moved to its master.

    Its ``.grad`` is the master's, in FP32, which no half-precision tensor could hold itself. So
    ``clip_grad_norm_(model.parameters())`` after ``unscale`` clips what the optimizer will use.
    Parameters become this by their ``__class__``, until the step is over.
    """

    _master: Tensor

    @property
    def grad(self) -> Tensor | None:
        """Its own gradient, or else its master's."""
        own: Tensor | None = _own.__get__(self)
        return self._master.grad if own is None else own

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
