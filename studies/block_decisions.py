"""What a recording says of block formats, held against what quantising the same tensors does.

    python studies/block_decisions.py --json studies/results/block-decisions.json
    python studies/block_decisions.py --models gpt llama                            # those tuned on
    python studies/block_decisions.py --only late --json studies/results/block-decisions-late.json

Six small models are trained in FP32 on bytes of the documentation, then a step is recorded with
``--blocks``. ``gpt`` and ``llama`` were seen while the estimate was written, ``moe`` and ``encoder``
while the samples of operands were; ``padded`` and ``answers`` were run once, afterwards. Seeds stand in
``MODELS`` and were fixed before the first run.

- ``shares``: zeros and clipped values that depths predict for MX formats, and those that quantising the
  operands gives: equal numbers.
- ``intervals``: how many of the 90 % intervals of SQNR, from samples, hold the SQNR of the whole
  operand. Operands that were measured whole are left out.
- ``ranks``: Spearman's correlation of each rule's order of layers with the measured change of the loss,
  one layer's forward product quantised at a time, on held-out batches.
- ``head``: an FP8 head with a gradient scale of its own (modded-nanogpt#77): which scales the recording
  allows, and the error of the gradients at each.
"""

import argparse
import json
import math
import platform
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mpdiag
from mpdiag.analysis.blocks.choice import late_over_early
from mpdiag.analysis.blocks.effects import layer_effects
from mpdiag.analysis.blocks.operands import operand_errors
from mpdiag.analysis.operations.loss_change import loss_curve
from mpdiag.emulation.block_errors import rotate, tile_errors
from mpdiag.emulation.block_rounding import quantize_blocks
from mpdiag.emulation.random_bits import CounterGenerator
from mpdiag.numerics.block_formats import block_format
from mpdiag.numerics.block_recipes import BLOCK_RECIPES
from mpdiag.numerics.formats import FP8_E5M2
from mpdiag.runs.run import open_run

WIDTH, HEADS, LENGTH, BATCH, WORDS = 128, 4, 64, 16, 128
TARGETS = ("mxfp4", "nvfp4")
MOST = 1 << 17
"""Values of an operand whose zeros are counted twice."""
HELD_OUT = 12
"""Batches on which changes of the loss are measured."""


