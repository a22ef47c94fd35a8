"""What recording inside ``torch.compile`` keeps, gets and costs.

    python benchmarks/compiled.py [--models mlp,gpt] [--backends eager,aot_eager,inductor] [--json FILE]

Each training runs in processes of its own: compiled without a recorder, compiled and recorded at the
default cadence, compiled and recorded in every step, and eagerly recorded. The first three take turns
step by step. A row says

- graphs, graph breaks and recompilations, without a recorder and recorded in every step;
- records that arrived of those due: of the rows that the eager recording has of the first steps;
- whether weights and losses at the end have the same bits; if not, the largest difference in units
  in the last place, beside that of two trainings without a recorder;
- processor time of a step, and its ratios: the median of pairs of steps after the first 20, and the
  ratio of their sums.

``fsdp2`` shards over two ranks on gloo.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import json
import multiprocessing
import os
import signal
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "studies"))
sys.path.insert(0, str(Path(__file__).parent))

import torch
from machine import machine
from real.compilation import arrived, compilations, records
from recording import Cnn, Layer, Lstm, Vit, images, tokens
from torch import nn
from torch.utils.checkpoint import checkpoint

import mpdiag

DENSE = 20
"""Steps that are recorded at any cost, and not timed."""
EAGER = 3
"""Steps of the eager recording, which say what is due."""
BACKENDS = ("eager", "aot_eager", "inductor")
FORK = multiprocessing.get_context("fork")


class Gpt(nn.Module):
    """A language model of transformer layers, with tied weights and checkpoints where asked for."""

    def __init__(self, *, tied: bool = False, checkpointed: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(2000, 192)
        self.layers = nn.ModuleList(Layer(192) for _ in range(4))
        self.norm = nn.LayerNorm(192)
        self.head = nn.Linear(192, 2000, bias=False)
        if tied:
            self.head.weight = self.embedding.weight
            nn.init.normal_(self.embedding.weight, 0.0, 0.02)
        self.checkpointed = checkpointed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embedding(x)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.checkpointed else layer(x)
        return self.head(self.norm(x))


class Experts(nn.Module):
    """A layer whose tokens go to two of four experts, each a module."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.router = nn.Linear(width, 4)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.SiLU(), nn.Linear(2 * width, width))
            for _ in range(4)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(x)
        weights, chosen = self.router(h).softmax(-1).topk(2)
        gates = torch.zeros_like(self.router(h)).scatter(-1, chosen, weights)
        outputs = [gates[..., i : i + 1] * expert(h) for i, expert in enumerate(self.experts)]
        return x + torch.stack(outputs).sum(0)


