"""What scripts do with models in half precision: add layers, load states, copy and average them."""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter
from torch.optim.swa_utils import AveragedModel

from mpdiag.tracing.precision import HALF
from mpdiag.training.weights.fp32_regions import IN_FULL
from mpdiag.training.weights.masters import Masters


class Additions:
    """Casts models that are to hold half-precision weights, and what a script adds to them.

    Parameters and floating-point buffers are cast in place; parameters keep their identity. A new
    layer, or a parameter put in the place of another, is FP32, which fits no input that is not.

    Args:
        castable: Yields the modules whose weights are of half precision.
        dtype: That precision.
        note_parameter: Called with a parameter that was cast, and what it was in FP32.
        note_buffer: Called with a module, a buffer's name and what it was in FP32.
    """

    def __init__(
        self,
        castable: Callable[[], Iterator[nn.Module]],
        dtype: torch.dtype,
        note_parameter: Callable[[Tensor, Tensor], None],
        note_buffer: Callable[[nn.Module, str, Tensor], None],
    ) -> None:
        self._castable = castable
        self._dtype = dtype
        self._note_parameter = note_parameter
        self._note_buffer = note_buffer
        self._known: dict[nn.Module, tuple[nn.Module | None, ...]] = {}
        self._cast_new()

    def look(self) -> None:
        """Cast what is FP32 and should not be."""
        grown = False
        for module, children in self._known.items():
            self._cast_parameters(module)
            inside = module._modules
            if len(inside) != len(children) or any(
                a is not b for a, b in zip(inside.values(), children, strict=True)
            ):
                grown = True
        if grown:
            self._cast_new()

    def _cast_new(self) -> None:
        """Note which modules there are, and cast those that are new."""
        before = self._known
        self._known = {m: tuple(m._modules.values()) for m in self._castable()}
        for module in [m for m in self._known if m not in before]:
            self._cast_parameters(module)
            for name, buffer in module._buffers.items():
                if buffer is not None and buffer.dtype is torch.float32:
                    module._buffers[name] = buffer.to(self._dtype)
                    self._note_buffer(module, name, buffer)

    def _cast_parameters(self, module: nn.Module) -> None:
        for parameter in module._parameters.values():
            if parameter is None or parameter.dtype is not torch.float32:
                continue
            if isinstance(parameter, UninitializedParameter):
                continue
            value = parameter.data
            parameter.data = value.to(self._dtype)
            if parameter.grad is not None and parameter.grad.dtype != self._dtype:
                parameter.grad = None
            self._note_parameter(parameter, value)


class BeforeLoad:
    """Notes each parameter that is about to load an FP32 value, with the value.

    The hook belongs to one model: copies of the model call nothing.
    """

    def __init__(self, call: Callable[[Tensor, Tensor], None] | None) -> None:
        self._call = call

    def __reduce__(self) -> Any:
        return type(self), (None,)

    def __call__(
        self, module: nn.Module, state: Mapping[str, Any], prefix: str, *_others: Any
    ) -> None:
        """A state is about to be loaded."""
        if self._call is None:
            return
        for name, parameter in module.named_parameters():
            value = state.get(prefix + name)
            if isinstance(value, torch.Tensor) and value.dtype == torch.float32:
                self._call(parameter, value)


def copy_in_full(model: nn.Module, memo: dict[int, Any]) -> None:
    """Let a deep copy that is under way have FP32 weights and buffers.

    Half-precision copies would swallow what an average of weights adds to them.

    Args:
        model: What is being copied.
        memo: What was copied already, by the id of the original.
    """
    memo[id(IN_FULL)] = IN_FULL
    for parameter in model.parameters():
        if parameter.dtype in HALF:
            value = in_full(parameter).detach().clone()
            if id(parameter) in memo:
                memo[id(parameter)].data = value
            else:
                memo[id(parameter)] = nn.Parameter(value, parameter.requires_grad)
    for buffer in model.buffers():
        if buffer.dtype in HALF:
            if id(buffer) in memo:
                memo[id(buffer)].data = buffer.float()
            else:
                memo[id(buffer)] = buffer.float()


#
# An average moves by a small share of each update, which half precision swallows. A copy of such a
# model is FP32, and while a trainer holds the model, its averages read the masters.

_held: list[tuple[frozenset[nn.Module], Masters]] = []  # models of live trainers, and their masters


class _InFull:
    """What ``update_parameters`` reads of a model: its parameters and buffers, in FP32."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def parameters(self) -> Iterator[Tensor]:
        return (in_full(p) for p in self._model.parameters())

    def buffers(self) -> Iterator[Tensor]:
        return (in_full(b) for b in self._model.buffers())


def in_full(tensor: Tensor) -> Tensor:
    """The FP32 value of a parameter or buffer of a model that a trainer holds."""
    for _, masters in _held:
        if tensor in masters:
            return masters.value(tensor)
    return tensor.float() if tensor.dtype in HALF else tensor


def read_masters(models: Sequence[nn.Module], masters: Masters) -> Callable[[], None]:
    """Let averages of some models read their masters from now on; returns what undoes it."""
    if not _held:
        _patch()
    entry = frozenset(models), masters
    _held.append(entry)

    def release() -> None:
        _held[:] = [other for other in _held if other is not entry]
        plain = getattr(AveragedModel.update_parameters, "_mpdiag", None)
        if not _held and plain is not None:  # else it was patched again since
            AveragedModel.update_parameters = plain  # type: ignore[method-assign]

    return release


def _patch() -> None:
    update = AveragedModel.update_parameters

    @functools.wraps(update)
    def update_parameters(self: Any, model: nn.Module) -> None:
        inside = set(model.modules())
        held = any(models & inside for models, _ in _held)
        update(self, _InFull(model) if held else model)  # type: ignore[arg-type]

    update_parameters._mpdiag = update  # type: ignore[attr-defined]
    AveragedModel.update_parameters = update_parameters  # type: ignore[method-assign]
