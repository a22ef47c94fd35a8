"""In which dtypes wrappers compute with parameters and reduce their gradients over ranks.

The gradient that arrives in a parameter does not show it: FSDP reduces a gradient in its policy's dtype
and hands it over in the parameter's. So the policy is read, or the hook that DDP calls.

FSDP2 keeps its policy in a state of the module (``torch.distributed.fsdp._fully_shard``), FSDP1 in
``mixed_precision``, DDP in ``mixed_precision`` and its list of communication hooks: all but the second
are private, so what cannot be read is said to be unknown.
"""

import gc
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from mpdiag.tracing.dtype_setters import policy_kinds
from mpdiag.tracing.precision import HALF

HOOKS = {
    "allreduce_hook": None,
    "fp16_compress_hook": torch.float16,
    "fp16_compress_wrapper": torch.float16,
    "bf16_compress_hook": torch.bfloat16,
    "bf16_compress_wrapper": torch.bfloat16,
    "batched_powerSGD_hook": torch.float32,
    "powerSGD_hook": torch.float32,
}
"""Communication hooks of torch, and the dtype in which each adds; None for the gradient's own."""


@dataclass(frozen=True)
class Reduction:
    """What a wrapper does with a parameter.

    Attributes:
        kind: ``FSDP2``, ``FSDP1`` or ``DDP``.
        compute: The dtype in which the parameter enters the forward pass; None for its own.
        dtype: The dtype in which gradients are added over ranks; None for the gradient's own.
        unknown: Why ``dtype`` is not known; empty where it is.
        policy: What chose ``compute``; empty where nothing did.
        numel: Elements of the parameter over all ranks; None where its own count says it.
    """

    kind: str
    compute: torch.dtype | None = None
    dtype: torch.dtype | None = None
    unknown: str = ""
    policy: str = ""
    numel: int | None = None


def reductions(modules: Iterable[nn.Module]) -> dict[int, Reduction]:
    """What reduces each parameter, by ``id``.

    Args:
        modules: Models, and wrappers around them.
    """
    found: dict[int, Reduction] = {}
    for root in modules:
        for module in root.modules():
            for parameters, reduction in (*_fsdp2(module), *_fsdp1(module), *_ddp(module)):
                found.update((id(p), reduction) for p in parameters)
    return found


def unapplied(found: Iterable[Reduction], made: Iterable[str]) -> list[str]:
    """Policies for half precision that were made, and that no wrapper applies, in words.

    Args:
        found: What wrappers do with the parameters of the training.
        made: Policies that were seen when they were made.
    """
    kinds = tuple(policy_kinds())
    if not kinds or any(one.policy for one in found):
        return []
    living = [one for one in gc.get_objects() if type(one) in kinds and one.param_dtype in HALF]
    words = [f"{type(one).__name__}(param_dtype={one.param_dtype})" for one in living]
    return sorted(set(made) or set(words))


def fsdp2_parameters(module: nn.Module) -> Iterator[tuple[Any, Any]]:
    """What FSDP2 holds for each parameter that it shards for a module, with the group it is in."""
    state_of = getattr(module, "_get_fsdp_state", None)
    if state_of is None:
        return
    state: Any = state_of()
    groups = getattr(state, "_fsdp_param_groups", None) or [
        getattr(state, "_fsdp_param_group", None)
    ]
    for group in groups:
        yield from ((group, parameter) for parameter in getattr(group, "fsdp_params", ()))


def shards_of(model: nn.Module) -> dict[int, nn.Parameter]:
    """By the ``id`` of each parameter that FSDP2 may have gathered, the shard that optimizers step."""
    return {
        id(getattr(held, "_unsharded_param", None)): held.sharded_param
        for module in model.modules()
        for _, held in fsdp2_parameters(module)
    }


def _fsdp2(module: nn.Module) -> Iterator[tuple[list[torch.Tensor], Reduction]]:
    for group, parameter in fsdp2_parameters(module):
        policy: Any = getattr(parameter, "mp_policy", None) or getattr(group, "mp_policy", None)
        compute = getattr(policy, "param_dtype", None)
        chosen = "FSDP2's MixedPrecisionPolicy" if compute else ""
        reduce = getattr(policy, "reduce_dtype", None) or compute
        mesh = getattr(group, "mesh_info", None)
        ranks = [getattr(mesh, f"{kind}_mesh_size", None) for kind in ("shard", "replicate")]
        found = Reduction("FSDP2", compute, reduce, _alone(*ranks), chosen)
        yield [parameter.sharded_param], found


def _alone(*ranks: int | None) -> str:
    """Why nothing is added where no group of ranks has a second one; empty where one has."""
    known = [size for size in ranks if size is not None]
    return "its group has one rank: nothing is reduced" if known and max(known) == 1 else ""


def _fsdp1(module: nn.Module) -> Iterator[tuple[list[torch.Tensor], Reduction]]:
    loaded = sys.modules.get("torch.distributed.fsdp")  # a second to import, and seldom there
    if loaded is not None and isinstance(module, loaded.FullyShardedDataParallel):
        policy: Any = module.mixed_precision
        compute = getattr(policy, "param_dtype", None)
        chosen = "FSDP1's MixedPrecision" if compute else ""
        reduce = getattr(policy, "reduce_dtype", None) or compute
        flat = getattr(getattr(module, "_handle", None), "flat_param", None)
        held = getattr(flat, "_params", None) or ()  # none of a wrapper that shows flat weights
        shapes = getattr(flat, "_shapes", ()) if held else ()
        sizes = {id(p): s.numel() for p, s in zip(held, shapes, strict=True)}
        groups = [getattr(module, n, None) for n in ("process_group", "_inter_node_pg")]
        unknown = _alone(*(g.size() for g in groups if g is not None))
        # An inner wrapper comes later, and takes its own parameters over.
        for p in module.parameters():
            yield [p], Reduction("FSDP1", compute, reduce, unknown, chosen, sizes.get(id(p)))


def _ddp(module: nn.Module) -> Iterator[tuple[list[torch.Tensor], Reduction]]:
    if not isinstance(module, DistributedDataParallel):
        return
    policy: Any = module.mixed_precision
    compute = getattr(policy, "param_dtype", None)
    reduce = getattr(policy, "reduce_dtype", None) or compute
    chosen = "DDP's mixed precision" if compute else ""
    unknown = _alone(module.process_group.size())
    hooks: Any = getattr(module, "_comm_hooks", ())
    for hook, _ in hooks:
        name = getattr(hook, "__name__", type(hook).__name__)
        own = str(getattr(hook, "__module__", "")).startswith("torch.")
        if own and name in HOOKS:
            reduce = HOOKS[name] or reduce
        else:
            unknown = f"the communication hook {name} decides it"
    ignored: Any = getattr(module, "parameters_to_ignore", ())
    inside = [p for name, p in module.module.named_parameters() if name not in ignored]
    yield inside, Reduction("DDP", compute, reduce, unknown, chosen)
