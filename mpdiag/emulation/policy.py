"""One operation policy on every device: which operation computes in which precision at level O1.

The base is ``torch.autocast`` with its CUDA lists: matrix multiplications in low precision,
exponentials, norms, sums and losses in FP32, the rest as wide as its inputs. On a CPU
torch's lists are shorter (softmax, layer norm, exp, pow and sum stay low there), and recurrent
networks are not cast at all. ``install`` fills these gaps with our own kernels, which act only while
one of our policies is in force and leave a plain ``torch.autocast`` unchanged.

A plan or a user can add rules: operations in FP32 or in low precision everywhere, operations in FP32
in one module, and whole modules in FP32.

Sources: PyTorch's documentation of automatic mixed precision (op reference, CUDA); GTC 2019,
*Automatic Mixed Precision for PyTorch* (white and black lists); *Mixed Precision Training*
(section 3.3, reductions in FP32).
"""

import ctypes
import difflib
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._guards import TracingContext
from torch.library import Library

from mpdiag.emulation import recurrent
from mpdiag.emulation.block_products import INTERCEPTED, BlockProducts
from mpdiag.emulation.mode import onednn_off
from mpdiag.errors import UsageError
from mpdiag.numerics.autocast_lists import BANNED, LISTS, RECURRENT, Rule
from mpdiag.tracing.dispatch import mapped
from mpdiag.tracing.precision import HALF

# Common name of an operation -> ATen's name.
ALIASES = {
    "cross_entropy": "cross_entropy_loss",
    "gelu": "gelu",
    "interpolate": "upsample_bilinear2d",
    "multi_head_attention": "scaled_dot_product_attention",
    "vector_norm": "linalg_vector_norm",
}

# Module types that are little more than one operation -> that operation.
MODULE_OPERATIONS = {
    "Softmax": "softmax", "Softmax2d": "softmax", "Softmin": "softmax", "LogSoftmax": "log_softmax",
    "Softplus": "softplus", "LayerNorm": "layer_norm", "RMSNorm": "rms_norm",
    "GroupNorm": "group_norm", "MSELoss": "mse_loss", "L1Loss": "l1_loss",
    "SmoothL1Loss": "smooth_l1_loss", "HuberLoss": "huber_loss", "NLLLoss": "nll_loss",
    "KLDivLoss": "kl_div", "CrossEntropyLoss": "cross_entropy_loss",
    "BCEWithLogitsLoss": "binary_cross_entropy_with_logits",
}  # fmt: skip


def operation_named(name: str) -> str:
    """The ATen name of an operation: ``torch.nn.functional.softmax`` -> ``softmax``.

    Raises:
        UsageError: If ATen knows no such operation; the message names the nearest.
    """
    text = name.removeprefix("aten::").removeprefix("aten.")
    plain = (
        text.split(".")[0] if hasattr(torch.ops.aten, text.split(".")[0]) else text.split(".")[-1]
    )
    plain = ALIASES.get(plain, plain)
    if plain and hasattr(torch.ops.aten, plain):
        return plain
    near = difflib.get_close_matches(plain, [*LISTS, *ALIASES], 3, 0.5)
    hint = f": did you mean {', '.join(near)}?" if near else ""
    raise UsageError(f"torch has no operation {name!r}{hint}")


@dataclass
class Policy:
    """The operation policy of one training.

    Attributes:
        dtype: The low precision.
        overrides: Rules by operation that replace those of the lists.
        outside: Operations that are FP32 while no submodule is being called: in a model's own code,
            and in the loop around it.
        running: For each module being called, what is FP32 in it, and the number of submodules around.
        products: Computes products in block formats; None: there are none.
    """

    dtype: torch.dtype
    overrides: Mapping[str, Rule] = field(default_factory=dict)
    outside: frozenset[str] = frozenset()
    running: list[tuple[frozenset[str], int]] = field(default_factory=list)
    products: BlockProducts | None = None

    @property
    def calls(self) -> list[tuple[frozenset[str], int]]:
        """The modules being called; while a compiler traces, those of the graph it traces.

        A trace that is given up leaves its calls behind with its context.
        """
        tracing = TracingContext.try_get()
        if tracing is None:
            return self.running
        found: list[tuple[frozenset[str], int]] = vars(tracing).setdefault(
            f"mpdiag_calls_{id(self)}", list(self.running)
        )
        return found

    def rule(self, operation: str) -> Rule | None:
        """The precision of an operation at the moment; None for as wide as its inputs."""
        operations, depth = self.calls[-1] if self.calls else (frozenset(), 0)
        if operation in operations or (depth == 0 and operation in self.outside):
            return "fp32"
        return self.overrides.get(operation) or LISTS.get(operation)

    def enter(self, operations: frozenset[str], *, submodule: bool = False) -> None:
        """A module is called in which these operations are FP32, too."""
        calls = self.calls
        around, depth = calls[-1] if calls else (frozenset(), 0)
        calls.append((around | operations, depth + submodule))

    def leave(self) -> None:
        """The call of the last module is over."""
        if self.calls:  # a trace that was given up may have begun it
            self.calls.pop()


