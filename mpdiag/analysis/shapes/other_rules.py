"""What normalisations, reductions, joins and look-ups say of sizes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mpdiag.analysis.shapes.rules import (
    BATCH_NORM,
    CLASSES,
    LOOKED_UP,
    NORM,
    REDUCED,
    SOFTMAX,
    inputs_named,
)
from mpdiag.analysis.shapes.tensors import MADE
from mpdiag.tensorcores.sizes.expressions import number

if TYPE_CHECKING:
    from mpdiag.analysis.shapes.rules import Rules
    from mpdiag.analysis.shapes.tensors import Dims
    from mpdiag.runs.operations import Operation


def _embedding(rules: Rules, op: Operation, inputs: list[Dims]) -> list[Dims] | None:
    named = {t.argument: d for t, d in zip(op.inputs, inputs, strict=True)}
    weight, indices = named.get("weight"), named.get("indices")
    if weight is None or indices is None or len(weight) != 2:
        return None
    rules.note(weight[0], LOOKED_UP)
    if op.op == "embedding":
        return [[*indices, weight[1]]]
    bags = [number(n) for n in op.outputs[0].shape[:-1]]
    return [[*bags, weight[1]]]


def _reshape(rules: Rules, op: Operation, inputs: list[Dims]) -> list[Dims] | None:
    return [rules.tensors.reshaped(inputs[0], o.shape) for o in op.outputs]


def _new(rules: Rules, op: Operation, _inputs: list[Dims]) -> list[Dims] | None:
    """Made by the script, perhaps after a tensor's dtype and device alone."""
    return [[rules.new(n, MADE) for n in o.shape] for o in op.outputs]


def _cat(rules: Rules, op: Operation, inputs: list[Dims]) -> list[Dims] | None:
    shape = op.outputs[0].shape
    value = rules.tensors.unknowns.value
    joined = [d for d in inputs if len(d) == len(shape)]
    dim = op.scalars.get("dim", 0)
    if not joined or type(dim) is not int:
        return None
    dim %= len(shape)
    if sum(value(d[dim]) for d in joined) != shape[dim]:
        return None
    result = list(joined[0])
    for other in joined[1:]:
        for i, size in enumerate(other):
            if i != dim:
                rules.equate(result[i], size)
        result[dim] = result[dim] + other[dim]
    return [result]


def _stack(rules: Rules, op: Operation, inputs: list[Dims]) -> list[Dims] | None:
    dim = op.scalars.get("dim", 0)
    if type(dim) is not int or not inputs:
        return None
    dim %= len(inputs[0]) + 1
    first = inputs[0]
    for other in inputs[1:]:
        for a, b in zip(first, other, strict=False):
            rules.equate(a, b)
    return [[*first[:dim], number(len(inputs)), *first[dim:]]]


def _split(rules: Rules, op: Operation, inputs: list[Dims]) -> list[Dims] | None:
    base, shapes = inputs[0], [o.shape for o in op.outputs]
    value = rules.tensors.unknowns.value
    odd = [i for i, d in enumerate(base) if any(s[i] != value(d) for s in shapes)]
    if len(odd) != 1 or sum(s[odd[0]] for s in shapes) != value(base[odd[0]]):
        return None
    dim = odd[0]
    if len({s[dim] for s in shapes}) == 1:
        part = rules.tensors.split(base[dim], [len(shapes), shapes[0][dim]])[-1]
        parts = [part] * len(shapes)
    else:
        parts = [rules.new(s[dim]) for s in shapes]
        total = number(0)
        for size in parts:
            total = total + size
        rules.equate(base[dim], total)
    return [[*base[:dim], part, *base[dim + 1 :]] for part in parts]


def _reduce(rules: Rules, op: Operation, inputs: list[Dims]) -> list[Dims] | None:
    x = inputs[0] if inputs else []
    dim: Any = op.scalars.get("dim")
    dims = [dim] if type(dim) is int else dim if isinstance(dim, list) and dim else range(len(x))
    gone = {int(d) % max(1, len(x)) for d in dims}
    for i in gone:
        if i < len(x):
            rules.note(x[i], REDUCED)
    kept = [d for i, d in enumerate(x) if i not in gone]
    wide = [number(1) if i in gone else d for i, d in enumerate(x)]
    return [wide if len(o.shape) == len(wide) else kept for o in op.outputs]


