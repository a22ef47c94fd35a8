"""What rounding an operation's inputs to a narrow format does to its result, measured.

The operation runs again on a sample of its inputs, one of them rounded. So a function needs no rule of
its own: cosine of a large angle, ``acosh`` close to 1 and the logarithm of something that has become 0
all show in the figures.

Figures, for each argument and format (``error_of_self_fp16`` …):

* ``error_of``: ‖result with the argument rounded − result‖ / ‖result‖, over what stays finite.
* ``diverged_of``: how many finite results become infinite or NaN though the rounded argument is finite.
* ``zeroed_of``: how many results other than 0 become 0.
* ``changed_of``: the share of results that change, where these are integers or truth values.
* ``noise_of``: of data (what needs no gradient) that a product or a loss reads: the rounding error of a
  feature beside its spread over the batch, the worst feature; or the same of all features beside their
  spread within a row, whichever is worse. 1 means that rounding moves values as far as they differ.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from mpdiag.emulation.rounding import DTYPES
from mpdiag.numerics.autocast_lists import OPERATIONS

_SAMPLE = 1 << 16
_WHOLE = 1 << 20
"""Reductions are measured on whole tensors, up to this size."""
_ENOUGH = 8
"""Fewer samples, or features, say nothing about a spread."""
_CONSTANT = 1e-6
"""A feature whose spread is below this share of its values is constant but for FP32's own rounding."""

# Pointwise operations that pass a relative error on as it is, or make it smaller.
_HARMLESS = OPERATIONS["harmless"]
_REDUCTIONS = OPERATIONS["reductions"]
_LOSSES = frozenset({"mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss"})
_NORMALISATIONS = {
    "native_layer_norm": "layer",
    "native_group_norm": "group",
    "native_batch_norm": "batch",
    "_native_batch_norm_legit": "batch",
    "cudnn_batch_norm": "batch",
}
_PRODUCTS = frozenset("mm addmm bmm baddbmm convolution linear".split())


def measure_rounding(
    func: Any, named: Mapping[str, Any], *, with_gradients: bool = True
) -> dict[str, Any]:
    """The figures of one operation, before it runs: tensors of one element, on its device.

    Args:
        func: The operation, an overload of ATen.
        named: Its arguments by name.
        with_gradients: Whether gradients are recorded; without, data and activations look alike, and
            there is no ``noise_of``.
    """
    op = func.overloadpacket.__name__
    if torch.Tag.nondeterministic_seeded in func.tags:
        return {}
    tensors = {n: v for n, v in named.items() if isinstance(v, torch.Tensor)}
    if not tensors or not all(_is_plain(t) for t in tensors.values()):
        return {}
    if op in _PRODUCTS:
        return _of_product(op, tensors) if with_gradients else {}
    if op in _NORMALISATIONS:
        return _of_normalisation(_NORMALISATIONS[op], named)
    if op in _REDUCTIONS and all(t.numel() <= _WHOLE for t in tensors.values()):
        figures = _replayed(lambda **a: func(**{**named, **a}), tensors)
        return figures | (_of_loss(tensors) if op in _LOSSES and with_gradients else {})
    pointwise = torch.Tag.pointwise in func.tags or op == "_to_copy"
    if not pointwise or op in _HARMLESS or (op == "_to_copy" and not _to_integers(named)):
        return {}
    sample = _sample(tensors)
    if sample is None:
        return {}
    return _replayed(lambda **a: func(**{**named, **a}), sample, mutable=func._schema.is_mutable)


def _to_integers(named: Mapping[str, Any]) -> bool:
    dtype = named.get("dtype")
    return isinstance(dtype, torch.dtype) and not dtype.is_floating_point and not dtype.is_complex


def _is_plain(x: torch.Tensor) -> bool:
    """Whether it can be computed with: a sum of a distributed tensor would talk to other ranks."""
    ordinary = type(x).__torch_dispatch__ is torch.Tensor.__torch_dispatch__ and not x.is_nested
    return ordinary and x.numel() > 0 and x.layout == torch.strided and not x.is_complex()


