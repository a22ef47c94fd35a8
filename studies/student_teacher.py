"""Does the student of arXiv 2506.20752 diverge in MXFP8, and does a recording of its start say so?

    python studies/student_teacher.py --json studies/results/student-teacher.json
    python studies/student_teacher.py --json … --width 256 --depth 4 --batch 256 --lr 2e-3 --steps 2000

The student is a residual MLP with layer norms (x + W2 · gelu(W1 · norm(x))), the teacher the same
without norms or residuals, inputs are Gaussian, targets have noise of 0.005, the optimizer is Adam
without a schedule (``olmo/synthetic/student_teacher.py`` of the paper's code, from which the sizes come
too). That code keeps checkpoints around step 5,100 in MX, at width 512, depth 4, batch 2048 and
learning rate 6e-4. One such step takes a core of this CPU seconds: options take the sizes down.

All variants of a seed see the same weights, inputs and noise. A variant is stored when it ends, and one
that the file has is not trained again.

- ``fp32``; ``bf16``: operands and outputs of products are rounded to BF16.
- ``mxfp8 paper``: E4M3 in all three products, scales by ``floor`` as OCP and microxcaling have them,
  BF16 around, gains and offsets of layer norms in blocks too.
- ``mxfp8 floor``: the same with layer norms in FP32.
- ``mxfp8``: as mpdiag's recipe (scales by ``rceil``, layer norms in FP32).
- ``mxfp6 paper``: E2M3, as ``mxfp8 paper``.

A training diverges if its loss exceeds 10 times its smallest of 100 steps before it and stays there to
the end, or is not finite. ``spikes`` are steps with a loss of twice the median of the 100 before.
"""

import argparse
import json
import math
import platform
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mpdiag

NOISE = 0.005
RECORDED = 200
"""Steps of the healthy start that are recorded, every twentieth with operands."""

Rounds = Callable[[Tensor, int], Tensor]
"""What quantises a matrix with blocks along an axis."""


@dataclass(frozen=True)
class Variant:
    """How a student computes.

    Attributes:
        format: Of the operands of products; "" for none.
        rule: Of the scales.
        bf16: Whether operands and outputs are rounded to BF16.
        norms: Whether gains and offsets of layer norms are quantised.
    """

    format: str = ""
    rule: str = "rceil"
    bf16: bool = True
    norms: bool = False

    def quantise(self, x: Tensor, axis: int) -> Tensor:
        x = self.rounded(x)
        if not self.format:
            return x
        return mpdiag.fake_quantize(x, self.format, axis=axis, scale_rounding=self.rule)

    def rounded(self, x: Tensor) -> Tensor:
        return x.bfloat16().float() if self.bf16 else x


VARIANTS = {
    "fp32": Variant(bf16=False),
    "bf16": Variant(),
    "mxfp8 paper": Variant("mxfp8_e4m3", "floor", norms=True),
    "mxfp8 floor": Variant("mxfp8_e4m3", "floor"),
    "mxfp8": Variant("mxfp8_e4m3"),
    "mxfp6 paper": Variant("mxfp6_e2m3", "floor", norms=True),
}


class Product(torch.autograd.Function):
    """x · wᵀ with five quantised operands."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, how: Variant) -> Tensor:
        ctx.save_for_backward(x, w)
        ctx.how = how
        return how.rounded(how.quantise(x, -1) @ how.quantise(w, -1).T)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, None]:
        (x, w), how = ctx.saved_tensors, ctx.how
        dx = how.quantise(dy, -1) @ how.quantise(w, 0)
        dw = how.quantise(dy, 0).T @ how.quantise(x, 0)
        return how.rounded(dx), how.rounded(dw), None


class StraightThrough(torch.autograd.Function):
    """A quantised vector; its gradient goes to the vector."""

    @staticmethod
    def forward(_ctx: Any, x: Tensor, how: Variant) -> Tensor:
        return how.quantise(x, -1)

    @staticmethod
    def backward(_ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class Block(nn.Module):
    """A residual block."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.fc1 = nn.Linear(width, 4 * width, bias=False)
        self.fc2 = nn.Linear(4 * width, width)

    def forward(self, x: Tensor, how: Variant | None) -> Tensor:
        if how is None:  # as a recording sees it
            return x + self.fc2(F.gelu(self.fc1(self.norm(x))))
        gains, offsets = self.norm.weight, self.norm.bias
        if how.norms:
            gains, offsets = (StraightThrough.apply(p, how) for p in (gains, offsets))
        normed = F.layer_norm(x, x.shape[-1:], gains, offsets)
        hidden = F.gelu(Product.apply(normed, self.fc1.weight, how))
        return x + Product.apply(hidden, self.fc2.weight, how) + self.fc2.bias


class Student(nn.Module):
    """Residual blocks, one after the other."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(width) for _ in range(depth))

    def forward(self, x: Tensor, how: Variant | None = None) -> Tensor:
        for layer in self.layers:
            x = layer(x, how)
        return x


@dataclass(frozen=True)
class Setting:
    """Sizes and learning rate, as in the paper's code."""

    width: int
    depth: int
    batch: int
    lr: float
    steps: int

    def __str__(self) -> str:
        return (
            f"width {self.width}, depth {self.depth}, batch {self.batch}, lr {self.lr:g}, "
            f"{self.steps} steps"
        )


