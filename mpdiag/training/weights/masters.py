"""Models that hold low-precision weights, and the FP32 masters that their optimizers hold.

A weight update is often thousands of times smaller than its weight; FP16 keeps 11 bits. So the
optimizer works on an FP32 copy, the master, and the model receives the rounded value after each
step (*Mixed Precision Training*, section 3.1; GTC 2019, O2). Weight decay and regularisers act on
the master, too: 1e-4 · 1e-4 is zero in FP16.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from mpdiag.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch.optim import Optimizer

    from mpdiag.training.levels import Precision

BATCH_NORMS = (nn.modules.batchnorm._BatchNorm,)


def cast_model(model: nn.Module, precision: Precision, fp32: frozenset[nn.Module]) -> None:
    """Cast parameters and floating-point buffers in place; parameters keep their identity.

    Args:
        model: The model.
        precision: Whether batch normalisation stays in FP32.
        fp32: Modules that stay in FP32, with all in them.
    """
    for module in _castable(model, precision, fp32):
        for parameter in module._parameters.values():
            if parameter is not None and parameter.dtype == torch.float32:
                parameter.data = parameter.data.to(precision.dtype)
                if parameter.grad is not None:
                    parameter.grad = None
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.dtype == torch.float32:
                module._buffers[name] = buffer.to(precision.dtype)


def _castable(
    module: nn.Module, precision: Precision, fp32: frozenset[nn.Module]
) -> Iterator[nn.Module]:
    if module in fp32:
        return
    if not (isinstance(module, BATCH_NORMS) and precision.keep_batch_norm_fp32):
        yield module
    for child in module.children():
        yield from _castable(child, precision, fp32)


class Masters:
    """FP32 masters of the low-precision parameters that some optimizers update.

    The optimizers' groups and states hold the masters from here on. A parameter that is FP32
    already is its own master.
    """

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self._optimizers = optimizers
        self._master: dict[Tensor, Tensor] = {}
        self._model: dict[Tensor, Tensor] = {}

    def adopt(self, originals: dict[Tensor, Tensor] | None = None) -> None:
        """Give every low-precision parameter in the optimizers a master.

        Run again before each step, it finds parameters of groups that were added later.

        Args:
            originals: FP32 values by parameter, from before the model was cast: a master made from
                the rounded weight would have lost 13 bits.
        """
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                group["params"] = [self._adopted(optimizer, p, originals) for p in group["params"]]
            _refresh(optimizer)

    def _adopted(
        self, optimizer: Optimizer, parameter: Tensor, originals: dict[Tensor, Tensor] | None
    ) -> Tensor:
        if parameter.dtype not in (torch.float16, torch.bfloat16):
            return parameter
        master = self._master.get(parameter)
        if master is None:
            value = (originals or {}).get(parameter, parameter.detach())
            master = value.detach().clone().float().requires_grad_(parameter.requires_grad)
            self._master[parameter], self._model[master] = master, parameter
        if parameter in optimizer.state:
            optimizer.state[master] = optimizer.state.pop(parameter)
        return master

    def model_parameter(self, master: Tensor) -> Tensor:
        """The model's parameter that a master stands for."""
        return self._model.get(master, master)

    def master(self, parameter: Tensor) -> Tensor:
        """What the optimizer updates for a parameter of the model."""
        return self._master.get(parameter, parameter)

    def __len__(self) -> int:
        """How many parameters have a master of their own."""
        return len(self._master)

    @torch.no_grad()
    def take_gradients(self, masters: Sequence[Tensor]) -> None:
        """Move the model's gradients to the masters, as FP32, still scaled."""
        for master in masters:
            parameter = self._model.get(master)
            if parameter is not None and parameter.grad is not None:
                master.grad = parameter.grad.to(torch.float32)
                parameter.grad = None

    @torch.no_grad()
    def give_weights(self, masters: Sequence[Tensor]) -> list[Tensor]:
        """Round masters into the model; those that do not fit are left out and returned."""
        pairs = [(self._model[m], m) for m in masters if m in self._model]
        misfits = []
        if pairs:
            tops = torch.stack([torch.linalg.vector_norm(m, torch.inf) for _, m in pairs]).tolist()
            fitting = []
            for (parameter, master), top in zip(pairs, tops, strict=True):
                fits = top <= torch.finfo(parameter.dtype).max
                (fitting.append((parameter, master)) if fits else misfits.append(master))
            if fitting:
                torch._foreach_copy_([p for p, _ in fitting], [m for _, m in fitting])
        return misfits

    @torch.no_grad()
    def release(self) -> None:
        """Hand the optimizers the model's own parameters again, in FP32 and with full values."""
        for master, parameter in self._model.items():
            parameter.data = master.detach().clone()
            parameter.grad = None
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                group["params"] = [self._model.get(p, p) for p in group["params"]]
            _refresh(optimizer)
            for master in [m for m in optimizer.state if m in self._model]:
                optimizer.state[self._model[master]] = optimizer.state.pop(master)
        self._master.clear()
        self._model.clear()


def _refresh(optimizer: Optimizer) -> None:
    """LBFGS keeps a list of its parameters of its own."""
    if hasattr(optimizer, "_params"):
        optimizer._params = optimizer.param_groups[0]["params"]


def refuse_low_precision(models: Sequence[nn.Module]) -> None:
    """Refuse models that are not FP32.

    Raises:
        UsageError: Naming the first parameter that is of another precision.
    """
    for model in models:
        for name, parameter in model.named_parameters():
            if parameter.dtype in (torch.float16, torch.bfloat16):
                message = (
                    f"parameter {name!r} is {str(parameter.dtype).removeprefix('torch.')} already: "
                    "give MixedPrecision the FP32 model, it casts what the level asks for"
                )
                raise UsageError(message)


def refuse_distributed(models: Sequence[nn.Module]) -> None:
    """Refuse to cast weights that a distributed wrapper has laid out already.

    Raises:
        UsageError: DDP's buckets and FSDP's shards are of the dtype they were made with.
    """
    for model in models:
        sharded = any(type(p.data).__name__ == "DTensor" for p in model.parameters())
        if sharded or isinstance(model, nn.parallel.DistributedDataParallel):
            message = (
                "levels O2 and O3 cast weights, which must happen before they are distributed: give "
                "MixedPrecision the plain model, then wrap it in DDP or shard it; or choose O1"
            )
            raise UsageError(message)


def refuse_vanishing_eps(optimizers: Sequence[Optimizer], dtype: torch.dtype) -> None:
    """Refuse an optimizer whose eps is zero in the dtype of the weights it updates.

    Raises:
        UsageError: Adam's 1e-8 in FP16 divides 0 by 0 at the first step.
    """
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            eps = group.get("eps")
            if isinstance(eps, float) and eps > 0 and torch.tensor(eps).to(dtype).item() == 0:
                smallest = torch.finfo(dtype).smallest_normal
                message = (
                    f"{type(optimizer).__name__}'s eps of {eps:g} is zero in "
                    f"{str(dtype).removeprefix('torch.')}, where it would divide 0 by 0: set eps to "
                    f"{smallest:.0e} or more, or keep FP32 master weights (level O2)"
                )
                raise UsageError(message)
