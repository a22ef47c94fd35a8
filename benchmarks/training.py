"""What the trainer costs: our steps over the loops people write by hand, side by side in one run.

    python benchmarks/training.py [--workload cnn lstm transformer] [--device cpu] [--json FILE]

Every variant trains its own copy of a model; the copies take turns step by step. Ratios are of
medians; a step's fixed cost is processor time on a CPU, its ratios are of minima, too. Peak memory is
measured in a child process for each level.
"""

from __future__ import annotations

import argparse
import functools
import json
import platform
import statistics
import subprocess
import sys
import time
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from recording import WORKLOADS
from torch import nn

import mpdiag
from mpdiag.plan import LossScalePlan, PrecisionPlan
from mpdiag.tracing.precision_share import DENSE
from mpdiag.training import judgement

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

PLAN = PrecisionPlan(loss_scale=LossScalePlan(method="backoff", init_scale=1024.0))
SWEEP_PARAMETERS = 24_000_000


class Trainee:
    """One copy of a model and the loop that trains it."""

    def __init__(self, workload: str, device: str, **options: Any) -> None:
        make, batch = WORKLOADS[workload]
        torch.manual_seed(0)
        self.model = make().to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 1e-4)
        self.x, self.y = (t.to(device) for t in batch())
        self.device = device
        self.prepare(**options)

    def prepare(self) -> None:
        """Whatever the loop needs."""

    def loss(self) -> torch.Tensor:
        out = self.model(self.x)
        return nn.functional.cross_entropy(out.flatten(0, -2), self.y.flatten())

    def train(self) -> None:
        """FP32, as everybody writes it."""
        self.optimizer.zero_grad()
        self.loss().backward()
        self.optimizer.step()

    def step(self, clock: Callable[[], float] = time.perf_counter) -> float:
        """Seconds one training step takes, by a clock."""
        self._wait()
        start = clock()
        self.train()
        self._wait()
        return clock() - start

    def _wait(self) -> None:
        if self.device != "cpu":
            torch.cuda.synchronize()


