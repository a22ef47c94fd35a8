"""How well one backward pass ranks operations: the estimate against sensitivity measured one by one.

    python studies/sensitivity.py [--format fp16] [--json studies/results/sensitivity.json]

A Transformer, a CNN and an LSTM on scikit-learn's digits and pydoc-like symbols, after some FP32
steps. Spearman's rank correlation over operations (calls of an operation in a module):

- ``loss``: |∑ adjoint × error| of one backward pass against the measured change of the loss;
- ``reach``: ∑ |adjoint × error| of one backward pass against the error of all weight gradients;
- ``forward``, ``backward``: the same measured errors, of either pass rounded alone, against the
  estimate that takes a few backward passes more (``estimate_gradients``).
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections import defaultdict
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from mpdiag.sensitivity.loss_estimate import estimate
from mpdiag.sensitivity.measurement import measure
from studies.exhibits.exhibit import Chain, digit_maps, digits
from studies.gradient_estimate import estimate_gradients

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

STEPS = 20
DIRECTIONS = 16


class Transformer(nn.Module):
    """A two-layer encoder over the rows of a digit."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(8, 64)
        layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.encoder(self.embed(x.view(-1, 8, 8))).mean(1))


class Lstm(nn.Module):
    """Two LSTM layers, each a module of its own, over the rows of a digit."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(8, 32)
        self.first = nn.LSTM(32, 48, batch_first=True)
        self.middle = nn.Linear(48, 48)
        self.second = nn.LSTM(48, 48, batch_first=True)
        self.head = nn.Sequential(nn.Linear(48, 32), nn.Tanh(), nn.Linear(32, 10))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(torch.tanh(self.embed(x.view(-1, 8, 8))))[0]
        return self.head(self.second(torch.relu(self.middle(h)))[0][:, -1])


def cnn() -> nn.Module:
    def block(a: int, b: int) -> list[nn.Module]:
        return [nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU()]

    body = [*block(1, 16), *block(16, 16), nn.MaxPool2d(2), *block(16, 32), *block(32, 32)]
    return nn.Sequential(*body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[torch.Generator], Any]]] = {
    "transformer": (Transformer, digits),
    "cnn": (cnn, digit_maps),
    "lstm": (Lstm, digits),
}


def spearman(a: Sequence[float], b: Sequence[float]) -> float:
    """Rank correlation, equal values sharing their mean rank."""

    def ranks(values: Sequence[float]) -> np.ndarray:
        x = np.asarray(values)
        order, inverse, counts = np.unique(x, return_inverse=True, return_counts=True)
        del order
        return (np.cumsum(counts) - (counts - 1) / 2)[inverse]

    return float(np.corrcoef(ranks(a), ranks(b))[0, 1])


def correlate(name: str, fmt: str, seed: int) -> dict[str, Any]:
    make, data = MODELS[name]
    torch.manual_seed(seed)
    model = Chain(make(), nn.CrossEntropyLoss())
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(*data(generator)).backward()
        optimizer.step()
    batch = data(generator)

    def step() -> torch.Tensor:
        return model(*batch)

    with sdpa_kernel(SDPBackend.MATH):  # fused attention cannot be differentiated twice
        return compare(model, step, fmt)


def compare(model: nn.Module, step: Callable[[], torch.Tensor], fmt: str) -> dict[str, Any]:
    scale = 1024.0
    step()
    began = time.perf_counter()
    estimates = estimate(model, step, fmt=fmt, scale=scale)
    once = time.perf_counter() - began
    began = time.perf_counter()
    gradients = estimate_gradients(model, step, fmt=fmt, scale=scale, directions=DIRECTIONS)
    twice = time.perf_counter() - began
    began = time.perf_counter()
    forward = measure(model, step, fmt=fmt, part="forward", scale=scale)
    backward = measure(model, step, fmt=fmt, part="backward", scale=scale)
    measured = (time.perf_counter() - began) / 2
    total: dict[tuple[str, str], np.ndarray] = defaultdict(lambda: np.zeros(4))
    for e, g in zip(estimates, gradients, strict=True):
        assert e.site == g.site
        # Errors of several calls add up as if independent; changes of the loss with their signs.
        total[e.site.module, e.site.op] += (e.loss_change, e.reach, g.forward**2, g.backward**2)
    keys = [(s.module, s.op) for s in forward]
    columns = np.array([total[k] for k in keys]).T
    return {
        "operations": len(keys),
        "loss": spearman(np.abs(columns[0]), [s.loss_error for s in forward]),
        "reach": spearman(columns[1], [s.gradient_error for s in forward]),
        "forward": spearman(columns[2], [s.gradient_error for s in forward]),
        "backward": spearman(columns[3], [s.gradient_error for s in backward]),
        "measured / estimated, time": measured / once,
        "measured / estimated gradients, time": 2 * measured / twice,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--format", nargs="*", default=["fp16", "bf16", "fp8_e4m3"])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    results: dict[str, Any] = {"date": date.today().isoformat(), "torch": torch.__version__}
    for fmt in options.format:
        for name in MODELS:
            found = [correlate(name, fmt, seed) for seed in range(options.seeds)]
            mean = {k: sum(f[k] for f in found) / len(found) for k in found[0]}
            results.setdefault(fmt, {})[name] = mean
            figures = ", ".join(f"{k} {v:.3g}" for k, v in mean.items())
            print(f"{fmt} {name}: {figures}", flush=True)
            assert not any(map(math.isnan, mean.values()))
    if options.json:
        options.json.write_text(json.dumps(results, indent=1, allow_nan=False) + "\n")


if __name__ == "__main__":
    main()
