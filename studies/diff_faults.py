"""Faults planted into trainings, and whether ``mpdiag diff`` names their module.

    python studies/diff_faults.py [--seeds dev|held-out|last|…] [--kinds …] [--models …]

Five small models train two steps, sound and with a fault in a module drawn by chance. The pairs are
of seven kinds: FP32 with BF16 and with FP16 (autocast, and a loss scale on both sides), eager with a
graph of torch's compiler (``aot_eager`` and ``inductor``), one device with DDP and with FSDP2 over two
ranks (gloo), and two ways to write the same model. For each kind there are clean pairs, too: what
differs there is rounding. The seeds ``dev`` were looked at while ``diff`` was built; ``held-out`` were
not, and their weights and data are others. What they showed was mended; ``last`` and those after it
were run once each, after that.

Each pair is written to ``studies/results/diff-faults.json`` when it is judged; those there are not
trained again. ``--table`` sums them up.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import mpdiag

KINDS = ("precision", "fp16", "compiled", "inductor", "ddp", "fsdp", "rewritten")
SEEDS = {"dev": 0, "held-out": 300_000, "last": 400_000, "fresh": 500_000, "newest": 600_000,
         "final": 700_000, "latest": 900_000, "eighth": 1_000_000, "ninth": 1_100_000}  # fmt: skip
RANKS, COMPILED = ("ddp", "fsdp"), ("compiled", "inductor")
RESULTS = Path(__file__).parent / "results/diff-faults.json"
CLEAN = 1
"""Clean pairs for each model, kind and half."""
SCALE = 1024.0
"""Of the loss, on both sides of pairs with FP16."""
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


def data(name: str, step: int, draw_of: int) -> tuple[Tensor, Tensor]:
    """A batch of a step."""
    draw = torch.Generator().manual_seed(1000 + step + draw_of)
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
        if f != "missing reduction" or kind != "fsdp"  # hooks of parameters do not run there
    }
    chosen = draw.choice(list(fits))
    return Fault(chosen, draw.choice(fits[chosen]))


# -- trainings ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Job:
    """A training of a pair.

    Attributes:
        model, kind: Of the pair.
        seed: Of the weights and the data.
        second: Whether it is the pair's second side.
        fault: Planted into it.
    """

    model: str
    kind: str
    seed: int
    second: bool = False
    fault: Fault | None = None


def laid_out(model: nn.Module, kind: str) -> Any:
    """A model over ranks, or compiled."""
    if kind == "ddp":
        return nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)
    if kind == "fsdp":
        for part in model.modules():
            if isinstance(part, (Block, Residual, Cell)):
                torch.distributed.fsdp.fully_shard(part)
        torch.distributed.fsdp.fully_shard(model)
    if kind in COMPILED:
        return torch.compile(model, backend="inductor" if kind == "inductor" else "aot_eager")
    return model


def train(job: Job, folder: Path) -> None:
    """Two steps, recorded with a trace."""
    torch.manual_seed(job.seed)
    torch._dynamo.reset()
    kind = job.kind if job.second else ""
    model = MODELS[job.model](kind == "rewritten")
    plant(model, job.fault)
    stale = {n for n, p in model.named_parameters() if hasattr(p, "stale")}
    runs = laid_out(model, kind)
    rank, ranks = 0, 1
    if kind in RANKS:
        rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    held = [p for n, p in model.named_parameters() if n not in stale]
    optimizer = torch.optim.AdamW(held, 1e-3)
    low = {"precision": torch.bfloat16, "fp16": torch.float16}.get(kind)
    scale = SCALE if job.kind == "fp16" else 1.0
    with mpdiag.record(model, optimizer, folder, trace=True, max_steps=2, operations=1):
        for step in range(2):
            x, y = data(job.model, step, job.seed)
            mine = slice(rank * BATCH // ranks, (rank + 1) * BATCH // ranks)
            with torch.autocast("cpu", low or torch.bfloat16, enabled=low is not None):
                out = runs(x[mine])
                loss = F.cross_entropy(out.flatten(0, -2), y[mine].flatten())
            if job.fault is not None and job.fault.module == "(loss)":
                loss = loss * OUTSIDE[job.fault.name]
            optimizer.zero_grad()
            (loss * scale).backward()
            for p in model.parameters():
                if p.grad is not None and scale != 1.0:
                    p.grad /= scale
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
    return kind in COMPILED and module is not None and fault.module.startswith(f"{module}.")


@dataclass
class Row:
    """A pair, and what was found; ``seed`` is that of the fault, or of a clean pair's weights."""

    seeds: str
    seed: int
    model: str
    kind: str
    fault: str
    module: str
    named: str = ""
    op: str = ""
    right: bool = False
    agree: Any = None
    median: float = 0.0
    largest: float | None = None
    different: int = 0
    step: int | None = None

    @property
    def key(self) -> tuple[Any, ...]:
        """Which pair it is."""
        return self.seeds, self.seed, self.model, self.kind, self.fault


