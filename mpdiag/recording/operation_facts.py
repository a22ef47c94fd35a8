"""What is known of an operation beside histograms: its cost, and facts that a rule needs.

Each fact is measured on the operation's inputs before it runs, on their device, and read back when
the step is over:

* ``add``, ``sub``, ``rsub``: what storing operands and result in a format does to the result.
  ``error_fp16``: ‖result in FP16 − result‖ / ‖result‖, over what stays finite; ``swallowed_fp16``:
  share of the pairs of non-zero operands whose sum is the larger of them; both for BF16, too;
  ``result_over_operand``: ‖result‖ / ‖larger operand‖, small where a subtraction cancels.
* ``exp`` and similar functions, softmax: ``highest``, the largest input, sign and all.
* ``topk`` of values in half precision: ``tied``, of ``rows`` choices those whose last one chosen is as
  large as the first one left.
* integers cast to half precision: ``distinct`` and ``distinct_half``, how many are different before and
  after.
* softmax: ``lowest_row_maximum``, over all rows the smallest of their maxima: a row below FP16's
  range is masked everywhere.

What rounding its inputs does to any operation's result is measured in ``emulation/rounding_effect.py``.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from mpdiag.emulation.rounding import DTYPES
from mpdiag.recording.counting.tensors import tensors_in
from mpdiag.tracing.dispatch import tensors_of
from mpdiag.tracing.precision import HALF
from mpdiag.tracing.precision_share import is_product, sparse_flops

# What moves values without computing: their results have the histogram of what they were given.
COPIES = frozenset({"clone", "_unsafe_view", "alias_copy", "contiguous", "lift_fresh"})
CONVERSIONS = COPIES | {"_to_copy"}
SUMS = frozenset({"add", "add_", "sub", "sub_", "rsub"})
SOFTMAX = frozenset({"_softmax", "_log_softmax", "_safe_softmax"})
EXPONENTIALS = frozenset({"exp", "exp_", "expm1", "sinh", "cosh"})
# Operations whose reduction is an inner product, and those that reduce what they read.
_PRODUCTS = frozenset("mm addmm bmm baddbmm mv addmv dot vdot".split())
_REDUCTIONS = frozenset(
    """
    sum mean prod norm linalg_vector_norm amax amin max min std var var_mean std_mean logsumexp
    nansum _softmax _log_softmax _safe_softmax mse_loss l1_loss smooth_l1_loss huber_loss
    nll_loss_forward nll_loss2d_forward binary_cross_entropy binary_cross_entropy_with_logits
    cumsum cumprod
    """.split()
)

# How many of an operation's results are values; the rest is scratch memory for its own backward
# pass, parts of which may never be written.
_RESULTS = {
    "_ctc_loss": 1,
    "_cudnn_ctc_loss": 1,
    "_thnn_fused_gru_cell": 1,
    "_thnn_fused_lstm_cell": 2,
    "_cudnn_rnn": 3,
    "miopen_rnn": 3,
    "mkldnn_rnn_layer": 3,
}
_SCRATCH = frozenset({"log_alpha", "reserve", "workspace"})
ANOTHER_BACKWARD = frozenset(
    {"ProdBackward", "CumprodBackward", "LinalgDetBackward", "MaskedFillBackward1"}
)
"""Nodes of autograd whose gradients, or theirs, have other last bits under a mode: torch takes another
formula there. Found by comparing all operations that torch's own tests know, to the second derivative.
``MaskedFillBackward1`` fills in a tensor; where it is a number (…0) nothing differs.
"""

COLLECTIVES = frozenset({"c10d", "_c10d_functional"})
"""Namespaces of operations over ranks."""
_SUMS = (0, 1, 8)
"""Reductions that add: sum, mean and a sum of multiples (``c10d::ReduceOp::RedOpType``)."""
_NEGLIGIBLE = 2.0**-9
"""Effects of rounding below this are what any rounding to BF16 does, and are not kept."""
_MOST_CHOICES = 1 << 22
"""Values of a tensor at most whose choice is made again, with one more."""
_INTEGERS = frozenset((torch.int16, torch.int32, torch.int64))
_SAMPLE = 1 << 18
"""Of larger tensors every n-th slice is looked at; the fact ``of`` says how many elements."""


def measure(op: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Facts about an operation by name: floats, or tensors of one element on the device."""
    x = arguments.get("self")
    if not isinstance(x, torch.Tensor) or x.numel() == 0 or not _is_plain(x):
        return {}
    if op == "_to_copy" and x.dtype in _INTEGERS and arguments.get("dtype") in HALF:
        return _of_integers(x, arguments["dtype"])
    if not x.is_floating_point():
        return {}
    if op == "topk" and x.dtype in HALF:
        return _of_choice(x, arguments)
    if op in SUMS:
        return _of_sum(op, x, arguments)
    if op in EXPONENTIALS:
        return {"highest": x.amax()}
    if op in SOFTMAX:
        rows = x.amax(int(arguments.get("dim", -1)))
        return {"highest": rows.max(), "lowest_row_maximum": rows.min()}
    return {}


