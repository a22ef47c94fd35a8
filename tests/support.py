"""Small models, batches and plans that several tests share."""

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import mpdiag
from mpdiag.numerics.block_recipes import BLOCK_RECIPES, OPERANDS
from mpdiag.plan import BlockLayer, BlockPlan, LossScalePlan, PrecisionPlan


def backoff(init_scale: float = 1024.0, **settings) -> PrecisionPlan:
    """A plan with a dynamic scale."""
    scale = LossScalePlan(method="backoff", init_scale=init_scale, **settings)
    return PrecisionPlan(loss_scale=scale)


def constant(scale: float = 1024.0) -> PrecisionPlan:
    """A plan with a constant scale."""
    return PrecisionPlan(loss_scale=LossScalePlan(method="constant", init_scale=scale))


def planned(target, *layers, wide=()) -> PrecisionPlan:
    """A plan in which some layers, (module, parameter, kind), are quantised but for some products."""
    each = ["bf16" if gemm in wide else target for gemm in OPERANDS]
    rows = tuple(BlockLayer(*layer, *each) for layer in layers)
    blocks = BlockPlan(target, BLOCK_RECIPES[target].formats(), layers=rows)
    return PrecisionPlan(target="bf16", blocks=blocks)


def network(seed: int = 0) -> nn.Module:
    """A little of everything: convolution, batch norm, linear."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 10)
    )


def batch(seed: int = 1, size: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    """Images and classes for ``network``."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(size, 1, 8, 8, generator=generator)
    return x, torch.randint(0, 10, (size,), generator=generator)


def loss_of_batch(model: nn.Module, mp: mpdiag.MixedPrecision, seed: int = 1) -> torch.Tensor:
    """A forward pass of a ``network`` under its trainer."""
    x, y = batch(seed)
    with mp.autocast():
        return nn.functional.cross_entropy(model(x).float(), y)


def summed(
    model: nn.Module, mp: mpdiag.MixedPrecision, x: torch.Tensor | None = None
) -> torch.Tensor:
    """The sum of a model's outputs under its trainer, by default of two rows of four ones."""
    with mp.autocast():
        return model(torch.ones(2, 4) if x is None else x).float().sum()


NEEDS_GLOO = pytest.mark.skipif(
    not torch.distributed.is_available() or not torch.distributed.is_gloo_available(),
    reason="this build of torch has no gloo",
)

BF16 = mpdiag.PrecisionOverrides(dtype="bf16")
LEVELS = ["O0", "O1", "O2", "O3"]
PRECISIONS = [
    ("O0", None),
    ("O1", "fp16"),
    ("O1", "bf16"),
    ("O2", "fp16"),
    ("O2", "bf16"),
    ("O3", "fp16"),
    ("O3", "bf16"),
]
"""Every level, in FP16 (emulated on a CPU) and in BF16."""


def perceptron(seed: int = 0) -> nn.Module:
    """Two layers, small enough for many trainings."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))


def trainer(
    model: nn.Module, optimizer: torch.optim.Optimizer, level: str, dtype: str | None, **options
) -> mpdiag.MixedPrecision:
    """A trainer at a level, at a constant scale."""
    scale = 1.0 if level == "O3" else 8.0
    plain = mpdiag.PrecisionOverrides()
    usual = mpdiag.PrecisionOverrides(dtype=dtype, loss_scale=scale) if dtype else plain
    options.setdefault("overrides", usual)
    return mpdiag.MixedPrecision(model, optimizer, constant(), level=level, **options)


def build(level, dtype, lr=0.1, kind=torch.optim.SGD, **options):
    """A perceptron, its optimizer and their trainer."""
    model = perceptron()
    optimizer = kind(model.parameters(), lr)
    return model, optimizer, trainer(model, optimizer, level, dtype, **options)


def wrapped(
    model: nn.Module,
    plan: PrecisionPlan | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    **options,
) -> mpdiag.MixedPrecision:
    """A trainer of a model, by default with plain SGD and a dynamic scale."""
    optimizer = optimizer or torch.optim.SGD(model.parameters(), 0.1)
    return mpdiag.MixedPrecision(model, optimizer, plan or backoff(), **options)


def take_step(model: nn.Module, mp: mpdiag.MixedPrecision, seed: int = 0, **options):
    """One step of a ``perceptron``."""
    x = torch.randn(5, 4, generator=torch.Generator().manual_seed(seed))
    with mp.autocast():
        loss = model(x).square().mean()
    return mp.step(loss, **options)


class Casts(TorchDispatchMode):
    def __init__(self, tensor: torch.Tensor) -> None:
        super().__init__()
        self.tensor, self.count = tensor, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._to_copy.default and args[0] is self.tensor:
            self.count += 1
        return func(*args, **(kwargs or {}))


class Container(torch.optim.Optimizer):
    """Optimizers inside hold the parameters, as torchtitan's OptimizersContainer."""

    def __init__(self, model, kind=torch.optim.SGD):
        self.optimizers = [kind(part.parameters(), 0.1) for part in model]
        super().__init__(list(model.parameters()), {"lr": 0.1})

    def step(self, closure=None):
        if closure is not None:
            closure()
        for optimizer in self.optimizers:
            optimizer.step()

    def zero_grad(self, set_to_none=True):
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none)


@pytest.fixture(autouse=True)
def one_thread():
    """Imported by the conftest of folders whose tests want one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def record_and_train(recording: Path, training: Path) -> mpdiag.MixedPrecision:
    """Record three steps in FP32, and train one by the plan that they give; the closed trainer."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with mpdiag.record(model, optimizer, recording):
        for i in range(3):
            x, y = batch(i)
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    plan = mpdiag.analyze(recording).plan
    with mpdiag.MixedPrecision(model, optimizer, plan, run=training) as mp:
        x, y = batch()
        with mp.autocast():
            loss = nn.functional.cross_entropy(model(x), y)
        mp.step(loss)
    return mp
