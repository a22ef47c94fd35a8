"""What each operation says of the sizes of its inputs and outputs.

A rule gets the sizes of the inputs in unknowns, says which are equal, and gives those of the outputs.
Operations without a rule compute element by element if their shapes broadcast to the result's; of
any other only the sizes in the same place are believed, and all others stay as they are.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from mpdiag.tensorcores.sizes.expressions import Size, number

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mpdiag.analysis.shapes.tensors import Dims, Tensors
    from mpdiag.runs.operations import Operation

SOFTMAX = "softmax"
CLASSES = "classes"
BATCH_NORM = "batch norm"
NORM = "norm over it"
REDUCED = "reduced"
TRANSPOSED = "transposed convolution"
LOOKED_UP = "looked up"
KEYS = "keys"


@dataclass(frozen=True)
class SizedProduct:
    """A matrix product with its sizes in unknowns.

    Attributes:
        module: Whose; "" outside of all modules.
        kind: ``linear``, ``matmul``, ``convolution``, ``attention`` or ``rnn``.
        flops: Of the training step.
        grows: Sizes that its FLOP are proportional to.
        aligned: Sizes of which rows are made, by name.
        weight: Whether one operand is a parameter, which tensor parallelism cuts.
    """

    module: str
    kind: str
    flops: float
    grows: tuple[Size, ...]
    aligned: tuple[tuple[str, Size], ...]
    weight: bool = False


@dataclass
class Rules:
    """Goes through a step's forward operations.

    Attributes:
        tensors: The tensors of the step.
        products: Matrix products found.
        normed: Sizes that a normalisation without parameters works on, by module.
    """

    tensors: Tensors
    products: list[SizedProduct] = field(default_factory=list)
    normed: dict[str, Size] = field(default_factory=dict)

    def follow(self, op: Operation) -> None:
        """Take in one operation."""
        inputs = self.tensors.read(op)
        rule = _RULES.get(op.op.rstrip("_") if op.op not in _RULES else op.op)
        results = rule(self, op, inputs) if rule is not None else None
        if results is None:
            results = self._other(op, inputs)
        fitting = [
            dims if self._fits(dims, record.shape) else [number(n) for n in record.shape]
            for record, dims in zip(op.outputs, results, strict=False)
        ]
        fitting += [[number(n) for n in r.shape] for r in op.outputs[len(fitting) :]]
        self.tensors.write(op, fitting)

    def _fits(self, dims: Dims, shape: Sequence[int]) -> bool:
        return [self.tensors.unknowns.value(d) for d in dims] == list(shape)

    def equate(self, a: Size, b: Size) -> None:
        """Two sizes are one; where they cannot be, neither changes."""
        if not self.tensors.unknowns.equate(a, b):
            self.tensors.unknowns.fix(a)
            self.tensors.unknowns.fix(b)

    def new(self, value: int, *notes: str) -> Size:
        """A size of which only the present value is known."""
        return self.tensors.unknowns.new(value, *notes)

    def note(self, size: Size, *words: str) -> None:
        """Add words about a size."""
        self.tensors.unknowns.note(size, *words)

    # -- operations of every kind ------------------------------------------------------------------

    def _other(self, op: Operation, inputs: list[Dims]) -> list[Dims]:
        results: list[Dims] = []
        widest = max((t.shape for t in op.inputs), key=lambda s: (len(s), math.prod(s)), default=())
        for record in op.outputs:
            if not record.shape and self.broadcast(inputs, widest) is not None:  # a loss
                for dim in (d for dims in inputs for d in dims):
                    self.note(dim, REDUCED)
                results.append([])
                continue
            made = self.broadcast(inputs, record.shape)
            if made is None:
                made = self._same_places(inputs, record.shape)
            results.append(made)
        return results

    def _same_places(self, inputs: list[Dims], shape: Sequence[int]) -> Dims:
        if not inputs:
            return [self.new(n) for n in shape]
        value = self.tensors.unknowns.value
        widest = max(inputs, key=lambda dims: math.prod(value(d) for d in dims))
        for dims in inputs:
            if dims is not widest:
                for dim in dims:
                    self.tensors.unknowns.fix(dim)
        return self.tensors.guess(widest, [value(d) for d in widest], shape)

    def broadcast(self, inputs: list[Dims], shape: Sequence[int]) -> Dims | None:
        """The sizes of a result that is computed element by element; None where shapes do not fit."""
        value = self.tensors.unknowns.value
        for dims in inputs:
            sizes = [value(d) for d in dims]
            places = list(shape)[len(shape) - len(sizes) :]
            fits = all(s in (1, n) for s, n in zip(sizes, places, strict=False))
            if len(sizes) > len(shape) or not fits:
                return None
        result: list[Size | None] = [None] * len(shape)
        for dims in inputs:
            for i in range(1, len(dims) + 1):
                if value(dims[-i]) != shape[-i]:
                    continue
                before = result[-i]
                result[-i] = dims[-i]
                if before is not None and shape[-i] != 1:
                    self.equate(before, dims[-i])
        return [self.new(n) if d is None else d for n, d in zip(shape, result, strict=True)]


# -- products --------------------------------------------------------------------------------------


def _named(op: Operation, inputs: list[Dims], *names: str) -> list[Dims]:
    """The inputs of these names, in that order."""
    found: list[Dims] = []
    for name in names:
        found += [d for t, d in zip(op.inputs, inputs, strict=True) if t.argument == name]
    return found


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
    found = _named(op, inputs, "self", "mat1", "batch1", "mat2", "batch2")
    if op.op.startswith(("addmm", "baddbmm")):
        found = found[1:]
    if len(found) != 2 or any(len(d) not in (2, 3) for d in found):
        return None
    a, b = found
    rules.equate(a[-1], b[-2])
    if len(a) == 3:
        rules.equate(a[0], b[0])
    result = [*a[:-1], b[-1]]
    for bias in _named(op, inputs, "self") if op.op.startswith(("addmm", "baddbmm")) else []:
        for x, y in zip(reversed(bias), reversed(result), strict=False):
            if rules.tensors.unknowns.value(x) == rules.tensors.unknowns.value(y) != 1:
                rules.equate(x, y)
    kind = "linear" if len(a) == 2 else "matmul"
    _product(rules, op, kind, (*a, b[-1]), {"K": a[-1], "N": b[-1]})
    return [result]


def _vector(rules: Rules, op: Operation, inputs: list[Dims]) -> list[Dims] | None:
    found = _named(op, inputs, "self", "mat", "vec", "tensor")
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
    found = _named(op, inputs, "query", "key", "value")
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


# -- the rest --------------------------------------------------------------------------------------


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


def _select(rules: Rules, op: Operation, inputs: list[Dims]) -> list[Dims] | None:
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


def _distances(rules: Rules, op: Operation, inputs: list[Dims]) -> list[Dims] | None:
    a, b = inputs[:2]
    rules.equate(a[-1], b[-1])
    return [[*a[:-1], b[-2]]]


def _index(rules: Rules, op: Operation, inputs: list[Dims]) -> list[Dims] | None:
    """``x[i]``: one index tensor for the first dimension."""
    named = _named(op, inputs, "self")
    indices = _named(op, inputs, "indices")
    if not named or len(indices) != 1 or not op.outputs:
        return None
    x, shape = named[0], op.outputs[0].shape
    result = [*indices[0], *x[1:]]
    value = rules.tensors.unknowns.value
    return [result] if [value(d) for d in result] == list(shape) else None


_RULES: dict[str, Callable[[Rules, Operation, list[Dims]], list[Dims] | None]] = {
    **dict.fromkeys(("mm", "addmm", "bmm", "baddbmm"), _matmul),
    **dict.fromkeys(("mv", "addmv", "dot"), _vector),
    **dict.fromkeys(("convolution", "convolution_overrideable", "cudnn_convolution",
                     "mkldnn_convolution"), _convolution),
    **dict.fromkeys(("_scaled_dot_product_flash_attention_for_cpu",
                     "_scaled_dot_product_flash_attention", "_scaled_dot_product_cudnn_attention",
                     "_scaled_dot_product_efficient_attention",
                     "_scaled_dot_product_fused_attention_overrideable"), _attention),
    **dict.fromkeys(("mkldnn_rnn_layer",), _recurrent),
    "_trilinear": _trilinear,
    **dict.fromkeys(("embedding", "_embedding_bag", "_embedding_bag_forward_only"), _embedding),
    **dict.fromkeys(("_unsafe_view", "view_copy", "_reshape_copy"), _reshape),
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
