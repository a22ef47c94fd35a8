"""What recording costs: step time with a recorder over step time without, and beside the habits.

    python benchmarks/recording.py [--device cpu] [--steps 100] [--peers] [--json FILE]

Every variant trains its own copy of a model; the copies take turns step by step, so that a machine
that slows down slows all of them. Each figure is a ratio of medians, of processor time of the process
on a CPU (``--clock wall`` for the time that passes), which a busy machine disturbs less.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from machine import machine
from torch import nn

import mpdiag


class Cnn(nn.Module):
    """A residual network for 32×32 images."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.blocks = nn.ModuleList()
        channels = width
        for stage in range(3):
            out = width * 2**stage
            self.blocks.append(Block(channels, out, 1 if stage == 0 else 2))
            self.blocks.append(Block(out, out, 1))
            channels = out
        self.head = nn.Linear(channels, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((2, 3)))


class Block(nn.Module):
    """Two convolutions and a shortcut."""

    def __init__(self, channels: int, out: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, out, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(out)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(out, out, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(out)
        self.shortcut = nn.Conv2d(channels, out, 1, stride) if stride > 1 else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.relu(self.norm1(self.conv1(x)))
        return self.relu(self.norm2(self.conv2(y)) + self.shortcut(x))


class Lstm(nn.Module):
    """A language model of two LSTM layers."""

    def __init__(self, vocabulary: int = 2000, hidden: int = 384) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, hidden)
        self.lstm = nn.LSTM(hidden, hidden, 2, batch_first=True)
        self.head = nn.Linear(hidden, vocabulary)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(self.embedding(x))[0])


class Transformer(nn.Module):
    """A small encoder with a language-model head."""

    def __init__(self, vocabulary: int = 2000, width: int = 256, layers: int = 4) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.encoder(self.embedding(x)))