class ByHand(Trainee):
    """torch.autocast and GradScaler, as PyTorch's documentation writes the loop."""

    def prepare(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.scaler = torch.amp.GradScaler(self.device, init_scale=1024.0)

    def train(self) -> None:
        self.optimizer.zero_grad()
        with torch.autocast(self.device, self.dtype):
            loss = self.loss()
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()


class Ours(Trainee):
    """MixedPrecision."""

    def prepare(self, dtype: Any = None, **options: Any) -> None:
        overrides = mpdiag.PrecisionOverrides(dtype=dtype)
        self.mp = mpdiag.MixedPrecision(
            self.model, self.optimizer, PLAN, overrides=overrides, **options
        )

    def train(self) -> None:
        with self.mp.autocast():
            loss = self.loss()
        self.mp.step(loss)


def medians(trainees: dict[str, Trainee], steps: int) -> dict[str, float]:
    """Median seconds of a step; the copies take turns."""
    times = step_times(trainees, steps)
    return {name: statistics.median(values) for name, values in times.items()}


def step_times(
    trainees: dict[str, Trainee], steps: int, clock: Callable[[], float] = time.perf_counter
) -> dict[str, list[float]]:
    """Seconds of each step, by a clock; the copies take turns."""
    times: dict[str, list[float]] = {name: [] for name in trainees}
    for i in range(steps + 3):
        for name, trainee in trainees.items():
            seconds = trainee.step(clock)
            if i >= 3:
                times[name].append(seconds)
    return times


def measure_steps(workload: str, device: str, steps: int) -> dict[str, float]:
    """Ratios of step times."""
    native = torch.bfloat16 if device == "cpu" else torch.float16
    trainees: dict[str, Trainee] = {
        "fp32": Trainee(workload, device),
        "by hand": ByHand(workload, device, dtype=native),
        "o1": Ours(workload, device, dtype=native, level="O1"),
        "o2": Ours(workload, device, dtype=native, level="O2"),
        "emulated": Ours(workload, device, dtype="fp16", backend="emulated"),
    }
    t = medians(trainees, steps)
    name = str(native).removeprefix("torch.")
    return {
        f"O1 {name} / autocast + GradScaler by hand": t["o1"] / t["by hand"],
        f"O1 {name} / FP32": t["o1"] / t["fp32"],
        f"O2 {name} / FP32": t["o2"] / t["fp32"],
        "emulated FP16 / FP32": t["emulated"] / t["fp32"],
        "FP32 step, ms": 1e3 * t["fp32"],
    }


class Tiny(Trainee):
    """A model so small that a step is the trainer's own work."""

    def __init__(self, device: str, **options: Any) -> None:
        torch.manual_seed(0)
        layers = [m for _ in range(4) for m in (nn.Linear(32, 32), nn.BatchNorm1d(32), nn.ReLU())]
        self.model = nn.Sequential(*layers).to(device)
        self.optimizer = torch.optim.SGD(self.model.parameters(), 1e-3)
        self.x = self.y = torch.randn(16, 32, device=device)
        self.device = device
        self.prepare(**options)

    def loss(self) -> torch.Tensor:
        return self.model(self.x).float().square().mean()


class TinyByHand(Tiny, ByHand):
    """With torch.amp."""


class TinyOurs(Tiny, Ours):
    """With MixedPrecision."""


def measure_fixed_cost(device: str, steps: int) -> dict[str, float]:
    """What a step costs whatever the model: ours over torch.amp's, side by side."""
    native = torch.bfloat16 if device == "cpu" else torch.float16
    trainees: dict[str, Trainee] = {
        "fp32": Tiny(device),
        "by hand": TinyByHand(device, dtype=native),
        "o1": TinyOurs(device, dtype=native, level="O1"),
        "o2": TinyOurs(device, dtype=native, level="O2"),
    }
    times = step_times(trainees, steps, time.thread_time if device == "cpu" else time.perf_counter)
    t, best = ({name: f(v) for name, v in times.items()} for f in (statistics.median, min))
    return {
        "a tiny step, O1 / autocast + GradScaler by hand": t["o1"] / t["by hand"],
        "the same, of minima": best["o1"] / best["by hand"],
        "a tiny step, O2 / autocast + GradScaler by hand": t["o2"] / t["by hand"],
        "a tiny step by hand, microseconds": 1e6 * t["by hand"],
        "a tiny step, O1, microseconds": 1e6 * t["o1"],
    }


def measure_sweep(device: str, rounds: int) -> dict[str, float]:  # noqa: C901 - a function a way
    """Check and unscale, against GradScaler's, on the same gradients."""
    torch.manual_seed(0)
    size = SWEEP_PARAMETERS // 24
    parameters = [nn.Parameter(torch.randn(size, device=device)) for _ in range(24)]
    for p in parameters:
        p.grad = torch.empty(size, device=device)
    grads = [p.grad for p in parameters if p.grad is not None]
    optimizer = torch.optim.SGD(parameters, 0.0)

    def by_hand() -> None:
        scaler = torch.amp.GradScaler(device, init_scale=2.0)
        scaler.scale(torch.ones((), device=device))
        scaler.unscale_(optimizer)
        sum(v.item() for v in scaler._found_inf_per_device(optimizer).values())

    def by_hand_clipped() -> None:
        by_hand()
        torch.nn.utils.clip_grad_norm_(parameters, 1e9)

    def ours(*, absmax: bool = False, clip: judgement.Clip = judgement.NO_CLIP) -> None:
        judgement.unscale(grads, 2.0)
        alone = judgement.Ranks(torch.device(device))
        judged = judgement.judge_gradients(grads, scale=2.0, ranks=alone, absmax=absmax, clip=clip)
        assert judged.finite

    work: dict[str, Callable[[], None]] = {
        "by hand": by_hand,
        "ours": ours,
        "ours, largest": functools.partial(ours, absmax=True),
        "by hand, clipped": by_hand_clipped,
        "ours, clipped": functools.partial(ours, clip=judgement.Clip(norm=1e9)),
    }
    times: dict[str, list[float]] = {name: [] for name in work}
    clock = time.process_time if device == "cpu" else time.perf_counter
    for i in range(rounds + 2):
        for g in grads:
            g.fill_(1.25)  # each way halves them
        for name, function in work.items():
            if device != "cpu":
                torch.cuda.synchronize()
            start = clock()
            function()
            if device != "cpu":
                torch.cuda.synchronize()
            if i >= 2:
                times[name].append(clock() - start)

    def ratio(a: str, b: str) -> float:
        return statistics.median(x / y for x, y in zip(times[a], times[b], strict=True))

    return {
        "check + unscale / GradScaler.unscale_": ratio("ours", "by hand"),
        "check + unscale + largest / GradScaler.unscale_": ratio("ours, largest", "by hand"),
        "check + unscale + clip / GradScaler.unscale_ + clip_grad_norm_": ratio(
            "ours, clipped", "by hand, clipped"
        ),
    }


class Small(Trainee):
    """A model whose operations take no longer than it takes to look at them."""

    def __init__(self, kind: str, units: int, **options: Any) -> None:
        torch.manual_seed(0)
        lstm = kind == "LSTM"
        self.model = SmallLstm(units) if lstm else small_mlp(units)
        self.x = torch.randn(32, 20, 32) if lstm else torch.randn(64, units)
        self.y = torch.randint(0, 10, (len(self.x),))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 1e-3)
        self.device = "cpu"
        self.prepare(**options)

    def loss(self) -> torch.Tensor:
        return nn.functional.cross_entropy(self.model(self.x), self.y)


class SmallOurs(Small, Ours):
    """With MixedPrecision."""


def small_mlp(units: int) -> nn.Module:
    hidden = [m for _ in range(2) for m in (nn.Linear(units, units), nn.ReLU())]
    return nn.Sequential(*hidden, nn.Linear(units, 10))


class SmallLstm(nn.Module):
    """An LSTM of 20 time steps."""

    def __init__(self, units: int) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(32, units, batch_first=True), nn.Linear(units, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(x)[0][:, -1])


