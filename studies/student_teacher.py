"""Does the student of arXiv 2506.20752 diverge in MXFP8, and does a recording of its start say so?

    python studies/student_teacher.py --json studies/results/student-teacher.json
    python studies/student_teacher.py --json … --width 512 --depth 4 --batch 256 --lr 6e-4 --steps 6000

The student is a residual MLP with layer norms (x + W2 · gelu(W1 · norm(x))), the teacher the same
without norms or residuals, inputs are Gaussian, targets have noise of 0.005, the optimizer is Adam
without a schedule (``olmo/synthetic/student_teacher.py`` of the paper's code, from which the sizes come
too). That code keeps checkpoints around step 5,100 in MX, at width 512, depth 4, batch 2048 and
learning rate 6e-4. Options take the sizes down.

All variants of a seed see the same weights, inputs and noise. A variant is stored every 500 steps, and
one that the file has is not trained again.

- ``fp32``; ``bf16``: operands and outputs of products are rounded to BF16.
- ``mxfp8 paper``: E4M3 in all three products, scales by ``floor`` as OCP and microxcaling have them,
  BF16 around, gains and offsets of layer norms in blocks too.
- ``mxfp8 floor``: the same with layer norms in FP32.
- ``mxfp8 forward``: as ``mxfp8 paper``, with backward products in BF16.
- ``mxfp8 rceil``: as ``mxfp8 paper``, with scales by ``rceil``, which clip nothing.
- ``mxfp8``: as mpdiag's recipe (scales by ``rceil``, layer norms in FP32).
- ``mxfp6 paper``: E2M3, as ``mxfp8 paper``.

Every 500 steps the file has

- ``clipped``: the share of layer norms' gains that ``floor`` clips: those above 0.875 of a power of two
  in a block with none beyond it;
- ``bias``: ‖g - g32‖ / ‖g32‖ of all parameters, g32 being the gradient of the same weights and batch in
  FP32. The paper sees divergence where this passes 2.

A training diverges if its loss exceeds 10 times its smallest of 100 steps before it and stays there to
the end, or is not finite. ``spikes`` are steps with a loss of twice the median of the 100 before.
"""

import argparse
import json
import math
import platform
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import date
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numba
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mpdiag

NOISE = 0.005
RECORDED = 200
"""Steps of the healthy start that are recorded, every twentieth with operands."""

EVERY = 500
"""Steps after which a training is looked at."""
ELEMENTS = {"mxfp8_e4m3": (3, 8, -6, 0x600000), "mxfp6_e2m3": (3, 2, 0, 0x700000)}
"""Bits of the mantissa, largest and smallest exponent, mantissa of the largest value as FP32 has it."""
U, S = np.uint32, np.int32


@dataclass(frozen=True)
class Variant:
    """How a student computes.

    Attributes:
        format: Of the operands of products; "" for none.
        rule: Of the scales.
        bf16: Whether operands and outputs are rounded to BF16.
        norms: Whether gains and offsets of layer norms are quantised.
        backward: Whether operands of backward products are.
    """

    format: str = ""
    rule: str = "floor"
    bf16: bool = True
    norms: bool = False
    backward: bool = True

    def operand(self, x: Tensor, axis: int, *, backward: bool = False) -> Tensor:
        """As a product reads it; a value of a block format is one of BF16, too."""
        if self.format and (self.backward or not backward):
            x = quantised(x, self.format, axis, self.rule)
        return x.bfloat16() if self.bf16 else x


VARIANTS = {
    "fp32": Variant(bf16=False),
    "bf16": Variant(),
    "mxfp8 paper": Variant("mxfp8_e4m3", norms=True),
    "mxfp8 floor": Variant("mxfp8_e4m3"),
    "mxfp8 forward": Variant("mxfp8_e4m3", norms=True, backward=False),
    "mxfp8 rceil": Variant("mxfp8_e4m3", "rceil", norms=True),
    "mxfp8": Variant("mxfp8_e4m3", "rceil"),
    "mxfp6 paper": Variant("mxfp6_e2m3", norms=True),
}


