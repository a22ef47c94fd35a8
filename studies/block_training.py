"""Trainings in block formats against BF16: small models, paired seeds, emulated.

    python studies/block_training.py --json studies/results/block-training.json
    python studies/block_training.py --models gpt --seeds 0 --variants bf16 nvfp4

Three models of at most 1 M parameters on real data: ``gpt`` (bytes of Python's language topics), ``vit``
(scikit-learn's digits) and ``moe`` (the bytes, two blocks with four experts each). Within a seed all
variants have the same initial weights and the same batches. A cell is a model, a seed and a variant. It
is stored when it ends, and one that the file has is not trained again.

- ``bf16``: linear layers read and write BF16, with FP32 sums and master weights. Attention's own
  products, norms and losses are in FP32 in all variants, so the format of linear layers is the only
  difference.
- ``mxfp8``, ``nvfp4``: every layer that the recipe can quantise.
- ``last``: NVFP4, the last layers in BF16, as many as 15 % of the matrix FLOPs allow.
- ``plan``: NVFP4, the layers in BF16 that the plan ranks first, for the same FLOPs.
- ``own``: NVFP4 by the plan as ``mpdiag analyze --target nvfp4`` makes it.
- ``nearest``, ``unrotated``, ``1d``: NVFP4 everywhere without stochastic rounding of gradients, without
  the rotation in wgrad, with weights in blocks of 1 × 16.

The plan comes from a recording of the training of seed 0 in FP32. Its estimates stand in the file beside
what came: ``foretold``.

``--by hand`` computes the products here, with ``quantize_blocks`` and nothing else of mpdiag.
``--by mpdiag`` trains with ``mpdiag.MixedPrecision``.
"""

import argparse
import json
import math
import platform
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import date
from functools import cache
from itertools import product
from pathlib import Path
from pydoc_data import topics
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from block_decisions import LENGTH, WIDTH, Block, Decoder, Experts, Mlp
from scipy import stats
from torch import Tensor, nn

import mpdiag
from mpdiag.analysis.analyzer import Analysis
from mpdiag.analysis.blocks.choice import choose
from mpdiag.emulation.block_errors import rotate
from mpdiag.emulation.block_rounding import quantize_blocks
from mpdiag.emulation.random_bits import CounterGenerator
from mpdiag.numerics.block_formats import block_format
from mpdiag.numerics.block_recipes import BLOCK_RECIPES, OPERANDS, BlockRecipe, OperandFormat

STEPS, RATE = 200, 1e-3
MAIN = ("bf16", "nvfp4", "mxfp8", "last", "plan", "own")
ABLATIONS = ("nearest", "unrotated", "1d")
RECORDED = 10
"""Every how many steps of the recorded training operands are measured."""
SHARE = 0.15
"""Of the matrix FLOPs in BF16, for ``last`` and ``plan``."""

Batch = tuple[Tensor, Tensor]
Layers = Mapping[str, tuple[str, ...]]
"""The products that are quantised, by layer; a layer without any is in BF16."""


