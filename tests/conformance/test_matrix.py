"""Every level, every optimizer of torch that runs on a CPU, and what loops do with them.

Ours runs beside a loop written by hand in plain torch for the same level: in BF16, which CPUs compute
themselves, the two must agree bit for bit.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from conformance.models import through_a_file
from conformance.subjects.ours import OurTraining
from torch import Tensor, nn, optim

import mpdiag
from mpdiag import PrecisionOverrides
from mpdiag.plan import PrecisionPlan

LEVELS = ("O0", "O1", "O2", "O3")
SCALE = 64.0
INF = float("inf")


def network(optimizer: str, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    if optimizer == "SparseAdam":
        return nn.Embedding(6, 3, sparse=True)
    bias = optimizer != "Muon"
    return nn.Sequential(nn.Linear(3, 4, bias=bias), nn.ReLU(), nn.Linear(4, 2, bias=bias))


def batch(optimizer: str, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    if optimizer == "SparseAdam":
        return torch.randint(0, 6, (5,), generator=generator)
    return torch.randn(5, 3, generator=generator)


TABLE = Path(__file__).with_name("optimizers.tsv").read_text().splitlines()
OPTIMIZERS: dict[str, Callable[[Any], optim.Optimizer]] = {
    name: eval(f"lambda p: {call}")
    for name, call in (row.split("\t") for row in TABLE[1:])
    if hasattr(optim, name)
}


class ByHand:
    """A level written in plain torch: BF16 by autocast (O1), masters (O2), or throughout (O3)."""

    def __init__(self, level: str, name: str, model: nn.Module) -> None:
        self.level, self.name, self.model = level, name, model
        full = [p.detach().clone() for p in model.parameters()]
        if level in ("O2", "O3"):
            model.to(torch.bfloat16)
        self.parameters = list(model.parameters())
        self.held = [f.requires_grad_() for f in full] if level == "O2" else self.parameters
        self.optimizer = OPTIMIZERS[name](self.held)

    def loss(self, x: Tensor) -> Tensor:
        low = self.level in ("O2", "O3") and x.is_floating_point()
        with torch.autocast("cpu", torch.bfloat16, enabled=self.level == "O1"):
            output = self.model(x.bfloat16() if low else x)
        return output.float().square().mean()

    def backward(self, loss: Tensor) -> None:
        """Gradients of several passes add up in FP32 where masters are."""
        (loss * SCALE).backward()
        for held, p in zip(self.held, self.parameters, strict=True):
            if held is not p and p.grad is not None:
                wide = p.grad.float()
                held.grad = wide if held.grad is None else held.grad + wide
                p.grad = None

    def unscale(self) -> None:
        for held in self.held:
            gradient = held.grad
            if gradient is not None:
                if gradient.is_sparse:
                    gradient = gradient.coalesce()
                held.grad = gradient / SCALE

    def give(self) -> None:
        if self.level == "O2":
            with torch.no_grad():
                for held, p in zip(self.held, self.parameters, strict=True):
                    p.copy_(held)

    def clip(self, limit: float | None) -> None:
        """As torch clips, with a norm in FP32 where gradients are half."""
        if limit is None:
            return
        if self.level != "O3":
            nn.utils.clip_grad_norm_(self.held, limit)
            return
        gradients = [h.grad for h in self.held if h.grad is not None]
        norm = nn.utils.get_total_norm([g.float() for g in gradients])
        factor = min(1.0, float(limit / (norm + 1e-6)))
        for gradient in gradients:
            gradient.mul_(factor)

    def step(self, clip: float | None = None) -> None:
        self.unscale()
        self.clip(clip)
        self.optimizer.step()
        self.give()
        self.optimizer.zero_grad()

    def step_with(self, loss_of: Callable[[], Tensor], clip: float | None = None) -> None:
        def closure() -> float:
            self.give()
            self.optimizer.zero_grad()
            loss = loss_of()
            self.backward(loss)
            self.unscale()
            self.clip(clip)
            return float(loss.detach())

        self.optimizer.step(closure)
        self.give()
        self.optimizer.zero_grad()

    def load(self, saved: dict[str, Tensor]) -> None:
        self.model.load_state_dict(saved)
        if self.level == "O2":
            with torch.no_grad():
                for held, p in zip(self.held, self.parameters, strict=True):
                    held.copy_(p)

    def weights(self) -> list[Tensor]:
        return [h.detach().float().clone() for h in self.held]


class Ours(OurTraining):
    def __init__(self, level: str, name: str, model: nn.Module, target: str = "bf16") -> None:
        self.name = name
        self.parameters = list(model.parameters())
        optimizer = OPTIMIZERS[name](self.parameters)
        plan, overrides = PrecisionPlan(target=target), PrecisionOverrides(loss_scale=SCALE)
        mp = mpdiag.MixedPrecision(model, optimizer, plan, level=level, overrides=overrides)
        super().__init__([model], [optimizer], mp)

    def loss(self, x: Tensor) -> Tensor:
        return self.forward(x).square().mean()

    def step(self, clip: float | None = None) -> None:
        self.mp.step(clip_norm=clip)

    def step_with(self, loss_of: Callable[[], Tensor], clip: float | None = None) -> None:
        self.mp.step(optimizer=self.optimizer, closure=loss_of, clip_norm=clip)

    def load(self, saved: dict[str, Tensor]) -> None:
        self.model.load_state_dict(saved)

    def weights(self) -> list[Tensor]:
        return list(super().weights().values())


Loop = ByHand | Ours


@contextmanager
def ours(level: str, name: str, *, target: str = "bf16", seed: int = 0) -> Iterator[Ours]:
    loop = Ours(level, name, network(name, seed), target)
    try:
        yield loop
    finally:
        loop.mp.close()


def advance(
    loop: Loop, step: int, *, parts: int = 1, clip: float | None = None, bad: bool = False
) -> None:
    inputs = [batch(loop.name, 10 * step + i) for i in range(parts)]

    def loss_of() -> Tensor:
        loss = torch.stack([loop.loss(x) for x in inputs]).sum() / parts
        return loss * INF if bad else loss

    if loop.name == "LBFGS":
        loop.step_with(loss_of, clip)
        return
    for x in inputs:
        loop.backward(loop.loss(x) / parts)
    if bad:
        for p in loop.parameters:
            p.grad.mul_(INF)  # type: ignore[union-attr]
    loop.step(clip)


def two_steps(loop: Loop, **options: Any) -> None:
    for step in range(2):
        advance(loop, step, **options)


def scheduler(loop: Loop) -> None:
    schedule = optim.lr_scheduler.StepLR(loop.optimizer, 1, 0.5)
    for step in range(3):
        advance(loop, step)
        schedule.step()


def load_in_the_middle(loop: Loop) -> None:
    """Weights loaded into the model after a step, which BF16 can hold."""
    saved = {n: v.bfloat16().float() for n, v in network(loop.name, seed=3).state_dict().items()}
    advance(loop, 0)
    loop.load(saved)
    advance(loop, 1)


def average(loop: Loop) -> None:
    """An average of the model's weights, swapped in for an evaluation and out again."""
    shadow = [p.detach().clone() for p in loop.parameters]
    for step in range(2):
        advance(loop, step)
        for mean, p in zip(shadow, loop.parameters, strict=True):
            mean.lerp_(p.detach(), 0.5)
        kept = [p.detach().clone() for p in loop.parameters]
        for mean, p in zip(shadow, loop.parameters, strict=True):
            p.data.copy_(mean)
        with torch.no_grad():
            loop.loss(batch(loop.name, 99))
        for before, p in zip(kept, loop.parameters, strict=True):
            p.data.copy_(before)


