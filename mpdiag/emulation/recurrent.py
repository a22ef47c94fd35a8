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

import weakref
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.autograd.function import once_differentiable
from torch.library import Library
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from mpdiag.emulation.mode import Emulation, unwatched
from mpdiag.tracing.precision_share import note_low_products

_AT_ONCE = 1 << 18
"""Values of gates whose slopes are computed and held at once, so that memory stays bounded."""


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


_held: weakref.WeakValueDictionary[str, Library] = weakref.WeakValueDictionary()


def in_one_piece() -> Library:
    """What holds a kernel that takes LSTMs here where no autocast is in force, as in an FP16 model.

    An LSTM is split above the level at which ``Emulation`` sees operations, so its kernel for tensors
    with gradients is replaced. That one leaves every other call to torch. It is in force in the whole
    process until the last holder lets go.
    """
    library = _held.get("lstm.input")
    if library is None:
        library = _held["lstm.input"] = Library("aten", "IMPL")
        library.impl("lstm.input", _disable_dynamo(_lstm_or_torch), "AutogradCPU")
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


def _sums(x: Tensor, across: Tensor, bias: Tensor | None) -> Tensor:
    """x · across + bias of FP32 values, rounded once."""
    return (torch.mm(x, across) if bias is None else torch.addmm(bias, x, across)).half()


def _by_gate(gates: Tensor) -> list[tuple[Tensor, ...]]:
    """Each gate of each step: input, forget, candidate and output, of (steps, batch, 4 × hidden)."""
    return [gate.unbind() for gate in gates.chunk(4, 2)]


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
        if any(ctx.needs_input_grad):
            note_low_products(1 + steps, 2 * steps * batch * (w_x.numel() + w_h.numel()))
        with unwatched():
            wide = [None if t is None else t.float() for t in (w_x, w_h, b_x, b_h)]
            inputs = _sums(x.reshape(-1, features).float(), wide[0].t(), wide[2])  # type: ignore[union-attr]
            inputs = inputs.view(steps, batch, 4 * hidden)
            gates = x.new_empty(steps, batch, 4 * hidden)
            states, cells = x.new_empty(2, steps + 1, batch, hidden).unbind()
            tanhs = x.new_empty(steps, batch, hidden)
            states[0], cells[0] = state, cell
            across = wide[1].t()  # type: ignore[union-attr]
            # All views at once: made step by step they cost as much as the arithmetic of a small cell.
            before, held = states.unbind(), cells.unbind()
            each = zip(
                inputs.unbind(), gates.unbind(), *_by_gate(gates), tanhs.unbind(), strict=True
            )
            for t, (given, row, i, f, g, o, tanh) in enumerate(each):
                sums = _sums(before[t].float(), across, wide[3]).add_(given)
                torch.sigmoid(sums, out=row)
                torch.tanh(sums[:, 2 * hidden : 3 * hidden], out=g)
                torch.mul(f, held[t], out=held[t + 1])
                held[t + 1].add_(i * g)
                torch.tanh(held[t + 1], out=tanh)
                torch.mul(o, tanh, out=before[t + 1])
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
        note_low_products(3 + steps, 4 * steps * batch * (w_x.numel() + w_h.numel()))
        with unwatched():
            recurrent = w_h.float()
            sums_grad = torch.empty_like(gates)
            outs, held, tanh = out_grad.unbind(), cells.unbind(), tanhs.unbind()
            rows, parts = sums_grad.unbind(), _by_gate(sums_grad)
            i, f, g, o = _by_gate(gates)
            for t, slopes in _slopes(gates, tanhs):
                state_grad = outs[t] + state_grad
                cell_grad = cell_grad + _scaled(state_grad * o[t], slopes.tanh)
                torch.mul(cell_grad, g[t], out=parts[0][t])
                torch.mul(cell_grad, held[t], out=parts[1][t])
                torch.mul(cell_grad, i[t], out=parts[2][t])
                torch.mul(state_grad, tanh[t], out=parts[3][t])
                candidate = _scaled(parts[2][t], slopes.candidate)
                rows[t].copy_(rows[t].float().mul_(slopes.rest).mul_(slopes.gates))
                parts[2][t].copy_(candidate)
                cell_grad = cell_grad * f[t]
                state_grad = torch.mm(rows[t].float(), recurrent).half()
            flat = sums_grad.view(-1, 4 * hidden).float()
            x_grad = torch.mm(flat, w_x.float()).half().view(steps, batch, features)
            w_x_grad = torch.mm(flat.t(), x.reshape(-1, features).float()).half()
            w_h_grad = torch.mm(flat.t(), states[:-1].reshape(-1, hidden).float()).half()
            b_grad = flat.sum(0).half() if ctx.biases else None
        return x_grad, state_grad, cell_grad, w_x_grad, w_h_grad, b_grad, b_grad


class _Slopes(NamedTuple):
    """What a step's gradients are multiplied by, in FP32.

    Attributes:
        gates: y of each gate, whose sigmoid has the derivative y · (1 - y).
        rest: 1 - y.
        candidate: 1 - y², the derivative of the candidate's tanh.
        tanh: The same of the cell's.
    """

    gates: Tensor
    rest: Tensor
    candidate: Tensor
    tanh: Tensor


def _slopes(gates: Tensor, tanhs: Tensor) -> Iterator[tuple[int, _Slopes]]:
    """Each step and its slopes, the last first; made for as many steps at once as are small."""
    steps, hidden = len(tanhs), tanhs.shape[2]
    block = max(1, _AT_ONCE // max(1, gates[0].numel()))
    for stop in range(steps, 0, -block):
        start = max(0, stop - block)
        y, tanh = gates[start:stop].float(), tanhs[start:stop].float()
        g = y[:, :, 2 * hidden : 3 * hidden]
        made = [v.unbind() for v in (y, 1 - y, 1 - g * g, 1 - tanh * tanh)]
        for t in reversed(range(stop - start)):
            yield start + t, _Slopes(*[rows[t] for rows in made])


def _scaled(gradient: Tensor, slope: Tensor) -> Tensor:
    """FP16 gradients times FP32 slopes, rounded once."""
    return gradient.float().mul_(slope).half()
