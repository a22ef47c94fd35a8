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

from __future__ import annotations

from contextlib import contextmanager
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only

from mpdiag.emulation import onednn
from mpdiag.emulation.accumulation import accumulates, product, reduces, reduction
from mpdiag.emulation.arguments import flattened, hashable, items, joined
from mpdiag.tracing.storages import WeakStorages
from mpdiag.tracing.uncompiled import CAN_HIDE, compiler_looks_on, hide, unseen

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

LOW = frozenset({torch.float16, torch.bfloat16})
Dtypes = tuple[torch.dtype | None, ...]
_WORTH_KEEPING = 1 << 14

# Operations that round once, or not at all, in torch's own half-precision kernels: they return the
# same as FP32 arithmetic rounded once (a test compares them bit by bit), and they are faster.
_EXACT_NATIVELY = frozenset(
    """
    _to_copy _unsafe_view abs alias_copy argmax argmin argsort bernoulli bernoulli_ cat clamp
    clamp_max clamp_min clone constant_pad_nd copy copy_ detach div embedding empty_like eq
    exponential_ fill fill_ flip full_like gather ge gt index index_select is_nonzero isfinite
    isinf isnan le lt masked_fill masked_fill_ masked_select max_pool2d_with_indices maximum
    minimum mul ne neg new_empty new_empty_strided new_full new_ones new_zeros nonzero normal_
    ones_like rand_like randn_like relu relu_ repeat roll sigmoid sigmoid_ silu tanh tanh_
    leaky_relu leaky_relu_ leaky_relu_backward scatter select_backward select_scatter set_ sign
    slice_backward slice_scatter sort stack threshold_backward topk tril triu uniform_ where
    zero_ zeros_like _local_scalar_dense record_stream _pin_memory resize_ unbind_copy
    as_strided_scatter lift_fresh t_ transpose_ squeeze_ unsqueeze_ as_strided_ detach_
    """.split()
)

_SUMS = frozenset(
    {torch.ops.aten.add, torch.ops.aten.add_, torch.ops.aten.sub, torch.ops.aten.sub_}
)

# Containers of arguments that may hold a tensor or a dtype.
_NESTED = frozenset({list, tuple, torch.dtype})

# Operations whose operands must share one dtype; their shape functions do not say so.
_ONE_DTYPE = frozenset(
    "mm addmm bmm baddbmm addbmm mv addmv dot vdot convolution _convolution convolution_backward".split()
)


class _Kind(NamedTuple):
    """What an operation is, which does not change from call to call.

    Attributes:
        operation: The operation, which lives as long as its id is a key.
        is_view: It returns a view and computes nothing.
        is_native: Torch's own kernel rounds as FP32 arithmetic rounded once does.
        is_sum: It adds or subtracts two tensors.
        is_foreign: It is not torch's own.
        writes: It writes to one of its arguments.
        is_light: It is torch's own, native, and changes nothing; oneDNN has no part in it.
    """

    operation: Any
    is_view: bool
    is_native: bool
    is_sum: bool
    is_foreign: bool
    writes: bool
    is_light: bool


