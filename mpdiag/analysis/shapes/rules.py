"""What each operation says of the sizes of its inputs and outputs.

A rule gets the sizes of the inputs in classes, says which are equal, and gives those of the outputs.
Operations without a rule compute element by element if their shapes broadcast to the result's; of
any other only the sizes in the same place are believed, and all others stay as they are.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any

from mpdiag.analysis.shapes import sizes

if TYPE_CHECKING:
    from mpdiag.analysis.shapes.tensors import Dims, Tensors
    from mpdiag.runs.operations import Operation

    Rule = Callable[["Step", Operation, list[Dims]], list[Dims] | None]


@dataclass(frozen=True)
class Product:
    """A matrix product with its sizes in classes.

    Attributes:
        module: Whose; "" outside of all modules.
        kind: ``linear``, ``matmul``, ``convolution``, ``attention`` or ``rnn``.
        flops: Of the training step.
        grows: Sizes that its FLOP are proportional to.
        aligned: Sizes of which rows are made.
        weight: Whether one operand is a parameter, which tensor parallelism cuts.
        heads: Of attention the numbers of heads of queries and of keys, which it shares out.
    """

    module: str
    kind: str
    flops: float
    grows: tuple[sizes.Size, ...]
    aligned: tuple[sizes.Size, ...]
    weight: bool = True
    heads: tuple[int, ...] = ()


@dataclass
class Step:
    """Goes through a step's forward operations.

    Attributes:
        tensors: The tensors of the step.
        products: Matrix products found.
        normed: Sizes of layer norms without parameters, by module.
    """

    tensors: Tensors
    products: list[Product] = field(default_factory=list)
    normed: dict[str, sizes.Size] = field(default_factory=dict)

    def follow(self, op: Operation) -> None:
        """Take in one operation."""
        inputs = self.tensors.read(op)
        rule = _rule(op.op)
        results = rule(self, op, inputs) if rule is not None else None
        if results is None:
            results = [self._by_places(op, inputs, record.shape) for record in op.outputs]
        results += [[] for _ in op.outputs[len(results) :]]
        self.tensors.write(
            op,
            [
                dims if tuple(map(self.value, dims)) == record.shape else numbers(record.shape)
                for record, dims in zip(op.outputs, results, strict=False)
            ],
        )

    def value(self, size: sizes.Size) -> int:
        """Its present value."""
        return self.tensors.sizes.value(size)

    def equate(self, a: sizes.Size, b: sizes.Size) -> None:
        """Two sizes are one."""
        self.tensors.sizes.equate(a, b)

    def note(self, size: sizes.Size, *words: str) -> None:
        """Add words about a size."""
        self.tensors.sizes.note(size, *words)

    def _by_places(self, op: Operation, inputs: list[Dims], shape: Sequence[int]) -> Dims:
        widest = max((t.shape for t in op.inputs), key=lambda s: (len(s), math.prod(s)), default=())
        if not shape and self.broadcast(inputs, widest) is not None:  # a loss
            for size in (size for dims in inputs for size in dims):
                self.note(size, sizes.REDUCED)
            return []
        made = self.broadcast(inputs, shape)
        if made is not None:
            return made
        largest = max(inputs, key=lambda dims: math.prod(map(self.value, dims)))
        for dims in inputs:
            if dims is largest:
                continue
            self.tensors.sizes.fix(*dims[: max(0, len(dims) - len(largest))])
            for size, other in zip(reversed(dims), reversed(largest), strict=False):
                if self.value(size) == self.value(other):
                    self.equate(size, other)
                else:
                    self.tensors.sizes.fix(size)
        return self.tensors.same_places(largest, shape)

    def broadcast(self, inputs: list[Dims], shape: Sequence[int]) -> Dims | None:
        """The sizes of a result that is computed element by element; None where shapes do not fit."""
        for dims in inputs:
            places = zip(reversed(dims), reversed(shape), strict=False)
            if len(dims) > len(shape) or any(self.value(d) not in (1, n) for d, n in places):
                return None
        result = []
        for i, n in enumerate(reversed(shape), 1):
            same = [d[-i] for d in inputs if len(d) >= i and self.value(d[-i]) == n]
            for other in same[1:]:
                self.equate(same[0], other)
            result.append(same[0] if same else self.tensors.sizes.new(n))
        return result[::-1]


def numbers(shape: Sequence[int]) -> Dims:
    """Sizes that never change."""
    return list(map(sizes.number, shape))


def _named(op: Operation, inputs: list[Dims], *names: str) -> list[Dims]:
    """The inputs of these names, in that order."""
    return [
        dims
        for name in names
        for t, dims in zip(op.inputs, inputs, strict=True)
        if t.argument == name
    ]


def _product(
    step: Step,
    op: Operation,
    kind: str,
    grows: Sequence[sizes.Size],
    aligned: Sequence[sizes.Size],
    heads: tuple[int, ...] = (),
) -> None:
    weight = any(t.parameter for t in op.inputs) or bool(op.scalars.get("parts"))
    flops = 3.0 * max(1, op.flops)
    found = Product(op.module or "", kind, flops, tuple(grows), tuple(aligned), weight, heads)
    step.products.append(found)


def _matmul(step: Step, op: Operation, inputs: list[Dims]) -> list[Dims] | None:
    operands = _named(op, inputs, "self", "mat1", "batch1", "mat2", "batch2")
    biases = operands[:1] if op.op.startswith(("addmm", "baddbmm")) else []
    operands = operands[len(biases) :]
    if len(operands) != 2 or any(len(d) not in (2, 3) for d in operands):
        return None
    a, b = operands
    step.equate(a[-1], b[-2])
    if len(a) == 3:
        step.equate(a[0], b[0])
        step.tensors.sizes.fix(a[0])  # a number of products, of experts say, is no width
    result = [*a[:-1], b[-1]]
    for bias in biases:
        step.broadcast([bias, result], [step.value(d) for d in result])
    _product(step, op, "linear" if len(a) == 2 else "matmul", (*a, b[-1]), (a[-1], b[-1]))
    return [result]


def _convolution(step: Step, op: Operation, inputs: list[Dims]) -> list[Dims] | None:
    named = {t.argument: d for t, d in zip(op.inputs, inputs, strict=True)}
    x, w = named.get("input"), named.get("weight")
    if x is None or w is None or len(x) != len(w) or not op.outputs:
        return None
    groups = int(op.scalars.get("groups") or 1)
    transposed = bool(op.scalars.get("transposed"))
    step.tensors.sizes.fix(*x[2:])
    aligned: tuple[sizes.Size, ...] = ()
    if groups > 1 and step.value(w[1]) == 1:  # depthwise: there are as many groups as channels
        factor = 1 if transposed else step.value(w[0]) // groups
        step.equate(w[0], sizes.number(factor) * x[1])
        leaving = w[0]
    else:
        part = step.tensors.sizes.part(w[0], groups)
        inner = sizes.number(groups) * w[1]
        entering, leaving = (w[0], inner) if transposed else (inner, w[0])
        step.equate(x[1], entering)
        aligned = (w[1], part)
    if transposed:
        step.note(leaving, sizes.TRANSPOSED)
    if step.value(leaving) < sizes.FEW_CHANNELS:  # an image is made: more channels are of no use
        step.tensors.sizes.fix(leaving)
    if "bias" in named:
        step.equate(named["bias"][0], leaving)
    _product(step, op, "convolution", (x[0], w[0], w[1]), aligned)
    return [[x[0], leaving, *numbers(op.outputs[0].shape[2:])]]


def _attention(step: Step, op: Operation, inputs: list[Dims]) -> list[Dims] | None:
    operands = _named(op, inputs, "query", "key", "value")
    if len(operands) != 3 or any(len(d) != 4 for d in operands):
        return None
    q, k, v = operands
    for a, b in ((q[3], k[3]), (q[0], k[0]), (k[2], v[2])):
        step.equate(a, b)
    step.note(k[2], sizes.KEYS)
    if step.value(q[3]) == step.value(v[3]):
        step.equate(q[3], v[3])  # not needed by the product, but scripts compute one width
    heads = (step.value(q[1]), step.value(k[1]))
    _product(step, op, "attention", (q[1], q[2], k[2], q[3]), (q[3], v[3]), heads)
    rows = tuple(map(step.value, q[:3]))
    rest = [q[:3] if o.shape == rows else numbers(o.shape) for o in op.outputs[1:]]
    return [[*q[:3], v[3]], *rest]


def _recurrent(step: Step, op: Operation, inputs: list[Dims]) -> list[Dims] | None:
    """Recurrent layers in one operation; its module says what its weights have in common.

    cuDNN's and MIOpen's, and torch's own ``lstm``, ``gru`` and ``rnn_*``, compute all layers and
    directions at once; oneDNN's computes one of them, whatever its arguments say of the module.
    """
    weights = [
        dims
        for t, dims in zip(op.inputs, inputs, strict=True)
        if t.argument.startswith(("weight", "params")) and len(dims) == 2
    ]
    if len(weights) < 2 or not inputs[0]:
        return None
    x, recurring = inputs[0], weights[1]
    projecting = weights[2] if op.scalars.get("proj_size") and len(weights) > 2 else None
    leaving = recurring[1] if projecting is None else projecting[0]
    hidden = recurring[1] if projecting is None else projecting[1]
    directions = 2 if op.scalars.get("bidirectional") and op.op != "mkldnn_rnn_layer" else 1
    step.equate(x[-1], weights[0][1])
    for state in _named(op, inputs, "hx", "hx_", "cx", "cx_"):
        width = leaving if step.value(state[-1]) == step.value(leaving) else hidden
        step.equate(state[-1], width)
    rows = 6.0 * math.prod(op.inputs[0].shape[:-1])
    for wide, inner in weights:
        flops = rows * step.value(wide) * step.value(inner)
        projects = projecting is not None and step.value(wide) == step.value(leaving)
        aligned = (inner, leaving if projects else hidden)
        found = Product(op.module or "", "rnn", flops, (*x[:-1], wide, inner), aligned)
        step.products.append(found)
    sequence = [*x[:-1], sizes.number(directions) * leaving]
    widths = {step.value(hidden): hidden, step.value(leaving): leaving}
    results = []
    for record in op.outputs:
        if tuple(map(step.value, sequence)) == record.shape:
            results.append(sequence)
        elif len(record.shape) in (2, 3) and record.shape[-1] in widths:
            results.append([*numbers(record.shape[:-1]), widths[record.shape[-1]]])
        else:  # a buffer that no script sees
            results.append(numbers(record.shape))
    return results


def _embedding(_step: Step, op: Operation, inputs: list[Dims]) -> list[Dims] | None:
    named = {t.argument: d for t, d in zip(op.inputs, inputs, strict=True)}
    weight, indices = named.get("weight"), named.get("indices")
    if weight is None or indices is None or len(weight) != 2:
        return None
    rows = indices if op.op == "embedding" else numbers(op.outputs[0].shape[:-1])
    return [[*rows, weight[1]]]


def _reshape(step: Step, op: Operation, inputs: list[Dims]) -> list[Dims]:
    return [step.tensors.reshaped(inputs[0], o.shape) for o in op.outputs]


def _new(step: Step, op: Operation, _inputs: list[Dims]) -> list[Dims]:
    """Made by the script, perhaps after a tensor's dtype and device alone."""
    return [[step.tensors.sizes.new(n, sizes.MADE) for n in o.shape] for o in op.outputs]