@numba.njit(cache=True, error_model="numpy")
def _rounded(x, out, bits, top, low, up):  # type: ignore[no-untyped-def]
    """Blocks of 32 rows, each column its own: FP32 as integers, to BF16 and then to an MX format.

    Args:
        x: uint32 (blocks, 32, columns).
        out: As x.
        bits: Of the element's mantissa.
        top: Exponent and mantissa of its largest value.
        low: Its smallest exponent.
        up: Whether a scale that would clip is one exponent larger.
    """
    blocks, _, columns = x.shape
    room = np.empty((5, columns), np.uint32)
    largest, limit, least, near, far = room[0], room[1], room[2], room[3], room[4]
    value, offset, sign = near.view(np.float32), far.view(np.float32), U(0x80000000)
    result = np.empty(columns, np.float32)
    for b in range(blocks):
        largest[:] = 0
        for k in range(32):
            for c in range(columns):
                v = x[b, k, c]
                v = (v + U(0x7FFF) + ((v >> U(16)) & U(1))) & U(0x7FFF0000)
                largest[c] = max(largest[c], v)
        for c in range(columns):
            scale = S(largest[c] >> U(23)) - S(top[0])
            if up and (largest[c] & U(0x7FFFFF)) > U(top[1]):
                scale += S(1)
            scale = min(max(scale, S(1)), S(254))
            limit[c] = U(scale + S(top[0])) << U(23) | U(top[1])
            least[c] = U(max(scale + S(low), S(1))) << U(23)
        for k in range(32):
            for c in range(columns):
                v = x[b, k, c]
                v = (v + U(0x7FFF) + ((v >> U(16)) & U(1))) & U(0x7FFF0000)
                near[c] = min(v, limit[c])
                unit = max(near[c], least[c]) & U(0x7F800000)
                far[c] = unit + U((23 - bits) << 23) | U(0x400000)
            for c in range(
                columns
            ):  # in FP32, a sum with 1.5 · 2^23 units is a whole number of them
                result[c] = (value[c] + offset[c]) - offset[c]
            whole = result.view(np.uint32)
            for c in range(columns):
                out[b, k, c] = whole[c] | (x[b, k, c] & sign)


def quantised(x: Tensor, fmt: str, axis: int, rule: str) -> Tensor:
    """A matrix, rounded to BF16 and to an MX format with blocks along an axis: as ``fake_quantize``."""
    lines = (x.T if axis else x).detach().contiguous()
    bits = lines.numpy().view(np.uint32).reshape(-1, 32, lines.shape[1])
    out = np.empty_like(bits)
    mantissa, exponent, low, largest = ELEMENTS[fmt]
    _rounded(bits, out, mantissa, (exponent, largest), low, rule == "rceil")
    found = torch.from_numpy(out.view(np.float32)).view(lines.shape)
    return found.T if axis else found


def check() -> None:
    """Hold ``quantised`` against mpdiag, bit for bit."""
    generator = torch.Generator().manual_seed(0)
    x, power = torch.randn(2, 256, 512, generator=generator)
    x = x * torch.exp(4 * power)
    x[:40, :40], x[64:96] = 0, 0.95 + 0.02 * power[64:96]
    for (fmt, rule), axis in product(product(ELEMENTS, ("floor", "rceil")), (0, 1)):
        want = mpdiag.fake_quantize(x.bfloat16().float(), fmt, axis, scale_rounding=rule)
        assert torch.equal(quantised(x, fmt, axis, rule), want)


