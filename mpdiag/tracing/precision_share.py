"""Which share of a training's FLOPs ran in half precision, counted on a few steps.

A dispatch mode sees matrix products, convolutions, attention and recurrent layers with the tensors
they are given, in forward passes with gradients and in backward passes; torch's own formulas
(``torch.utils.flop_counter``) turn shapes into FLOPs; of a sparse matrix, what it stores counts. It
looks at every operation, which costs a few microseconds each, so it is at work in the first steps and
then in one step of each octave. Of compiled code, ``compiled_products`` counts the graphs.
"""

import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import Any

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from mpdiag.hardware.cpu_instructions import read_instructions
from mpdiag.numerics.autocast_lists import ONE_DTYPE
from mpdiag.tracing.dispatch import in_backward, tensors_of
from mpdiag.tracing.precision import HALF
from mpdiag.tracing.tap import OperationTap
from mpdiag.tracing.uncompiled import lets_compile

DENSE = 8
"""Every one of the first steps is counted."""
_SKIPPED = torch._C._disabled_torch_dispatch_impl


def is_counted(step: int) -> bool:
    """Whether a step is counted: the first few, then one of each octave, at no fixed offset."""
    if step < DENSE:
        return True
    start = 1 << (step.bit_length() - 1)
    return step == start + zlib.crc32(str(start).encode()) % start