_KEY = "mpdiag.emulation.policies"
_everywhere: list[Policy] = []


class in_force:  # noqa: N801 - it reads as a function, and is faster than one
    """Make our kernels follow this policy inside the context.

    It applies to this thread, to autograd's threads while they work for it (a checkpointed forward
    pass is recomputed there), for torch hands them this thread's objects, and to ``DataParallel``'s.
    """

    def __init__(self, policy: Policy) -> None:
        self._policy = policy

    def __enter__(self) -> None:
        self._before = _of_this_thread()
        _everywhere.append(self._policy)
        _keep_in_thread(_KEY, (*self._before, self._policy))

    def __exit__(self, *_exception: object) -> None:
        _keep_in_thread(_KEY, self._before)
        _everywhere.remove(self._policy)


def _keep_in_thread(key: str, value: tuple[Any, ...]) -> None:
    torch._C._stash_obj_in_tls(key, value)
    if not _COUNTS_REFERENCE:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(value))


def _counts_reference() -> bool:
    """Whether torch counts the reference that it keeps; it always gives one up later.

    Up to torch 2.11 it does not: the object would be freed while autograd's threads use it.
    """
    value = (object(),)
    before = sys.getrefcount(value)
    torch._C._stash_obj_in_tls("mpdiag.emulation.probe", value)
    if sys.getrefcount(value) > before:
        return True
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(value))
    return False


_COUNTS_REFERENCE = _counts_reference()


def _of_this_thread() -> tuple[Policy, ...]:
    if not torch._C._is_key_in_tls(_KEY):
        return ()
    found: tuple[Policy, ...] = torch._C._get_obj_in_tls(_KEY)
    return found


def _policy_in_force() -> Policy | None:
    policies = _of_this_thread()
    if not policies and _everywhere and _is_data_parallel(threading.current_thread()):
        return _everywhere[-1]
    return policies[-1] if policies else None


def _is_data_parallel(thread: threading.Thread) -> bool:
    """Whether a thread is one of those in which ``nn.DataParallel`` calls a model's replicas."""
    work = getattr(thread, "_target", None)
    return getattr(work, "__module__", "") == "torch.nn.parallel.parallel_apply"


_libraries: list[Library] = []  # with kernels that torch lacks; they stay
_installed: set[tuple[str, str]] = set()
_replacing: weakref.WeakValueDictionary[tuple[str, str], Library] = weakref.WeakValueDictionary()


def install(device_type: str, operations: frozenset[str] = frozenset()) -> list[Library]:
    """Register the autocast kernels that a device lacks for our lists, and for these operations.

    An operation that torch's autocast on that device treats as our lists do is left to torch,
    unless it is named in ``operations``.

    Returns:
        What holds the kernels that replace torch's own: these are in force until nobody holds it. A
        plain ``torch.autocast`` casts a weight once with torch's kernels, and at each use with ours.
    """
    held = []
    key = f"Autocast{device_type.upper()}"
    if device_type == "cpu":
        operations |= BANNED  # torch bans them on CUDA only
    for name, full, op in _castable(frozenset(LISTS) | operations):
        known = torch._C._dispatch_has_kernel_for_dispatch_key(full, key)
        if (full, key) in _installed or (known and name not in operations):
            continue
        if known:
            held.append(_replaced(op, full, key, name))
        elif device_type == "cpu" or name in operations:  # CUDA's own lists are the same as ours
            if not _libraries:
                _libraries.append(Library("aten", "IMPL"))
            _register(_libraries[0], op, full, key, name, replaces=False)
            _installed.add((full, key))
    return held


def _castable(names: frozenset[str]) -> Iterator[tuple[str, str, Any]]:
    """The overloads of some operations that take tensors: each name, the full one, and the overload."""
    for name in sorted(names):
        if not hasattr(torch.ops.aten, name):
            continue  # a name of another torch version
        packet = getattr(torch.ops.aten, name)
        for overload in packet.overloads():
            op = getattr(packet, overload)
            full = f"aten::{name}" + ("" if overload == "default" else f".{overload}")
            if "out" in overload or "Dimname" in str(op._schema):
                continue
            if not any("Tensor" in str(a.type) for a in op._schema.arguments):
                continue
            if torch._C._dispatch_has_kernel(full):  # else it exists for TorchScript only
                yield name, full, op