def judged(row: Row, fault: Fault | None, a: Path, b: Path) -> Row:
    """Compare two runs."""
    found = mpdiag.diff(a, b).to_json()
    first, compared = found["first"] or {}, found["compared"]
    return replace(
        row,
        named=str(first.get("module", "-")),
        op=f"{first.get('phase', '')} {first.get('op', '')} {first.get('code', '')}".strip(),
        right=named(found, fault, row.kind) if fault else found["agree"] is True,
        agree=found["agree"],
        median=compared["median_ratio"] or 0.0,
        largest=compared["largest_ratio"],
        different=compared["different"],
        step=compared["last_step"],
    )


def pairs_of(seeds: str, kind: str, name: str, each: int) -> list[tuple[Row, Fault | None, int]]:
    """The pairs of a kind and a model, each with its fault and the seed of the weights."""
    first = SEEDS[seeds]
    found: list[tuple[Row, Fault | None, int]] = [
        (Row(seeds, first + i, name, kind, "", ""), None, first + i) for i in range(CLEAN)
    ]
    for i in range(each):
        fault = drawn(first + i, name, kind)
        found.append((Row(seeds, first + i, name, kind, fault.name, fault.module), fault, first))
    return found


def work(rank: int, jobs: Sequence[tuple[Job, str]], port: int) -> None:
    """One rank of trainings under DDP or FSDP2."""
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", LOCAL_RANK=str(rank))
    torch.distributed.init_process_group("gloo", rank=rank, world_size=2)
    for job, folder in jobs:
        train(job, Path(folder))
        torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def run(place: Path, waiting: Sequence[tuple[Row, Fault | None, int]]) -> Iterator[Row]:
    """Train and judge pairs of one kind."""
    kind = waiting[0][0].kind
    jobs = [
        (Job(row.model, kind, seed, True, fault), place / f"{kind}-{row.model}-{i}")
        for i, (row, fault, seed) in enumerate(waiting)
    ]
    if kind in RANKS:
        port = 20_000 + os.getpid() % 20_000
        told = [(job, str(folder)) for job, folder in jobs]
        torch.multiprocessing.spawn(work, (told, port), nprocs=2)
    for (job, folder), (row, fault, seed) in zip(jobs, waiting, strict=True):
        reference = place / f"{kind}-{job.model}-sound-{seed}"
        if not reference.exists():
            train(Job(job.model, kind, seed), reference)
        if kind not in RANKS:
            train(job, folder)
        yield judged(row, fault, reference, folder)
        shutil.rmtree(folder)


def table(rows: Sequence[Row]) -> None:
    """Print what was named, by kind."""
    for seeds in SEEDS:
        for kind in (*KINDS, None):
            some = [r for r in rows if r.seeds == seeds and kind in (r.kind, None)]
            faults, clean = [r for r in some if r.fault], [r for r in some if not r.fault]
            different = [r for r in clean if r.different]
            print(
                f"{seeds:8} {kind or 'all':10} named {sum(r.right for r in faults)} of {len(faults)}, "
                f"clean pairs that agree {sum(r.right for r in clean)} of {len(clean)}, "
                f"{len(different)} differ: largest ratio "
                f"{max((r.largest or 0.0 for r in different), default=0.0):.2g}, medians "
                f"{min((r.median for r in different), default=0.0):.2g} to "
                f"{max((r.median for r in different), default=0.0):.2g}"
            )


def main() -> None:
    """Plant, train, compare, and say what was named."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", choices=list(SEEDS), default="dev")
    parser.add_argument("--kinds", nargs="*", default=list(KINDS))
    parser.add_argument("--models", nargs="*", default=list(MODELS))
    parser.add_argument("--each", type=int, default=2, help="faults for each model and kind")
    parser.add_argument("--json", type=Path, default=RESULTS)
    parser.add_argument("--table", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    held = json.loads(options.json.read_text()) if options.json.exists() else []
    rows = [Row(**row) for row in held]
    if options.table:
        table(rows)
        return
    known = {row.key for row in rows}
    for kind in options.kinds:
        every = [
            p for name in options.models for p in pairs_of(options.seeds, kind, name, options.each)
        ]
        waiting = [pair for pair in every if pair[0].key not in known]
        if not waiting:
            continue
        with TemporaryDirectory() as place:
            for row in run(Path(place), waiting):
                rows.append(row)
                print("ok  " if row.right else "MISS", row, flush=True)
                options.json.write_text(json.dumps([asdict(r) for r in rows], indent=1) + "\n")


if __name__ == "__main__":
    main()
