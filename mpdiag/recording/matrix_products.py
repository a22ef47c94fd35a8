"""Matrix products of a step as ATen runs them, and which operand of which product each tensor is.

A forward product is noted with the places of its two factors in memory. Its backward products have one
of these factors again, perhaps transposed, and the gradient of the output as the other: with the weight
it is dgrad, with the input wgrad. Convolutions and fused attention name their arguments themselves.
"""

import math
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mpdiag.emulation.block_products import FACTORS, windows
from mpdiag.recording.operand_matrices import Matrix, Measured, measure
from mpdiag.runs.block_operands import BlockOperand, Gemm, OperandRole, ProductKind
from mpdiag.tracing.precision_share import is_product

_CONVOLUTIONS = "convolution", "convolution_backward"
_FUSED_ATTENTION = "_scaled_dot_product_"
_ATTENTION: dict[bool, tuple[tuple[int, Gemm, OperandRole, str, int], ...]] = {
    False: (
        (0, "fprop", "input", "query", -1),
        (0, "fprop", "weight", "key", -1),
        (1, "fprop", "weight", "value", -2),
    ),
    True: (
        (0, "dgrad", "weight", "key", -2),
        (0, "wgrad", "input", "query", -2),
        (1, "dgrad", "grad_output", "grad_out", -1),
        (1, "dgrad", "weight", "value", -1),
        (1, "wgrad", "grad_output", "grad_out", -2),
    ),
}
"""What fused attention is given, forwards and backwards: product, operand, argument, axis of blocks."""
_UNSHOWN = "fused attention shows neither its probabilities nor the gradient of its scores"

MOST = 4096
"""Operands that are measured in a step: each takes some 10 ms, and a model has up to 100,000."""
_TOO_MANY = f"a step has more than {MOST:,} operands: some were recorded in each step"

Role = tuple[OperandRole, Matrix]
Place = tuple[Any, ...]


class Parameter(NamedTuple):
    """A parameter among the arguments of an operation.

    Attributes:
        name: Its name; "" if that is not known.
        part: The part of it that the operation is given, before a conversion.
        whole: The parameter, or what it was converted to as a whole.
    """

    name: str
    part: Tensor
    whole: Tensor


@dataclass(frozen=True)
class _Forward:
    """A product of the forward pass, as its backward ones find it again.

    Attributes:
        module, kind, call: See ``BlockOperand``.
        parameter: Name of the parameter it is with; "" if none is known.
        expert: Which expert, if it is a single one's.
        input, weight: Where its factors lie in memory.
    """

    module: str | None
    kind: ProductKind
    call: int
    parameter: str = ""
    expert: int | None = None
    input: Place = ()
    weight: Place = ()