class Product(torch.autograd.Function):
    """x · wᵀ with five quantised operands and sums in FP32."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, how: Variant) -> Tensor:
        ctx.save_for_backward(x, w)
        ctx.how = how
        return (how.operand(x, 1) @ how.operand(w, 1).T).float()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, None]:
        (x, w), operand = ctx.saved_tensors, partial(ctx.how.operand, backward=True)
        dx = operand(dy, 1) @ operand(w, 0)
        dw = operand(dy, 0).T @ operand(x, 0)
        return dx.float(), dw.float(), None


class StraightThrough(torch.autograd.Function):
    """A quantised vector; its gradient goes to the vector."""

    @staticmethod
    def forward(_ctx: Any, x: Tensor, how: Variant) -> Tensor:
        return quantised(x[None], how.format, 1, how.rule)[0]

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
        self.optimizer = torch.optim.Adam(self.model.parameters(), setting.lr, fused=True)

    def loss(self, number: int, how: Variant | None) -> Tensor:
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + number)
        x = torch.randn(self.setting.batch, self.setting.width, generator=generator)
        noise = NOISE * torch.randn(x.shape, generator=generator)
        return F.mse_loss(self.model(x, how), self.teacher(x) + noise)

    def step(self, number: int, how: Variant | None) -> float:
        loss = self.loss(number, how)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return float(loss.detach())

    def bias(self, number: int, how: Variant) -> float:
        """How far a step's gradient is from that in FP32, as a share of it."""
        weights = list(self.model.parameters())
        found, exact = (
            torch.cat([g.flatten() for g in torch.autograd.grad(self.loss(number, one), weights)])
            for one in (how, VARIANTS["fp32"])
        )
        return float((found - exact).norm() / exact.norm())

    def gains(self) -> Tensor:
        return torch.cat([block.norm.weight for block in self.model.layers]).detach()


def clipped(gains: Tensor) -> float:
    """The share of gains that E4M3 with scales by ``floor`` clips."""
    blocks = gains.abs().view(-1, 32)
    power = blocks.amax(1, keepdim=True).log2().floor().exp2()
    return float((blocks > 1.75 * power).float().mean())


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


def trained(setting: Setting, seed: int, name: str) -> Iterator[dict[str, Any]]:
    """A variant of a seed, every 500 steps, to the end or to a loss that is not finite."""
    training, how, began = Training(setting, seed), VARIANTS[name], time.process_time()
    losses: list[float] = []
    course = []
    for number in range(setting.steps):
        losses.append(training.step(number, how))
        ended = number + 1 == setting.steps or not math.isfinite(losses[-1])
        if (number + 1) % EVERY and not ended:
            continue
        gains = training.gains()
        few = losses[-100:]
        row = {
            "step": number + 1,
            "loss": float(f"{np.median(few):.4g}"),
            "highest": float(f"{max(losses[-EVERY:]):.4g}"),
            "gains": [round(float(v), 3) for v in (gains.min(), gains.mean(), gains.max())],
            "clipped": round(clipped(gains), 3),
            "bias": round(training.bias(number, how), 2) if how.format else None,
        }
        course.append(row)
        yield {
            "course": course,
            "diverged": diverged(losses),
            "spikes": spikes(losses),
            "seconds": round(time.process_time() - began, 1),
        }
        if ended:
            return


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
    parser.add_argument(
        "--variants", nargs="*", default=list(VARIANTS), choices=["foretold", *VARIANTS]
    )
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    check()
    torch.set_num_threads(1)
    setting = Setting(options.width, options.depth, options.batch, options.lr, options.steps)
    for seed in options.seeds:
        for name in options.variants:
            keep(options.json, setting, seed, name)


def keep(file: Path | None, setting: Setting, seed: int, name: str) -> None:
    """Train a variant unless the file has it, and write it there."""
    document: dict[str, Any] = {"settings": {}}
    if file is not None and file.exists():
        document = json.loads(file.read_text(encoding="utf-8"))
    cell = document["settings"].setdefault(str(setting), {}).setdefault(str(seed), {})
    if name in cell:
        return
    found = [foretold(setting, seed)] if name == "foretold" else trained(setting, seed, name)
    for cell[name] in found:
        last = cell[name].get("course", [cell[name]])[-1]
        print(setting, "seed", seed, name, last, flush=True)
        if file is not None:
            made = {
                "made": date.today().isoformat(),
                "torch": torch.__version__,
                "machine": platform.machine(),
            }
            file.write_text(json.dumps(document | made, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