class UNet(nn.Module):
    """Two resolutions, a skip connection, and a class for each image."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.down = nn.Sequential(nn.Conv2d(3, width, 3, 1, 1), nn.GroupNorm(4, width), nn.SiLU())
        self.middle = nn.Sequential(
            nn.Conv2d(width, 2 * width, 3, 2, 1),
            nn.GroupNorm(4, 2 * width),
            nn.SiLU(),
            nn.ConvTranspose2d(2 * width, width, 4, 2, 1),
        )
        self.up = nn.Sequential(nn.Conv2d(2 * width, width, 3, 1, 1), nn.ReLU(inplace=True))
        self.head = nn.Linear(width, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.down(x)
        h = self.up(torch.cat([h, self.middle(h)], 1))
        return self.head(h.mean((2, 3)))


def mlp() -> nn.Module:
    layers = [nn.Sequential(nn.LayerNorm(512), nn.Linear(512, 512), nn.GELU()) for _ in range(6)]
    return nn.Sequential(nn.Flatten(), nn.Linear(3072, 512), *layers, nn.Linear(512, 10))


def moe() -> nn.Module:
    return nn.Sequential(nn.Embedding(2000, 128), Experts(128), Experts(128), nn.Linear(128, 2000))


Batch = Callable[[], tuple[torch.Tensor, torch.Tensor]]
MODELS: dict[str, tuple[Callable[[], nn.Module], Batch]] = {
    "mlp": (mlp, lambda: images(256)),
    "cnn": (Cnn, lambda: images(8)),
    "gpt": (Gpt, lambda: tokens(8, 64)),
    "vit": (Vit, lambda: images(8)),
    "lstm": (Lstm, lambda: tokens(8, 24)),
    "moe": (moe, lambda: tokens(8, 64)),
    "unet": (UNet, lambda: images(8)),
    "tied": (lambda: Gpt(tied=True), lambda: tokens(8, 64)),
    "checkpointed": (lambda: Gpt(checkpointed=True), lambda: tokens(8, 64)),
    "fsdp2": (Gpt, lambda: tokens(8, 64)),
}
VARIANTS: dict[str, dict[str, Any] | None] = {
    "plain": None,
    "default": {},
    "every step": {"every": 1},
}


class Training:
    """A model that trains in a process of its own; ``fsdp2`` in two.

    Args:
        model: Its name.
        backend: What compiles it; None leaves it eager.
        options: The recorder's; None records nothing.
        folder: Where the run and the weights are written, and the ranks meet.
    """

    def __init__(
        self, model: str, backend: str | None, options: dict[str, Any] | None, folder: Path
    ) -> None:
        folder.mkdir(parents=True)
        self.pipes, self.processes = [], []
        ranks = 2 if model == "fsdp2" else 1
        for rank in range(ranks):
            ours, theirs = FORK.Pipe()
            arguments = (theirs, model, backend, options, folder, rank, ranks)
            process = FORK.Process(target=_train, args=arguments, daemon=True)
            process.start()
            self.pipes.append(ours)
            self.processes.append(process)

    def step(self) -> float:
        """Seconds of processor time that the first rank took for a step."""
        return float(self._ask("step"))

    def end(self) -> dict[str, Any]:
        """What the first rank knows after its last step."""
        return dict(self._ask("end"))

    def close(self) -> None:
        """End the processes that still run; one that failed leaves the others waiting."""
        for process in self.processes:
            process.terminate()
            process.join()

    def _ask(self, word: str) -> Any:
        for pipe in self.pipes:
            pipe.send(word)
        answers = [pipe.recv() for pipe in self.pipes]
        for answer in answers:
            if isinstance(answer, str):
                raise RuntimeError(answer)
        return answers[0]


def _train(
    pipe: Connection,
    name: str,
    backend: str | None,
    options: dict[str, Any] | None,
    folder: Path,
    rank: int,
    ranks: int,
) -> None:
    """Answer ``step`` and ``end`` in a child; an error is answered by its text."""
    try:
        with ExitStack() as stack:
            model, step = _trainee(name, backend, options, folder, rank, ranks, stack)
            losses = []
            while pipe.recv() == "step":
                start = time.process_time()
                losses.append(step())
                pipe.send(time.process_time() - start)
        weights = {key: _whole(value) for key, value in model.state_dict().items()}
        torch.save(weights, folder / f"weights-{rank}.pt")
        digest = hashlib.sha256(repr(losses).encode())
        for value in weights.values():
            digest.update(value.contiguous().numpy().tobytes())
        pipe.send({"digest": digest.hexdigest(), **compilations()})
    except BaseException:  # noqa: BLE001 - the parent raises it
        pipe.send(traceback.format_exc())


def _trainee(
    name: str,
    backend: str | None,
    options: dict[str, Any] | None,
    folder: Path,
    rank: int,
    ranks: int,
    stack: ExitStack,
) -> tuple[nn.Module, Callable[[], float]]:
    """A model, recorded until the stack closes, and what trains it by a step."""
    torch.manual_seed(0)
    make, batch = MODELS[name]
    model = make()
    called: Any = model
    if name == "fsdp2":
        import torch.distributed as dist
        from torch.distributed.fsdp import fully_shard

        store = dist.FileStore(str(folder / "store"), ranks)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
        mesh = dist.init_device_mesh("cpu", (ranks,))
        for layer in model.layers:
            if backend:
                layer.compile(backend=backend, fullgraph=True)
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    elif backend:
        called = torch.compile(model, backend=backend)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4)
    if options is not None:
        stack.enter_context(mpdiag.record(model, optimizer, folder / "run", **options))
    torch.manual_seed(1 + rank)
    x, y = batch()

    def step() -> float:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(called(x).flatten(0, -2), y.flatten())
        loss.backward()
        optimizer.step()
        return loss.item()

    return model, step


def _whole(value: torch.Tensor) -> torch.Tensor:
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def ulps(first: Path, second: Path) -> int:
    """The largest difference of two trainings' FP32 weights, in units in the last place."""
    pairs = [torch.load(folder / "weights-0.pt") for folder in (first, second)]
    most = 0
    for name, a in pairs[0].items():
        if a.dtype == torch.float32:
            lines = [_ordered(values[name]) for values in pairs]
            most = max(most, int((lines[0] - lines[1]).abs().max()))
    return most


