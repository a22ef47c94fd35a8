"""From what a module returns to flat values that a counter can read."""

import dataclasses
import sys
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch

from mpdiag.recording.counting import layout
from mpdiag.runs.schema import Placement
from mpdiag.tracing.sharding import fsdp2_parameters

_MAX_DEPTH = 16
_OWN_TYPES = (torch.Tensor, torch.nn.Parameter)
KINDS = {
    torch.float32: layout.FLOAT32,
    torch.bfloat16: layout.BFLOAT16,
    torch.float16: layout.FLOAT16,
    torch.float64: layout.FLOAT64,
}
"""Types of values that counters read in place."""
_PACKED = {t for t in (getattr(torch, "float4_e2m1fn_x2", None),) if t is not None}
"""Types that torch itself converts to no other; not every torch has them."""
SOME = 256
"""Elements that are looked at one by one, of a tensor at most."""
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Countable(NamedTuple):
    """A tensor made ready for counting.

    Attributes:
        values: Flat, dense and real; shares the tensor's memory where that is possible.
        repeat: How often each value stands in the tensor.
        zeros: Zeros that are not stored (sparse tensors).
        dtype: The tensor's dtype, without ``torch.``.
        placement: ``local``, ``sharded`` or ``replicated``.
        shared: Whether ``values`` is the tensor's own memory, not a copy.
    """

    values: torch.Tensor
    repeat: int
    zeros: int
    dtype: str
    placement: Placement
    shared: bool


def tensors_in(output: Any, depth: int = 0) -> Iterator[torch.Tensor]:
    """Every tensor in nested tuples, lists, mappings and dataclasses, in order."""
    if isinstance(output, torch.Tensor):
        yield output
    elif depth >= _MAX_DEPTH or output is None or isinstance(output, (str, bytes, int, float)):
        return
    elif isinstance(output, Mapping):
        for value in output.values():
            yield from tensors_in(value, depth + 1)
    elif isinstance(output, (tuple, list)):
        for value in output:
            yield from tensors_in(value, depth + 1)
    elif dataclasses.is_dataclass(output) and not isinstance(output, type):
        for field in dataclasses.fields(output):
            yield from tensors_in(getattr(output, field.name, None), depth + 1)


def countable(tensor: torch.Tensor) -> Countable | str:
    """Make a tensor ready for counting, or say in a few words why it cannot be counted."""
    refusal = _refusal(tensor)
    if refusal is not None:
        return refusal
    dtype = str(tensor.dtype).removeprefix("torch.")
    local, placement = local_part(tensor.detach())
    arrived = getattr(local, "trigger_wait", None)
    if arrived is not None:  # the result of a collective under way, which the next module awaits
        local = arrived()
    if type(local) not in _OWN_TYPES:
        if type(local).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
            return f"a {type(local).__name__}, a tensor class whose values cannot be read"
        local = local.as_subclass(torch.Tensor)
    if not has_memory(local):
        return "memory that was given back (FSDP does so with gathered parameters)"
    dense = _dense(local)
    implicit = 0 if local.layout == torch.strided else local.numel() - dense.numel()
    # Magnitudes alone are counted: what a view turns the sign of is read as it lies.
    if dense.is_complex():
        implicit *= 2
        dense = torch.view_as_real(dense.conj() if dense.is_conj() else dense)
    if dense.is_neg():
        dense = torch._neg_view(dense)
    values, repeat = flat_values(dense)
    own = local.layout == torch.strided and values.data_ptr() == local.data_ptr()
    return Countable(values, repeat, implicit, dtype, placement, own)


def has_memory(tensor: torch.Tensor) -> bool:
    """Whether a plain tensor's values can be read; reading a storage of size 0 crashes."""
    if tensor.layout != torch.strided or tensor.numel() == 0:
        return True
    return tensor.untyped_storage().nbytes() > 0