class Vit(nn.Module):
    """Of 16 patches of 2 × 2."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.places = nn.Linear(4, WIDTH), nn.Parameter(torch.zeros(16, WIDTH))
        self.layers = nn.ModuleList(Block(nn.LayerNorm, Mlp(), causal=False) for _ in range(3))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 10)

    def forward(self, images: Tensor) -> Tensor:
        x = images.unflatten(-1, (4, 2, 4, 2)).transpose(2, 3).reshape(-1, 16, 4)
        x = self.patches(x) + self.places
        for block in self.layers:
            x = block(x)
        return self.head(self.norm(x).mean(1))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "gpt": lambda: Decoder(Mlp, nn.LayerNorm, 3),
    "vit": Vit,
    "moe": lambda: Decoder(lambda: Experts(2 * WIDTH, shared=False), nn.LayerNorm, 2),
}


@cache
def text() -> Tensor:
    """The topics as bytes below 128, the last tenth held out."""
    whole = "\n".join(topics.topics[name] for name in sorted(topics.topics))
    return torch.tensor(list(whole.encode("ascii", "replace")))


@cache
def digits() -> Batch:
    """Images and classes in a fixed order, the last fifth held out."""
    from sklearn.datasets import load_digits

    images, classes = load_digits(return_X_y=True)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    return torch.tensor(images).float()[order] / 16, torch.tensor(classes)[order]


def batch_of(name: str, generator: torch.Generator, *, held_out: bool = False) -> Batch:
    """256 tokens: 4 pieces of text, or 16 images; of held-out data 1,024."""
    size = 4 if held_out else 1
    if name == "vit":
        images, classes = digits()
        cut = len(images) * 4 // 5
        low, high = (cut, len(images)) if held_out else (0, cut)
        rows = torch.randint(low, high, (16 * size,), generator=generator)
        return images[rows], classes[rows]
    data = text()
    cut = len(data) * 9 // 10
    low, high = (cut, len(data)) if held_out else (0, cut)
    starts = torch.randint(low, high - LENGTH - 1, (4 * size,), generator=generator)
    rows = torch.stack([data[i : i + LENGTH + 1] for i in starts.tolist()])
    return rows[:, :-1], rows[:, 1:].flatten()


@dataclass(frozen=True)
class Variant:
    """A recipe and the products that it quantises; without a recipe all is in BF16."""

    recipe: BlockRecipe | None
    layers: Layers


# By hand


def operand(x: Tensor, how: OperandFormat, axis: int, generator: CounterGenerator) -> Tensor:
    """A matrix, quantised in blocks along an axis, after a rotation where the recipe has one."""
    if how.rotated:
        lines = x if axis else x.T
        lines = F.pad(lines, (0, -lines.shape[1] % 16))  # products with zeros add nothing
        lines = rotate(lines)
        x = lines if axis else lines.T
    fmt = block_format(how.format, block=how.block or None, rounding=how.rounding)
    bits = generator.bits(x.shape) if how.rounding == "stochastic" else None
    return quantize_blocks(x, fmt, axis, bits)


def rounded(x: Tensor) -> Tensor:
    return x.bfloat16().float()


class Product(torch.autograd.Function):
    """x · wᵀ of a layer: three products, each with the operands that a recipe quantises."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, hand: "Hand", name: str) -> Tensor:
        x, w = rounded(x), rounded(w)
        ctx.save_for_backward(x, w)
        ctx.hand, ctx.name = hand, name
        a, b = hand.operands(name, "fprop", (x, 1), (w, 1))
        return rounded(a @ b.T)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, None, None]:
        (x, w), hand, name = ctx.saved_tensors, ctx.hand, ctx.name
        dy = rounded(dy)
        a, b = hand.operands(name, "dgrad", (dy, 1), (w, 0))
        dx = rounded(a @ b)
        a, b = hand.operands(name, "wgrad", (dy, 0), (x, 0))
        return dx, rounded(a.T @ b), None, None


class Hand:
    """Trains a model by a variant, product by product."""

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, variant: Variant
    ) -> None:
        self.optimizer, self.variant, self.step_number = optimizer, variant, 0
        for name, module in model.named_modules():
            if isinstance(module, nn.Linear):
                module.forward = self._forward(name, module)  # type: ignore[method-assign]

    def _forward(self, name: str, module: nn.Linear) -> Callable[[Tensor], Tensor]:
        def forward(x: Tensor) -> Tensor:
            y = Product.apply(x.reshape(-1, x.shape[-1]), module.weight, self, name)
            y = y if module.bias is None else rounded(y + module.bias)
            return y.view(*x.shape[:-1], -1)

        return forward

    def operands(self, name: str, gemm: str, *matrices: tuple[Tensor, int]) -> tuple[Tensor, ...]:
        recipe = self.variant.recipe
        if recipe is None or gemm not in self.variant.layers.get(name, ()):
            return tuple(x for x, _ in matrices)
        return tuple(
            operand(
                x,
                recipe.operand(gemm, role),
                axis,
                CounterGenerator(0, self.step_number, f"{name}.{gemm}.{role}"),
            )
            for (x, axis), role in zip(matrices, OPERANDS[gemm], strict=True)
        )

    @contextmanager
    def autocast(self) -> Iterator[None]:
        yield

    def step(self, loss: Tensor) -> None:
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.step_number += 1


# Trainings


class Training:
    """A model, its optimizer and its data, all from a seed."""

    def __init__(self, name: str, seed: int) -> None:
        torch.manual_seed(seed)
        self.name, self.seed = name, seed
        self.model = MODELS[name]()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), RATE)

    def loss(self, number: int, *, held_out: bool = False) -> Tensor:
        seed = 77 if held_out else self.seed * 1_000_003
        generator = torch.Generator().manual_seed(seed + number)
        inputs, wanted = batch_of(self.name, generator, held_out=held_out)
        return F.cross_entropy(self.model(inputs).flatten(0, -2), wanted)

    def train(self, trainer: Any) -> list[float]:
        losses = []
        for number in range(STEPS):
            rate = RATE * min(1.0, (number + 1) / 20, 2 * (STEPS - number) / STEPS)
            for group in self.optimizer.param_groups:
                group["lr"] = rate
            with trainer.autocast():
                loss = self.loss(number)
            trainer.step(loss)
            losses.append(float(loss.detach()))
        return losses

    def held_out(self, trainer: Any) -> float:
        with torch.no_grad(), trainer.autocast():
            return float(np.mean([float(self.loss(i, held_out=True)) for i in range(16)]))