def skip(loop: Loop) -> None:
    """A step in the middle whose gradients are infinite; by hand it is left out."""
    advance(loop, 0)
    if isinstance(loop, Ours):
        advance(loop, 1, bad=True)
    advance(loop, 2)


SCENARIOS: dict[str, Callable[[Loop], None]] = {
    "plain": two_steps,
    "accumulation": partial(two_steps, parts=2),
    "clip": partial(two_steps, clip=0.125),
    "scheduler": scheduler,
    "load in the middle": load_in_the_middle,
    "average": average,
    "skip": skip,
}


def equal(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def nearly(level: str, scenario: str, found: list[Tensor], expected: list[Tensor]) -> bool:
    """Clipping half gradients by hand: torch's foreach kernels round the factor to their format."""
    if (level, scenario) != ("O3", "clip"):
        return False
    return all(
        torch.allclose(x, y, rtol=0, atol=2**-7) for x, y in zip(found, expected, strict=True)
    )


def differs(level: str, name: str, scenario: str) -> str:
    """Where ours leaves the loop by hand; empty if it does not."""
    hand = ByHand(level, name, network(name))
    SCENARIOS[scenario](hand)
    with ours(level, name) as loop:
        start = loop.weights()
        SCENARIOS[scenario](loop)
        found, expected = loop.weights(), hand.weights()
        if equal(found, start):
            return f"{name}: nothing moved"
        if not equal(found, expected) and not nearly(level, scenario, found, expected):
            off = max(float((x - y).abs().max()) for x, y in zip(found, expected, strict=True))
            return f"{name}: off by {off:.2g}"
        low = level in ("O2", "O3")
        if not equal([p.bfloat16() if low else p for p in found], loop.parameters):
            return f"{name}: the model does not hold what its master says"
    return "" if equal(loop.parameters, found) else f"{name}: closed with other weights"


def resumes(level: str, name: str, target: str) -> str:
    """Whether a training resumed from a file goes on bit for bit; empty if it does."""
    with ours(level, name, target=target) as loop:
        for step in range(3):
            advance(loop, step)
        whole = loop.weights()
    with ours(level, name, target=target) as loop:
        advance(loop, 0)
        state = through_a_file(loop.mp.state_dict())
    with ours(level, name, target=target, seed=1) as loop:
        loop.mp.load_state_dict(state)
        for step in range(1, 3):
            advance(loop, step)
        found = loop.weights()
    return "" if equal(found, whole) else f"{name}: resumed otherwise"


FULL = bool(os.environ.get("MPDIAG_FULL_MATRIX"))
FEW = ("SGD", "Adam", "Adagrad", "LBFGS", "SparseAdam")
"""What emulated FP16, which is slow, is resumed with unless the whole product is asked for."""

NO_CLIP = {"SparseAdam"}
"""torch's own ``clip_grad_norm_`` takes no sparse gradients."""


@pytest.mark.parametrize("scenario", SCENARIOS)
@pytest.mark.parametrize("level", LEVELS)
def test_as_a_loop_by_hand(level, scenario):
    names = [n for n in OPTIMIZERS if scenario != "clip" or n not in NO_CLIP]
    assert not [found for name in names if (found := differs(level, name, scenario))]


@pytest.mark.parametrize(
    ("level", "target"),
    [*((level, "bf16") for level in LEVELS), ("O1", "fp16"), ("O2", "fp16"), ("O3", "fp16")],
)
def test_resumed_bit_for_bit(level, target):
    names = OPTIMIZERS if FULL or target == "bf16" else FEW
    assert not [found for name in names if (found := resumes(level, name, target))]


def test_every_optimizer_of_torch_is_there():
    kinds = {
        name
        for name, kind in vars(torch.optim).items()
        if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)
    }
    assert kinds - {"Optimizer"} <= OPTIMIZERS.keys()