class ProductCount:
    """Counts products, their FLOPs, and those of them in half precision.

    Attributes:
        flops, low_flops: FLOPs of all products, and of those in half precision.
        products, low_products: How many of them.
        unknown: Why nothing is known; empty where something is.
    """

    def __init__(self) -> None:
        self.flops = self.low_flops = self.products = self.low_products = 0
        self.unknown = ""

    def add(self, other: "ProductCount") -> None:
        """Add what another has counted."""
        self.flops += other.flops
        self.low_flops += other.low_flops
        self.products += other.products
        self.low_products += other.low_products
        self.unknown = self.unknown or other.unknown

    def run(self, func: Any, _types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation, and count it if it is a product."""
        result = func(*args, **kwargs)
        self._count(func, args, kwargs, result)
        return result

    def _count(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        formula = _formulas().get(func.overloadpacket.__name__)
        if formula is None:
            return
        try:
            flops = sparse_flops(args)
            if flops is None:
                flops = int(formula(*args, **kwargs, out_val=result))
        except Exception as error:  # noqa: BLE001 - a count must never end a training
            self.unknown = f"mpdiag cannot count the FLOPs of {func} ({type(error).__name__})"
            return
        low = any(t.dtype in HALF for t in tensors_of((args, kwargs)))
        self.flops += flops
        self.products += 1
        self.low_flops += flops if low else 0
        self.low_products += low


class PrecisionShare(ProductCount):
    """Counts the products of a training.

    Attributes:
        steps: The steps that were counted.
        is_active: Whether the present step is counted.

    Args:
        everywhere: Count all operations of the thread that trains, rather than those in the contexts
            of ``counting`` alone.
        unknown: See ``ProductCount``; if given, nothing is counted.
    """

    def __init__(self, *, everywhere: bool = False, unknown: str = "") -> None:
        super().__init__()
        self.steps: list[int] = []
        self.unknown = unknown
        self._step = 0
        self._busy = self._fixed = False
        self._everywhere = OperationTap(self) if everywhere else None
        self.is_active = False

    @property
    def is_counting(self) -> bool:
        """Whether a product that runs now is counted."""
        return self.is_active and not self._busy

    @property
    def share(self) -> float | None:
        """Share of FLOPs in half precision, 0 to 1; None where it is not known."""
        return None if self.unknown or not self.flops else self.low_flops / self.flops

    @property
    def percent(self) -> str:
        """The share as a person reads it; never 0 or 100 where it is not."""
        share = self.share or 0.0
        if 0 < share < 0.001:
            return "less than 0.1 %"
        return "more than 99.9 %" if 0.999 < share < 1 else f"{100 * share:.3g} %"

    @property
    def message(self) -> str:
        """What was counted, or why nothing is known."""
        if self.share is None:
            why = self.unknown or "no matrix product or convolution ran"
            return f"the share of FLOPs in half precision is unknown: {why}"
        return (
            f"{self.percent} of FLOPs in half precision ({self.low_products} of {self.products} "
            f"products, counted in {len(self.steps)} steps)"
        )

    def begin(self) -> None:
        """Training begins; a second call does nothing."""
        if not self.is_active and not self._step:
            self._switch()

    def step_ended(self) -> None:
        """A step is over: count the next one, if it is its turn."""
        if self._step < 0:  # stopped
            return
        if self.is_active:
            self.steps.append(self._step)
        self._step += 1
        if self.is_active or is_counted(self._step):
            self._switch()

    def stop(self, unknown: str = "") -> None:
        """Count no more.

        Args:
            unknown: Why what was counted says nothing.
        """
        self.unknown = self.unknown or unknown
        self._step = -1
        if self.is_active:
            self.is_active = False
            if self._everywhere is not None:
                self._everywhere.detach()

    @contextmanager
    def unswitched(self) -> Iterator[None]:
        """Begin and end counting after this only: compiled code restores the modes of its begin."""
        self._fixed = True
        try:
            yield
        finally:
            self._fixed = False
            self._switch()

    def _switch(self) -> None:
        if self._fixed:
            return
        wanted = not self.unknown and self._step >= 0 and is_counted(self._step)
        if wanted == self.is_active:
            return
        self.is_active = wanted
        if self._everywhere is None:
            return
        if not wanted:
            self._everywhere.detach()
        elif self._may_count() and not self._everywhere.attach():
            self.stop("the script traces its steps, and mpdiag sees no operations there")

    def counting(self) -> AbstractContextManager[object]:
        """Count what runs here, above every other mode: before emulation widens it."""
        return OperationTap(self) if self.is_active and self._may_count() else nullcontext()

    def _may_count(self) -> bool:
        """Whether compiled code runs as it is while products are counted; else none are."""
        if lets_compile():
            return True
        self.stop("this version of torch cannot count compiled code")
        return False

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Count nothing here: updates of weights, and what is run again for a diagnosis."""
        before, self._busy = self._busy, True
        try:
            yield
        finally:
            self._busy = before

    def run(self, func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation, and count it if it is a product of this training.

        One of a tensor subclass is seen again as what it is made of.
        """
        others = [t.__name__ for t in types if t.__torch_dispatch__ is not _SKIPPED]
        if others and ("FakeTensor" in others or not is_product(func)):
            return func(*args, **kwargs)  # shapes alone, or nothing to count
        if others:
            return NotImplemented
        trained = torch.is_grad_enabled() or in_backward()
        if self._busy or not trained or not is_product(func):
            return func(*args, **kwargs)
        with self.paused():  # the same product is seen again below emulation
            result = func(*args, **kwargs)
        self._count(func, args, kwargs, result)
        return result

    def note_low(self, products: int, flops: int) -> None:
        """Count products in half precision that no mode has seen."""
        if not self._busy:
            self.products += products
            self.low_products += products
            self.flops += flops
            self.low_flops += flops

    def to_json(self) -> dict[str, Any]:
        """The closing record of ``training.jsonl``."""
        return {
            "half_precision_flops": self.share,
            "products": self.products,
            "half_precision_products": self.low_products,
            "counted_steps": list(self.steps),
            "not_counted_because": self.unknown,
            "message": self.message,
        }


def note_low_products(products: int, flops: int) -> None:
    """An emulated function has computed products in half precision, with all modes suspended."""
    taps = [m for m in _get_current_dispatch_mode_stack() if isinstance(m, OperationTap)]
    for listener in {tap.listener for tap in taps}:
        if isinstance(listener, PrecisionShare):
            listener.note_low(products, flops)


def is_product(func: Any) -> bool:
    """Whether an operation is counted."""
    return func.overloadpacket.__name__ in _formulas()


_instructions = cache(lambda: read_instructions(torch))
_ON_CPU = {"tf32": ("amx_fp16",), "bf16": ("amx_bf16", "bf16")}
"""Instructions of which a CPU needs one to round FP32 operands to a format."""


def operand_format(func: Any, read: Sequence[torch.Tensor]) -> str:
    """To which format torch's settings and the hardware let a product round FP32 operands, or ""."""
    name = func.overloadpacket.__name__
    if not read or read[0].dtype is not torch.float32 or not is_product(func):
        return ""
    kind = "rnn" if "_rnn" in name else "conv" if "conv" in name else "matmul"
    device, cuda = read[0].device, torch.backends.cuda if kind == "matmul" else torch.backends.cudnn
    backend: Any = torch.backends.mkldnn if device.type == "cpu" else cuda
    own = getattr(backend, kind, backend)
    allowed = getattr(own, "fp32_precision", None)
    if allowed is None and device.type == "cuda":  # before torch 2.9
        allowed = "tf32" if getattr(own if kind == "matmul" else cuda, "allow_tf32", 0) else ""
    able = device.type == "cpu" and any(map(_instructions().has, _ON_CPU.get(str(allowed), ())))
    if device.type == "cuda" and torch.version.cuda:  # AMD's GPUs do not, nor those before Ampere
        able = torch.cuda.get_device_capability(device) >= (8, 0)
    return allowed if able and allowed in _ON_CPU else ""


@cache
def _formulas() -> dict[str, Callable[..., Any]]:
    """FLOPs by the name of an operation: torch's formulas, and those it lacks."""
    from torch.utils.flop_counter import flop_registry, sdpa_backward_flop, sdpa_flop

    known = {
        packet.__name__: f for packet, f in flop_registry.items() if hasattr(packet, "__name__")
    }
    cpu = "_scaled_dot_product_flash_attention_for_cpu"
    own: dict[str, Callable[..., Any]] = {
        cpu: sdpa_flop,
        f"{cpu}_backward": sdpa_backward_flop,
        "mv": _vector_product,
        **dict.fromkeys(ONE_DTYPE, lambda *_args, **_options: 0),  # sparse_flops knows them
        "addmv": lambda _added, *rest, **options: _vector_product(*rest, **options),
    }
    for name, passes in (("", 1), ("_backward", 2)):
        own[f"mkldnn_rnn_layer{name}"] = _recurrent(passes)
        own[f"_cudnn_rnn{name}"] = own[f"miopen_rnn{name}"] = _recurrent(passes)
    return {**own, **known}


def sparse_flops(args: tuple[Any, ...]) -> int | None:
    """FLOPs of a product of a sparse matrix, two for each stored value and column of the other one.

    None for a product of dense tensors.
    """
    factors = [t for t in tensors_of(args) if t.dim()][-2:]
    stored = [t for t in factors if t.layout != torch.strided]
    if not stored:
        return None
    values = stored[0]._values() if stored[0].layout is torch.sparse_coo else stored[0].values()
    other = factors[1] if stored[0] is factors[0] else factors[0].mT
    return 2 * values.numel() * (int(other.shape[-1]) if other.dim() > 1 else 1)


def _vector_product(matrix: torch.Tensor, *_rest: Any, **_options: Any) -> int:
    return 2 * matrix.numel()


def _recurrent(passes: int) -> Callable[..., int]:
    """Each weight matrix is met once for each row of the input."""

    def flops(x: torch.Tensor, *rest: Any, **_options: Any) -> int:
        matrices = [t for t in tensors_of(rest[:4]) if t.dim() == 2]
        return passes * 2 * (x.numel() // x.shape[-1]) * sum(m.numel() for m in matrices)

    return flops