def measure_small(steps: int) -> dict[str, float]:
    """Emulated FP16 over FP32 alone where models are small; processor time."""
    found = {}
    for kind, units, level in (
        ("MLP", 16, "O1"),
        ("MLP", 128, "O1"),
        ("MLP", 128, "O2"),
        ("LSTM", 64, "O1"),
        ("LSTM", 64, "O2"),
    ):
        trainees = {
            "fp32": Small(kind, units),
            "ours": SmallOurs(kind, units, dtype="fp16", backend="emulated", level=level),
        }
        times = step_times(trainees, steps, time.process_time)
        found[f"{kind} of {units} units, {level} in emulated FP16 / FP32"] = statistics.median(
            a / b for a, b in zip(times["ours"], times["fp32"], strict=True)
        )
    return found


def measure_emulated(workload: str, steps: int) -> dict[str, float]:
    """Emulated FP16 over FP32, and O1 in BF16 over the loop by hand; processor time, step by step."""
    emulated: dict[str, Any] = {"dtype": "fp16", "backend": "emulated"}
    native = torch.bfloat16
    trainees: dict[str, Trainee] = {
        "fp32": Trainee(workload, "cpu"),
        "o1": Ours(workload, "cpu", level="O1", **emulated),
        "o2": Ours(workload, "cpu", level="O2", **emulated),
    }
    by_hand = ByHand(workload, "cpu", dtype=native)
    try:
        by_hand.step()
    except RuntimeError as error:  # an LSTM, where the processor has no BF16 arithmetic
        print(f"{workload} by hand in BF16: {error}", file=sys.stderr)
    else:
        trainees |= {"by hand": by_hand, "bf16": Ours(workload, "cpu", dtype=native, level="O1")}
    for trainee in trainees.values():
        for _ in range(DENSE):  # steps that count FLOPs, too
            trainee.step()
    times = step_times(trainees, steps, time.process_time)

    def ratio(a: str, b: str) -> float:
        return statistics.median(x / y for x, y in zip(times[a], times[b], strict=True))

    found = {
        "O1 in emulated FP16 / FP32": ratio("o1", "fp32"),
        "O2 in emulated FP16 / FP32": ratio("o2", "fp32"),
    }
    if "bf16" in times:
        found["O1 in BF16 / autocast + GradScaler by hand"] = ratio("bf16", "by hand")
        found["the same, of minima"] = min(times["bf16"]) / min(times["by hand"])
    return found


def peak_memory(workload: str, device: str, level: str) -> int:
    """Bytes at the peak of three steps, beyond the interpreter's own (CPU) or in all (CUDA)."""
    child = subprocess.run(
        [sys.executable, __file__, "--peak", workload, device, level],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    return int(child.stdout.split()[-1])


def print_peak(workload: str, device: str, level: str) -> None:
    """What a child of ``peak_memory`` does."""

    def used() -> int:
        if device != "cpu":
            return torch.cuda.max_memory_allocated()
        # Not ru_maxrss, which a child inherits from its parent.
        status = Path("/proc/self/status").read_text(encoding="ascii")
        line = next(row for row in status.splitlines() if row.startswith("VmHWM"))
        return int(line.split()[1]) * 1024

    torch.ones(1, device=device)
    before = used()
    options = {} if level == "O0" else {"dtype": "bf16" if device == "cpu" else "fp16"}
    trainee = Ours(workload, device, level=level, **options)
    for _ in range(3):
        trainee.step()
    print(used() - (before if device == "cpu" else 0))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workload", nargs="*", choices=[*WORKLOADS], default=[*WORKLOADS])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--emulated", action="store_true", help="what emulation costs alone")
    parser.add_argument("--peak", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.peak:
        print_peak(*options.peak)
        return
    device = options.device
    results: dict[str, Any] = {
        "date": date.today().isoformat(),
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if device != "cpu" else platform.machine(),
        "threads": torch.get_num_threads(),
    }
    sections = emulation_sections(options) if options.emulated else all_sections(options)
    for title, figures in sections:
        results[title] = figures
        show(title, figures)
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")


def all_sections(options: argparse.Namespace) -> Iterator[tuple[str, dict[str, float]]]:
    device, steps = options.device, options.steps
    yield "sweep", measure_sweep(device, steps)
    yield "fixed", measure_fixed_cost(device, 20 * steps)
    if device == "cpu":
        yield "small", measure_small(4 * steps)
    for workload in options.workload:
        figures = measure_steps(workload, device, steps)
        for level in ("O0", "O1", "O2"):
            figures[f"peak MiB, {level}"] = peak_memory(workload, device, level) / 2**20
        yield workload, figures


def emulation_sections(options: argparse.Namespace) -> Iterator[tuple[str, dict[str, float]]]:
    yield "small", measure_small(8 * options.steps)
    yield "fixed", measure_fixed_cost("cpu", 20 * options.steps)
    for workload in options.workload:
        yield workload, measure_emulated(workload, options.steps)


def show(title: str, figures: dict[str, float]) -> None:
    print(title)
    for name, value in figures.items():
        print(f"  {value:8.2f}  {name}")


if __name__ == "__main__":
    main()