class Plain(Hand):
    """Trains in FP32."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer, self.step_number = optimizer, 0


def recorded(name: str, folder: Path) -> dict[str, Analysis]:
    """The analyses of seed 0's training in FP32, by target; it is recorded unless the folder has it."""
    training, run = Training(name, 0), folder / name
    if not run.exists():
        with mpdiag.record(
            training.model,
            training.optimizer,
            run,
            every=RECORDED,
            operations=STEPS // RECORDED,
            blocks=True,
        ):
            training.train(Plain(training.optimizer))
    return {target: mpdiag.analyze(run, target=target) for target in ("nvfp4", "mxfp8")}


def variants(found: Mapping[str, Analysis]) -> dict[str, Variant]:
    """All variants of a model."""
    nvfp4, mxfp8 = (BLOCK_RECIPES[t] for t in ("nvfp4", "mxfp8"))
    blocks = found["nvfp4"].blocks
    assert blocks is not None
    assert found["mxfp8"].blocks is not None
    free = [e for e in blocks.effects if "not a multiple" not in blocks.layer(e).reason]
    free = [e for e in free if e.kind == "linear"]
    whole = sum(e.flops for e in blocks.effects)
    gemms = tuple(OPERANDS)
    every = {e.module: gemms for e in free}

    def without(kept: set[str]) -> Layers:
        return {name: products for name, products in every.items() if name not in kept}

    cost, last = 0.0, set()
    for e in free[::-1]:
        if cost + e.flops > SHARE * whole:
            break
        cost += e.flops
        last.add(e.module)
    ranked, _ = choose(free, cost * (1 + 1e-9), harmless=0.0)
    own = {c.module: c.quantised for c in blocks.plan.layers if c.quantised}
    own8 = {c.module: c.quantised for c in found["mxfp8"].blocks.plan.layers if c.quantised}
    plain = replace(nvfp4.grad_output, rounding="nearest")
    return {
        "bf16": Variant(None, {}),
        "mxfp8": Variant(mxfp8, own8),
        "nvfp4": Variant(nvfp4, every),
        "last": Variant(nvfp4, without(last)),
        "plan": Variant(nvfp4, without({module for module, _ in ranked})),
        "own": Variant(nvfp4, own),
        "nearest": Variant(replace(nvfp4, grad_output=plain), every),
        "unrotated": Variant(replace(nvfp4, rotates_wgrad=False), every),
        "1d": Variant(replace(nvfp4, weight=OperandFormat("nvfp4")), every),
    }


def foretold(found: Mapping[str, Analysis], made: Mapping[str, Variant]) -> dict[str, Any]:
    """What the recording says, and the layers of each variant that stay in BF16."""
    blocks = found["nvfp4"].blocks
    assert blocks is not None
    rises = {e.module: e.rise for e in blocks.effects}  # in NVFP4 with all that belongs to it
    flops = {e.module: e.flops for e in blocks.effects}
    whole = sum(flops.values())
    told: dict[str, Any] = {
        "layers": {m: [round(rises[m], 6), round(flops[m] / whole, 4)] for m in rises}
    }
    for target, analysis in found.items():
        evidence = analysis.plan.blocks.evidence
        told[target] = {
            "level": analysis.verdict.level,
            "text": analysis.verdict.text,
            "reason": analysis.plan.blocks.reason,
            "rise": evidence["rise"],
            "rise_all_quantised": evidence["rise_all_quantised"],
        }
    for name in ("nvfp4", "last", "plan", "own"):
        variant = made[name]
        wide = sorted(set(made["nvfp4"].layers) - set(variant.layers))
        told[name + " in bf16"] = {
            "layers": wide,
            "flops": round(sum(flops[m] for m in wide) / whole, 4),
            "rise": sum(rises[m] for m in variant.layers),
        }
    return told


def trained(name: str, seed: int, variant: Variant, by: str, plan: Any) -> dict[str, Any]:
    """One cell."""
    training, began = Training(name, seed), time.process_time()
    if by == "hand":
        trainer: Any = Hand(training.model, training.optimizer, variant)
    else:
        trainer = mpdiag.MixedPrecision(
            training.model, training.optimizer, planned(plan, variant), backend="emulated"
        )
    losses = training.train(trainer)
    held_out = training.held_out(trainer)
    return {
        "held_out": held_out,
        "last": float(np.mean(losses[-20:])),
        "losses": [round(float(np.mean(losses[i : i + 20])), 4) for i in range(0, STEPS, 20)],
        "seconds": round(time.process_time() - began, 1),
    }


