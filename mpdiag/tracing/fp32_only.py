"""What of a training asks for half precision, beside autocast; and how it gets FP32 in its place.

A training is of FP32 when its parameters, its inputs, what wrappers cast to and what the optimizer keeps
are. Casts of models are refused where they are asked for, and parameters that are in half precision
nevertheless (a checkpoint's, ``dtype=``) are converted before an optimizer steps them. Wrappers lose
their policy before their first pass: FSDP reads it there. Inputs are converted where a module is called.
"""

import functools
import inspect
import operator
import sys
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from mpdiag.tracing.dispatch import is_traced
from mpdiag.tracing.dtype_setters import Replacements
from mpdiag.tracing.precision import HALF
from mpdiag.tracing.sharding import HOOKS, Reduction, reductions
from mpdiag.tracing.source_lines import calling_line

_GB = 1e9


class Fp32Only:
    """Keeps a training in FP32 that asks for half precision.

    Args:
        tell: Told what is switched off, what cannot be, and what memory that takes; each once.
        setter: Says who gave a parameter its dtype, if that was seen.

    Attributes:
        refused: What was switched off.
        kept: What could not be switched off.
    """

    def __init__(
        self,
        tell: Callable[[str], None],
        setter: Callable[[nn.Parameter], str | None] = lambda _: None,
    ) -> None:
        self._tell = tell
        self._setter = setter
        self.refused: list[str] = []
        self.kept: list[str] = []
        self._seen: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._bytes: dict[int, int] = {}  # in half precision, by id of a parameter
        self._told_bytes = 0
        self._replaced = Replacements()
        self._converted: list[tuple[torch.Tensor, torch.dtype]] = []
        self._optimizers: list[Optimizer] = []

    def attach(self) -> None:
        """Replace torch's functions that give half precision."""
        if self._replaced:
            return
        replace, module = self._replaced.replace, nn.Module
        replace(module, "to", self._to)
        replace(module, "type", self._type)
        replace(module, "half", functools.partial(self._cast, "half"))
        replace(module, "bfloat16", functools.partial(self._cast, "bfloat16"))
        replace(module, "__call__", self._call)
        replace(DistributedDataParallel, "__init__", self._make_ddp)
        replace(DistributedDataParallel, "register_comm_hook", self._reduce)

    def detach(self) -> None:
        """Put torch's functions back, and converted parameters and states into their dtype."""
        self._replaced.restore()
        for tensor, dtype in self._converted:
            states = [v for o in self._optimizers for v in o.state.get(tensor, {}).values()]
            alike = [v for v in states if isinstance(v, torch.Tensor) and v.shape == tensor.shape]
            gradient, tensor.grad = tensor.grad, None
            for one in (tensor, *alike):
                one.data = one.data.to(dtype)
            tensor.grad = None if gradient is None else gradient.to(dtype)
        self._converted, self._optimizers = [], []

    def settle(
        self, modules: Iterable[nn.Module], optimizers: Sequence[Optimizer], *, lasting: bool
    ) -> None:
        """Convert models and what optimizers keep, before they train.

        Args:
            modules: The models, or wrappers around them.
            optimizers: The optimizers that hold their parameters, or some of their own.
            lasting: Whether they stay FP32 when this is detached.
        """
        groups = [g["params"] for o in optimizers for g in o.param_groups]
        loose = [p for parameters in groups for p in parameters if p.dtype in HALF]
        modules = list(modules)
        held = [*loose, *(p for module in modules for p in module.parameters())]
        self._bytes.update((id(p), 2 * p.numel()) for p in held if p.dtype in HALF)
        self._say_bytes(optimizers)
        for module in modules:
            self._enter(module, lasting=lasting)
        for parameter in loose:
            self._convert(parameter, lasting)
        self._optimizers += [] if lasting else optimizers
        for optimizer in optimizers:
            for state in optimizer.state.values():
                for key, value in state.items():
                    if isinstance(value, torch.Tensor) and value.dtype in HALF:
                        self._refuse(f"{type(optimizer).__name__}'s {_name(value.dtype)} {key}")
                        self._convert(value, lasting)

    def to_json(self) -> dict[str, Any]:
        """For ``meta.json``: what was switched off and what was not, and weights that became FP32."""
        found = {"switched_off": list(self.refused), "not_switched_off": list(self.kept)}
        widened = {"widened_parameters": sum(self._bytes.values()) // 2}
        return {name: said for name, said in (found | widened).items() if said}

    # -- what asks for half precision --------------------------------------------------------------

    def _to(self, plain: Any, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        device, dtype, non_blocking, layout = torch._C._nn._parse_to(*args, **kwargs)
        if dtype not in HALF:
            return plain(module, *args, **kwargs)
        if device is not None:
            plain(module, device, non_blocking=non_blocking)
        if layout is not None:
            plain(module, memory_format=layout)
        return self._cast(f"to({dtype})", None, module)

    def _type(self, plain: Any, module: nn.Module, dst_type: Any) -> Any:
        if dst_type not in HALF:
            return plain(module, dst_type)
        return self._cast(f"type({dst_type})", None, module)

    def _cast(self, what: str, _plain: Any, module: nn.Module) -> nn.Module:
        """Leave a module in FP32; one that is in half precision becomes FP32."""
        call = what if what.endswith(")") else f"{what}()"
        self._refuse(f"{type(module).__name__}.{call} at {calling_line()}")
        self._bytes.update((id(p), 2 * p.numel()) for p in module.parameters())
        self._widen(module, lasting=True, say=False)
        return module

    def _make_ddp(self, plain: Any, *args: Any, **kwargs: Any) -> None:
        given = inspect.signature(plain).bind(*args, **kwargs)
        if given.arguments.get("mixed_precision") is not None:
            self._refuse(f"DDP's mixed precision at {calling_line()}")
            given.arguments["mixed_precision"] = None
        self._enter(given.arguments["module"], lasting=True)  # it makes buckets of its dtypes
        plain(*given.args, **given.kwargs)

    def _reduce(self, plain: Any, model: Any, state: Any, hook: Any) -> Any:
        name = getattr(hook, "__name__", "")
        own = str(getattr(hook, "__module__", "")).startswith("torch.")
        if own and HOOKS.get(name) in HALF:
            return self._refuse(f"DDP's {name} at {calling_line()}")
        return plain(model, state, hook)

    def _call(self, plain: Any, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Call a module with FP32 inputs, and with FP32 parameters."""
        if is_traced():
            return plain(module, *args, **kwargs)
        if module not in self._seen:
            self._enter(module, lasting=True)
        elif any(p is not None and p.dtype in HALF for p in module._parameters.values()):
            self._widen(module, lasting=True)
        return plain(module, *self._wide(args), **self._wide(kwargs))

    def _wide(self, value: Any) -> Any:
        """An argument with FP32 in place of half precision; the object itself where there is none."""
        if isinstance(value, torch.Tensor):
            if value.dtype not in HALF:
                return value
            # A model has made it: a cast of its own has rounded it, or autocast, which is told.
            if value.requires_grad and not torch.is_autocast_enabled(value.device.type):
                self._keep(f"a cast to {_name(value.dtype)} before the call at {calling_line()}")
            return value.float()
        if type(value) is dict:
            wide = {name: self._wide(one) for name, one in value.items()}
            return wide if any(wide[name] is not value[name] for name in value) else value
        if not isinstance(value, (tuple, list)):
            return value
        found = [self._wide(one) for one in value]
        if all(map(operator.is_, found, value)):
            return value
        return type(value)(*found) if hasattr(value, "_fields") else type(value)(found)

    # -- models ------------------------------------------------------------------------------------

    def _enter(self, module: nn.Module, *, lasting: bool) -> None:
        """A module that was not seen before, with all in it: its policy goes, and it becomes FP32."""
        inside = list(module.modules())
        for one in inside:
            if one not in self._seen:
                self._without_policy(one)
        self._widen(module, lasting=lasting)
        self._seen.update(inside)
        for words in sorted({w for r in reductions([module]).values() for w in _half(r)}):
            self._keep(words)

    def _widen(self, module: nn.Module, *, lasting: bool, say: bool = True) -> None:
        tensors = [*module.parameters(), *module.buffers()]
        half = {id(t): t for t in tensors if t.dtype in HALF}
        if not half:
            return
        kinds = " and ".join(sorted({_name(t.dtype) for t in half.values()}))
        if say:
            setters = {self._setter(t) for t in half.values() if isinstance(t, nn.Parameter)}
            known = "; ".join(sorted(filter(None, setters)))
            by = f" ({known})" if known else ""
            self._refuse(f"the {kinds} weights of {type(module).__name__}{by}")
        try:
            if lasting or any(hasattr(t, "_local_tensor") for t in half.values()):
                module._apply(lambda t: t.float() if t.dtype in HALF else t)  # as FSDP wants it
            else:
                for tensor in half.values():
                    self._convert(tensor, lasting)
        except Exception as error:  # noqa: BLE001 - whatever it is, training goes on
            self._keep(f"the {kinds} weights of {type(module).__name__} ({error})")

    def _convert(self, tensor: torch.Tensor, lasting: bool) -> None:
        if tensor.dtype in HALF:
            if not lasting:
                self._converted.append((tensor, tensor.dtype))
            tensor.data = tensor.data.float()
            if tensor.grad is not None:
                tensor.grad = tensor.grad.float()

    def _without_policy(self, module: nn.Module) -> None:
        """Take FSDP's policy away; what had its first pass already keeps it."""
        with suppress(AttributeError, TypeError):  # private: another torch may hold it elsewhere
            state: Any = getattr(module, "_get_fsdp_state", lambda: None)()
            policy: Any = getattr(state, "_mp_policy", None)
            if policy is not None and state._is_root is None and _narrow(policy):
                state._mp_policy = type(policy)()
                for group in getattr(state, "_fsdp_param_groups", None) or [
                    state._fsdp_param_group
                ]:
                    group.mp_policy = state._mp_policy
                    for parameter in group.fsdp_params:
                        parameter.mp_policy = state._mp_policy
                self._refuse(f"FSDP2's MixedPrecisionPolicy ({_narrow(policy)})")
            loaded = sys.modules.get("torch.distributed.fsdp")
            if loaded is None or not isinstance(module, loaded.FullyShardedDataParallel):
                return
            policy = module.mixed_precision
            if module._is_root is None and _narrow(policy):
                module.mixed_precision = type(policy)()
                handle = module._handle
                if handle is not None:
                    handle._init_param_reduce_dtypes(None, None)
                self._refuse(f"FSDP1's MixedPrecision ({_narrow(policy)})")

    # -- what is said ------------------------------------------------------------------------------

    def _refuse(self, what: str) -> None:
        if what not in self.refused:
            self.refused.append(what)
            self._tell(f"--fp32 switches off {what}")

    def _keep(self, what: str) -> None:
        if what not in self.kept:
            self.kept.append(what)
            self._tell(f"--fp32 cannot switch off {what}: what it rounds away is not recorded")

    def _say_bytes(self, optimizers: Sequence[Optimizer]) -> None:
        """Say what FP32 takes, before it is taken."""
        held = sum(self._bytes.values())
        if held <= self._told_bytes:
            return
        self._told_bytes = held
        states = f"; the states of {type(optimizers[0]).__name__} double too" if optimizers else ""
        self._tell(
            f"--fp32: weights and gradients take {_size(4 * held)} in FP32, "
            f"{_size(2 * held)} in half precision{states}"
        )


def _size(count: int) -> str:
    return f"{count / _GB:.1f} GB" if count >= _GB / 10 else f"{count / 1e6:.3g} MB"


def _narrow(policy: Any) -> str:
    """The half-precision fields of a policy: ``param_dtype=bfloat16``."""
    fields = ("param_dtype", "reduce_dtype", "buffer_dtype", "output_dtype")
    found = [(name, getattr(policy, name, None)) for name in fields]
    return ", ".join(f"{name}={_name(dtype)}" for name, dtype in found if dtype in HALF)


def _half(reduction: Reduction) -> list[str]:
    """What a wrapper still computes or reduces in half precision."""
    found = []
    if reduction.compute in HALF:
        found.append(f"{reduction.policy}, which is in use already")
    elif reduction.dtype in HALF:
        found.append(f"{reduction.kind}'s reduction in {_name(reduction.dtype)}")
    return found


def _name(dtype: torch.dtype | None) -> str:
    return str(dtype).removeprefix("torch.")
