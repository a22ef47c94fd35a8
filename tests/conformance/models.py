"""Small models of which every gradient is known, and how gradients are made to overflow."""

import io
from typing import Any

import torch
from torch import Tensor, nn

INF, NAN = float("inf"), float("nan")
ONE = torch.ones(2)


class Weighted(nn.Module):
    """The product of input and weight: the gradient of the output's sum is the input."""

    def __init__(self, *values: complex) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(values or (1.0, 2.0)))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


def perceptron(seed: int = 0, width: int = 8) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, width), nn.ReLU(), nn.Linear(width, 2))


def rows(seed: int = 0, count: int = 8, width: int = 4) -> Tensor:
    return torch.randn(count, width, generator=torch.Generator().manual_seed(seed))


class _Poison(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, value: float) -> Tensor:
        ctx.value = value
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * ctx.value, None


def poisoned(x: Tensor, value: float = INF) -> Tensor:
    """The same values, with a backward pass that multiplies gradients by a number."""
    result: Tensor = _Poison.apply(x, value)
    return result


def values(weights: dict[str, Tensor]) -> list[float]:
    return torch.cat([w.flatten() for w in weights.values()]).tolist()


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    """Whether weights are bit for bit the same."""
    return a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a)


def close(a: dict[str, Tensor], b: dict[str, Tensor], tolerance: float) -> bool:
    """Whether weights agree within an absolute tolerance."""
    return all(torch.allclose(a[n], b[n], rtol=0, atol=tolerance) for n in a)


def through_a_file(saved: Any, *, weights_only: bool = True) -> Any:
    """What ``torch.load`` gives of what ``torch.save`` wrote."""
    file = io.BytesIO()
    torch.save(saved, file)
    file.seek(0)
    return torch.load(file, weights_only=weights_only)
