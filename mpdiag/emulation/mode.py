"""Low-precision storage with FP32 arithmetic, on any device.

A Tensor Core multiplies FP16 values and adds in FP32; what it stores is rounded to FP16. Any
device gives the same numbers if each operation reads its half-precision tensors, computes in FP32 and
rounds its results: *Mixed Precision Training* (section 4) emulated FP16 on Maxwell GPUs like this.

``Emulation`` does this below autograd, so tensors *are* half precision: their dtypes, the
gradients', what is saved for backward, and every error of mixed dtypes are those of the native
backend. Only the arithmetic inside an operation differs from a CPU's own half precision, which is
slow, incomplete (no LSTM), and adds in half precision here and there.

What is not emulated: the order of a GPU's additions (FP32 results differ in their last bits before
they are rounded), and what fused kernels keep in registers.
"""

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mpdiag.numerics.autocast_lists import OPERATIONS
from mpdiag.tracing.dispatch import is_written, mapped, tensors_of
from mpdiag.tracing.precision import HALF
from mpdiag.tracing.uncompiled import CAN_HIDE, compiler_looks_on, hide, unseen

Dtypes = tuple[torch.dtype | None, ...]

# Operations that round once, or not at all, in torch's own half-precision kernels: they return the
# same as FP32 arithmetic rounded once (a test compares them bit by bit), and they are faster.
_EXACT_NATIVELY = OPERATIONS["exact_natively"]

_SUMS = frozenset(
    {torch.ops.aten.add, torch.ops.aten.add_, torch.ops.aten.sub, torch.ops.aten.sub_}
)

# Operations whose operands must share one dtype; their shape functions do not say so.
_ONE_DTYPE = frozenset(
    "mm addmm bmm baddbmm addbmm mv addmv dot vdot convolution _convolution convolution_backward".split()
)


class _Kind(NamedTuple):
    """What an operation is, which does not change from call to call.

    Attributes:
        operation: The operation, which lives as long as its id is a key.
        is_native: Torch's own kernel rounds as FP32 arithmetic rounded once does.
        is_sum: It adds or subtracts two tensors.
        writes: It writes to one of its arguments.
    """

    operation: Any
    is_native: bool
    is_sum: bool
    writes: bool


