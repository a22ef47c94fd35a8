"""Matrix products of a training in block formats, emulated: operands are rounded, sums are FP32.

A layer has three products, and each rounds its two operands along the axis that it sums over, so an
input and a weight are rounded twice, unless their blocks are square. Products are met where autocast
casts their operands, so what is rounded has passed through BF16, and so does what comes out.

Sources: TransformerEngine's ``nvfp4.rst`` and torchao 0.18's ``mxfp8_linear.py`` (which operand is
rounded along which axis); arXiv 2509.25149, section 4.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial, reduce
from threading import get_ident
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from mpdiag.emulation.block_errors import rotate
from mpdiag.emulation.block_rounding import quantize_blocks
from mpdiag.emulation.mode import unwatched
from mpdiag.emulation.random_bits import CounterGenerator
from mpdiag.numerics.block_formats import block_format
from mpdiag.numerics.block_recipes import OperandFormat
from mpdiag.tracing.precision_share import note_low_products

FACTORS = {
    "mm": ("self", "mat2"),
    "addmm": ("mat1", "mat2"),
    "bmm": ("self", "mat2"),
    "baddbmm": ("batch1", "batch2"),
    "_grouped_mm": ("self", "mat2"),
}
"""Products of two matrices, or of batches of them: the arguments that are multiplied."""
_OPENED = frozenset(
    {"linear", "matmul", "einsum", "chain_matmul", "linalg_multi_dot", "conv1d", "conv2d", "conv3d"}
)
"""What consists of these: its parts are met in its place."""
INTERCEPTED = frozenset(FACTORS) | {"convolution"} | _OPENED
"""Operations that autocast has to pass on to ``BlockProducts``."""
_VIEWS = (
    "ToCopy T Transpose Permute View UnsafeView Select Slice Split Unbind Unsqueeze Squeeze Expand"
).split()
"""What leads from a parameter to the part of it that is multiplied, by autograd's names."""
_format = lru_cache(block_format)


@dataclass(frozen=True)
class QuantisedLayer:
    """A layer with products in a block format.

    Attributes:
        name: Its name in the plan.
        parameter: The weight's name in its module; "" for products of two other tensors.
        grouped: Whether each part of the weight is a matrix of its own, with a scale of its own.
        formats: By product, how its operands are rounded; a product that is left out is in BF16.
    """

    name: str
    parameter: str
    grouped: bool
    formats: Mapping[str, tuple[OperandFormat, OperandFormat]]


Bits = Callable[[str, Tensor], Tensor]
_Called = tuple[nn.Module | None, Sequence[QuantisedLayer]]


def _multiply(layer: QuantisedLayer, gemm: str, left: Tensor, right: Tensor, bits: Bits) -> Tensor:
    """left · rightᵀ in FP32, of matrices with lines that a product of a layer sums over."""
    if gemm in layer.formats:
        first, second = layer.formats[gemm]
        draw = partial(bits, gemm)
        left, right = _rounded(left, first, draw), _rounded(right, second, draw)
    return left @ right.mT


def _rounded(lines: Tensor, operand: OperandFormat, draw: Callable[[Tensor], Tensor]) -> Tensor:
    """An operand, its lines along the last axis. Zeros fill up a rotation's last group."""
    if not lines.numel():
        return lines
    if operand.rotated:  # 16 neighbours together
        lines = rotate(F.pad(lines, (0, -lines.shape[-1] % 16)))
    fmt = _format(operand.format, block=operand.block or None, rounding=operand.rounding)
    return quantize_blocks(lines, fmt, -1, draw(lines) if fmt.rounding != "nearest" else None)


