"""What matrix products, convolutions, attention and recurrent layers say of sizes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mpdiag.analysis.shapes.rules import KEYS, TRANSPOSED, SizedProduct, inputs_named
from mpdiag.tensorcores.sizes.expressions import Size, number

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mpdiag.analysis.shapes.rules import Rules
    from mpdiag.analysis.shapes.tensors import Dims
    from mpdiag.runs.operations import Operation


def _product(
    rules: Rules,
    op: Operation,
    kind: str,
    grows: Sequence[Size],
    aligned: dict[str, Size],
    heads: tuple[int, ...] = (),
) -> None:
    weight = any(t.parameter for t in op.inputs) or bool(op.scalars.get("parts"))
    rules.products.append(
        SizedProduct(
            op.module or "",
            kind,
            3.0 * max(1, op.flops),
            tuple(grows),
            tuple(aligned.items()),
            weight,
            heads,
        )
    )


def _matmul(rules: Rules, op: Operation, inputs: list[Dims]) -> list[Dims] | None:
    found = inputs_named(op, inputs, "self", "mat1", "batch1", "mat2", "batch2")
    if op.op.startswith(("addmm", "baddbmm")):
        found = found[1:]
    if len(found) != 2 or any(len(d) not in (2, 3) for d in found):
        return None
    a, b = found
    rules.equate(a[-1], b[-2])
    if len(a) == 3:
        rules.equate(a[0], b[0])
        rules.tensors.unknowns.fix(a[0])  # a number of products, of experts say, is no width
    result = [*a[:-1], b[-1]]
    for bias in inputs_named(op, inputs, "self") if op.op.startswith(("addmm", "baddbmm")) else []:
        for x, y in zip(reversed(bias), reversed(result), strict=False):
            if rules.tensors.unknowns.value(x) == rules.tensors.unknowns.value(y) != 1:
                rules.equate(x, y)
    kind = "linear" if len(a) == 2 else "matmul"
    _product(rules, op, kind, (*a, b[-1]), {"K": a[-1], "N": b[-1]})
    return [result]


def _vector(rules: Rules, op: Operation, inputs: list[Dims]) -> list[Dims] | None:
    found = inputs_named(op, inputs, "self", "mat", "vec", "tensor")
    if op.op.startswith("addmv"):
        found = found[1:]
    if len(found) != 2:
        return None
    rules.equate(found[0][-1], found[1][-1])
    return [found[0][:-1]]


def _convolution(rules: Rules, op: Operation, inputs: list[Dims]) -> list[Dims] | None:
    named = {t.argument: d for t, d in zip(op.inputs, inputs, strict=True)}
    x, w = named.get("input"), named.get("weight")
    if x is None or w is None or len(x) != len(w) or not op.outputs:
        return None
    groups = int(op.scalars.get("groups") or 1)
    transposed = bool(op.scalars.get("transposed"))
    value = rules.tensors.unknowns.value
    for dim in x[2:]:
        rules.tensors.unknowns.fix(dim)
    if groups > 1 and value(w[1]) == 1:  # depthwise: there are as many groups as channels
        factor = value(w[0]) // groups
        rules.equate(w[0], number(factor) * x[1] if not transposed else x[1])
        leaving = w[0]
        aligned: dict[str, Size] = {}
    else:
        whole = w[0]
        part = rules.tensors.split(whole, [groups, value(whole) // groups])[-1]
        rules.equate(x[1], whole if transposed else number(groups) * w[1])
        leaving = number(groups) * w[1] if transposed else whole
        aligned = {"K": part, "N": w[1]} if transposed else {"K": w[1], "N": part}
    if transposed:
        rules.note(leaving, TRANSPOSED)
    if "bias" in named:
        rules.equate(named["bias"][0], leaving)
    _product(rules, op, "convolution", (x[0], w[0], w[1]), aligned)
    return [[x[0], leaving, *(number(n) for n in op.outputs[0].shape[2:])]]


def _attention(rules: Rules, op: Operation, inputs: list[Dims]) -> list[Dims] | None:
    found = inputs_named(op, inputs, "query", "key", "value")
    if len(found) != 3 or any(len(d) != 4 for d in found):
        return None
    q, k, v = found
    rules.equate(q[3], k[3])
    rules.equate(q[0], k[0])
    rules.equate(k[2], v[2])
    rules.note(k[2], KEYS)
    if rules.tensors.unknowns.value(q[3]) == rules.tensors.unknowns.value(v[3]):
        rules.equate(q[3], v[3])  # not needed by the product, but scripts compute one width
    value = rules.tensors.unknowns.value
    _product(
        *(rules, op, "attention", (q[1], q[2], k[2], q[3])),
        {"head": q[3], "value head": v[3]},
        heads=(value(q[1]), value(k[1])),
    )
    shapes = [list(o.shape) for o in op.outputs]
    out = [q[0], q[1], q[2], v[3]]
    rest = [[q[0], q[1], q[2]] if s == [value(d) for d in q[:3]] else [number(n) for n in s]
            for s in shapes[1:]]  # fmt: skip
    return [out, *rest]


@dataclass(frozen=True)
class _Cell:
    """The weights of one layer and direction of a recurrent operation.

    Attributes:
        entering, recurring: Of the input and of the state: gates · hidden × what they multiply.
        projecting: Of the projection, hidden to what leaves; None where there is none.
        biases: Sizes of the biases.
    """

    entering: Dims
    recurring: Dims
    projecting: Dims | None
    biases: tuple[Size, ...]

    @property
    def hidden(self) -> Size:
        return self.recurring[1] if self.projecting is None else self.projecting[1]

    @property
    def leaving(self) -> Size:
        return self.recurring[1] if self.projecting is None else self.projecting[0]


_RECURRENT_WEIGHTS = frozenset({"weight", "weight0", "weight1", "weight2", "weight3", "params"})
_STATES = {"hx": 0, "hx_": 0, "cx": 1, "cx_": 1}


def _cells(op: Operation, inputs: list[Dims]) -> list[_Cell]:
    """The weights by layer and direction, as torch lists them: input, state, biases, projection."""
    found: list[_Cell] = []
    group: list[Dims] = []
    projected = bool(op.scalars.get("proj_size"))
    weights = [
        d for t, d in zip(op.inputs, inputs, strict=True) if t.argument in _RECURRENT_WEIGHTS
    ]

    def close() -> None:
        matrices = [d for d in group if len(d) == 2]
        if len(matrices) == 2 + projected:
            biases = tuple(d[0] for d in group if len(d) == 1)
            found.append(
                _Cell(matrices[0], matrices[1], matrices[2] if projected else None, biases)
            )
        group.clear()

    for dims in weights:
        if len(dims) == 2 and sum(len(d) == 2 for d in group) == 2 + projected:
            close()
        group.append(dims)
    close()
    return found


def _recurrent(rules: Rules, op: Operation, inputs: list[Dims]) -> list[Dims] | None:
    """Recurrent layers in one operation: its weights are those of its module.

    cuDNN's and MIOpen's, and torch's own ``lstm``, ``gru`` and ``rnn_*``, compute all layers and
    directions at once; oneDNN's computes one of them, whatever its arguments say of the module.
    """
    single = op.op == "mkldnn_rnn_layer"
    directions = 2 if op.scalars.get("bidirectional") and not single else 1
    layers = 1 if single else int(op.scalars.get("num_layers") or 1)
    cells, x = _cells(op, inputs), inputs[0]
    if not x or len(cells) != layers * directions:
        return None
    entering = x[-1]
    for layer in range(layers):
        row = cells[layer * directions : (layer + 1) * directions]
        for cell in row:
            rules.equate(cell.entering[1], entering)
            _equate_cell(rules, cell)
            rules.equate(cell.leaving, row[0].leaving)
            _recurrent_products(rules, op, cell, x)
        entering = number(directions) * row[0].leaving
    last = cells[-1]
    for state, dims in _states(op, inputs):
        rules.equate(dims[-1], last.hidden if state else last.leaving)
    return [_recurrent_output(rules, record.shape, x, entering, last) for record in op.outputs]


def _states(op: Operation, inputs: list[Dims]) -> list[tuple[int, Dims]]:
    """The states that come in: 0 for the output's, 1 for the cell's."""
    found: list[tuple[int, Dims]] = []
    for record, dims in zip(op.inputs, inputs, strict=True):
        if record.argument in _STATES and dims:
            second = op.op == "lstm" and any(state == 0 for state, _ in found)
            found.append((1 if second else _STATES[record.argument], dims))
    return found


def _equate_cell(rules: Rules, cell: _Cell) -> None:
    rules.equate(cell.entering[0], cell.recurring[0])
    for bias in cell.biases:
        rules.equate(bias, cell.entering[0])
    if cell.projecting is not None:
        rules.equate(cell.recurring[1], cell.projecting[0])


def _recurrent_products(rules: Rules, op: Operation, cell: _Cell, x: Dims) -> None:
    value = rules.tensors.unknowns.value
    rows = 6.0 * math.prod(op.inputs[0].shape[:-1])
    pairs = [(cell.entering[0], cell.entering[1]), (cell.recurring[0], cell.recurring[1])]
    if cell.projecting is not None:
        pairs.append((cell.projecting[0], cell.projecting[1]))
    for wide, inner in pairs:
        leaving = cell.leaving if cell.projecting and wide is cell.projecting[0] else cell.hidden
        rules.products.append(
            SizedProduct(
                op.module or "",
                "rnn",
                rows * value(wide) * value(inner),
                (*x[:-1], wide, inner),
                (("K", inner), ("N", leaving)),
                weight=True,
            )
        )


def _recurrent_output(
    rules: Rules, shape: Sequence[int], x: Dims, leaving: Size, last: _Cell
) -> Dims:
    """The sequence, the states (layers × batch × width), or a buffer that no script sees."""
    value = rules.tensors.unknowns.value
    dims: Dims = [number(n) for n in shape]
    sequence = [*(value(d) for d in x[:-1]), value(leaving)]
    if list(shape) == sequence:
        return [*x[:-1], leaving]
    for width in (last.leaving, last.hidden):
        if len(shape) in (2, 3) and shape[-1] == value(width):
            return [*dims[:-1], width]
    return dims


def _trilinear(rules: Rules, op: Operation, inputs: list[Dims]) -> list[Dims] | None:
    if len(inputs) != 3 or len(inputs[1]) != 3 or not op.outputs:
        return None
    x, w, y = inputs
    rules.equate(x[-1], w[1])
    rules.equate(y[-1], w[2])
    rules.products.append(
        SizedProduct(
            op.module or "", "linear", 6.0 * math.prod(op.inputs[1].shape) * op.inputs[0].shape[0],
            (x[0], *w), (("K", w[2]), ("N", w[0])), weight=True,
        )
    )  # fmt: skip
    return [[*x[:-1], w[0]]]


PRODUCT_RULES = {
    **dict.fromkeys(("mm", "addmm", "bmm", "baddbmm"), _matmul),
    **dict.fromkeys(("mv", "addmv", "dot"), _vector),
    **dict.fromkeys(("convolution", "convolution_overrideable", "cudnn_convolution",
                     "mkldnn_convolution"), _convolution),
    **dict.fromkeys(("_scaled_dot_product_flash_attention_for_cpu",
                     "_scaled_dot_product_flash_attention", "_scaled_dot_product_cudnn_attention",
                     "_scaled_dot_product_efficient_attention",
                     "_scaled_dot_product_fused_attention_overrideable"), _attention),
    **dict.fromkeys(("mkldnn_rnn_layer", "_cudnn_rnn", "miopen_rnn", "lstm", "gru", "rnn_tanh",
                     "rnn_relu"), _recurrent),
    "_trilinear": _trilinear,
}  # fmt: skip