def _cat(step: Step, op: Operation, inputs: list[Dims]) -> list[Dims] | None:
    shape, dim = op.outputs[0].shape, op.scalars.get("dim", 0)
    joined = [d for d in inputs if len(d) == len(shape)]
    if not joined or type(dim) is not int:
        return None
    dim %= len(shape)
    result = list(joined[0])
    for other in joined[1:]:
        for i, size in enumerate(other):
            if i != dim:
                step.equate(result[i], size)
        result[dim] = result[dim] + other[dim]
    return [result]


def _split(step: Step, op: Operation, inputs: list[Dims]) -> list[Dims] | None:
    base, shapes = inputs[0], [o.shape for o in op.outputs]
    odd = [i for i, d in enumerate(base) if any(s[i] != step.value(d) for s in shapes)]
    if len(odd) != 1 or len(set(shapes)) != 1:
        return None
    dim, width = odd[0], shapes[0][odd[0]]
    if len(shapes) * width != step.value(base[dim]):
        return None
    part = step.tensors.split(base[dim], [len(shapes), width])[-1]
    return [[*base[:dim], part, *base[dim + 1 :]]] * len(shapes)


def _reduce(step: Step, op: Operation, inputs: list[Dims]) -> list[Dims]:
    x = inputs[0] if inputs else []
    dim: Any = op.scalars.get("dim")
    dims = [dim] if type(dim) is int else dim if isinstance(dim, list) and dim else range(len(x))
    gone = {int(d) % max(1, len(x)) for d in dims} & set(range(len(x)))
    for i in gone:
        step.note(x[i], sizes.REDUCED)
    left = [d for i, d in enumerate(x) if i not in gone]
    wide = [sizes.number(1) if i in gone else d for i, d in enumerate(x)]
    return [wide if len(o.shape) == len(wide) else left for o in op.outputs]