class BlockProducts:
    """Computes the products of the layers that a plan quantises.

    Args:
        names: Of the layers.
        multiple: What engines need every size of a product to be a multiple of.
        rank: This process's rank: bits of stochastic rounding differ from rank to rank.

    Attributes:
        rank: As above.
        step: Tells the training's step, which bits of stochastic rounding depend on.
        note: Told after some forward passes: the layers of which no product was computed, and those
            with sizes that engines do not take.
    """

    def __init__(self, names: Iterable[str] = (), multiple: int = 1, rank: int = 0) -> None:
        self.step: Callable[[], int] = lambda: 0
        self.note: Callable[[list[str], list[str]], None] = lambda _missing, _padded: None
        self._missing, self._padded = dict.fromkeys(names), dict.fromkeys("")
        self._multiple, self.rank = multiple, rank
        self._passes = 0
        self._calls: defaultdict[int, list[_Called]] = defaultdict(list)  # by thread
        self._drawn: tuple[int, Counter[str]] = 0, Counter()

    def __reduce__(self) -> Any:
        """A copy of a model takes no training along."""
        return type(self), ()

    def look(self) -> None:
        """A forward pass of the training begins; after eight, every layer should have been met."""
        self._passes += 1
        if self._passes == 8:
            self.note(list(self._missing), list(self._padded))

    def restart(self) -> None:
        """The step begins again: the same bits are drawn."""
        self._drawn = 0, Counter()

    # -- modules -----------------------------------------------------------------------------------

    def enter(self, layers: Sequence[QuantisedLayer], module: nn.Module, _args: Any) -> None:
        """A forward hook: a module is called, which has these quantised layers."""
        self._calls[get_ident()].append((module, layers))

    def leave(self, *_call: Any) -> None:
        """A forward hook: the call of the last module is over."""
        del self._calls[get_ident()][-1:]

    @property
    def _called(self) -> _Called:
        return (self._calls[get_ident()] or [(None, ())])[-1]

    # -- products ----------------------------------------------------------------------------------

    def opens(self, name: str) -> bool:
        """Whether an operation's parts are to be met in its place."""
        return name in _OPENED and bool(self._called[1])

    def run(self, name: str, named: Mapping[str, Any], low: torch.dtype) -> Tensor | None:
        """A product of the module being called; None if it is not quantised.

        Args:
            name: ATen's operation.
            named: Its arguments by name.
            low: What operands and result are rounded to besides.
        """
        if name == "convolution":
            layer = self._layer_of(named["input"], named["weight"])[0]
            if layer is None or named["transposed"]:
                return None
            return self._convolve(layer, named, low)
        if name not in FACTORS or named.get("out_dtype") not in (None, low):
            return None
        left, right = (named[factor] for factor in FACTORS[name])
        layer, turned = self._layer_of(left, right)
        ends = named.get("offs")
        if layer is None or (ends is not None and (left.dim(), right.dim()) != (2, 3)):
            return None
        x, weight = (right.mT, left) if turned else (left, right.mT)
        out = self._products(layer, _through(x, low), _through(weight, low), ends)
        out = out.mT if turned else out
        added = named.get("bias") if name == "_grouped_mm" else None
        if name in ("addmm", "baddbmm"):
            added = named["self"] if named.get("beta", 1) else None
            out = out * named.get("alpha", 1)
        if added is not None:
            out = out + _through(added, low) * named.get("beta", 1)
        return out.to(low)

    def _layer_of(self, left: Tensor, right: Tensor) -> tuple[QuantisedLayer | None, bool]:
        """The layer that two factors belong to, and whether the weight is the first one."""
        if not all(type(t) in (Tensor, nn.Parameter) for t in (left, right)):
            return None, False
        module, layers = self._called
        sources = _source(left), _source(right)
        for layer in layers:
            if not layer.parameter:
                continue
            path = layer.parameter.split(".")
            weight: Any = reduce(lambda owner, name: getattr(owner, name, None), path, module)
            for tensor, source in zip((right, left), sources[::-1], strict=True):
                if isinstance(weight, Tensor) and _is_part(tensor, source, weight):
                    return layer, tensor is left
        if any(isinstance(s if s._base is None else s._base, nn.Parameter) for s in sources):
            return None, False
        return next((layer for layer in layers if not layer.parameter), None), False

    def _products(
        self, layer: QuantisedLayer, x: Tensor, weight: Tensor, ends: Tensor | None
    ) -> Tensor:
        """x · weightᵀ in FP32 of matrices, or of equally many matrices of each.

        Args:
            layer: The layer.
            x: (…, tokens, length).
            weight: (…, columns, length).
            ends: Where each expert's tokens end, if x has those of all.
        """
        self._missing.pop(layer.name, None)
        if any(size % self._multiple for size in (*x.shape[-2:], weight.shape[-2])):
            self._padded[layer.name] = None
        bits = partial(self._bits, layer.name)
        if ends is None and not (layer.grouped and x.dim() == 3):
            matrices = (t[None].flatten(0, -3) for t in (x, weight))
            whole: Tensor = _Product.apply(*matrices, layer, bits)  # type: ignore[no-untyped-call]
            return whole.view(*x.shape[:-1], weight.shape[-2])
        if ends is None:
            each: Sequence[Tensor] = x.unbind()
        else:
            sizes = torch.diff(ends, prepend=ends.new_zeros(1)).tolist()
            *each, rest = x.split([*sizes, len(x) - sum(sizes)])
        found = [
            _Product.apply(one[None], matrix[None], layer, bits)[0]  # type: ignore[no-untyped-call]
            for one, matrix in zip(each, weight.unbind(), strict=True)
        ]
        if ends is None:
            return torch.stack(found)
        return torch.cat([*found, rest.new_zeros(len(rest), weight.shape[1])])

    def _convolve(
        self, layer: QuantisedLayer, named: Mapping[str, Any], low: torch.dtype
    ) -> Tensor:
        """A convolution as the product that follows ``unfold``; groups are matrices of one tensor."""
        x, weight = (_through(named[name], low) for name in ("input", "weight"))
        groups, places = named["groups"], x.dim() - 2
        _, seen = windows(x, weight, named)  # images, groups, channels, places, places of a window
        outputs = seen.shape[3 : 3 + places]
        order = 1, 0, *range(3, 3 + places), 2, *range(3 + places, 3 + 2 * places)
        lines = seen.permute(order).reshape(groups, -1, weight[0].numel())
        found = self._products(layer, lines, weight.reshape(groups, -1, lines.shape[2]), None)
        found = found.view(groups, len(x), *outputs, -1).movedim((0, -1), (1, 2)).flatten(1, 2)
        if named["bias"] is not None:
            found = found + _through(named["bias"], low).view(-1, *[1] * places)
        return found.to(low)

    def _bits(self, layer: str, gemm: str, lines: Tensor) -> Tensor:
        """Random bits for the next tensor that a product of a layer rounds in this step."""
        if self._drawn[0] != self.step():
            self._drawn = self.step(), Counter()
        step, counts = self._drawn
        counts[layer + gemm] += 1
        generator = CounterGenerator(0, step, repr((layer, gemm, counts[layer + gemm], self.rank)))
        return generator.bits(lines.shape, lines.device)