def _batch_norm(rules: Rules, op: Operation, inputs: list[Dims]) -> list[Dims] | None:
    x = inputs[0]
    if len(x) < 2:
        return None
    for other in inputs[1:]:
        if len(other) == 1:
            rules.equate(x[1], other[0])
    rules.note(x[1], BATCH_NORM)
    rules.normed[op.module or ""] = x[1]
    return [x, *([x[1]] for _ in op.outputs[1:])]


def _layer_norm(rules: Rules, op: Operation, inputs: list[Dims]) -> list[Dims] | None:
    x = inputs[0]
    count = len(op.scalars.get("normalized_shape") or [0])
    for other in inputs[1:]:
        for a, b in zip(reversed(x), reversed(other), strict=False):
            rules.equate(a, b)
    for dim in x[-count:]:
        rules.note(dim, NORM)
    rules.normed[op.module or ""] = x[-1]
    kept = [*x[:-count], *(number(1) for _ in range(count))]
    return [x, kept, kept]


def _group_norm(rules: Rules, op: Operation, inputs: list[Dims]) -> list[Dims] | None:
    x = inputs[0]
    groups = int(op.scalars.get("group") or 1)
    value = rules.tensors.unknowns.value
    for other in inputs[1:]:
        rules.equate(x[1], other[0])
    rules.tensors.split(x[1], [groups, value(x[1]) // groups])
    rules.note(x[1], NORM)
    rules.normed[op.module or ""] = x[1]
    return [x, *([number(n) for n in o.shape] for o in op.outputs[1:])]


def _spatial(rules: Rules, op: Operation, inputs: list[Dims]) -> list[Dims] | None:
    """Pooling and resizing: batch and channels stay."""
    x = inputs[0]
    value = rules.tensors.unknowns.value
    results: list[Dims] = []
    for output in op.outputs:
        if len(output.shape) != len(x):
            return None
        results.append(
            [
                d if i < len(x) - _spatial_rank(x) and value(d) == n else number(n)
                for i, (d, n) in enumerate(zip(x, output.shape, strict=True))
            ]
        )
    for dim in x[len(x) - _spatial_rank(x) :]:
        rules.tensors.unknowns.fix(dim)
    return results


def _spatial_rank(x: Dims) -> int:
    return max(1, len(x) - 2)


def _pad(rules: Rules, op: Operation, inputs: list[Dims]) -> list[Dims] | None:
    x = inputs[0]
    value = rules.tensors.unknowns.value
    if len(op.outputs) != 1 or len(op.outputs[0].shape) != len(x):
        return None
    more = [n - value(d) for d, n in zip(x, op.outputs[0].shape, strict=True)]
    if any(n < 0 for n in more):
        return None
    return [[d + number(n) if n else d for d, n in zip(x, more, strict=True)]]


def _shuffle(rules: Rules, op: Operation, inputs: list[Dims]) -> list[Dims] | None:
    x, factor = inputs[0], int(op.scalars.get("upscale_factor") or 1)
    value = rules.tensors.unknowns.value
    inner = rules.new(value(x[-3]) // factor**2)
    rules.equate(x[-3], number(factor**2) * inner)
    return [[*x[:-3], inner, *(number(factor) * d for d in x[-2:])]]


def _softmax(rules: Rules, op: Operation, inputs: list[Dims]) -> list[Dims] | None:
    dim = op.scalars.get("dim", -1)
    if type(dim) is int and inputs and inputs[0]:
        rules.note(inputs[0][dim % len(inputs[0])], SOFTMAX)
    return None


def _class_loss(rules: Rules, op: Operation, inputs: list[Dims]) -> list[Dims] | None:
    x = inputs[0]
    if x:
        rules.note(x[1] if len(x) > 1 else x[0], CLASSES)
    return [[number(n) for n in o.shape] for o in op.outputs]


def _select(_rules: Rules, op: Operation, inputs: list[Dims]) -> list[Dims] | None:
    """Rows picked by an index: all other dimensions stay."""
    named = {t.argument: d for t, d in zip(op.inputs, inputs, strict=True)}
    x, index = named.get("self"), named.get("index")
    dim = op.scalars.get("dim")
    if x is None or index is None or type(dim) is not int or op.op != "index_select":
        return None
    dim %= len(x)
    return [[*x[:dim], *(index or [number(1)]), *x[dim + 1 :]]]


def _add_rows(rules: Rules, op: Operation, inputs: list[Dims]) -> list[Dims] | None:
    """Rows added or written at an index: all other dimensions are those of what is added."""
    named = {t.argument: d for t, d in zip(op.inputs, inputs, strict=True)}
    x, source = named.get("self"), named.get("source") or named.get("src")
    dim = op.scalars.get("dim")
    if x is None or type(dim) is not int:
        return None
    value = rules.tensors.unknowns.value
    for other in (source, named.get("index")):
        if other is not None and len(other) == len(x):
            for i, (a, b) in enumerate(zip(x, other, strict=True)):
                if i != dim % len(x) and value(a) == value(b):
                    rules.equate(a, b)
    return [x for _ in op.outputs]


def _distances(rules: Rules, _op: Operation, inputs: list[Dims]) -> list[Dims] | None:
    a, b = inputs[:2]
    rules.equate(a[-1], b[-1])
    return [[*a[:-1], b[-2]]]


def _index(rules: Rules, op: Operation, inputs: list[Dims]) -> list[Dims] | None:
    """``x[i]``: one index tensor for the first dimension."""
    named = inputs_named(op, inputs, "self")
    indices = inputs_named(op, inputs, "indices")
    if not named or len(indices) != 1 or not op.outputs:
        return None
    x, shape = named[0], op.outputs[0].shape
    result = [*indices[0], *x[1:]]
    value = rules.tensors.unknowns.value
    return [result] if [value(d) for d in result] == list(shape) else None


OTHER_RULES = {
    **dict.fromkeys(("embedding", "_embedding_bag", "_embedding_bag_forward_only"), _embedding),
    **dict.fromkeys(("_unsafe_view", "view_copy", "_reshape_copy"), _reshape),
    **dict.fromkeys(("new_zeros", "new_ones", "new_full", "new_empty", "zeros", "ones", "full",
                     "rand", "randn", "randint", "arange", "linspace", "eye"), _new),
    "cat": _cat, "stack": _stack,
    **dict.fromkeys(("unsafe_split", "unsafe_split_with_sizes", "split_copy",
                     "split_with_sizes_copy", "unsafe_chunk"), _split),
    **dict.fromkeys(("sum", "mean", "var", "std", "amax", "amin", "argmax", "argmin", "prod",
                     "linalg_vector_norm", "norm", "logsumexp", "var_mean", "std_mean", "any",
                     "all", "max", "min"), _reduce),
    **dict.fromkeys(("native_batch_norm", "_native_batch_norm_legit", "cudnn_batch_norm",
                     "_batch_norm_with_update", "miopen_batch_norm",
                     "_native_batch_norm_legit_functional"), _batch_norm),
    **dict.fromkeys(("native_layer_norm", "_fused_rms_norm"), _layer_norm),
    "native_group_norm": _group_norm,
    **dict.fromkeys((*(f"{kind}_pool{n}d{end}" for kind in ("max", "avg", "adaptive_avg",
                     "_adaptive_avg", "adaptive_max") for n in (1, 2, 3)
                     for end in ("", "_with_indices")),
                     *(f"upsample_{kind}" for kind in ("nearest1d", "nearest2d", "nearest3d",
                     "_nearest_exact1d", "_nearest_exact2d", "linear1d", "bilinear2d",
                     "bicubic2d", "trilinear3d")), "reflection_pad1d", "reflection_pad2d",
                     "replication_pad1d", "replication_pad2d"), _spatial),
    "constant_pad_nd": _pad, "pixel_shuffle": _shuffle,
    **dict.fromkeys(("_softmax", "_log_softmax", "_safe_softmax"), _softmax),
    **dict.fromkeys(("nll_loss_forward", "nll_loss2d_forward"), _class_loss),
    "index_select": _select,
    **dict.fromkeys(("index_add", "scatter_add", "scatter_reduce", "scatter", "index_copy"),
                    _add_rows),
    "_cdist_forward": _distances, "_euclidean_dist": _distances, "index": _index,
}  # fmt: skip