def own_part(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a distributed tensor; any other is the part itself."""
    part: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
    return part


def readable(tensor: torch.Tensor) -> torch.Tensor | None:
    """This rank's values; None without memory, and of a class that keeps them in a way of its own.

    What a function transform (vmap, grad) has wrapped, as where the compiler traces one, has none.
    """
    part = own_part(tensor)
    plain = type(part).__torch_dispatch__ is torch.Tensor.__torch_dispatch__
    plain = plain and not torch._C._functorch.is_functorch_wrapped_tensor(part)
    return part.detach() if plain and has_memory(part) else None


def stored_as(tensor: torch.Tensor) -> torch.dtype:
    """The dtype of what a tensor holds in memory; a class that quantizes claims that of its results.

    Such a class names the tensors that it holds (``__tensor_flatten__``): the largest has the values.
    """
    names = tensor.__tensor_flatten__()[0] if hasattr(tensor, "__tensor_flatten__") else ()
    held = [t for name in names if isinstance(t := getattr(tensor, name), torch.Tensor)]
    return stored_as(max(held, key=torch.Tensor.numel)) if held else tensor.dtype


def some_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """Copies of ``SOME`` elements at equal distances, (k,); None where there are none to read."""
    part = readable(tensor)
    if part is None or not part.is_floating_point() or part.numel() == 0:
        return None
    if part.layout != torch.strided:
        return None
    flat = part.reshape(-1)
    return flat[:: max(1, flat.numel() // SOME)][:SOME].clone()


def sum_of_bits(values: torch.Tensor) -> int | None:
    """A sum by which it is seen that memory was written since; None off the CPU.

    Values in another order have the same sum, and the same count.

    Args:
        values: Flat and dense, as ``Countable`` has them.
    """
    if values.device.type != "cpu":
        return None
    size = values.element_size()
    whole = values.numel() * size // 8 * (8 // size)
    if values.storage_offset() * size % 8:
        whole = 0
    longs = int(values[:whole].view(torch.int64).sum()) if whole else 0
    return longs + int(values[whole:].view(_BITS[size]).sum())


def _refusal(tensor: torch.Tensor) -> str | None:
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return "quantized" if tensor.is_quantized else "not floating point"
    if tensor.dtype in _PACKED:
        return "two values in a byte"
    if tensor.is_meta:
        return "a meta tensor without values"
    if tensor.is_nested:
        return "a nested tensor"
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        return "inside a function transform (vmap, grad)"
    fake = sys.modules.get("torch._subclasses.fake_tensor")
    if fake is not None and isinstance(tensor, fake.FakeTensor):
        return "a fake tensor without values"
    return None


def local_part(tensor: torch.Tensor) -> tuple[torch.Tensor, Placement]:
    """This rank's share of a tensor that may be distributed, and how the tensor lies over the ranks.

    A partial sum counts as the rank's own: it has not been reduced yet. Of shards that are held
    several times (hybrid sharding) all but the first are ``replicated``.
    """
    module = sys.modules.get("torch.distributed.tensor")
    if module is None or not isinstance(tensor, module.DTensor):
        return tensor, "local"
    placements = tensor.placements
    place = tensor.device_mesh.get_coordinate() or [0] * len(placements)
    copied = any(p.is_replicate() and i > 0 for p, i in zip(placements, place, strict=True))
    if any(p.is_partial() for p in placements):
        return tensor.to_local(), "local"
    if copied or all(p.is_replicate() for p in placements):
        return tensor.to_local(), "replicated"
    return tensor.to_local(), "sharded"


def is_tensor_parallel(model: torch.nn.Module) -> bool:
    """Whether a model's own code computes with distributed tensors.

    Under ``fully_shard`` it does so only with those that were distributed before.
    """
    module = sys.modules.get("torch.distributed.tensor")
    if module is None or not any(isinstance(p, module.DTensor) for p in model.parameters()):
        return False
    held = [p for m in model.modules() for _, p in fsdp2_parameters(m)]
    return not held or any(p.is_dtensor for p in held)


def beside_sharded(model: torch.nn.Module) -> list[torch.nn.Parameter]:
    """Parameters of a tensor-parallel model that it does not split: other ranks have the same ones.

    Those that ``fully_shard`` was told to ignore are not meant: they may be each rank's own. Where it
    shards a tensor-parallel model, the ranks that split a layer hold equal shards of the other layers;
    these are found on all of them but the first.
    """
    if not is_tensor_parallel(model):
        return []
    parameters = list(model.parameters())
    meshes = {id(p): p.device_mesh for p in parameters if hasattr(p, "device_mesh")}
    if not any(True for m in model.modules() for _ in fsdp2_parameters(m)):
        return [p for p in parameters if id(p) not in meshes]
    widest = max(meshes.values(), key=lambda mesh: mesh.ndim)
    return [p for p in parameters if id(p) in meshes and _is_beside(meshes[id(p)], widest)]


def _is_beside(mesh: Any, widest: Any) -> bool:
    """Whether this rank is not the first along the dimensions that a wider mesh has beside these."""
    own, names = mesh.mesh_dim_names or (), widest.mesh_dim_names or ()
    if not set(own) < set(names):
        return False
    place = widest.get_coordinate() or [0] * len(names)
    return any(i > 0 for name, i in zip(names, place, strict=True) if name not in own)


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    """The values a tensor stores, strided; those of a sparse one without its implicit zeros."""
    if tensor.layout == torch.strided:
        return tensor
    if tensor.layout == torch.sparse_coo:
        return tensor.coalesce().values()
    if tensor.layout in (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc):
        return tensor.values()
    return tensor.to_dense()


def flat_values(tensor: torch.Tensor) -> tuple[torch.Tensor, int]:
    """The stored values of a strided tensor as a flat, dense one, and how often each stands.

    Order does not matter to a count, so a transposed tensor is read in memory order, and a
    dimension expanded by stride 0 (the gradient of ``sum()``) is read once. Only overlapping or
    gappy layouts are copied.

    Args:
        tensor: Any shape and strides, real, floating point.

    Returns:
        A tensor (n,) that shares memory where possible, and the factor its counts need.
    """
    if tensor.is_contiguous():
        return tensor.view(-1), 1
    repeat = 1
    dims = []
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        if stride == 0:
            repeat *= size
        elif size != 1:
            dims.append((stride, size))
    expected = 1
    for stride, size in sorted(dims):
        if stride != expected:
            break
        expected *= size
    else:
        return tensor.as_strided((expected,), (1,)), repeat
    if repeat > 1:
        narrow = tuple(0 if stride == 0 else slice(None) for stride in tensor.stride())
        return tensor[narrow].reshape(-1).contiguous(), repeat
    # Of one dimension ``reshape`` returns the tensor as it is, gaps included.
    return tensor.reshape(-1).contiguous(), 1