class MatrixProducts:
    """Measures the operands of the matrix products of one step, once each.

    Attributes:
        unseen: Products that were not measured: dicts of module, product and reason.
    """

    def __init__(self, rank: int) -> None:
        self.unseen: dict[tuple[str | None, str], dict[str, Any]] = {}
        self._rank = rank
        self._products: set[tuple[Any, ...]] = set()
        self._thin = 1
        self.begin(0)

    def begin(self, step: int) -> None:
        """Begin a new step. Of the products of the one before, at most ``MOST`` operands fit."""
        if self._products:
            self._thin = -(-2 * len(self._products) // MOST)
        self._products = set()
        self._step = step
        self._found: dict[tuple[Any, ...], tuple[partial[BlockOperand], Measured]] = {}
        self._forward: dict[int, _Forward] = {}
        self._calls: Counter[tuple[Any, ...]] = Counter()

    def enter(self, module: str | None) -> None:
        """A module is called: its products are counted from 0."""
        for key in [key for key in self._calls if key[0] == module]:
            del self._calls[key]

    def see(
        self,
        func: Any,
        named: Mapping[str, Any],
        fields: Mapping[str, Any],
        parameters: Mapping[str, Parameter],
    ) -> None:
        """An operation is about to run.

        Args:
            func: ATen's operation.
            named: Its arguments by name.
            fields: Those of ``Operation``: ``index``, ``module``, ``node``, ``forward``, ``function``.
            parameters: Of its arguments that are parameters, views of them, or converted from them.
        """
        op = func.overloadpacket.__name__
        if op in FACTORS:
            self._see_factors(op, named, fields, parameters)
        elif op in _CONVOLUTIONS:
            self._see_convolution(named, fields, parameters)
        elif op.startswith(_FUSED_ATTENTION):
            self._see_attention(named, fields)
        elif is_product(func):
            self._leave_out(fields["module"], op, "mpdiag does not see into this operation")

    def _leave_out(self, module: str | None, product: str, reason: str) -> None:
        found = {"module": module, "product": product, "reason": reason}
        self.unseen.setdefault((module, reason), found)

    # -- products of two factors -------------------------------------------------------------------

    def _see_factors(
        self,
        op: str,
        named: Mapping[str, Any],
        fields: Mapping[str, Any],
        parameters: Mapping[str, Parameter],
    ) -> None:
        left, right = (named[name] for name in FACTORS[op])
        places = _place(left), _place(right)
        roles: tuple[OperandRole, OperandRole] | None = ("input", "weight")
        gemm: Gemm = "fprop"
        if fields["node"]:
            known = self._forward.get(fields["forward"])
            if known is None:
                return
            forward = known
            gemm, roles = _backward_roles(forward, *places)
        else:
            first, second = (parameters.get(name) for name in FACTORS[op])
            if first is not None and second is None:
                roles, places = ("weight", "input"), (places[1], places[0])
            weight = second or first
            kind, expert = _kind_of(op, weight)
            if weight is None and "attention" in fields["function"]:
                kind = "attention"
            call = self._call(fields["module"], kind, expert)
            name = "" if weight is None else weight.name
            forward = _Forward(fields["module"], kind, call, name, expert, *places)
            self._forward[fields["index"]] = forward
        if roles is not None:
            for expert, a, b in _parts(forward, left, right, named.get("offs")):
                pair = (roles[0], _matrix(a, -1)), (roles[1], _matrix(b, -2))
                self._measure(forward, gemm, pair, expert)

    def _call(self, module: str | None, kind: ProductKind, expert: int | None) -> int:
        """Which product of its kind in its module's call this is."""
        self._calls[module, kind, expert] += 1
        return self._calls[module, kind, expert] - 1

    # -- products that name their arguments --------------------------------------------------------

    def _see_convolution(
        self,
        named: Mapping[str, Any],
        fields: Mapping[str, Any],
        parameters: Mapping[str, Parameter],
    ) -> None:
        wanted: dict[Gemm, bool] = {"fprop": True}
        forward = self._forward.get(fields["forward"])
        if fields["node"]:
            wanted = dict(zip(("dgrad", "wgrad"), named["output_mask"], strict=False))
        else:
            name = parameters["weight"].name if "weight" in parameters else ""
            call = self._call(fields["module"], "convolution", None)
            forward = _Forward(fields["module"], "convolution", call, name)
            self._forward[fields["index"]] = forward
        for gemm, is_wanted in wanted.items():
            if is_wanted and forward is not None:
                self._measure(forward, gemm, _convolved(gemm, named))

    def _see_attention(self, named: Mapping[str, Any], fields: Mapping[str, Any]) -> None:
        """Call 0 is queries · keysᵀ, 1 probabilities · values; what a fused kernel is given of them."""
        module, query = fields["module"], named["query"]
        if query.dim() != 4:
            self._leave_out(module, "attention", "packed sequences are not recorded")
            return
        self._leave_out(module, "attention", _UNSHOWN)
        forward = self._forward.get(fields["forward"])
        if not fields["node"]:
            forward = _Forward(module, "attention", self._call(module, "attention", None))
            self._call(module, "attention", None)
            self._forward[fields["index"]] = forward
        if forward is None:
            return
        for call, gemm, role, name, along in _ATTENTION[bool(fields["node"])]:
            tensor = next(t for argument, t in named.items() if argument.startswith(name))
            other = named["value" if call else "key"]
            flops = 2 * query[..., 0].numel() * other.shape[-2] * other.shape[-1]
            product = replace(forward, call=forward.call + call)
            self._measure(product, gemm, [(role, _matrix(tensor, along))], flops=flops)

    # -- measuring ---------------------------------------------------------------------------------

    def _measure(
        self,
        forward: _Forward,
        gemm: Gemm,
        operands: Sequence[Role],
        expert: int | None = None,
        flops: int = 0,
    ) -> None:
        """Measure operands of a product, unless they were in this step; ``flops`` follow from two."""
        odd = [m.values for _, m in operands if not _is_readable(m.values)]
        if odd:
            reason = f"an operand is a {type(odd[0]).__name__} of {odd[0].dtype}"
            self._leave_out(forward.module, forward.kind, reason)
            return
        shapes = [matrix.shape for _, matrix in operands]
        if not all(math.prod(shape) for shape in shapes):
            return  # an expert without tokens
        product = forward.module, forward.kind, forward.call, expert, gemm
        self._products.add(product)
        if len(self._found) + len(operands) > MOST or _hash(self._step, product) % self._thin:
            self._leave_out(None, "", _TOO_MANY)
            return
        for role, matrix in operands:
            flops = flops or 2 * math.prod(shapes[0]) * shapes[1][1]
            key = *product, role
            if key in self._found:
                continue
            batch, lines, length = matrix.shape
            describe = partial(
                BlockOperand,
                rank=self._rank,
                steps=(self._step,),
                module=forward.module,
                product=forward.kind,
                call=forward.call,
                gemm=gemm,
                operand=role,
                parameter=forward.parameter,
                expert=expert,
                dtype=str(matrix.values.dtype).removeprefix("torch."),
                lines=batch * lines,
                length=length,
                flops=flops,
            )
            self._found[key] = describe, measure(matrix, role, gemm, repr(key), self._step)

    def end(self) -> list[BlockOperand]:
        """The step's operands; waits for their devices."""
        found = [describe(**measured.fields()) for describe, measured in self._found.values()]
        self.begin(self._step)
        return found


def _hash(*what: Any) -> int:
    """A number that looks random and is the same on every machine."""
    return zlib.crc32(repr(what).encode())


def _place(tensor: Tensor) -> Place:
    """Where a tensor lies in memory, the same for its transpose."""
    if not _is_readable(tensor):
        return (id(tensor),)
    axes = sorted(zip(tensor.stride(), tensor.shape, strict=True))
    return tensor.untyped_storage()._cdata, tensor.storage_offset(), *axes


def _is_readable(tensor: Tensor) -> bool:
    plain = type(tensor) in (Tensor, torch.nn.Parameter) and tensor.layout == torch.strided
    return plain and tensor.is_floating_point() and tensor.dtype.itemsize > 1


def _backward_roles(
    forward: _Forward, left: Place, right: Place
) -> tuple[Gemm, tuple[OperandRole, OperandRole] | None]:
    """Which backward product of a forward one has these factors, and what they are.

    None where that does not show: x · xᵀ has its input as its weight, and saved tensors may have been
    moved elsewhere meanwhile.
    """
    of_input, of_weight = (place in (left, right) for place in (forward.input, forward.weight))
    if of_input == of_weight:
        return "dgrad", None
    gemm: Gemm = "wgrad" if of_input else "dgrad"
    known: OperandRole = "input" if of_input else "weight"
    first = left == (forward.input if of_input else forward.weight)
    return gemm, (known, "grad_output") if first else ("grad_output", known)


def _kind_of(op: str, weight: Parameter | None) -> tuple[ProductKind, int | None]:
    """The kind of a product with a parameter, or of two other tensors; the expert, if it is of one."""
    if op == "_grouped_mm":
        return "grouped", None
    if weight is None:
        return "matmul", None
    part, whole = weight.part, weight.whole
    if whole.dim() == 3 and part.dim() == 3 and part.shape[0] == whole.shape[0] > 1:
        return "experts", None
    if whole.dim() == 3 and _place(part)[2:] == _place(whole[0])[2:]:
        return "experts", (part.storage_offset() - whole.storage_offset()) // whole.stride(0)
    return "linear", None


def _parts(
    forward: _Forward, left: Tensor, right: Tensor, ends: Tensor | None
) -> Iterator[tuple[int | None, Tensor, Tensor]]:
    """A product's matrices by expert: those of a grouped one, or the product as it is."""
    if forward.kind not in ("grouped", "experts") or (
        ends is None and left.dim() == right.dim() == 2
    ):
        yield forward.expert, left, right
        return
    bounds = [0, *([] if ends is None else ends.tolist())]
    for expert in range(left.shape[0] if ends is None else len(bounds) - 1):
        some = slice(*bounds[expert : expert + 2]) if ends is not None else slice(None)
        if left.dim() == right.dim() == 2:  # of what is summed over
            yield expert, left[:, some], right[some]
        else:
            a = left[expert] if left.dim() == 3 else left[some]
            yield expert, a, right[expert] if right.dim() == 3 else right[:, some]


def _matrix(tensor: Tensor, along: int) -> Matrix:
    """Matrices in the last two axes, lines along one of them."""
    last = tensor.dim() - 1, tensor.dim() - 2
    along += tensor.dim()
    batch = tuple(range(tensor.dim() - 2))
    return Matrix(tensor, batch, tuple(axis for axis in last if axis != along), (along,))


def _convolved(gemm: Gemm, named: Mapping[str, Any]) -> tuple[Role, ...]:
    """The operands of a convolution's product, as ``runs.block_operands`` lays them out.

    Args:
        gemm: Which product.
        named: Arguments of ``convolution`` or ``convolution_backward``.
    """
    weight, groups, transposed = named["weight"], named["groups"], named["transposed"]
    x, gradient = named["input"], named.get("grad_output")
    places = range(3, weight.dim() + 1)
    factor = weight.unflatten(0, (groups, -1))  # groups, channels, channels of a window, window
    window, channels = (2, *places), (1,)
    narrow, wide = (x, gradient) if transposed else (gradient, x)
    of_narrow: OperandRole = "input" if transposed else "grad_output"
    of_wide: OperandRole = "grad_output" if transposed else "input"
    if narrow is not None:
        split = narrow.unflatten(1, (groups, -1))  # images, groups, channels, places
        tokens = (0, *places)
    if wide is not None:
        padded, windowed = windows(wide, weight, named)
        seen = (0, *places)
        inside = (2, *range(weight.dim() + 1, 2 * weight.dim() - 1))
    if gemm == "wgrad":
        return (
            (of_narrow, Matrix(split, (1,), (2,), tokens, narrow)),
            (of_wide, Matrix(windowed, (1,), inside, seen, padded)),
        )
    if gemm == ("dgrad" if transposed else "fprop"):
        lines = of_wide, Matrix(windowed, (1,), seen, inside, padded)
        return lines, ("weight", Matrix(factor, (0,), channels, window, weight))
    lines = of_narrow, Matrix(split, (1,), tokens, (2,), narrow)
    return lines, ("weight", Matrix(factor, (0,), window, channels, weight))