def planned(plan: Any, variant: Variant) -> Any:
    """The plan of a recording with a variant's products and formats."""
    if variant.recipe is None:
        return replace(plan, blocks=None)
    layers = []
    for layer in plan.blocks.layers:
        products = variant.layers.get(layer.module, ()) if layer.kind == "linear" else ()
        chosen = {g: variant.recipe.target if g in products else "bf16" for g in OPERANDS}
        layers.append(replace(layer, **chosen))
    formats = variant.recipe.formats()
    return replace(plan, blocks=replace(plan.blocks, layers=tuple(layers), formats=formats))


def differences(cells: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Held-out loss minus BF16's of the same seed: mean, 95 % interval (t over seeds) and n."""
    found = {}
    names = dict.fromkeys(name for cell in cells.values() for name in cell)
    for name in names:
        pairs = [
            cell[name]["held_out"] - cell["bf16"]["held_out"]
            for cell in cells.values()
            if name in cell and "bf16" in cell and name != "bf16"
        ]
        if not pairs:
            continue
        mean = float(np.mean(pairs))
        found[name] = {"mean": round(mean, 5), "n": len(pairs)}
        if len(pairs) > 1:
            spread = np.std(pairs, ddof=1) / math.sqrt(len(pairs))
            half = stats.t.ppf(0.975, len(pairs) - 1) * spread
            found[name] |= {"low": round(mean - half, 5), "high": round(mean + half, 5)}
    return found


def table(models: Mapping[str, Any]) -> Iterator[str]:
    """The page's table: what came beside what was expected, line by line."""
    yield "| model | variant | in BF16 | loss − BF16's | 95 % interval | n | relative | expected |"
    yield "|---|---|---|---|---|---|---|---|"
    for model, part in models.items():
        told = part["foretold"]
        cells = part["cells"].values()
        base = float(np.mean([cell["bf16"]["held_out"] for cell in cells if "bf16" in cell]))
        found = differences(part["cells"])
        for name in filter(found.__contains__, (*MAIN, *ABLATIONS)):
            if all("same_as" in cell[name] for cell in cells if name in cell):
                continue
            one = found[name]
            wide = told.get(f"{name} in bf16", {}).get("flops")
            rise = told["mxfp8" if name == "mxfp8" else "nvfp4"]["rise"]
            rise = told.get(f"{name} in bf16", {}).get("rise", rise)
            ends = f"{one['low']:+.4f} to {one['high']:+.4f}" if "low" in one else "–"
            yield (
                f"| {model} | `{name}` | {'–' if wide is None else f'{wide:.1%}'} "
                f"| {one['mean']:+.4f} | {ends} | {one['n']} | {one['mean'] / base:+.2%} "
                f"| {'–' if name in ABLATIONS else f'{rise:+.2%}'} |"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2])
    parser.add_argument("--variants", nargs="*", help="all of them by default")
    parser.add_argument("--by", default="hand", choices=("hand", "mpdiag"))
    parser.add_argument("--runs", type=Path, help="keeps the recordings for the next call")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--table", action="store_true", help="only print what the file has")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    document: dict[str, Any] = {}
    if options.json is not None and options.json.exists():
        document = json.loads(options.json.read_text(encoding="utf-8"))
    if options.table:
        print("\n".join(table(document[options.by])))
        return
    plans = {}
    with tempfile.TemporaryDirectory() as place:
        for name in options.models:
            found = recorded(name, options.runs or Path(place))
            plans[name] = found, variants(found)
    rest = [v for v in options.variants or (*MAIN, *ABLATIONS) if v not in MAIN]
    for some in (MAIN, rest):  # all seeds of all models before the first ablation
        for seed, name in product(options.seeds, options.models):
            found, made = plans[name]
            part = document.setdefault(options.by, {}).setdefault(name, {"cells": {}})
            part["parameters"] = sum(p.numel() for p in MODELS[name]().parameters())
            part["foretold"] = foretold(found, made)
            cells = part["cells"].setdefault(str(seed), {})
            for variant in some:
                if variant in cells or variant not in (options.variants or made):
                    continue
                same = [v for v in cells if made[v] == made[variant]]
                target = "mxfp8" if variant == "mxfp8" else "nvfp4"
                cells[variant] = (
                    {**cells[same[0]], "same_as": same[0]}
                    if same
                    else trained(name, seed, made[variant], options.by, found[target].plan)
                )
                part["differences"] = differences(part["cells"])
                print(name, seed, variant, cells[variant], flush=True)
                write(options.json, document)


def write(file: Path | None, document: dict[str, Any]) -> None:
    if file is None:
        return
    about = {
        "made": date.today().isoformat(),
        "torch": torch.__version__,
        "machine": platform.machine(),
        "steps": STEPS,
    }
    file.write_text(json.dumps(about | document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
