"""An emulated LSTM in one function: the same roundings, without intercepting each operation.

On a CPU an FP16 LSTM is split into its time steps, so that every gate and state is rounded as a GPU
stores it. Intercepting each of these small operations costs more than the operations themselves. Here
forward and backward are written out; a test compares the results bit by bit with those of the
intercepted operations.

Weight gradients are summed over time in FP32 and rounded once, as cuDNN does in one
multiplication; split into steps, every time step's share would be rounded separately.

Like cuDNN's, it is differentiable once; for a second derivative switch it off as on a GPU, with
``torch.backends.cudnn.flags(enabled=False)``.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.autograd.function import once_differentiable
from torch.library import Library
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from mpdiag.emulation.mode import Emulation, suspended
from mpdiag.tracing.precision_share import note_low_products

if TYPE_CHECKING:
    from collections.abc import Sequence

FORWARD_ROUNDINGS = 11
"""Roundings of a step: two sums of products, four gates, two products, a cell, its tanh, a state."""
BACKWARD_ROUNDINGS = 16
"""Roundings of a step: the gradients at state and cell, and those of each value above."""


def applies(op: Any, args: tuple[Any, ...]) -> bool:
    """Whether a call of an ATen operation is an FP16 LSTM that is emulated here."""
    if op is not torch.ops.aten.lstm.input or not torch.backends.cudnn.enabled or len(args) != 9:
        return False
    if not any(isinstance(mode, Emulation) for mode in _get_current_dispatch_mode_stack()):
        return False
    x, hx, parameters, biases, layers, _, _, bidirectional, _ = args
    each = 4 if biases else 2
    plain = (x, *hx, *parameters)
    return (
        all(type(t) in {Tensor, torch.nn.Parameter} and t.dtype == torch.float16 for t in plain)
        and x.dim() == 3
        and x.device.type == "cpu"
        and len(hx) == 2
        and len(parameters) == each * layers * (2 if bidirectional else 1)  # no projections
    )


_KEY = "AutogradCPU"
_held: weakref.WeakValueDictionary[str, Library] = weakref.WeakValueDictionary()


def in_one_piece() -> Library:
    """What holds a kernel that takes LSTMs here where no autocast is in force, as in an FP16 model.

    An LSTM is split above the level at which ``Emulation`` sees operations, so its kernel for tensors
    with gradients is replaced. That one leaves every other call to torch. It is in force until nobody
    holds it.
    """
    library = _held.get(_KEY)
    if library is None:
        library = _held[_KEY] = Library("aten", "IMPL")
        library.impl("lstm.input", _disable_dynamo(_lstm_or_torch), _KEY)
    return library


def _lstm_or_torch(*args: Any) -> Any:
    op = torch.ops.aten.lstm.input
    if applies(op, args):
        return lstm(*args)
    # Not ``decompose``: torch's Python decomposition asks oneDNN for what it refuses.
    return op._op_dk(torch._C.DispatchKey.CompositeImplicitAutograd, *args)


def lstm(
    x: Tensor,
    hx: Sequence[Tensor],
    parameters: Sequence[Tensor],
    biases: bool,
    layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """``aten::lstm`` on FP16 tensors: all steps' outputs, the last states, the last cells.

    Args:
        x: (steps, batch, features), or (batch, steps, features) if ``batch_first``.
        hx: Initial states and cells, each (layers × directions, batch, hidden).
        parameters: As ``nn.LSTM`` orders its flat weights.
        biases: Whether two biases follow each pair of weights.
        layers: Number of layers.
        dropout: Between layers, while ``train``.
        train: Whether the module is training.
        bidirectional: Whether each layer also runs backwards.
        batch_first: See ``x``.
    """
    x = x.transpose(0, 1) if batch_first else x
    directions = 2 if bidirectional else 1
    each = 4 if biases else 2
    states, cells = [], []
    for layer in range(layers):
        outputs = []
        for direction in range(directions):
            i = layer * directions + direction
            own = [*parameters[each * i : each * (i + 1)], None, None][:4]
            forth = x.flip(0) if direction else x
            out, state, cell = _Layer.apply(forth, hx[0][i], hx[1][i], *own)  # type: ignore[no-untyped-call]
            outputs.append(out.flip(0) if direction else out)
            states.append(state)
            cells.append(cell)
        x = outputs[0] if directions == 1 else torch.cat(outputs, 2)
        if dropout and train and layer + 1 < layers:
            x = torch.dropout(x, dropout, train)
    x = x.transpose(0, 1) if batch_first else x
    return x, torch.stack(states), torch.stack(cells)


def _count(roundings: int) -> None:
    for mode in _get_current_dispatch_mode_stack():
        if isinstance(mode, Emulation):
            mode.roundings += roundings


def _product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x · weightᵀ + bias of FP32 values, rounded once."""
    if bias is None:
        return torch.mm(x, weight.t()).half()
    return torch.addmm(bias, x, weight.t()).half()