def _channel_norm(step: Step, op: Operation, inputs: list[Dims]) -> list[Dims] | None:
    """Batch and group norm: every vector has a value for each channel."""
    x = inputs[0]
    if len(x) < 2:
        return None
    for other in inputs[1:]:
        if len(other) == 1:
            step.equate(x[1], other[0])
    groups = int(op.scalars.get("group") or 1)
    step.tensors.sizes.part(x[1], groups)
    grouped = op.op == "native_group_norm"
    step.note(x[1], sizes.NORM if grouped else sizes.BATCH_NORM)
    return [x, *(numbers(o.shape) if grouped else [x[1]] for o in op.outputs[1:])]


def _layer_norm(step: Step, op: Operation, inputs: list[Dims]) -> list[Dims]:
    x = inputs[0]
    count = len(op.scalars.get("normalized_shape") or [0])
    for other in inputs[1:]:
        step.broadcast([x, other], [step.value(d) for d in x])
    for dim in x[-count:]:
        step.note(dim, sizes.NORM)
    if len(inputs) == 1:
        step.normed[op.module or ""] = x[-1]
    kept = [*x[:-count], *numbers([1] * count)]
    return [x, kept, kept]


def _spatial(step: Step, op: Operation, inputs: list[Dims]) -> list[Dims] | None:
    """Pooling and resizing: batch and channels stay."""
    x = inputs[0]
    lead = len(x) - max(1, len(x) - 2)
    if any(len(o.shape) != len(x) for o in op.outputs):
        return None
    step.tensors.sizes.fix(*x[lead:])
    return [[*x[:lead], *numbers(o.shape[lead:])] for o in op.outputs]