class _Product(torch.autograd.Function):
    """x · weightᵀ of FP32 matrices, and its two products backwards, rounded as a layer says.

    Bits of stochastic rounding are drawn by backward passes alone, in autograd's order: evaluations and
    recomputed forward passes change none.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, layer: QuantisedLayer, bits: Bits) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.layer, ctx.bits = layer, bits
        ctx.flops = 2 * math.prod(x.shape) * weight.shape[1]
        if any(ctx.needs_input_grad):
            note_low_products(1, ctx.flops)
        with unwatched():
            return _multiply(layer, "fprop", x, weight, bits)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        layer, bits = ctx.layer, ctx.bits
        of_x, of_weight = ctx.needs_input_grad[:2]
        note_low_products(of_x + of_weight, ctx.flops * (of_x + of_weight))
        with unwatched():
            dx = _multiply(layer, "dgrad", gradient, weight.mT, bits) if of_x else None
            dw = _multiply(layer, "wgrad", gradient.mT, x.mT, bits) if of_weight else None
        return dx, dw, None, None


def windows(x: Tensor, weight: Tensor, named: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """A convolution's input with its padding, and what each place of the output sees of it.

    Args:
        x: (images, channels, places …).
        weight: Of the convolution.
        named: Its ``groups``, ``stride``, ``dilation`` and ``padding``.

    Returns:
        The padded input; a view of it: images, groups, channels of a group, places of the output, places
        of the window.
    """
    groups, step, dilation = named["groups"], named["stride"], named["dilation"]
    around = [size for size in reversed(named["padding"]) for _ in range(2)]
    padded = F.pad(x, around) if any(around) else x
    sizes = weight.shape[2:]
    outputs = [
        (have - spread * (size - 1) - 1) // by + 1
        for have, size, spread, by in zip(padded.shape[2:], sizes, dilation, step, strict=True)
    ]
    images, channels, *rest = padded.stride()
    inside = padded.shape[1] // groups
    shape = (x.shape[0], groups, inside, *outputs, *sizes)
    strides = [images, inside * channels, channels]
    strides += [by * stride for by, stride in zip(step, rest, strict=True)]
    strides += [by * stride for by, stride in zip(dilation, rest, strict=True)]
    return padded, padded.as_strided(shape, strides)


def _through(x: Tensor, low: torch.dtype) -> Tensor:
    """FP32 values that a lower precision holds."""
    return x.to(low).float()


def _source(tensor: Tensor) -> Tensor:
    """The parameter that a tensor is a part or a conversion of; otherwise the tensor."""
    node: Any = tensor.grad_fn
    while node is not None and node.name().removesuffix("Backward0") in _VIEWS:
        node = node.next_functions[0][0]
    return getattr(node, "variable", tensor)


def _is_part(tensor: Tensor, source: Tensor, weight: Tensor) -> bool:
    """Whether a factor is a weight, or a part of it. Without autograd, a conversion shows its sizes."""
    if source.untyped_storage()._cdata == weight.untyped_storage()._cdata:
        return True
    sizes = sorted(weight.shape), sorted(weight.shape[1:])
    return not torch.is_grad_enabled() and weight.dim() == 3 and sorted(tensor.shape) in sizes