class Attention(nn.Module):
    """Attention of several heads, written out, as vision transformers do."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.out = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            f(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for f in (self.query, self.key, self.value)
        )
        y = nn.functional.scaled_dot_product_attention(q, k, v)
        return self.out(y.transpose(1, 2).flatten(-2))


class Layer(nn.Module):
    """A layer of a vision transformer, each of its parts a module."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, 4)
        self.up, self.act, self.down = (
            nn.Linear(width, 2 * width),
            nn.GELU(),
            nn.Linear(2 * width, width),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.down(self.act(self.up(self.norm2(x))))


class Vit(nn.Module):
    """A vision transformer of many small tensors: 294 parameters in 203 modules."""

    def __init__(self, width: int = 64, layers: int = 18) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 4, 4)
        self.layers = nn.Sequential(*(Layer(width) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        return self.head(self.norm(self.layers(x)).mean(1))


def images(batch: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(batch, 3, 32, 32), torch.randint(0, 10, (batch,))


def tokens(batch: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randint(0, 2000, (batch, length)), torch.randint(0, 2000, (batch, length))


WORKLOADS: dict[
    str, tuple[Callable[[], nn.Module], Callable[[], tuple[torch.Tensor, torch.Tensor]]]
] = {
    "cnn": (Cnn, lambda: images(32)),
    "lstm": (Lstm, lambda: tokens(16, 32)),
    "transformer": (Transformer, lambda: tokens(8, 64)),
    "vit": (Vit, lambda: images(4)),
}


class Trainee:
    """One copy of a model under one variant of observation."""

    def __init__(self, workload: str, device: str, clock: Callable[[], float]) -> None:
        self.clock = clock
        make, batch = WORKLOADS[workload]
        torch.manual_seed(0)
        self.model = make().to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 1e-4)
        self.batch = tuple(t.to(device) for t in batch())
        self.device = device
        self.step_index = 0

    def step(self) -> float:
        """Seconds one training step takes."""
        x, y = self.batch
        self._wait()
        start = self.clock()
        self.optimizer.zero_grad()
        out = self.model(x)
        loss = nn.functional.cross_entropy(out.flatten(0, -2), y.flatten())
        loss.backward()
        self.after_backward()
        self.optimizer.step()
        self._wait()
        self.step_index += 1
        return self.clock() - start

    def after_backward(self) -> None:
        """Where loops log gradients."""

    def _wait(self) -> None:
        if self.device != "cpu":
            torch.cuda.synchronize()


Attach = Callable[[Trainee, ExitStack, Path], None]


def plain(trainee: Trainee, stack: ExitStack, folder: Path) -> None:
    """Nothing attached."""


def recorded(**options: Any) -> Attach:
    def attach(trainee: Trainee, stack: ExitStack, folder: Path) -> None:
        stack.enter_context(
            mpdiag.record(trainee.model, trainee.optimizer, folder / "run", **options)
        )

    return attach


def tensorboard(trainee: Trainee, stack: ExitStack, folder: Path) -> None:
    """SummaryWriter.add_histogram of every weight and weight gradient, every step."""
    from torch.utils.tensorboard import SummaryWriter

    writer = stack.enter_context(SummaryWriter(str(folder)))

    def log() -> None:
        for name, p in trainee.model.named_parameters():
            writer.add_histogram(f"weights/{name}", p, trainee.step_index)
            if p.grad is not None:
                writer.add_histogram(f"gradients/{name}", p.grad, trainee.step_index)

    trainee.after_backward = log  # type: ignore[method-assign]


def wandb_watch(trainee: Trainee, stack: ExitStack, folder: Path) -> None:
    """wandb.watch(log="all"), offline, every step."""
    import wandb

    run = wandb.init(mode="offline", dir=str(folder), settings=wandb.Settings(silent=True))
    run.watch(trainee.model, log="all", log_freq=1)
    stack.callback(run.finish)
    trainee.after_backward = lambda: run.log({"step": trainee.step_index})  # type: ignore[method-assign]


def underflow_overflow(trainee: Trainee, stack: ExitStack, folder: Path) -> None:
    """transformers' DebugUnderflowOverflow: absolute minimum and maximum of inputs and outputs."""
    from transformers.debug_utils import DebugUnderflowOverflow

    DebugUnderflowOverflow(trainee.model, max_frames_to_save=1)


def histc(trainee: Trainee, stack: ExitStack, folder: Path) -> None:
    """Hooks with torch.histc of log2|x|: activation gradients and weight gradients."""
    kept: list[torch.Tensor] = []

    def count(t: torch.Tensor) -> None:
        kept.append(torch.histc(t.detach().abs().log2(), bins=64, min=-50, max=14).cpu())

    def forward(module: nn.Module, args: Any, output: Any) -> None:
        for t in output if isinstance(output, tuple) else (output,):
            if isinstance(t, torch.Tensor) and t.requires_grad:
                t.register_hook(count)

    for module in trainee.model.modules():
        module.register_forward_hook(forward)

    def log() -> None:
        for p in trainee.model.parameters():
            if p.grad is not None:
                count(p.grad)
        kept.clear()

    trainee.after_backward = log  # type: ignore[method-assign]


VARIANTS: dict[str, Attach] = {
    "plain": plain,
    "plain again": plain,
    "mpdiag, default cadence": recorded(),
    "mpdiag, default cadence, blocks": recorded(blocks=True),
    "mpdiag, every step": recorded(every=1),
    "mpdiag, never": recorded(every=10**9),
}
PEERS: dict[str, Attach] = {
    "hooks with torch.histc": histc,
    "SummaryWriter.add_histogram": tensorboard,
    "wandb.watch(log='all')": wandb_watch,
    "DebugUnderflowOverflow": underflow_overflow,
}


def measure(
    workload: str,
    variants: dict[str, Attach],
    steps: int,
    device: str,
    clock: Callable[[], float],
) -> Iterator[dict[str, Any]]:
    """Ratios of one workload, one variant a row."""
    with tempfile.TemporaryDirectory() as temporary, ExitStack() as stack:
        trainees = {}
        for i, (name, attach) in enumerate(variants.items()):
            try:
                trainees[name] = Trainee(workload, device, clock)
                folder = Path(temporary) / str(i)
                folder.mkdir()
                attach(trainees[name], stack, folder)
            except ImportError as error:
                del trainees[name]
                yield {"workload": workload, "variant": name, "skipped": str(error)}
        # The first recorded step compiles kernels and writes the first part; the 20 dense steps of
        # the default cadence pass, so that what is timed is its steady state.
        for _ in range(21):
            for name, trainee in trainees.items():
                if name.startswith("mpdiag") or trainee.step_index < 2:
                    trainee.step()
        times: dict[str, list[float]] = {name: [] for name in trainees}
        for _ in range(steps):
            for name, trainee in trainees.items():
                times[name].append(trainee.step())
    base = statistics.median(times["plain"])
    for name, seconds in times.items():
        # A cadence makes some steps dear: the mean over whole periods, outliers cut, is its cost.
        # Outliers are a step whose operations are recorded, and those that write a part: every 30 s,
        # which is far oftener in steps here, where the variants take turns, than in a training of
        # its own.
        if "default" in name:
            ordered = [s for i, s in enumerate(seconds) if i % 20 != 19]
            dear = [s for i, s in enumerate(seconds) if i % 20 == 19]
            typical = (19 * statistics.median(ordered) + statistics.median(dear or ordered)) / 20
        else:
            typical = statistics.median(seconds)
        yield {
            "workload": workload,
            "variant": name,
            "ratio": round(typical / base, 3),
            "milliseconds": round(typical * 1e3, 1),
            "ratio_of_fastest": round(min(seconds) / min(times["plain"]), 3),
        }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--clock", choices=["processor", "wall"], default="processor")
    parser.add_argument("--workload", choices=list(WORKLOADS), action="append")
    parser.add_argument("--peers", action="store_true", help="also measure the habits")
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args()
    processor = options.clock == "processor" and options.device == "cpu"
    clock = time.process_time if processor else time.perf_counter
    groups = [(VARIANTS, options.steps)]
    if options.peers:  # in turns of their own: they are slow, and hold ours up
        groups.append(({"plain": plain} | PEERS, options.steps // 2))
    rows = []
    print(f"{'workload':12} {'variant':30} {'ratio':>7} {'ms/step':>8}")
    for workload, group, steps in [
        (workload, *group) for workload in options.workload or WORKLOADS for group in groups
    ]:
        for row in measure(workload, group, steps, options.device, clock):
            rows.append(row)
            figures = (
                f"skipped: {row['skipped']}"
                if "skipped" in row
                else f"{row['ratio']:7.3f} {row['milliseconds']:8.1f}"
            )
            print(f"{row['workload']:12} {row['variant']:30} {figures}", flush=True)
    if options.json:
        here = machine(
            clock="processor" if processor else "wall",
            device=torch.cuda.get_device_name() if options.device != "cpu" else "cpu",
        )
        options.json.write_text(json.dumps({"machine": here, "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