class Emulation(TorchDispatchMode):
    """A context in which half-precision operations compute in FP32 and round their results.

    Backward passes must run inside it, too. oneDNN is switched off above the dispatch level: its LSTM
    and GRU are one opaque operation that would hide every stored gate and state. Below it, for
    convolutions and the rest, oneDNN is switched on again.

    Args:
        low_sums: Accumulate in FP16, too (see ``accumulation``).

    Attributes:
        low_sums: See above.
        roundings: Number of tensors rounded so far, including those of natively exact operations that
            it has seen.
        hooked: Whether an operation ran while hooks on saved tensors were in force; the user clears it.
    """

    def __init__(self, *, low_sums: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.roundings = 0
        self.low_sums = low_sums
        self._kinds: dict[int, _Kind] = {}  # by id: torch's hash of an operation is Python's
        self._results: dict[Any, Dtypes | None] = {}
        self._copies: WeakStorages[tuple[tuple[int, int], torch.Tensor]] = WeakStorages()
        self._copied: dict[int, list[Any]] = {}  # keys of copies, by their storage
        self._seen: set[Any] = set()
        self._onednn: list[bool] = []
        self.hooked = False

    def __enter__(self) -> Emulation:  # noqa: PYI034 - typing.Self is Python 3.11's
        """Start emulating on this thread."""
        self._onednn.append(onednn.switch_off())
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *exception: object) -> None:
        """Stop emulating, and restore oneDNN's setting."""
        super().__exit__(*exception)  # type: ignore[no-untyped-call]
        self._onednn.pop()
        onednn.give_back()
        if not self._onednn:
            self._copies.clear()
            self._copied.clear()
            self._seen.clear()

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
        if not self.hooked:
            self.hooked = saved_tensors_are_hooked()
        if compiler_looks_on():
            return unseen(self._run, func, kind, args, kwargs or {})
        if kind.is_light:
            result = func(*args, **kwargs) if kwargs else func(*args)
            if not kind.is_view and type(result) is torch.Tensor and result.dtype in LOW:
                self.roundings += 1
            return result
        return self._run(func, kind, args, kwargs or {})

    def _run(self, func: Any, kind: _Kind, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        torch._C._set_mkldnn_enabled(self._onednn[-1])
        try:
            if self._copied and (kind.is_foreign or kind.writes):
                self._note_write(func, args, kwargs)
            if self.low_sums and reduces(func, args):
                with self:  # the sums inside are dispatched as operations
                    return reduction(func, args, kwargs)
            if kind.is_native or (kind.is_sum and _is_plain(args, kwargs)):
                result = func(*args, **kwargs)
                if not kind.is_view and type(result) is torch.Tensor and result.dtype in LOW:
                    self.roundings += 1
                return result
            if self.low_sums and accumulates(func, args, kwargs):
                self.roundings += 1
                return product(*args)
            return self._compute(func, kind, args, kwargs)
        finally:
            torch._C._set_mkldnn_enabled(False)

    def _learn(self, func: Any) -> _Kind:
        own, native = func.namespace == "aten", _is_native(func)
        view = func.is_view and own  # nothing is computed
        writes = any(_is_written(func, argument) for argument in func._schema.arguments)
        kind = self._kinds[id(func)] = _Kind(
            func,
            is_view=view,
            is_native=native,
            is_sum=func.overloadpacket in _SUMS,
            is_foreign=not own,
            writes=writes,
            is_light=view or (own and native and not writes),
        )
        return kind

    def _compute(
        self, func: Any, kind: _Kind, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run in FP32 if any argument is of half precision, and round the results."""
        signature = tuple([x.dtype if isinstance(x, torch.Tensor) else type(x) for x in args])
        if kwargs or kind.writes or not _NESTED.isdisjoint(signature):
            return self._compute_nested(func, kind, args, kwargs)
        if LOW.isdisjoint(signature):
            return func(*args)
        dtypes = self._result_dtypes(func, signature, args, kwargs)
        if dtypes is None:  # torch itself refuses this: let it raise
            return func(*args)
        return self._narrowed(func(*[self._wide(x) for x in args]), dtypes)

    def _compute_nested(
        self, func: Any, kind: _Kind, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """The same for tensors in lists or keywords, and for tensors that are written to."""
        leaves, form = flattened(args, kwargs)
        signature = tuple([x.dtype if isinstance(x, torch.Tensor) else type(x) for x in leaves])
        if LOW.isdisjoint(signature):
            return func(*args, **kwargs)
        key = (*signature, hashable(form), *[x for x in leaves if isinstance(x, torch.dtype)])
        dtypes = self._result_dtypes(func, key, args, kwargs)
        if dtypes is None:
            return func(*args, **kwargs)
        mutable = kind.writes
        wide = [self._wide(x, keep=not mutable) for x in leaves]
        wide_args, wide_kwargs = joined(wide, form)
        result = func(*wide_args, **wide_kwargs)
        if not mutable:
            return self._narrowed(result, dtypes)
        back = {}
        for to, source in _written(func, (args, kwargs), (wide_args, wide_kwargs)):
            back[id(source)] = to
            if source is not to:
                to.copy_(source)
                self.roundings += 1
        return self._narrowed(result, dtypes, back)

    def _result_dtypes(
        self, func: Any, signature: tuple[Any, ...], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Dtypes | None:
        key = (id(func), signature)
        try:
            return self._results[key]
        except KeyError:
            found = self._results[key] = _result_dtypes(func, args, kwargs)
            return found

    def _narrowed(
        self,
        result: Any,
        dtypes: Dtypes,
        written: Mapping[int, torch.Tensor] = MappingProxyType({}),
    ) -> Any:
        """The results in their dtypes; for FP32 versions of what was written to, the originals."""
        if type(result) is torch.Tensor and not written:
            return self._rounded(result, dtypes[0])
        flat, form = flattened((result,), {})
        if len(dtypes) != len(flat):
            dtypes = dtypes[:1] * len(flat)
        rounded = [
            written[id(r)] if id(r) in written else self._rounded(r, d)
            for r, d in zip(flat, dtypes, strict=True)
        ]
        (made,), _ = joined(rounded, form)
        return made if type(made) is type(result) else type(result)(made)

    def _wide(self, x: Any, *, keep: bool = True) -> Any:
        """A tensor in FP32; for one that is read repeatedly (a weight), the copy made before.

        Version counters alone do not tell whether it still holds: ``torch._foreach_*``, fused kernels
        and writes through ``.data`` do not raise them here. Their operations pass through this mode,
        which drops the copies of what they write, and of whatever an operation that is not torch's own
        is given. Memory that NumPy has is not kept. Elsewhere than on a CPU nothing is: a kernel that is
        given an address (Triton) passes no mode, and copying costs little there.
        """
        if isinstance(x, torch.dtype):
            return torch.float32 if x in LOW else x
        if not isinstance(x, torch.Tensor) or x.dtype not in LOW:
            return x
        if not keep or x.numel() < _WORTH_KEEPING or not _has_memory(x):
            return x.float()
        storage = x.untyped_storage()
        key = (storage._cdata, x.storage_offset(), x.shape, x.stride())
        kept = self._copies.get(key)
        version = (x._version, _suspensions)
        if kept is not None and kept[0] == version:
            return kept[1]
        copy = x.float()
        if key in self._seen:
            self._copies.put(key, storage, (version, copy))
            self._copied.setdefault(storage._cdata, []).append(key)
        self._seen.add(key)
        return copy

    def _note_write(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Drop the copies of what an operation writes to, or may write to, whatever its schema says."""
        if func.namespace == "aten":
            given = [to for to, _ in _written(func, (args, kwargs), (args, kwargs))]
        else:
            given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        for to in given:
            if to.layout == torch.strided and not to.is_nested:
                for key in self._copied.pop(to.untyped_storage()._cdata, ()):
                    self._copies.drop(key)
                    self._seen.discard(key)

    def _rounded(self, value: Any, dtype: torch.dtype | None) -> Any:
        if dtype is None or not isinstance(value, torch.Tensor) or not value.is_floating_point():
            return value
        if dtype in LOW:
            self.roundings += 1
        return value.to(dtype)


def alone() -> Emulation | None:
    """The emulation that is the only thing to see this thread's operations, if there is one.

    None as well where sums are in FP16, and where hooks on saved tensors are in force: checkpointing
    compares what two forward passes save.
    """
    if torch._C._len_torch_dispatch_stack() != 1:
        return None
    mode = torch._C._get_dispatch_stack_at(0)
    plain = isinstance(mode, Emulation) and not mode.low_sums and not saved_tensors_are_hooked()
    return mode if plain else None


class unwatched:  # noqa: N801 - it reads as a function, and is faster than one
    """A context in which no mode sees operations, for FP32 work inside an emulated region.

    oneDNN is as it is below the emulation. What it writes to may have been read before by a mode that
    keeps a copy: see ``suspended``.
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


def saved_tensors_are_hooked() -> bool:
    """Whether hooks on what a backward pass needs are in force, as where it is computed again."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


_suspensions = 0  # how often emulations were suspended


@contextmanager
def suspended() -> Iterator[None]:
    """``unwatched``, for work that writes: copies that emulations keep hold no longer."""
    global _suspensions  # noqa: PLW0603
    _suspensions += 1
    with unwatched():
        yield


hide(Emulation.__torch_dispatch__)


def _is_native(func: Any) -> bool:
    if func.is_view or func.namespace != "aten":
        return True
    return func.overloadpacket.__name__ in _EXACT_NATIVELY


def _is_plain(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a sum of two dense tensors has no factor; a factor would be rounded separately."""
    return kwargs.get("alpha", 1) == 1 and all(
        isinstance(x, torch.Tensor) and x.layout == torch.strided for x in args
    )


def _has_memory(x: torch.Tensor) -> bool:
    """Whether a tensor is one piece of memory all writes to which are seen, so that a copy can be kept.

    Sparse and nested tensors, fake ones and other subclasses with operations of their own are not;
    one made in inference mode has no version; a storage that NumPy shares cannot be resized.
    """
    known = type(x).__torch_dispatch__ is torch._C._disabled_torch_dispatch_impl
    plain = known and x.layout == torch.strided and not x.is_nested and not x.is_inference()
    return plain and x.device.type == "cpu" and x.untyped_storage().resizable()


def _is_written(func: Any, argument: Any) -> bool:
    """Whether an operation writes to an argument.

    Batch normalisation (``native_batch_norm``, ``cudnn_batch_norm``, ``batch_norm_gather_stats`` …)
    writes to its running statistics, and its schema does not say so.
    """
    if argument.alias_info is not None:
        return bool(argument.alias_info.is_write)
    name = func.overloadpacket.__name__
    return argument.name in ("running_mean", "running_var") and not name.endswith(
        ("backward", "functional")
    )


def _written(func: Any, given: Any, wide: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The tensors an operation writes to: the originals, and their FP32 versions."""
    for i, argument in enumerate(func._schema.arguments):
        if not _is_written(func, argument):
            continue
        pair = [
            args[i] if i < len(args) else kwargs.get(argument.name)
            for args, kwargs in (given, wide)
        ]
        for to, source in zip(*map(items, pair), strict=True):
            if isinstance(to, torch.Tensor):
                yield to, source


def _result_dtypes(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Dtypes | None:
    """The dtypes that torch returns for tensors of these dtypes; None if it refuses them.

    It is determined without data. A single dtype applies to all results.
    """
    leaves = tree_leaves((args, kwargs))
    given = {x.dtype for x in leaves if isinstance(x, torch.Tensor) and x.is_floating_point()}
    if len(given) > 1 and func.overloadpacket.__name__ in _ONE_DTYPE:
        return None
    try:
        meta_args, meta_kwargs = tree_map_only(torch.Tensor, lambda x: x.to("meta"), (args, kwargs))
        if "device" in meta_kwargs:
            meta_kwargs["device"] = "meta"
        flat = tree_flatten(func(*meta_args, **meta_kwargs))[0]
    except (RuntimeError, NotImplementedError):
        if len(given) > 1:  # incompatible dtypes
            return None
        return (kwargs.get("dtype") or given.pop(),)  # no shape function: same as the inputs
    return tuple(
        x.dtype if isinstance(x, torch.Tensor) and x.is_floating_point() else None for x in flat
    )