class Emulation(TorchDispatchMode):
    """A context in which half-precision operations compute in FP32 and round their results.

    Backward passes must run inside it, too. oneDNN is switched off above the dispatch level: its LSTM
    and GRU are one opaque operation that would hide every stored gate and state. Below it, for
    convolutions and the rest, oneDNN is switched on again.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._kinds: dict[int, _Kind] = {}  # by id: torch's hash of an operation is Python's
        self._results: dict[Any, Dtypes | None] = {}
        self._onednn: list[bool] = []

    def __enter__(self) -> "Emulation":  # noqa: PYI034 - typing.Self is Python 3.11's
        """Start emulating on this thread."""
        self._onednn.append(switch_onednn_off())
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *exception: object) -> None:
        """Stop emulating, and restore oneDNN's setting."""
        super().__exit__(*exception)  # type: ignore[no-untyped-call]
        self._onednn.pop()
        give_onednn_back()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Whether torch hides each call from its compiler, which costs more than the call itself."""
        return not CAN_HIDE

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run one operation and round what it stores."""
        kind = self._kinds.get(id(func))
        if kind is None:
            kind = unseen(self._learn, func)
        if compiler_looks_on():
            return unseen(self._run, func, kind, args, kwargs or {})
        return self._run(func, kind, args, kwargs or {})

    def _run(self, func: Any, kind: _Kind, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        torch._C._set_mkldnn_enabled(self._onednn[-1])
        try:
            if kind.is_native or (kind.is_sum and _is_plain(args, kwargs)):
                return func(*args, **kwargs)
            return self._compute(func, kind, args, kwargs)
        finally:
            torch._C._set_mkldnn_enabled(False)

    def _learn(self, func: Any) -> _Kind:
        kind = self._kinds[id(func)] = _Kind(
            func,
            is_native=func.is_view
            or func.namespace != "aten"
            or func.overloadpacket.__name__ in _EXACT_NATIVELY,
            is_sum=func.overloadpacket in _SUMS,
            writes=any(is_written(func, argument) for argument in func._schema.arguments),
        )
        return kind

    def _compute(
        self, func: Any, kind: _Kind, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run in FP32 if any argument is of half precision, and round the results."""
        given = (args, kwargs)
        if HALF.isdisjoint([x.dtype for x in tensors_of(given)]):
            return func(*args, **kwargs)
        dtypes = self._result_dtypes(func, _signature(given), args, kwargs)
        if dtypes is None:  # torch itself refuses this: let it raise
            return func(*args, **kwargs)
        wide_args, wide_kwargs = wide = mapped(given, (torch.Tensor, torch.dtype), _wide)
        result = func(*wide_args, **wide_kwargs)
        if not kind.writes:
            return _narrowed(result, dtypes)
        back = {}
        for to, source in _written(func, given, wide):
            back[id(source)] = to
            if source is not to:
                to.copy_(source)
        return _narrowed(result, dtypes, back)

    def _result_dtypes(
        self, func: Any, signature: tuple[Any, ...], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Dtypes | None:
        key = (id(func), signature)
        try:
            return self._results[key]
        except KeyError:
            found = self._results[key] = _result_dtypes(func, args, kwargs)
            return found


class unwatched:  # noqa: N801 - it reads as a function, and is faster than one
    """A context in which no mode sees operations, for FP32 work inside an emulated region.

    oneDNN is as it is below the emulation.
    """

    def __enter__(self) -> None:
        self._others: Any = None
        self._mode = mode = _innermost()
        if mode is not None:
            self._onednn = torch._C._get_mkldnn_enabled()
            torch._C._set_mkldnn_enabled(mode._onednn[-1])
        if mode is not None and torch._C._len_torch_dispatch_stack() == 1:
            torch._C._pop_torch_dispatch_stack(None)
        elif torch._C._len_torch_dispatch_stack():  # of torch's own, each is kept in its own place
            self._others = torch.utils._python_dispatch._disable_current_modes()
            self._others.__enter__()

    def __exit__(self, *exception: object) -> None:
        if self._others is not None:
            self._others.__exit__(*exception)
        elif self._mode is not None:
            torch._C._push_on_torch_dispatch_stack(self._mode)
        if self._mode is not None:
            torch._C._set_mkldnn_enabled(self._onednn)


def _innermost() -> Emulation | None:
    """The emulation that sees this thread's operations first, if there is one."""
    for i in reversed(range(torch._C._len_torch_dispatch_stack())):
        mode = torch._C._get_dispatch_stack_at(i)
        if isinstance(mode, Emulation):
            return mode
    return None


hide(Emulation.__torch_dispatch__)


def _wide(x: Any) -> Any:
    """A tensor, or a dtype, in FP32 where it is of half precision."""
    if isinstance(x, torch.dtype):
        return torch.float32 if x in HALF else x
    return x.float() if isinstance(x, torch.Tensor) and x.dtype in HALF else x


def _rounded(value: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    return value if dtype is None or not value.is_floating_point() else value.to(dtype)


def _narrowed(
    result: Any, dtypes: Dtypes, written: Mapping[int, torch.Tensor] = MappingProxyType({})
) -> Any:
    """The results in their dtypes; for FP32 versions of what was written to, the originals."""
    if type(result) is torch.Tensor and not written:
        return _rounded(result, dtypes[0])
    count = len(tensors_of(result))
    order = iter(dtypes if len(dtypes) == count else dtypes[:1] * count)

    def narrow(x: torch.Tensor) -> torch.Tensor:
        dtype = next(order)
        return written[id(x)] if id(x) in written else _rounded(x, dtype)

    return mapped(result, torch.Tensor, narrow)


def _signature(given: Any) -> Any:
    """What the dtypes of results depend on: the form of the arguments, and all dtypes in them."""
    if isinstance(given, (list, tuple)):
        return tuple([_signature(x) for x in given])
    if isinstance(given, dict):
        return tuple([(name, _signature(x)) for name, x in given.items()])
    if isinstance(given, torch.Tensor):
        return given.dtype
    return ("dtype", given) if isinstance(given, torch.dtype) else type(given)


def _is_plain(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a sum of two dense tensors has no factor; a factor would be rounded separately."""
    return kwargs.get("alpha", 1) == 1 and all(
        isinstance(x, torch.Tensor) and x.layout == torch.strided for x in args
    )


def _written(func: Any, given: Any, wide: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The tensors an operation writes to: the originals, and their FP32 versions."""
    for i, argument in enumerate(func._schema.arguments):
        if not is_written(func, argument):
            continue
        pair = [
            args[i] if i < len(args) else kwargs.get(argument.name)
            for args, kwargs in (given, wide)
        ]
        yield from zip(*map(tensors_of, pair), strict=True)


def _result_dtypes(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Dtypes | None:
    """The dtypes that torch returns for tensors of these dtypes; None if it refuses them.

    It is determined without data. A single dtype applies to all results.
    """
    given = {x.dtype for x in tensors_of((args, kwargs)) if x.is_floating_point()}
    if len(given) > 1 and func.overloadpacket.__name__ in _ONE_DTYPE:
        return None
    try:
        on_meta = partial(torch.Tensor.to, device="meta")
        meta_args, meta_kwargs = mapped((args, kwargs), torch.Tensor, on_meta)
        if "device" in meta_kwargs:
            meta_kwargs["device"] = "meta"
        results = tensors_of(func(*meta_args, **meta_kwargs))
    except (RuntimeError, NotImplementedError):
        if len(given) > 1:  # incompatible dtypes
            return None
        return (kwargs.get("dtype") or given.pop(),)  # no shape function: same as the inputs
    return tuple(x.dtype if x.is_floating_point() else None for x in results)


#
# It is the whole process's, shared by all threads that emulate. Two threads that each restored what
# they found would leave it off for good. So contexts in which it is off are counted, and the last to
# end gives it back. A thread that computes in FP32 meanwhile finds it off or on: its results may
# differ by the rounding of other kernels.

_lock = threading.Lock()
_contexts = 0
_before = True


def switch_onednn_off() -> bool:
    """Switch it off until ``give_onednn_back`` was called as often; returns how it was at first."""
    global _contexts, _before  # noqa: PLW0603 - as the switch itself
    with _lock:
        if _contexts == 0:
            _before = torch._C._get_mkldnn_enabled()
        _contexts += 1
        torch._C._set_mkldnn_enabled(False)
        return _before


def give_onednn_back() -> None:
    """One context in which it was off is over."""
    global _contexts  # noqa: PLW0603
    with _lock:
        _contexts -= 1
        if _contexts == 0:
            torch._C._set_mkldnn_enabled(_before)


@contextmanager
def onednn_off() -> Iterator[None]:
    """oneDNN is off inside."""
    switch_onednn_off()
    try:
        yield
    finally:
        give_onednn_back()
