"""What recording a language model of 1, 7 and 70 billion parameters takes, computed from its sizes.

    python studies/recording_size.py           # the table, and the check on models that fit here

A row is written for each module's output and its gradient and for each parameter, its gradient and its
update, whatever their width. So a narrow model with the layers of a wide one leaves as many rows: their
number is computed, and checked by recording models that fit. What a row takes on disk depends on the
values; the range is that of the checked models and of ``sample_runs/``. What a step's rows take on the
device is the length of a raw row. Sizes are those of Llama 3.2 1B, Llama 2 7B and Llama 2 70B.
"""

from __future__ import annotations

import math
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))
from larger_than_memory import write

import mpdiag
from mpdiag.recording.cadence import Cadence
from mpdiag.recording.counting import layout

MODULES, PARAMETERS = 10, 9
"""Modules (itself among them) and parameters of a block: seven linear layers, two norms."""
BESIDE_MODULES, BESIDE_PARAMETERS = 4, 3
"""The model, its embedding, its last norm and its head."""
ROWS_OF_MODULE, ROWS_OF_PARAMETER = 2, 3
RAW_BYTES = 8 * layout.RAW + 16
UPDATE_BYTES = 2 * RAW_BYTES + 8 * (layout.UPDATE + layout.RATIO_BINS)
"""Of the weight and of its update, and of the ratio of both."""
STEPS = 100_000
"""Of a training that is recorded at the default cadence."""
PART_ROWS = 20_000
"""Rows from which a part of statistics is written; three small ones come first."""
SAMPLES = Path(__file__).resolve().parents[1] / "sample_runs"


@dataclass(frozen=True)
class Size:
    """A language model: layers, width, width of its feed-forward part, heads that share keys, words."""

    name: str
    layers: int
    width: int
    inner: int
    keys: int
    words: int

    @property
    def parameters(self) -> int:
        """Values of all weights."""
        block = 2 * self.width * (self.width + self.keys) + 3 * self.width * self.inner
        return self.layers * (block + 2 * self.width) + (2 * self.words + 1) * self.width

    @property
    def rows(self) -> int:
        """Rows of a recorded step of one rank; an embedding's input has no gradient, its output has."""
        modules = MODULES * self.layers + BESIDE_MODULES
        parameters = PARAMETERS * self.layers + BESIDE_PARAMETERS
        return ROWS_OF_MODULE * modules + ROWS_OF_PARAMETER * parameters

    @property
    def memory(self) -> int:
        """Bytes of a step's raw rows on the device, without the copies of weights."""
        modules = MODULES * self.layers + BESIDE_MODULES
        parameters = PARAMETERS * self.layers + BESIDE_PARAMETERS
        return ROWS_OF_MODULE * modules * RAW_BYTES + parameters * (RAW_BYTES + UPDATE_BYTES)


SIZES = (
    Size("1B", 16, 2048, 8192, 512, 128_256),
    Size("7B", 32, 4096, 11_008, 4096, 32_000),
    Size("70B", 80, 8192, 28_672, 1024, 32_000),
)
CHECKED = (
    Size("4 layers of 64", 4, 64, 192, 64, 96),
    Size("16 layers of 32", 16, 32, 96, 32, 96),
    Size("80 layers of 16", 80, 16, 48, 16, 96),
    Size("4 layers of 256", 4, 256, 768, 256, 512),
)