def _ordered(values: torch.Tensor) -> torch.Tensor:
    """Integers that are neighbours where the FP32 values are."""
    bits = values.contiguous().view(torch.int32).long()
    return torch.where(bits < 0, -(bits & 0x7FFFFFFF), bits)


def measure(model: str, backend: str, steps: int, place: Path) -> dict[str, Any]:
    """One row; raises RuntimeError with the child's traceback where a training fails."""
    with ExitStack() as stack:

        def start(compiled: str | None, options: dict[str, Any] | None, name: str) -> Training:
            training = Training(model, compiled, options, place / name)
            stack.callback(training.close)
            return training

        return _measured(model, backend, steps, place, start)


def _measured(
    model: str, backend: str, steps: int, place: Path, start: Callable[..., Training]
) -> dict[str, Any]:
    trainings = {
        name: start(backend, options, name.replace(" ", "-")) for name, options in VARIANTS.items()
    }
    for _ in range(DENSE + 1):
        for training in trainings.values():
            training.step()
    times: dict[str, list[float]] = {name: [] for name in trainings}
    for _ in range(steps):
        for name, training in trainings.items():
            times[name].append(training.step())
    ends = {name: training.end() for name, training in trainings.items()}
    eager = start(None, {"every": 1}, "eager")
    for _ in range(EAGER):
        eager.step()
    eager.end()
    due, came = (records(place / name / "run", EAGER) for name in ("eager", "every-step"))
    plain, recorded = ends["plain"], ends["every step"]
    row = {
        "model": model,
        "backend": backend,
        **{name: [plain[name], recorded[name]] for name in ("graphs", "breaks", "recompilations")},
        **arrived(due, came),
        "identical": len({end["digest"] for end in ends.values()}) == 1,
        "milliseconds": round(1e3 * statistics.median(times["plain"]), 1),
        **{name: _ratios(times["plain"], times[name]) for name in ("default", "every step")},
    }
    if not row["identical"]:
        again = start(backend, None, "again")
        for _ in range(DENSE + 1 + steps):
            again.step()
        again.end()
        row["ulps"] = max(ulps(place / "plain", place / n) for n in ("default", "every-step"))
        row["ulps_of_two_plain"] = ulps(place / "plain", place / "again")
    return row


def _ratios(plain: Sequence[float], recorded: Sequence[float]) -> dict[str, float]:
    return {
        "median": round(statistics.median(b / a for a, b in zip(plain, recorded, strict=True)), 3),
        "of_sums": round(sum(recorded) / sum(plain), 3),
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--backends", default=",".join(BACKENDS))
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that no training is left
    importlib.import_module("torch._inductor.compile_fx")  # once, before processes are forked
    torch.set_num_threads(1)
    here = machine(clock="processor")
    print(here)
    print("of two figures the first is without a recorder, the second recorded in every step")
    print(
        f"{'model':12} {'backend':9} {'graphs':>7} {'breaks':>7} {'recomp.':>7} {'arrived':>9} "
        f"{'identical':>9} {'ms':>6} {'default':>14} {'every step':>14}"
    )
    rows: list[dict[str, Any]] = []
    for model in options.models.split(","):
        for backend in options.backends.split(","):
            with tempfile.TemporaryDirectory() as place:
                try:
                    row = measure(model, backend, options.steps, Path(place))
                except RuntimeError as error:
                    row = {"model": model, "backend": backend, "failed": str(error)}
            rows.append(row)
            print(told(row), flush=True)
            if options.json:
                document = {"machine": here, "rows": rows}
                options.json.write_text(json.dumps(document, indent=2) + "\n")


def told(row: dict[str, Any]) -> str:
    """A row as a line."""
    begin = f"{row['model']:12} {row['backend']:9}"
    if "failed" in row:
        return f"{begin} failed: {row['failed'].strip().splitlines()[-1]}"
    counts = [
        "{}, {}".format(*row[name]).rjust(7) for name in ("graphs", "breaks", "recompilations")
    ]
    same = "yes" if row["identical"] else f"{row['ulps']} ulp ({row['ulps_of_two_plain']})"
    ratios = [
        f"{row[name]['median']:.3f} ({row[name]['of_sums']:.3f})"
        for name in ("default", "every step")
    ]
    arrived = f"{row['arrived']}/{row['due']}"
    return (
        f"{begin} {' '.join(counts)} {arrived:>9} {same:>9} {row['milliseconds']:6.1f} "
        f"{ratios[0]:>14} {ratios[1]:>14}"
    )


if __name__ == "__main__":
    main()