def _softmax(step: Step, op: Operation, inputs: list[Dims]) -> None:
    dim = op.scalars.get("dim", -1)
    if type(dim) is int and inputs and inputs[0]:
        step.note(inputs[0][dim % len(inputs[0])], sizes.SOFTMAX)


def _class_loss(step: Step, op: Operation, inputs: list[Dims]) -> list[Dims]:
    x = inputs[0]
    if x:
        step.note(x[1] if len(x) > 1 else x[0], sizes.CLASSES)
    return [numbers(o.shape) for o in op.outputs]


_RULES: tuple[tuple[str, Rule], ...] = (
    ("mm|addmm|bmm|baddbmm", _matmul),
    ("convolution(_overrideable)?|(cudnn|mkldnn)_convolution", _convolution),
    ("_scaled_dot_product_(flash|cudnn|efficient|fused)_attention.*", _attention),
    ("mkldnn_rnn_layer|_cudnn_rnn|miopen_rnn|lstm|gru|rnn_tanh|rnn_relu", _recurrent),
    ("embedding|_embedding_bag(_forward_only)?", _embedding),
    ("_unsafe_view|view_copy|_reshape_copy", _reshape),
    ("(new_)?(zeros|ones|full|empty)|rand|randn|randint|arange|linspace|eye", _new),
    ("cat", _cat),
    ("unsafe_split(_with_sizes)?|split(_with_sizes)?_copy|unsafe_chunk", _split),
    ("sum|mean|(var|std)(_mean)?|a?(max|min)|arg(max|min)|prod|any|all", _reduce),
    ("linalg_vector_norm|norm|logsumexp", _reduce),
    ("_?native_batch_norm.*|(cudnn|miopen)_batch_norm|_batch_norm_with_update", _channel_norm),
    ("native_group_norm", _channel_norm),
    ("native_layer_norm|_fused_rms_norm", _layer_norm),
    ("(max|avg|_?adaptive_(avg|max))_pool[123]d(_with_indices)?", _spatial),
    ("upsample_.*|(reflection|replication)_pad[12]d", _spatial),
    ("_(log_|safe_)?softmax", _softmax),
    ("nll_loss(2d)?_forward", _class_loss),
)


@cache
def _rule(op: str) -> Rule | None:
    """The rule for an operation, in place or not."""
    plain = op.rstrip("_")
    return next((rule for names, rule in _RULES if re.fullmatch(names, plain)), None)