class Training:
    """A student, its teacher and its data, all from a seed."""

    def __init__(self, setting: Setting, seed: int) -> None:
        torch.manual_seed(seed)
        self.setting, self.seed = setting, seed
        self.model = Student(setting.width, setting.depth)
        parts: list[nn.Module] = []
        for _ in range(setting.depth):
            parts += [nn.Linear(setting.width, setting.width, bias=False), nn.GELU()]
            parts += [nn.Linear(setting.width, setting.width, bias=False)]
        self.teacher = nn.Sequential(*parts).requires_grad_(False)
        self.optimizer = torch.optim.Adam(self.model.parameters(), setting.lr)

    def step(self, number: int, how: Variant | None) -> float:
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + number)
        x = torch.randn(self.setting.batch, self.setting.width, generator=generator)
        noise = NOISE * torch.randn(x.shape, generator=generator)
        self.optimizer.zero_grad()
        loss = F.mse_loss(self.model(x, how), self.teacher(x) + noise)
        loss.backward()
        self.optimizer.step()
        return float(loss.detach())


def diverged(losses: list[float]) -> int | None:
    """The step from which the loss stays above 10 times its smallest before; None if it never does."""
    values = np.array(losses)
    if not np.isfinite(values[-1]):
        return int(np.flatnonzero(~np.isfinite(values))[0])
    lowest = np.minimum.accumulate(values)
    high = values > 10 * lowest
    if not high[-1]:
        return None
    low = np.flatnonzero(~high)
    return int(low[-1] + 1) if len(low) else 0


def spikes(losses: list[float]) -> list[int]:
    """Steps with a loss of twice the median of the 100 before."""
    values = np.array(losses)
    found = [
        i for i in range(100, len(values)) if not values[i] <= 2 * np.median(values[i - 100 : i])
    ]
    return found[:50]


def trained(setting: Setting, seed: int, name: str) -> dict[str, Any]:
    """A variant of a seed, to the end or to a loss that is not finite."""
    training, began = Training(setting, seed), time.process_time()
    losses: list[float] = []
    for number in range(setting.steps):
        losses.append(training.step(number, VARIANTS[name]))
        if not math.isfinite(losses[-1]):
            break
    gains = torch.cat([block.norm.weight for block in training.model.layers]).detach()
    return {
        "losses": [float(f"{np.mean(losses[i : i + 20]):.4g}") for i in range(0, len(losses), 20)],
        "last": float(f"{np.median(losses[-100:]):.5g}"),
        "lowest": float(f"{min(losses):.4g}"),
        "diverged": diverged(losses),
        "spikes": spikes(losses),
        "gains": [round(float(v), 4) for v in (gains.min(), gains.mean(), gains.max())],
        "seconds": round(time.process_time() - began, 1),
    }


def foretold(setting: Setting, seed: int) -> dict[str, Any]:
    """What a recording of the start in FP32 says of MXFP8."""
    training = Training(setting, seed)
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        with mpdiag.record(
            training.model, training.optimizer, run, every=20, operations=10, blocks=True
        ):
            for number in range(RECORDED):
                training.step(number, None)
        found = mpdiag.analyze(run, target="mxfp8")
    plan = found.plan.blocks
    assert plan is not None
    rows = found.to_json()["blocks"]
    return {
        "steps": RECORDED,
        "level": found.verdict.level,
        "text": found.verdict.text,
        "evidence": list(found.verdict.evidence),
        "findings": sorted({f.code for f in found.findings}),
        "layers_in_bf16": sum(not layer.quantised for layer in plan.layers),
        "lowest_sqnr_db": min(row["sqnr_db"] for row in rows if row["sqnr_db"] is not None),
        "most_clipped": max(row["clipped"] or 0.0 for row in rows),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2])
    parser.add_argument("--variants", nargs="*", default=list(VARIANTS), choices=list(VARIANTS))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    setting = Setting(options.width, options.depth, options.batch, options.lr, options.steps)
    for seed in options.seeds:
        for name in ("foretold", *options.variants):
            keep(options.json, setting, seed, name)


def keep(file: Path | None, setting: Setting, seed: int, name: str) -> None:
    """Train a variant unless the file has it, and write it there."""
    document: dict[str, Any] = {"settings": {}}
    if file is not None and file.exists():
        document = json.loads(file.read_text(encoding="utf-8"))
    cell = document["settings"].setdefault(str(setting), {}).setdefault(str(seed), {})
    if name in cell:
        return
    cell[name] = foretold(setting, seed) if name == "foretold" else trained(setting, seed, name)
    shown = {key: value for key, value in cell[name].items() if key not in ("losses", "spikes")}
    print(setting, "seed", seed, name, shown, flush=True)
    if file is not None:
        made = {
            "made": date.today().isoformat(),
            "torch": torch.__version__,
            "machine": platform.machine(),
        }
        file.write_text(json.dumps(made | document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