class Attention(nn.Module):
    """Causal or not."""

    def __init__(self, causal: bool, bias: bool) -> None:
        super().__init__()
        self.causal = causal
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=bias)
        self.proj = nn.Linear(WIDTH, WIDTH, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(x).chunk(3, -1)
        heads = [t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in parts]
        mixed = F.scaled_dot_product_attention(*heads, is_causal=self.causal)
        return self.proj(mixed.transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    """GPT's."""

    def __init__(self, hidden: int = 4 * WIDTH) -> None:
        super().__init__()
        self.fc, self.out = nn.Linear(WIDTH, hidden), nn.Linear(hidden, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(F.gelu(self.fc(x)))


class SwiGlu(nn.Module):
    """Llama's."""

    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w3 = (nn.Linear(WIDTH, 3 * WIDTH, bias=False) for _ in range(2))
        self.w2 = nn.Linear(3 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Experts(nn.Module):
    """Four experts, a token goes to one, and perhaps one that all tokens share."""

    def __init__(self, hidden: int = 4 * WIDTH, *, shared: bool = True) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 4, bias=False)
        self.experts = nn.ModuleList(Mlp(hidden) for _ in range(4))
        self.shared = SwiGlu() if shared else None

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        chances, chosen = self.router(flat).softmax(-1).max(-1)
        found = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            mine = (chosen == number).nonzero().flatten()
            if self.shared is not None or len(mine):
                found = found.index_add(0, mine, expert(flat[mine]) * chances[mine, None])
        return found.view_as(x) if self.shared is None else self.shared(x) + found.view_as(x)


class Block(nn.Module):
    """Attention and a body, each behind a norm."""

    def __init__(self, norm: Callable[[int], nn.Module], body: nn.Module, causal: bool) -> None:
        super().__init__()
        self.norm1, self.norm2 = norm(WIDTH), norm(WIDTH)
        self.attention = Attention(causal, bias=norm is nn.LayerNorm)
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.body(self.norm2(x))


class Decoder(nn.Module):
    """A language model of bytes. ``causal=False``: it fills in masked ones.

    Args:
        outliers: Channels whose norm gains begin 20 times larger, as large models grow them.
    """

    def __init__(
        self,
        body: Callable[[], nn.Module],
        norm: Callable[[int], nn.Module],
        layers: int = 6,
        *,
        causal: bool = True,
        outliers: int = 0,
    ) -> None:
        super().__init__()
        self.causal = causal
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.places = nn.Embedding(LENGTH, WIDTH)
        self.layers = nn.ModuleList(Block(norm, body(), causal) for _ in range(layers))
        self.norm, self.head = norm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        with torch.no_grad():
            for block in self.layers:
                for gains in (block.norm1.weight, block.norm2.weight):
                    gains[:outliers] *= 20

    def forward(self, words: Tensor) -> Tensor:
        x = self.embedding(words) + self.places.weight
        for block in self.layers:
            x = block(x)
        return self.head(self.norm(x))


@dataclass(frozen=True)
class Subject:
    """A model and its seed.

    Attributes:
        make: Makes it.
        seed: Of its weights and batches.
        tuned: Whether it was seen while the estimate or the samples were written.
        losses: Which positions of a line have a loss: ``first``, as with padding; ``last``, as with
            prompts; ``all``.
    """

    make: Callable[[], Decoder]
    seed: int
    tuned: bool
    losses: str = "all"


MODELS = {
    "gpt": Subject(lambda: Decoder(Mlp, nn.LayerNorm), 0, tuned=True),
    "llama": Subject(lambda: Decoder(SwiGlu, nn.RMSNorm, outliers=2), 1, tuned=True),
    "moe": Subject(lambda: Decoder(Experts, nn.RMSNorm, 4), 101, tuned=True),
    "encoder": Subject(
        lambda: Decoder(Mlp, nn.LayerNorm, 5, causal=False, outliers=1), 102, tuned=True
    ),
    "padded": Subject(lambda: Decoder(SwiGlu, nn.LayerNorm, 5), 203, tuned=False, losses="first"),
    "answers": Subject(
        lambda: Decoder(Mlp, nn.RMSNorm, 4, outliers=3), 204, tuned=False, losses="last"
    ),
}


def corpus() -> Tensor:
    """The documentation as bytes below 128."""
    root = Path(__file__).resolve().parents[1] / "docs"
    text = b"\n".join(path.read_bytes() for path in sorted(root.glob("*.md")))
    return torch.tensor(list(text)).clamp(max=WORDS - 1)


@dataclass
class Training:
    """A model, its optimizer, and batches that come from the subject's seed."""

    subject: Subject
    data: Tensor
    model: Decoder = field(init=False)
    optimizer: torch.optim.Optimizer = field(init=False)
    generator: torch.Generator = field(init=False)

    def __post_init__(self) -> None:
        torch.manual_seed(self.subject.seed)
        self.model = self.subject.make()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 1e-3)
        self.generator = torch.Generator().manual_seed(self.subject.seed)

    def batch(self) -> tuple[Tensor, Tensor]:
        starts = torch.randint(len(self.data) - LENGTH - 1, (BATCH,), generator=self.generator)
        rows = torch.stack([self.data[i : i + LENGTH + 1] for i in starts.tolist()])
        if self.model.causal:
            places = torch.arange(LENGTH)
            shares = torch.rand((BATCH, 1), generator=self.generator) * (
                self.subject.losses != "all"
            )
            hidden = (
                places.flip(0) < shares * LENGTH
            )  # the last ones; nothing where all have a loss
            hidden = hidden.flip(1) if self.subject.losses == "last" else hidden
            return rows[:, :-1], torch.where(hidden, -100, rows[:, 1:])
        words = rows[:, :-1].clone()
        hidden = torch.rand(words.shape, generator=self.generator) < 0.15
        return torch.where(hidden, 0, words), torch.where(hidden, words, -100)

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(self.model(batch[0]).flatten(0, 1), batch[1].flatten())

    def step(self, batch: tuple[Tensor, Tensor]) -> float:
        self.optimizer.zero_grad()
        loss = self.loss(batch)
        loss.backward()
        self.optimizer.step()
        return float(loss.detach())


def linears(model: nn.Module) -> dict[str, nn.Linear]:
    return {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear)}


@contextmanager
def captured(model: nn.Module) -> Iterator[dict[tuple[str, str, str], Tensor]]:
    """Every operand of the products of linear layers: lines along the last axis."""
    found: dict[tuple[str, str, str], Tensor] = {}

    def keep(name: str, across: str, along: str, operand: str, x: Tensor) -> None:
        matrix = x.detach().flatten(0, -2).clone()
        found[name, across, operand], found[name, along, operand] = matrix, matrix.T

    def seen(name: str, module: nn.Linear, x: Tensor, y: Tensor) -> None:
        keep(name, "fprop", "wgrad", "input", x)
        keep(name, "fprop", "dgrad", "weight", module.weight)
        y.register_hook(lambda g: keep(name, "dgrad", "wgrad", "grad_output", g))

    with watched(model, seen):
        yield found


def quantised(x: Tensor, how: Any, name: str) -> Tensor:
    """An operand with lines along the last axis, as a recipe quantises it."""
    fmt = block_format(how.format, block=how.block or None, rounding=how.rounding)
    bits = None
    if how.rounding == "stochastic":
        bits = CounterGenerator(7, tensor=name).bits(x.shape, x.device)
    return quantize_blocks(x.float(), fmt, -1, bits)


def with_quantised(module: nn.Linear, x: Tensor, recipe: Any) -> Tensor:
    """A layer's forward product with quantised operands."""
    weight = quantised(module.weight, recipe.weight, "w")
    return F.linear(quantised(x, recipe.input, "x"), weight, module.bias)


@contextmanager
def one_layer(module: nn.Linear, recipe: Any) -> Iterator[None]:
    """The forward product of one layer with quantised operands."""
    module.forward = lambda x: with_quantised(module, x, recipe)  # type: ignore[method-assign]
    try:
        yield
    finally:
        del module.forward


@contextmanager
def watched(
    model: nn.Module, seen: Callable[[str, nn.Linear, Tensor, Tensor], None]
) -> Iterator[None]:
    """Show each linear layer's name, itself, input and output to a function."""

    def hook(name: str) -> Any:
        return lambda module, args, output: seen(name, module, args[0], output)

    hooks = [m.register_forward_hook(hook(name)) for name, m in linears(model).items()]
    try:
        yield
    finally:
        for one in hooks:
            one.remove()


def spearman(a: list[float], b: list[float]) -> float:
    ranks = [np.argsort(np.argsort(np.array(x))) for x in (a, b)]
    return round(float(np.corrcoef(*ranks)[0, 1]), 3)


def measured_changes(training: Training, recipe: Any) -> dict[str, Any]:
    """Of each layer: the change of the loss, the divergence it adds, and the gradient score."""
    batches = [training.batch() for _ in range(HELD_OUT)]
    with torch.no_grad():
        exact = [float(training.loss(b)) for b in batches]
    changes = {}
    for name, module in linears(training.model).items():
        with one_layer(module, recipe), torch.no_grad():
            moved = [float(training.loss(b)) - e for b, e in zip(batches, exact, strict=True)]
        changes[name] = float(np.mean(moved))
    scores: dict[str, float] = dict.fromkeys(changes, 0.0)

    def score(name: str, module: nn.Linear, x: Tensor, y: Tensor) -> None:
        error = (with_quantised(module, x.detach(), recipe) - y).detach()

        def add(gradient: Tensor) -> None:
            scores[name] += float((gradient * error).double().square().sum())

        y.register_hook(add)

    with watched(training.model, score):
        training.loss(batches[0]).backward()
    return {
        "changes": changes,
        "scores": scores,
        "divergence": divergence(training, recipe, batches[0]),
    }


def divergence(training: Training, recipe: Any, batch: tuple[Tensor, Tensor]) -> dict[str, float]:
    """How much each layer adds to the relative error of outputs when all layers are quantised."""
    outputs: list[dict[str, Tensor]] = []
    for quantise in (False, True):
        found: dict[str, Tensor] = {}
        with ExitStack() as stack:
            stack.enter_context(torch.no_grad())
            for module in linears(training.model).values() if quantise else ():
                stack.enter_context(one_layer(module, recipe))
            seen = watched(training.model, lambda n, _m, _x, y, found=found: found.update({n: y}))
            stack.enter_context(seen)
            training.loss(batch)
        outputs.append(found)
    before, added = 0.0, {}
    for name, y in outputs[0].items():
        other = outputs[1].get(name)
        same = other is not None and other.shape == y.shape  # experts may get other tokens
        now = float((other - y).norm() / y.norm()) if same else before
        added[name], before = now - before, now
    return added


def study(name: str, steps: int, data: Tensor, only: str | None = None) -> dict[str, Any]:
    """All figures of one model, or the intervals alone."""
    training = Training(MODELS[name], data)
    losses = [training.step(training.batch()) for _ in range(steps)]
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        recorder = mpdiag.record(
            training.model, training.optimizer, run, every=1, operations=1, blocks=True
        )
        with recorder, captured(training.model) as operands:
            losses.append(training.step(training.batch()))
            truth = dict(operands)
        opened = open_run(run)
        rows = [row for row in opened.block_operands() if row.steps == (0,)]
        curve = loss_curve(opened)
    covered = {t: intervals(rows, truth, t) for t in (*TARGETS, "mxfp8")}
    print(name, covered, flush=True)
    if only:
        return {"tuned": MODELS[name].tuned, "intervals": covered}
    found = {
        "tuned": MODELS[name].tuned,
        "loss": [round(losses[0], 3), round(losses[-1], 3)],
        "layers": len(linears(training.model)),
        "shares": shares(rows, truth),
        "intervals": covered,
        "ranks": {},
    }
    for target in TARGETS:
        recipe = BLOCK_RECIPES[target]
        effects = {
            e.module: e for e in layer_effects(rows, recipe, curve, {}) if e.kind == "linear"
        }
        real = measured_changes(training, recipe)
        names = [n for n in real["changes"] if n in effects]
        change = [abs(real["changes"][n]) for n in names]
        rises = [effects[n].rise * losses[-1] for n in names]
        found["ranks"][target] = {
            "layers": len(names),
            "measured_rise": sum(real["changes"][n] for n in names),
            "estimated_rise": sum(rises),
            "estimate": spearman(rises, change),
            "last layers": spearman(list(range(len(names))), change),
            "largest divergence": spearman([real["divergence"].get(n, 0.0) for n in names], change),
            "gradient score": spearman([real["scores"][n] for n in names], change),
            "of_each": [[n, r, real["changes"][n]] for n, r in zip(names, rises, strict=True)],
        }
    found["head"] = head(rows, truth["head", "dgrad", "grad_output"])
    return found


def late(name: str, steps: int, data: Tensor) -> dict[str, dict[str, float]]:
    """By format: the estimated rise in each recorded step of a training, and late over early."""
    training = Training(MODELS[name], data)
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        with mpdiag.record(
            training.model, training.optimizer, run, every=20, operations=3, blocks=True
        ):
            for _ in range(steps):
                training.step(training.batch())
        rows, curve = open_run(run).block_operands(), loss_curve(open_run(run))
    found = {}
    for target in (*TARGETS, "mxfp8"):
        known = layer_effects(rows, BLOCK_RECIPES[target], curve, {})
        effects = [e for e in known if e.kind == "linear"]
        recorded = sorted({step for e in effects for step in e.by_step})
        rises = {str(step): sum(e.by_step.get(step, 0.0) for e in effects) for step in recorded}
        found[target] = {**rises, "late_over_early": late_over_early(effects)}
    return found


def shares(rows: Any, truth: dict[tuple[str, str, str], Tensor]) -> dict[str, int]:
    """Operands with depths of all values, and how many of their zeros and clipped values are equal."""
    names = ("mxfp8_e4m3", "mxfp8_e5m2", "mxfp6_e3m2", "mxfp6_e2m3", "mxfp4")
    compared = equal = outside = bounded = 0
    for row in rows:
        x = truth.get((row.module, row.gemm, row.operand))
        if x is None or row.sampled or row.product != "linear" or x.numel() > MOST:
            continue
        for name in names:
            for rule in ("floor", "rceil", "ceil", "even"):
                fmt = block_format(name, scale_rounding=rule)
                q = quantize_blocks(x.float(), fmt, -1)
                zeros = int(((q == 0) & (x != 0)).sum())
                low, high = row.depths.zeroed(fmt.element, rule)
                compared += 1
                equal += low == high == zeros
                bounded += low != high
                outside += not low <= zeros <= high
    return {"compared": compared, "equal": equal, "bounds": bounded, "outside": outside}


def intervals(rows: Any, truth: Any, target: str) -> dict[str, float]:
    """How many intervals hold the SQNR of the whole operand."""
    inside = whole = 0
    widths = []
    for found in operand_errors(rows, BLOCK_RECIPES[target]):
        one, how = found.operand, found.format
        x = truth.get((one.module, one.gemm, one.operand))
        if x is None or one.product != "linear" or not found.low_db < found.high_db:
            continue
        if not found.measured:  # a line of an expert's tokens has no groups of 16 to rotate
            continue
        fmt = block_format(how.format, block=how.block or None, rounding=how.rounding)
        bits = None
        if how.rounding != "nearest":
            bits = CounterGenerator(3, tensor=str(one.key)).bits(x.shape, x.device)[None]
        tiles = rotate(x.float()[None]) if how.rotated else x.float()[None]
        (_, signal, error, *_) = tile_errors(tiles, fmt, rotated=how.rotated, bits=bits)[0].tolist()
        real = 10 * math.log10(signal / error) if error else math.inf
        whole += 1
        inside += found.low_db <= real <= found.high_db
        widths.append(found.high_db - found.low_db)
    return {
        "operands": whole,
        "inside": inside,
        "share": round(inside / whole, 3) if whole else math.nan,
        "median_width_db": round(float(np.median(widths)), 3) if widths else math.nan,
    }


def head(rows: Any, gradient: Tensor) -> dict[str, Any]:
    """Gradient scales of an FP8 head: those that the recording allows, and the error at each."""
    (row,) = (
        r
        for r in rows
        if (r.module, r.gemm, r.operand, r.product) == ("head", "dgrad", "grad_output", "linear")
    )
    upper = math.floor(math.log2(FP8_E5M2.max / row.absmax))
    (fmt,) = (e for e in row.errors if e.variant == ("mxfp8_e5m2", "", "nearest", False))
    lows = [e for e, n in enumerate(row.maxima, row.maxima_first) if n]
    lower = FP8_E5M2.min_exponent - min(lows)  # every block's largest value stays normal
    errors = {}
    for exponent in range(upper - 34, upper + 4):
        scaled = gradient * 2.0**exponent
        q = scaled.clamp(-FP8_E5M2.max, FP8_E5M2.max).to(torch.float8_e5m2).float() / 2.0**exponent
        errors[exponent] = float((q - gradient).norm() / gradient.norm())
    best = min(errors.values())
    good = [e for e, off in errors.items() if off <= 1.05 * best]
    return {
        "recorded_upper": upper,
        "recorded_lower": lower,
        "measured_upper": max(good),
        "measured_lower": min(good),
        "best_error": best,
        "recorded_error": 10 ** (-fmt.total.sqnr_db / 20),
        "errors": {str(e): round(off, 5) for e, off in errors.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--only", choices=("intervals", "late"), help="a part of the study")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    data = corpus()
    results = {}
    for name in options.models:
        if options.only == "late":
            results[name] = late(name, options.steps, data)
            print(name, results[name], flush=True)
            keep(options, results)
            continue
        results[name] = found = study(name, options.steps, data, options.only)
        if options.only:
            keep(options, results)
            continue
        print(name, found["loss"], found["shares"])
        for target, ranks in found["ranks"].items():
            print("  ", target, {k: v for k, v in ranks.items() if k != "of_each"})
        print("  ", {k: v for k, v in found["head"].items() if k != "errors"}, flush=True)
        keep(options, results)


def keep(options: argparse.Namespace, results: dict[str, Any]) -> None:
    """Write what was found so far beside what the file has of other models."""
    if options.json is None:
        return
    if options.json.exists():
        results = json.loads(options.json.read_text(encoding="utf-8"))["models"] | results
    document = {
        "made": date.today().isoformat(),
        "torch": torch.__version__,
        "machine": platform.machine(),
        "steps": options.steps,
        "models": results,
    }
    options.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