class _Layer(torch.autograd.Function):
    """One layer, one direction. Elementwise FP16 operations round once, as torch's kernels do."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        state: Tensor,
        cell: Tensor,
        w_x: Tensor,
        w_h: Tensor,
        b_x: Tensor | None,
        b_h: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        steps, batch, features = x.shape
        hidden = cell.shape[1]
        _count(1 + FORWARD_ROUNDINGS * steps)
        if any(ctx.needs_input_grad):
            note_low_products(1 + steps, 2 * steps * batch * (w_x.numel() + w_h.numel()))
        with suspended():
            wide = [None if t is None else t.float() for t in (w_x, w_h, b_x, b_h)]
            inputs = _product(x.reshape(-1, features).float(), wide[0], wide[2])  # type: ignore[arg-type]
            inputs = inputs.view(steps, batch, 4 * hidden)
            gates = x.new_empty(steps, batch, 4 * hidden)
            states, cells = x.new_empty(2, steps + 1, batch, hidden).unbind()
            tanhs = x.new_empty(steps, batch, hidden)
            states[0], cells[0] = state, cell
            for t in range(steps):
                sums = _product(states[t].float(), wide[1], wide[3]).add_(inputs[t])  # type: ignore[arg-type]
                torch.sigmoid(sums, out=gates[t])
                i, f, g, o = gates[t].chunk(4, 1)
                torch.tanh(sums[:, 2 * hidden : 3 * hidden], out=g)
                torch.mul(f, cells[t], out=cells[t + 1])
                cells[t + 1].add_(i * g)
                torch.tanh(cells[t + 1], out=tanhs[t])
                torch.mul(o, tanhs[t], out=states[t + 1])
        ctx.save_for_backward(x, gates, states, cells, tanhs, w_x, w_h)
        ctx.biases = b_x is not None
        return states[1:].clone(), states[-1].clone(), cells[-1].clone()

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, out_grad: Tensor, state_grad: Tensor, cell_grad: Tensor
    ) -> tuple[Tensor | None, ...]:
        x, gates, states, cells, tanhs, w_x, w_h = ctx.saved_tensors
        steps, batch, features = x.shape
        hidden = cells.shape[2]
        _count(4 + BACKWARD_ROUNDINGS * steps)
        note_low_products(3 + steps, 4 * steps * batch * (w_x.numel() + w_h.numel()))
        with suspended():
            recurrent = w_h.float()
            sums_grad = torch.empty_like(gates)
            for t in reversed(range(steps)):
                i, f, g, o = gates[t].chunk(4, 1)
                state_grad = out_grad[t] + state_grad
                cell_grad = cell_grad + _through_tanh(state_grad * o, tanhs[t])
                grad = sums_grad[t]
                parts = grad.chunk(4, 1)
                for part, from_cell in zip(parts, (g, cells[t], i), strict=False):
                    torch.mul(cell_grad, from_cell, out=part)
                torch.mul(state_grad, tanhs[t], out=parts[3])
                candidate = _through_tanh(parts[2], g)
                y = gates[t].float()
                grad.copy_(grad.float().mul_(1 - y).mul_(y))  # derivative of the sigmoids
                parts[2].copy_(candidate)
                cell_grad = cell_grad * f
                state_grad = torch.mm(grad.float(), recurrent).half()
            flat = sums_grad.view(-1, 4 * hidden).float()
            x_grad = torch.mm(flat, w_x.float()).half().view(steps, batch, features)
            w_x_grad = torch.mm(flat.t(), x.reshape(-1, features).float()).half()
            w_h_grad = torch.mm(flat.t(), states[:-1].reshape(-1, hidden).float()).half()
            b_grad = flat.sum(0).half() if ctx.biases else None
        return x_grad, state_grad, cell_grad, w_x_grad, w_h_grad, b_grad, b_grad


def _through_tanh(gradient: Tensor, y: Tensor) -> Tensor:
    """The gradient below a tanh whose value is y, rounded once."""
    wide = y.float()
    return gradient.float().mul_(1 - wide * wide).half()
