"""Which dtypes a script's training has, seen by other means than mpdiag's, which is not imported.

    python studies/dtype_witness.py OUT.json SCRIPT ARGS…

A dispatch mode sees products and collectives as they run; what a tensor takes in memory says how it is
stored, whatever dtype it claims. The dtypes after the third step of an optimizer are written.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as modules
from torch.optim import Optimizer, optimizer
from torch.utils._python_dispatch import TorchDispatchMode

STEPS = 3
PRODUCTS = frozenset("aten::mm aten::addmm aten::bmm aten::baddbmm aten::convolution".split())
WRAPPERS = ("module", "_fsdp_wrapped_module", "_orig_mod")


class Witness(TorchDispatchMode):
    """Counts products by module and dtype, and elements of gradients added over ranks by dtype."""

    def __init__(self, out: Path) -> None:
        super().__init__()
        self.out = out
        self.forward: dict[str, Counter[str]] = {}
        self.backward: Counter[str] = Counter()
        self.collectives: Counter[str] = Counter()
        self.running: list[nn.Module] = []
        self.roots: dict[int, nn.Module] = {}
        self.gradients: dict[int, str] = {}
        self.steps = 0

    def attach(self) -> None:
        """Follow modules and optimizers."""
        modules.register_module_forward_pre_hook(self._called)
        modules.register_module_forward_hook(self._returned, always_call=True)
        optimizer.register_optimizer_step_pre_hook(self._steps)
        optimizer.register_optimizer_step_post_hook(self._stepped)

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        """Look at an operation; a tensor class is first taken apart into plain tensors."""
        if any(hasattr(t, "__tensor_flatten__") for t in types):
            return NotImplemented
        name = func._schema.name
        if name in PRODUCTS:
            dtype = plain(args[1 if name in ("aten::addmm", "aten::baddbmm") else 0].dtype)
            if self.running:
                inside = self.forward.setdefault(self._name(self.running[-1]), Counter())
                inside[dtype] += 1
            else:
                self.backward[dtype] += 1
        # Tensor parallelism adds activations by functional collectives; these add gradients.
        if name.startswith("c10d::") and "reduce" in name and not self.running:
            for tensor in tensors_of(args):
                self.collectives[plain(tensor.dtype)] += tensor.numel()
        return func(*args, **(kwargs or {}))

    def _name(self, module: nn.Module) -> str:
        for root in self.roots.values():
            for name, one in root.named_modules():
                if one is module:
                    return unwrapped(name)
        return type(module).__name__

    def _called(self, module: nn.Module, _args: Any) -> None:
        if not self.running:
            inside = {id(m) for root in self.roots.values() for m in root.modules()}
            if id(module) not in inside:
                below = {id(m) for m in module.modules()}
                self.roots = {k: m for k, m in self.roots.items() if k not in below}
                self.roots[id(module)] = module
        self.running.append(module)

    def _returned(self, _module: nn.Module, _args: Any, _result: Any) -> None:
        self.running.pop()

    def _steps(self, one: Optimizer, _args: Any, _kwargs: Any) -> None:
        self.__exit__(None, None, None)  # a step may be compiled, which no mode may see
        for group in one.param_groups:
            self.gradients.update(
                {id(p): stored(p.grad)[0][0] for p in group["params"] if p.grad is not None}
            )

    def _stepped(self, one: Optimizer, _args: Any, _kwargs: Any) -> None:
        self.__enter__()
        self.steps += 1
        if self.steps > STEPS:
            return
        found = {}
        for root in self.roots.values():
            for name, p in root.named_parameters():
                states = one.state.get(p, {})
                found[unwrapped(name)] = {
                    "stored": stored(p),
                    "trainable": p.requires_grad,
                    "grad": self.gradients.get(id(p)),
                    "states": {
                        str(key): stored(value)
                        for key, value in states.items()
                        if isinstance(value, torch.Tensor) and key not in ("step", "steps")
                    },
                }
        document = {
            "parameters": found,
            "forward": self.forward,
            "backward": self.backward,
            "collectives": self.collectives,
        }
        if os.environ.get("RANK", "0") == "0":
            self.out.write_text(json.dumps(document, indent=1))


def plain(dtype: torch.dtype) -> str:
    """A dtype's name."""
    return str(dtype).removeprefix("torch.")


def stored(tensor: torch.Tensor) -> list[tuple[str, int]]:
    """The dtypes in memory with their bytes, the most first; what a tensor class claims is no matter."""
    found: Counter[str] = Counter()
    waiting = [tensor]
    while waiting:
        one = waiting.pop()
        if hasattr(one, "__tensor_flatten__"):
            inner = [getattr(one, name) for name in one.__tensor_flatten__()[0]]
            waiting += [part for part in inner if isinstance(part, torch.Tensor)]
        else:
            found[plain(one.dtype)] += one.numel() * one.element_size()
    return found.most_common()


def tensors_of(value: Any) -> list[torch.Tensor]:
    """The tensors in nested lists."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, (list, tuple)):
        return [tensor for one in value for tensor in tensors_of(one)]
    return []


def unwrapped(name: str) -> str:
    """A name without what wrappers add to it."""
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def run(out: Path, words: Sequence[str]) -> None:
    """Run a script with its arguments, and write what was seen."""
    sys.argv = list(words)
    sys.path.insert(0, str(Path(words[0]).parent))
    witness = Witness(out)
    witness.attach()
    with witness:
        runpy.run_path(words[0], run_name="__main__")


if __name__ == "__main__":
    run(Path(sys.argv[1]), sys.argv[2:])
