"""Faults planted into trainings, and whether ``mpdiag diff`` names their module.

    python studies/diff_faults.py [--seeds dev|held-out] [--kinds …] [--json FILE]

Five small models train two steps, sound and with a fault in a module drawn by chance. The pairs are
of four kinds: FP32 with BF16 (autocast), eager with a graph of torch's compiler (``aot_eager``), one
device with DDP over two ranks (gloo), and two ways to write the same model. For each kind there are
clean pairs, too: what differs there is rounding. The seeds ``dev`` were looked at while ``diff`` was
built; ``held-out`` were not.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import mpdiag

KINDS = ("precision", "compiled", "ddp", "rewritten")
BATCH, TIME, WIDTH, WORDS = 8, 12, 32, 40


class Norm(nn.Module):
    """RMSNorm, written out."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(width)), 1e-5

    def forward(self, x: Tensor) -> Tensor:
        """(…, C) to (…, C)."""
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.weight


class Attention(nn.Module):
    """Causal attention with rotary positions; two ways to write it."""

    def __init__(self, rewritten: bool = False) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.rewritten, self.offset, self.scale, self.shift = rewritten, 0, (WIDTH // 4) ** -0.5, 0

    def forward(self, x: Tensor) -> Tensor:
        """(N, T, C) to (N, T, C)."""
        n, t, c = x.shape
        q, k, v = self.qkv(x).view(n, t, 3, 4, c // 4).permute(2, 0, 3, 1, 4)
        angle = torch.arange(t)[:, None] * 100.0 ** (-torch.arange(c // 8) / (c // 8))
        moved = (torch.arange(t) + self.offset)[:, None] * 100.0 ** (
            -torch.arange(c // 8) / (c // 8)
        )
        q, k = rotated(q, moved), rotated(k, angle)
        if self.rewritten and not self.shift:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale)
        else:
            hidden = torch.ones(t, t, dtype=torch.bool).triu(1 + self.shift)
            scores = (q @ k.transpose(2, 3) * self.scale).masked_fill(hidden, -math.inf)
            y = torch.softmax(scores, -1) @ v
        return self.out(y.transpose(1, 2).reshape(n, t, c))


def rotated(x: Tensor, angle: Tensor) -> Tensor:
    """Rotary positions: (N, H, T, C) and (T, C/2)."""
    a, b = x.chunk(2, -1)
    cos, sin = angle.cos(), angle.sin()
    return torch.cat((a * cos - b * sin, a * sin + b * cos), -1)


class Gated(nn.Module):
    """SwiGLU."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.gate, self.down = (
            nn.Linear(WIDTH, 64),
            nn.Linear(WIDTH, 64),
            nn.Linear(64, WIDTH),
        )

    def forward(self, x: Tensor) -> Tensor:
        """(…, C) to (…, C)."""
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Experts(nn.Module):
    """Two of four experts for each token."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 4)
        self.experts = nn.ModuleList(Gated() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        """(N, T, C) to (N, T, C)."""
        share, chosen = torch.softmax(self.router(x).float(), -1).topk(2, -1)
        every = torch.stack([expert(x) for expert in self.experts], -2)
        weights = torch.zeros(*x.shape[:-1], 4, dtype=share.dtype).scatter(-1, chosen, share)
        return (every * weights.to(x.dtype)[..., None]).sum(-2)


class Block(nn.Module):
    """Attention and a network, with residuals."""

    def __init__(self, inner: nn.Module, rewritten: bool) -> None:
        super().__init__()
        self.norm_1, self.norm_2, self.attn = Norm(), nn.LayerNorm(WIDTH), Attention(rewritten)
        self.mlp = inner

    def forward(self, x: Tensor) -> Tensor:
        """(N, T, C) to (N, T, C)."""
        x = x + self.attn(self.norm_1(x))
        return x + self.mlp(self.norm_2(x))


class Language(nn.Module):
    """Embedding, blocks, head."""

    def __init__(self, inner: Callable[[], nn.Module], rewritten: bool) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(WORDS, WIDTH), nn.LayerNorm(WIDTH)
        self.blocks = nn.Sequential(*(Block(inner(), rewritten) for _ in range(2)))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, x: Tensor) -> Tensor:
        """(N, T) to (N, T, words)."""
        return self.head(self.norm(self.blocks(self.embed(x))))


class Cell(nn.Module):
    """A recurrent layer written out."""

    def __init__(self) -> None:
        super().__init__()
        self.gates, self.head = nn.Linear(2 * WIDTH, 3 * WIDTH), nn.Linear(WIDTH, 10)

    def forward(self, x: Tensor) -> Tensor:
        """(N, T, C) to (N, 10)."""
        h = x.new_zeros(x.shape[0], WIDTH)
        for step in x.unbind(1):
            z, r, n = self.gates(torch.cat((step, h), -1)).chunk(3, -1)
            h = (1 - z.sigmoid()) * h + z.sigmoid() * torch.tanh(n * r.sigmoid())
        return self.head(h)


class Residual(nn.Module):
    """A convolution, group normalization and its input."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(16, 16, 3, padding=1), nn.GroupNorm(4, 16)

    def forward(self, x: Tensor) -> Tensor:
        """(N, 16, H, W) to the same."""
        return x + F.gelu(self.norm(self.conv(x)))


def mlp(_rewritten: bool) -> nn.Module:
    """Linear layers, LayerNorm, GELU."""
    layers: list[nn.Module] = []
    for a, b in ((WIDTH, 64), (64, 64), (64, 64)):
        layers += [nn.Linear(a, b), nn.LayerNorm(b), nn.GELU()]
    return nn.Sequential(*layers, nn.Linear(64, 10))


def cnn(_rewritten: bool) -> nn.Module:
    """Convolutions with residuals, pooling."""
    stem = (nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2))
    return nn.Sequential(*stem, Residual(), Residual(), nn.Flatten(), nn.Linear(16 * 16, 10))


MODELS: dict[str, Callable[[bool], nn.Module]] = {
    "mlp": mlp,
    "cnn": cnn,
    "gpt": lambda rewritten: Language(Gated, rewritten),
    "moe": lambda rewritten: Language(Experts, rewritten),
    "rnn": lambda _rewritten: nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), Cell()),
}


def data(name: str, step: int) -> tuple[Tensor, Tensor]:
    """A batch of a step."""
    draw = torch.Generator().manual_seed(1000 + step)
    if name in ("gpt", "moe"):
        words = torch.randint(0, WORDS, (BATCH, TIME + 1), generator=draw)
        return words[:, :-1], words[:, 1:]
    shape = {"mlp": (BATCH, WIDTH), "cnn": (BATCH, 3, 8, 8), "rnn": (BATCH, TIME, WIDTH)}[name]
    return torch.randn(shape, generator=draw), torch.randint(0, 10, (BATCH,), generator=draw)


# -- faults ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fault:
    """A fault in a module.

    Attributes:
        name: What kind.
        module: Where; "(loss)" outside of the model.
    """

    name: str
    module: str


class Dropped(torch.autograd.Function):
    """Passes values on, and a share of gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, share: float) -> Tensor:
        """The same values."""
        ctx.share = share
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        """A share of the gradient."""
        return grad * ctx.share, None


def around(module: nn.Module, before: Any = None, after: Any = None) -> None:
    """Change what a module is given, or returns."""
    inner = module.forward

    def forward(*args: Any) -> Any:
        out = inner(*(before(a) for a in args)) if before else inner(*args)
        return after(out) if after else out

    module.forward = forward  # type: ignore[method-assign]


def coarse(x: Tensor) -> Tensor:
    """Values with three bits of their mantissa, as in a narrower format."""
    return x + (x.detach().to(torch.float8_e4m3fn).to(x.dtype) - x.detach())


def set_to(**values: Any) -> Callable[[nn.Module], None]:
    """Set attributes of a module."""

    def plant(module: nn.Module) -> None:
        for name, value in values.items():
            assert hasattr(module, name)
            setattr(module, name, value)

    return plant


def swap_halves(module: Any) -> None:
    """A weight whose two shards were put together in the wrong order."""
    with torch.no_grad():
        half = module.weight.shape[0] // 2
        module.weight.copy_(torch.cat((module.weight[half:], module.weight[:half])))


def transpose(module: Any) -> None:
    """A square block of a weight, transposed."""
    with torch.no_grad():
        n = min(module.weight.shape[:2])
        block = module.weight[:n, :n].transpose(0, 1).clone()
        module.weight[:n, :n] = block


def freeze(module: nn.Module) -> None:
    """Weights that the optimizer does not step."""
    for p in module.parameters():
        p.stale = True  # type: ignore[attr-defined]


def sum_missing(module: nn.Module) -> None:
    """Gradients of a module that miss a factor, as of a reduction that does not take place."""
    for p in module.parameters():
        p.register_hook(lambda g: g * 0.5)


NORMS, LINEAR = (nn.LayerNorm, nn.GroupNorm, Norm), (nn.Linear, nn.Conv2d)
FAULTS: dict[str, tuple[tuple[type, ...], Callable[[Any], None]]] = {
    "output scaled": ((*LINEAR, *NORMS), lambda m: around(m, after=lambda y: y * 1.25)),
    "gradient dropped": (LINEAR, lambda m: around(m, before=Tensor.detach)),
    "gradient halved": (LINEAR, lambda m: around(m, after=lambda y: Dropped.apply(y, 0.5))),
    "lower precision": ((*LINEAR, nn.GELU), lambda m: around(m, after=coarse)),
    "shards swapped": (LINEAR, swap_halves),
    "block transposed": (LINEAR, transpose),
    "stale weight": ((*LINEAR, *NORMS), freeze),
    "epsilon": (NORMS, set_to(eps=0.1)),
    "missing reduction": ((*LINEAR, *NORMS), sum_missing),
    "bias left out": (LINEAR, lambda m: around(m, after=lambda y: y + 0.05)),
    "activation": ((nn.GELU,), lambda m: around(m, after=lambda y: y + 0.05 * y.tanh())),
    "rotary offset": ((Attention,), set_to(offset=1)),
    "attention scale": ((Attention,), set_to(scale=4.0 / WIDTH)),
    "mask": ((Attention,), set_to(shift=1)),
    "residual": ((Residual, Block), lambda m: around(m, after=lambda y: y * 0.75)),
    "cell output": ((Cell, Experts, Gated), lambda m: around(m, after=lambda y: y - 0.1 * y.abs())),
}
OUTSIDE = {"loss counted twice": 2.0, "loss scaled": 1.0 / 3.0}


def plant(model: nn.Module, fault: Fault | None) -> None:
    """Plant a fault into a model."""
    if fault is not None and fault.name in FAULTS:
        FAULTS[fault.name][1](model.get_submodule(fault.module))


def drawn(seed: int, name: str, kind: str) -> Fault:
    """A fault by chance."""
    draw = random.Random(f"{seed} {name} {kind}")  # noqa: S311 - no secret
    if draw.random() < 0.06:
        return Fault(draw.choice(list(OUTSIDE)), "(loss)")
    model = MODELS[name](False)
    fits = {
        f: places
        for f, (kinds, _) in FAULTS.items()
        if (places := [n for n, m in model.named_modules() if isinstance(m, kinds) and n])
        if f != "gradient dropped" or (places := [n for n in places if n != "0"])  # data has none
    }
    chosen = draw.choice(list(fits))
    return Fault(chosen, draw.choice(fits[chosen]))


# -- trainings ---------------------------------------------------------------------------------------


def train(name: str, kind: str, second: bool, fault: Fault | None, folder: Path) -> None:
    """Two steps, recorded with a trace.

    Args:
        name: The model's.
        kind: Of the pair.
        second: Whether it is the pair's second side.
        fault: Planted into it.
        folder: The run folder.
    """
    torch.manual_seed(0)
    torch._dynamo.reset()
    model = MODELS[name](kind == "rewritten" and second)
    plant(model, fault)
    held = [p for p in model.parameters() if not hasattr(p, "stale")]
    optimizer = torch.optim.AdamW(held, 1e-3)
    runs: Any = model
    rank, ranks = 0, 1
    if kind == "ddp" and second:
        rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
        runs = nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)
    if kind == "compiled" and second:
        runs = torch.compile(model, backend="aot_eager")
    low = kind == "precision" and second
    with mpdiag.record(model, optimizer, folder, trace=True, max_steps=2, operations=1):
        for step in range(2):
            x, y = data(name, step)
            mine = slice(rank * BATCH // ranks, (rank + 1) * BATCH // ranks)
            with torch.autocast("cpu", torch.bfloat16, enabled=low):
                out = runs(x[mine])
                loss = F.cross_entropy(out.flatten(0, -2), y[mine].flatten())
            if fault is not None and fault.module == "(loss)":
                loss = loss * OUTSIDE[fault.name]
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


def named(found: Any, fault: Fault, kind: str) -> bool:
    """Whether the module is named; of a compiled model the one that it lies in, or that follows, too."""
    first = found["first"]
    if first is None:
        return False
    module = first["module"]
    if fault.module == "(loss)":
        return module is None or module == ""
    if module == fault.module:
        return True
    return kind == "compiled" and module is not None and fault.module.startswith(f"{module}.")


@dataclass
class Row:
    """A pair, and what was found."""

    model: str
    kind: str
    fault: str
    module: str
    named: str
    op: str
    right: bool
    agree: Any
    median: float
    largest: float
    different: int


def judged(name: str, kind: str, fault: Fault | None, a: Path, b: Path) -> Row:
    """Compare two runs."""
    found = mpdiag.diff(a, b).to_json()
    first, compared = found["first"] or {}, found["compared"]
    return Row(
        name,
        kind,
        fault.name if fault else "",
        fault.module if fault else "",
        str(first.get("module", "-")),
        f"{first.get('phase', '')} {first.get('op', '')} {first.get('code', '')}",
        named(found, fault, kind) if fault else found["agree"] is True,
        found["agree"],
        compared["median_ratio"] or 0.0,
        compared["largest_ratio"] or math.inf,
        compared["different"],
    )


def work(rank: int, jobs: Sequence[tuple[str, str, Fault | None, str]], port: int) -> None:
    """One rank of trainings under DDP."""
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", LOCAL_RANK=str(rank))
    torch.distributed.init_process_group("gloo", rank=rank, world_size=2)
    for name, kind, fault, folder in jobs:
        train(name, kind, True, fault, Path(folder))
        torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def main() -> None:
    """Plant, train, compare, and say what was named."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", choices=("dev", "held-out"), default="dev")
    parser.add_argument("--kinds", nargs="*", default=list(KINDS))
    parser.add_argument("--models", nargs="*", default=list(MODELS))
    parser.add_argument("--each", type=int, default=3, help="faults for each model and kind")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    first = 0 if options.seeds == "dev" else 200_000
    rows: list[Row] = []
    with TemporaryDirectory() as place:
        for kind in options.kinds:
            pairs: list[tuple[str, Fault | None, str]] = []
            for name in options.models:
                train(name, kind, False, None, Path(place) / f"{kind}-{name}")
                pairs.append((name, None, f"{kind}-{name}-clean"))
                pairs += [
                    (name, drawn(first + i, name, kind), f"{kind}-{name}-{i}")
                    for i in range(options.each)
                ]
            jobs = [(n, kind, fault, str(Path(place) / folder)) for n, fault, folder in pairs]
            if kind == "ddp":
                port = 20_000 + os.getpid() % 20_000
                torch.multiprocessing.spawn(work, (jobs, port), nprocs=2)
            for name, fault, folder in pairs:
                if kind != "ddp":
                    train(name, kind, True, fault, Path(place) / folder)
                row = judged(
                    name, kind, fault, Path(place) / f"{kind}-{name}", Path(place) / folder
                )
                rows.append(row)
                print("ok  " if row.right else "MISS", row, flush=True)
    faults, clean = [r for r in rows if r.fault], [r for r in rows if not r.fault]
    print(f"named: {sum(r.right for r in faults)} of {len(faults)}")
    print(f"clean pairs that agree: {sum(r.right for r in clean)} of {len(clean)}")
    if options.json:
        options.json.write_text(json.dumps([asdict(r) for r in rows], indent=1) + "\n")


if __name__ == "__main__":
    main()
