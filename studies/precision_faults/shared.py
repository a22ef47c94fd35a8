"""What the files of this folder share: a small model, its batches, and the command line of each.

A file is a plain script without mpdiag: ``python FILE.py fault`` and ``python FILE.py twin`` train, on
as many ranks as its ``RANKS`` says (``torchrun`` starts them). Files are named after their threads.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator

import torch
import torch.distributed as dist
from torch import nn

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
STEPS = 12


def block(seed: int = 0, width: int = 64) -> nn.Sequential:
    """Two linear layers, with a norm between them."""
    torch.manual_seed(seed)
    return nn.Sequential(
        OrderedDict(
            up=nn.Linear(16, width),
            norm=nn.LayerNorm(width),
            act=nn.SiLU(),
            down=nn.Linear(width, 16),
        )
    )


def batches(steps: int = STEPS, size: int = 32, seed: int = 1) -> Iterator[torch.Tensor]:
    """Inputs (size, 16), whose square is to be learned."""
    generator = torch.Generator().manual_seed(seed + 1000 * rank())
    for _ in range(steps):
        yield torch.randn(size, 16, generator=generator)


def loss_of(model: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """The mean squared error, in FP32."""
    return (model(x).float() - x.float().square()).square().mean()


class MasterAdamW(torch.optim.AdamW):
    """Steps FP32 copies of half-precision parameters and copies them back.

    A gradient is read from ``main_grad`` where a parameter has one.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], lr: float, **settings: object) -> None:
        self.held = [p for p in parameters if p.requires_grad]
        self.copies = [p.detach().float().clone().requires_grad_() for p in self.held]
        super().__init__(self.copies, lr=lr, **settings)

    def step(self, closure: None = None) -> None:
        """One step of the copies."""
        for copy, p in zip(self.copies, self.held, strict=True):
            gradient = getattr(p, "main_grad", None)
            gradient = p.grad if gradient is None else gradient
            copy.grad = None if gradient is None else gradient.float()
        super().step(closure)
        with torch.no_grad():
            for copy, p in zip(self.copies, self.held, strict=True):
                p.copy_(copy)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of copies and parameters."""
        super().zero_grad(set_to_none)
        for p in self.held:
            p.grad = None


def rank() -> int:
    """This process among the ranks; 0 where there is one."""
    return dist.get_rank() if dist.is_initialized() else 0


def main(fault: Callable[[], None], twin: Callable[[], None], ranks: int) -> None:
    """Train as the command line says."""
    chosen = {"fault": fault, "twin": twin}[sys.argv[1]]
    if ranks > 1:
        dist.init_process_group("gloo")
    chosen()
    if dist.is_initialized():
        dist.destroy_process_group()