def results(op: str, result: Any) -> list[torch.Tensor]:
    """The tensors of an operation's result that hold values, without scratch memory."""
    return list(tensors_in(result))[: _RESULTS.get(op)]


def operands(arguments: Mapping[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors among an operation's arguments, by name, without scratch memory."""
    for name, value in arguments.items():
        if name not in _SCRATCH:
            for tensor in [value] if isinstance(value, torch.Tensor) else tensors_in(value):
                yield name, tensor


def ranks_added(arguments: Sequence[Any]) -> int:
    """Over how many ranks a collective adds tensors of half precision; 0 where it does not.

    Args:
        arguments: Of an operation of ``c10d`` or ``_c10d_functional``, not by name.
    """
    given = {str(a._type()): a for a in arguments if isinstance(a, torch.ScriptObject)}
    kind: Any = given.get("__torch__.torch.classes.c10d.ReduceOp")
    group = given.get("__torch__.torch.classes.c10d.ProcessGroup")
    adds = any(a in ("sum", "avg") for a in arguments if isinstance(a, str))
    adds = adds or getattr(kind, "op", lambda: None)() in _SUMS  # torch 2.6 does not tell
    if not adds or not any(t.dtype in HALF for t in tensors_of(arguments)):
        return 0
    if group is None:
        name: Any = str(arguments[-1])
        return int(torch._C._distributed_c10d._resolve_process_group(name).size())
    return int(torch._C._distributed_c10d.ProcessGroup.unbox(group).size())


def _of_sum(op: str, x: torch.Tensor, arguments: Mapping[str, Any]) -> dict[str, Any]:
    alpha = arguments.get("alpha", 1)
    a, b = x, arguments.get("other")
    if isinstance(b, torch.Tensor):
        if b.numel() == 0 or not b.is_floating_point() or not _is_plain(b):
            return {}
        a, b = torch.broadcast_tensors(a, b)
        a, b = _thinned(a).float(), _thinned(b).float()
    elif isinstance(b, (int, float)):
        a = _thinned(x).float()
        b = torch.full_like(a, float(b))
    else:
        return {}
    if op == "rsub":
        a, b = b, a
    b = b * (alpha if op.startswith("add") else -alpha)
    exact = a + b
    size = exact.norm()
    both = (a != 0) & (b != 0)
    facts: dict[str, Any] = {
        "of": a.numel(),
        "result_over_operand": size / torch.maximum(a.norm(), b.norm()).clamp_min(1e-38),
    }
    for name, dtype in DTYPES.items():
        low_a, low_b = a.to(dtype).float(), b.to(dtype).float()
        low = (low_a + low_b).to(dtype).float()
        error = torch.where(low.isfinite() & exact.isfinite(), low - exact, 0.0)
        larger = torch.where(low_a.abs() >= low_b.abs(), low_a, low_b)
        facts[f"error_{name}"] = error.norm() / size.clamp_min(1e-38)
        facts[f"swallowed_{name}"] = ((low == larger) & both).sum() / both.sum().clamp_min(1)
    return facts


def _of_integers(x: torch.Tensor, dtype: torch.dtype) -> dict[str, Any]:
    def different(values: torch.Tensor) -> torch.Tensor:
        ordered = values.sort().values
        return (ordered[1:] != ordered[:-1]).sum() + 1

    some = x.detach().flatten()[:_SAMPLE]
    return {"distinct": different(some), "distinct_half": different(some.to(dtype))}


def _of_choice(x: torch.Tensor, arguments: Mapping[str, Any]) -> dict[str, Any]:
    k, dim = int(arguments["k"]), int(arguments.get("dim", -1))
    if x.dim() == 0 or not k < x.shape[dim] or x.numel() > _MOST_CHOICES:
        return {}
    best = x.detach().topk(k + 1, dim, arguments.get("largest", True)).values
    last, next_one = best.select(dim, k - 1), best.select(dim, k)
    tied = (last == next_one) & (last != 0) & last.isfinite()  # what is masked ties in any format
    return {"tied": tied.sum(), "rows": last.numel()}


def _is_plain(x: torch.Tensor) -> bool:
    """Whether it can be computed with: a norm of a distributed tensor would talk to other ranks."""
    ordinary = type(x).__torch_dispatch__ is torch.Tensor.__torch_dispatch__
    return ordinary and x.layout == torch.strided


def _thinned(x: torch.Tensor) -> torch.Tensor:
    """Every n-th slice along the longest dimension, so that a sample's size is bounded."""
    n = -(-x.numel() // _SAMPLE)
    if n == 1:
        return x
    longest = max(range(x.dim()), key=lambda i: int(x.shape[i]))
    return x[(slice(None),) * longest + (slice(None, None, n),)]


def read_back(facts: Sequence[dict[str, Any]]) -> list[dict[str, float]]:
    """Facts as plain numbers, one transfer for each device; what is not finite is left out."""
    waiting: dict[torch.device, list[tuple[dict[str, Any], str, torch.Tensor]]] = {}
    result: list[dict[str, float]] = []
    for one in facts:
        plain: dict[str, float] = {}
        result.append(plain)
        for name, value in one.items():
            if isinstance(value, torch.Tensor):
                waiting.setdefault(value.device, []).append((plain, name, value))
            else:
                plain[name] = value
    for entries in waiting.values():
        stacked = torch.stack([v.detach().double().reshape(()) for *_, v in entries])
        for (plain, name, _), value in zip(entries, stacked.tolist(), strict=True):
            if value == value and abs(value) != float("inf"):
                plain[name] = value
        for plain, name, _ in entries:
            if "_of_" in name and plain.get(name, 0.0) < _NEGLIGIBLE:
                plain.pop(name, None)
    return result


def is_json(value: Any) -> bool:
    """Whether an argument is a plain value, or a short list of them, that JSON can hold."""
    if isinstance(value, (list, tuple)):
        return len(value) <= 16 and all(is_json(v) for v in value)
    if isinstance(value, float):
        return value == value and abs(value) != float("inf")
    return isinstance(value, (bool, int, str))


def views(tensors: Iterable[torch.Tensor]) -> list[list[int]]:
    """How tensors lie in memory: number, offset and strides of those that are not plainly dense.

    A view leaves no other trace in the record; shape rules read from it what was split or joined.
    """
    found = []
    for i, tensor in enumerate(tensors):
        if tensor.layout != torch.strided or tensor.is_nested:
            continue
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
            continue
        if tensor.storage_offset() or not tensor.is_contiguous():
            found.append([i, int(tensor.storage_offset()), *map(int, tensor.stride())])
    return found


def cost(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> dict[str, int]:
    """``flops``, ``bytes`` and ``reduction`` of an operation.

    FLOPs of matrix products, convolutions and attention as ``torch.utils.flop_counter`` counts
    them, those of a sparse matrix by what it stores, one for each element read or written otherwise.
    """
    read = list(tensors_in([args, kwargs]))
    wrote = list(tensors_in(result))
    size = sum(_bytes(t) for t in read) + sum(_bytes(t) for t in wrote)
    elements = max([t.numel() for t in (*read, *wrote)], default=0)
    counter = flop_registry.get(func.overloadpacket)
    sparse = sparse_flops(args) if is_product(func) else None
    flops = elements if sparse is None else sparse
    if counter is not None and sparse is None:
        try:
            flops = int(counter(*args, **kwargs, out_val=result))
        except (TypeError, ValueError, AssertionError, IndexError):
            flops = elements  # an overload the counter does not know
    return {"flops": flops, "bytes": size, "reduction": reduction(func, read, wrote, args)}


def _bytes(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_nested else tensor.numel() * tensor.element_size()


def reduction(
    func: Any, read: list[torch.Tensor], wrote: list[torch.Tensor], args: tuple[Any, ...]
) -> int:
    """How many values an operation adds to make one of its result; 1 where that is not known."""
    op = func.overloadpacket.__name__
    if not read or not wrote or any(t.is_nested for t in (*read, *wrote)):
        return 1
    if op in _PRODUCTS:
        left = read[-2] if len(read) > 1 else read[0]
        return int(left.shape[-1]) if left.dim() else 1
    if op == "convolution" and len(read) > 1:
        return read[1].numel() // max(1, int(read[1].shape[0]))
    if op.rstrip("_") in _REDUCTIONS:
        if wrote[0].shape == read[0].shape:  # along one dimension, which stays
            dim = args[1] if len(args) > 1 and isinstance(args[1], int) else -1
            return int(read[0].shape[dim]) if read[0].dim() else 1
        return max(1, read[0].numel() // max(1, wrote[0].numel()))
    return 1