class Block(nn.Module):
    """Attention and a gated feed-forward part, each after a norm."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.norm, self.second_norm = nn.RMSNorm(size.width), nn.RMSNorm(size.width)
        self.query = nn.Linear(size.width, size.width, bias=False)
        self.key = nn.Linear(size.width, size.keys, bias=False)
        self.value = nn.Linear(size.width, size.keys, bias=False)
        self.out = nn.Linear(size.width, size.width, bias=False)
        self.gate = nn.Linear(size.width, size.inner, bias=False)
        self.up = nn.Linear(size.width, size.inner, bias=False)
        self.down = nn.Linear(size.inner, size.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        heads = [part(h).unsqueeze(1) for part in (self.query, self.key, self.value)]
        x = x + self.out(F.scaled_dot_product_attention(*heads, is_causal=True).squeeze(1))
        h = self.second_norm(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Model(nn.Module):
    """Words in, a distribution over the next one out."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.embed = nn.Embedding(size.words, size.width)
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.layers))
        self.norm, self.head = nn.RMSNorm(size.width), nn.Linear(size.width, size.words, bias=False)

    def forward(self, words: Tensor) -> Tensor:
        x = self.embed(words)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def recorded(size: Size, steps: int = 8) -> tuple[int, int]:
    """Rows of a step, and bytes of a step on disk, of a real recording."""
    torch.manual_seed(0)
    model = Model(size)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "run"
        with mpdiag.record(model, optimizer, folder, every=1):
            for _ in range(steps):
                words = torch.randint(0, size.words, (4, 33))
                loss = F.cross_entropy(model(words[:, :-1]).flatten(0, 1), words[:, 1:].flatten())
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        rows = mpdiag.open_run(folder).rows()
        size_on_disk = sum(p.stat().st_size for p in (folder / "stats").iterdir())
    return rows // steps, size_on_disk // steps


def bytes_a_row(folder: Path) -> float:
    """What a row of a run takes on disk."""
    size = sum(p.stat().st_size for p in (folder / "stats").iterdir())
    return size / mpdiag.open_run(folder).rows()


def steps_recorded(steps: int) -> int:
    """How many of a training's steps the default cadence records."""
    cadence, count = Cadence(), 0
    for step in range(steps):
        count += cadence.records(step, count)
    return count


def seconds_a_row() -> float:
    """Of analyzing a generated run of 800,000 rows, by the processor's clock."""
    with tempfile.TemporaryDirectory() as temporary:
        rows = write(Path(temporary) / "run", 500, 200, 1)
        before = time.process_time()
        mpdiag.analyze(Path(temporary) / "run")
        return (time.process_time() - before) / rows


def main() -> None:
    """Print the check, then the table."""
    print(
        f"{'checked':>16} {'parameters':>11} {'foretold':>9} {'rows a step':>12} {'bytes a row':>12}"
    )
    on_disk = [bytes_a_row(p.parent) for p in sorted(SAMPLES.glob("*/stats")) if any(p.iterdir())]
    for size in CHECKED:
        rows, size_on_disk = recorded(size)
        on_disk.append(size_on_disk / rows)
        print(
            f"{size.name:>16} {size.parameters:11,} {size.rows:9,} {rows:12,} {on_disk[-1]:12.0f}"
        )
    low, high = min(on_disk), max(on_disk)
    steps, seconds = steps_recorded(STEPS), seconds_a_row()
    print(f"\nA row takes {low:.0f} to {high:.0f} bytes on disk in these and in sample_runs/, and")
    print(f"{1e6 * seconds:.1f} us to analyze; of {STEPS:,} steps {steps} are recorded.\n")
    heads = (
        "model",
        "parameters",
        "rows a step",
        "device, MB",
        "KB a step",
        "ranks",
        "files",
        "MB",
    )
    print("".join(f"{head:>15}" for head in (*heads, "analysis, s")))
    for size in SIZES:
        for ranks in (1, 8, 1024):
            rows = size.rows * steps * ranks
            files = ranks * (2 + 3 + math.ceil(size.rows * steps / PART_ROWS))
            step, run = (
                f"{n * low:,.0f} to {n * high:,.0f}" for n in (size.rows / 1e3, rows / 1e6)
            )
            figures = (f"{size.parameters:,}", f"{size.rows:,}", f"{size.memory / 1e6:.1f}", step)
            last = (str(ranks), f"{files:,}", run, f"{rows * seconds:,.0f}")
            print("".join(f"{cell:>15}" for cell in (size.name, *figures, *last)))


if __name__ == "__main__":
    main()