def _replaced(op: Any, full: str, key: str, name: str) -> Library:
    """What holds our kernel in the place of torch's; torch's is back once it is gone."""
    library = _replacing.get((full, key))
    if library is None:
        library = _replacing[full, key] = Library("aten", "IMPL")
        _register(library, op, full, key, name, replaces=True)
    return library


def _register(library: Library, op: Any, full: str, key: str, name: str, *, replaces: bool) -> None:
    kernel = _kernel(op, name, key, replaces=replaces)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Warning only once for all operators")
        warnings.filterwarnings("ignore", ".*verriding a previously registered kernel")
        options = {"with_keyset": True}
        if replaces and "allow_override" in Library.impl.__code__.co_varnames:
            options["allow_override"] = True
        library.impl(full.removeprefix("aten::"), kernel, key, **options)


def _kernel(op: Any, name: str, key: str, *, replaces: bool) -> Callable[..., Any]:
    """The autocast kernel of one operation: cast by the policy in force, then call the kernels below."""
    autocast = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key))
    below = torch._C._dispatch_keyset_full_after(getattr(torch._C.DispatchKey, key))
    device_type = key.removeprefix("Autocast").lower()

    def kernel(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        policy = _policy_in_force()
        if policy is not None:
            rule = policy.rule(name)
        else:  # a plain autocast: do what torch would have done
            rule = LISTS.get(name) if replaces else None
            rule = "fp32" if rule == "banned" else rule
        products = None if policy is None or rule == "fp32" else policy.products
        if products is not None and name in INTERCEPTED:
            names = (argument.name for argument in op._schema.arguments)
            named = {**dict(zip(names, args, strict=False)), **kwargs}
            low = torch.get_autocast_dtype(device_type)
            if products.opens(name):
                beside = {n: named[n] for n in ("input", "bias") if named.get(n) is not None}
                beside = mapped(beside, torch.Tensor, _cast_to("low", low, (), {}))
                return op.redispatch(keyset & below, **{**named, **beside})
            with torch._C._ExcludeDispatchKeyGuard(autocast):
                found = products.run(name, named, low)
            if found is not None:
                return found
        if rule is None:
            # Redispatching does not accept a number that is passed as a tensor (``x + 1``).
            if any(
                isinstance(x, (int, float, complex)) and isinstance(a.type, torch.TensorType)
                for x, a in zip(args, op._schema.arguments, strict=False)
            ):
                with torch._C._ExcludeDispatchKeyGuard(autocast):
                    return op(*args, **kwargs)
            return op.redispatch(keyset & below, *args, **kwargs)
        if rule == "banned":
            raise UsageError(_BANNED)
        low = torch.get_autocast_dtype(device_type)
        cast = _cast_to(rule, low, args, kwargs)
        args = mapped(args, torch.Tensor, cast)
        kwargs = mapped(kwargs, torch.Tensor, cast) if kwargs else kwargs
        if recurrent.applies(op, args):
            with torch._C._ExcludeDispatchKeyGuard(autocast):
                return recurrent.lstm(*args)
        # oneDNN has no FP16 LSTM on most CPUs; ATen's own takes it step by step.
        stepwise = name in RECURRENT and rule == "low" and low == torch.float16
        switched = onednn_off() if stepwise else nullcontext()
        with switched, torch._C._ExcludeDispatchKeyGuard(autocast):
            return op(*args, **kwargs)

    # Where a whole step is compiled, torch would compile what runs between its graphs, and this.
    left_alone: Callable[..., Any] = torch.compiler.disable(kernel)
    return left_alone


_BANNED = (
    "binary_cross_entropy rounds small probabilities to 0 in low precision: pass logits "
    "to binary_cross_entropy_with_logits, or name it in fp32_operations"
)


def _cast_to(
    rule: Rule, low: torch.dtype, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Callable[[torch.Tensor], torch.Tensor]:
    if rule == "promote":
        wide = any(
            isinstance(x, torch.Tensor) and x.dtype == torch.float32
            for x in (*args, *kwargs.values())
        )
        rule = "fp32" if wide else "low"
    dtype = torch.float32 if rule == "fp32" else low
    eligible = HALF if rule == "fp32" else HALF | {torch.float32}

    def cast(x: torch.Tensor) -> torch.Tensor:
        return x.to(dtype) if x.dtype in eligible else x

    return cast
