"""What matrix products, convolutions, attention and recurrent layers say of sizes."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from mpdiag.analysis.shapes.rules import KEYS, TRANSPOSED, SizedProduct, inputs_named
from mpdiag.tensorcores.sizes.expressions import Size, number

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mpdiag.analysis.shapes.rules import Rules
    from mpdiag.analysis.shapes.tensors import Dims
    from mpdiag.runs.operations import Operation


def _product(
    rules: Rules, op: Operation, kind: str, grows: Sequence[Size], aligned: dict[str, Size]
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
    _product(rules, op, "attention", (q[1], q[2], k[2], q[3]), {"head": q[3], "value head": v[3]})
    value = rules.tensors.unknowns.value
    shapes = [list(o.shape) for o in op.outputs]
    out = [q[0], q[1], q[2], v[3]]
    rest = [[q[0], q[1], q[2]] if s == [value(d) for d in q[:3]] else [number(n) for n in s]
            for s in shapes[1:]]  # fmt: skip
    return [out, *rest]


def _recurrent(rules: Rules, op: Operation, inputs: list[Dims]) -> list[Dims] | None:
    """A recurrent layer in one operation: its weights are those of its module."""
    weights = [d for t, d in zip(op.inputs, inputs, strict=True) if t.parameter and len(d) == 2]
    x = inputs[0]
    if len(weights) != 2:
        return None
    entering, recurring = weights
    rules.equate(x[-1], entering[1])
    rules.equate(entering[0], recurring[0])
    hidden = recurring[1]
    for t, d in zip(op.inputs, inputs, strict=True):
        if t.argument in ("hx_", "cx_", "hx", "cx"):
            rules.equate(d[-1], hidden)
    flops = 6.0 * math.prod(op.inputs[0].shape[:-1])
    value = rules.tensors.unknowns.value
    for inner in (entering[1], hidden):
        rules.products.append(
            SizedProduct(
                op.module or "",
                "rnn",
                flops * value(entering[0]) * value(inner),
                (*x[:-1], entering[0], inner),
                (("K", inner), ("N", hidden)),
                weight=True,
            )
        )
    results = []
    for record in op.outputs:
        dims: Dims = [number(n) for n in record.shape]
        if dims and record.shape[-1] == value(hidden):
            dims[-1] = hidden
        if len(dims) == len(x) and [*record.shape[:-1]] == [value(d) for d in x[:-1]]:
            dims[:-1] = x[:-1]
        results.append(dims)
    return results


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
    "mkldnn_rnn_layer": _recurrent,
    "_trilinear": _trilinear,
}  # fmt: skip