def _sample(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor] | None:
    """Every n-th slice of all operands, broadcast to one shape; None where they have none."""
    try:
        shape = torch.broadcast_shapes(*(t.shape for t in tensors.values()))
    except RuntimeError:
        return None
    n = -(-shape.numel() // _SAMPLE)
    found = {}
    for name, tensor in tensors.items():
        whole = tensor.expand(shape)
        if n > 1:
            longest = max(range(len(shape)), key=lambda i: shape[i])
            whole = whole[(slice(None),) * longest + (slice(None, None, n),)]
        found[name] = whole
    return found


def _replayed(
    run: Callable[..., Any], tensors: Mapping[str, torch.Tensor], *, mutable: bool = False
) -> dict[str, Any]:
    """Run an operation as it is, and with each floating-point operand rounded."""
    plain = {n: t.clone() if mutable else t for n, t in tensors.items()}
    exact = run(**plain)
    if not isinstance(exact, torch.Tensor) or exact.dtype is torch.float64:
        return {}
    figures: dict[str, Any] = {}
    for name, tensor in tensors.items():
        if tensor.dtype is not torch.float32:
            continue
        for label, dtype in DTYPES.items():
            rounded = tensor.to(dtype).float()
            others = {n: t.clone() if mutable else t for n, t in tensors.items() if n != name}
            low = run(**{**others, name: rounded})
            finite = rounded.isfinite()
            usable = finite if finite.shape == low.shape else finite.all()
            for figure, value in _compared(exact, low, usable).items():
                figures[f"{figure}_of_{name}_{label}"] = value
    return figures


def _compared(
    exact: torch.Tensor, low: torch.Tensor, usable: torch.Tensor
) -> dict[str, torch.Tensor]:
    if not exact.is_floating_point():
        return {"changed": ((low != exact) & usable).float().mean()}
    sound = exact.isfinite() & usable
    kept = sound & low.isfinite()
    size = torch.where(sound, exact, 0.0).norm().clamp_min(1e-38)
    return {
        "error": torch.where(kept, low - exact, 0.0).norm() / size,
        "diverged": (sound & ~low.isfinite()).sum(),
        "zeroed": (sound & (exact != 0) & (low == 0)).sum(),
    }


def _of_normalisation(kind: str, named: Mapping[str, Any]) -> dict[str, Any]:
    """Rounding the input of a normalisation: what is small beside the mean is noise afterwards."""
    x = named.get("input")
    if not isinstance(x, torch.Tensor) or x.dtype is not torch.float32 or x.numel() > _WHOLE:
        return {}
    eps = float(named.get("eps", 1e-5))
    if kind == "batch":
        if named.get("training") is False:
            return {}
        dims = [d for d in range(x.dim()) if d != 1]
    elif kind == "layer":
        dims = list(range(x.dim() - len(named["normalized_shape"]), x.dim()))
    else:
        groups = int(named["group"])
        x = x.reshape(x.shape[0], groups, -1)
        dims = [2]

    def normalised(**operands: torch.Tensor) -> torch.Tensor:
        values = operands["input"]
        variance, mean = torch.var_mean(values, dims, correction=0, keepdim=True)
        return (values - mean) * torch.rsqrt(variance + eps)

    return _replayed(normalised, {"input": x})


def _of_product(op: str, tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Noise of the data that a product reads, by its features; what is learned can adapt."""
    figures: dict[str, Any] = {}
    for name in ("input", "self", "mat1", "batch1"):
        tensor = tensors.get(name)
        added = name == "self" and op in ("addmm", "baddbmm")
        if tensor is None or tensor.requires_grad or added:
            continue
        rows = tensor.movedim(1, -1) if op == "convolution" else tensor
        figures |= _noise(name, rows, within=tensor.movedim(1, 0) if op == "convolution" else rows)
    return figures


def _of_loss(tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    target = tensors.get("target")
    if target is None or target.requires_grad:
        return {}
    return _noise("target", target, within=None)


def _noise(name: str, x: torch.Tensor, *, within: torch.Tensor | None) -> dict[str, Any]:
    """The rounding error of features beside their spread.

    Args:
        name: The argument.
        x: (…, features).
        within: (…, along which the values of one sample lie), None to leave it out.
    """
    if x.dtype is not torch.float32 or x.dim() == 0:
        return {}
    if x.dim() == 1:
        x = x[:, None]
    flat = _thinned(x.reshape(-1, x.shape[-1]))
    if flat.shape[0] < _ENOUGH:
        return {}
    mean = flat.mean(0)
    spread = (flat - mean).square().mean(0)
    varies = spread > (_CONSTANT * mean).square()
    figures: dict[str, Any] = {}
    for label, dtype in DTYPES.items():
        error = _error(flat, dtype).square().mean(0)
        ratio = torch.where(varies, (error / spread.clamp_min(1e-38)).sqrt(), 0.0).max()
        figures[f"noise_of_{name}_{label}"] = ratio
    if within is None or within.dim() < 2 or within.shape[-1] < _ENOUGH:
        return figures
    rows = _thinned(within.reshape(-1, within.shape[-1]))
    middle = rows.mean(-1, keepdim=True)
    inner = (rows - middle).square().sum()
    moves = inner > (_CONSTANT * middle).square().sum() * rows.shape[-1]
    for label, dtype in DTYPES.items():
        ratio = (_error(rows, dtype).square().sum() / inner.clamp_min(1e-38)).sqrt()
        known = figures[f"noise_of_{name}_{label}"]
        figures[f"noise_of_{name}_{label}"] = torch.maximum(known, torch.where(moves, ratio, 0.0))
    return figures


def _error(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """What rounding changes; 0 where it leaves the format's range, which is another finding."""
    low = x.to(dtype).float()
    return torch.where(low.isfinite() & x.isfinite(), low - x, 0.0)


def _thinned(rows: torch.Tensor) -> torch.Tensor:
    n = -(-rows.numel() // _WHOLE)
    return rows[::n] if n > 1 else rows
