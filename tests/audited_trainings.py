"""Small trainings of a known precision, each with what an audit of its recording is to say."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

import mpdiag

BF16, FP32 = torch.bfloat16, torch.float32


class Masters(torch.optim.AdamW):
    """Steps FP32 copies of half-precision parameters, and copies them back, as Megatron's does."""

    def __init__(self, parameters, **settings):
        self.model = list(parameters)
        self.copies = [p.detach().float().requires_grad_() for p in self.model]
        super().__init__(self.copies, **settings)

    def step(self, closure=None):
        for copy, p in zip(self.copies, self.model, strict=True):
            copy.grad = None if p.grad is None else p.grad.float()
        super().step(closure)
        self.copy_back()

    def copy_back(self, _: int = 0):
        for copy, p in zip(self.copies, self.model, strict=True):
            p.data.copy_(copy)


def model(dtype: torch.dtype = FP32) -> nn.Module:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.ReLU(), nn.Linear(16, 4))
    return net.to(dtype)


def train(
    net: nn.Module,
    optimizer: torch.optim.Optimizer,
    folder,
    *,
    autocast: torch.dtype | None = None,
    steps: int = 3,
    micro: int = 1,
    between: Callable[[int], None] = lambda _: None,
    **options,
):
    """Record a few steps, with some options, and audit them."""
    dtype = next(net.parameters()).dtype
    generator = torch.Generator().manual_seed(1)
    with mpdiag.record(net, optimizer, folder, every=1, overwrite=True, **options):
        for step in range(steps):
            for _ in range(micro):
                x = torch.randn(12, 8, generator=generator).to(dtype)
                with torch.autocast("cpu", autocast or BF16, enabled=autocast is not None):
                    loss = net(x).float().square().mean()
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            between(step)
    return mpdiag.audit(folder)


@dataclass(frozen=True)
class Case:
    """A training, and the one line and the findings' codes of its audit."""

    name: str
    run: Callable
    line: str
    codes: tuple[str, ...]


def _of(dtype, make=torch.optim.AdamW, **options) -> Callable:
    settings = options.pop("settings", {})

    def run(folder):
        net = model(dtype)
        return train(net, make(net.parameters(), lr=1e-2, **settings), folder, **options)

    return run


STUCK, DECAY = "precision-stuck-state", "precision-decay-without-effect"
SUM, STILL = "precision-narrow-sum", "precision-updates-rounded-away"
NO_MASTERS = "BF16 weights and AdamW states, no FP32 masters"
CASES = (
    Case("fp32", _of(FP32), "FP32 weights and AdamW states", ()),
    Case(
        "autocast",
        _of(FP32, autocast=BF16),
        "FP32 weights and AdamW states; autocast computes in BF16",
        (),
    ),
    Case("bf16", _of(BF16), NO_MASTERS, (STUCK, DECAY)),
    Case("bf16-summed", _of(BF16, micro=4), NO_MASTERS, (STUCK, DECAY, SUM)),
    Case(
        "bf16-short-memory",
        _of(BF16, settings={"betas": (0.9, 0.95), "weight_decay": 0.0}),
        NO_MASTERS,
        (STILL,),
    ),
    Case(
        "bf16-masters",
        _of(BF16, make=Masters),
        "BF16 weights, FP32 Masters states, FP32 masters",
        (),
    ),
    Case(
        "sgd",
        _of(BF16, make=torch.optim.SGD, settings={"momentum": 0.9}),
        "BF16 weights and SGD states, no FP32 masters",
        (STILL,),
    ),
)
