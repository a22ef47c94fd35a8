"""A second moment in BF16 that cannot fall: does it cost loss, and what did the audit say?

    python studies/stalled_moment.py                      # about three minutes on one core
    python studies/stalled_moment.py --json studies/results/stalled-moment.json

Three trainings of three seeds, each with ``exp_avg_sq`` in FP32 and in BF16; everything else is FP32 and
equal, batches included, and AdamW is torch's own, with its default betas.

    jump     a regression whose targets lie 100 too high for 20 steps: gradients fall a thousandfold
    noise    the same regression without the jump, its targets noisier than they are large
    digits   scikit-learn's digits, where gradients fall as the images are learned

The BF16 trainings are recorded and audited. The loss is the mean over the last 100 steps; of ``digits``
also over the held-out images.
"""

import argparse
import json
import platform
import statistics
import tempfile
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mpdiag
from mpdiag.workloads.digits import digit_images

STEPS = 2000
LAST = 100
SEEDS = 3
HIGH, HIGH_STEPS = 100.0, 20


def jump(seed: int, steps: int = STEPS) -> tuple[nn.Module, Iterator[Tensor]]:
    """A network and its losses: targets of another network, the first ones far too high."""
    return _regression(seed, steps, HIGH, 0.0)


def noise(seed: int, steps: int = STEPS) -> tuple[nn.Module, Iterator[Tensor]]:
    """A network and its losses: targets of another network, and noise."""
    return _regression(seed, steps, 0.0, 1.0)


def _regression(
    seed: int, steps: int, high: float, noisy: float
) -> tuple[nn.Module, Iterator[Tensor]]:
    torch.manual_seed(7)
    teacher = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4))
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 4))

    def losses() -> Iterator[Tensor]:
        generator = torch.Generator().manual_seed(seed)
        for step in range(steps):
            x = torch.randn(64, 16, generator=generator)
            away = noisy * torch.randn(64, 4, generator=generator)
            away += high if step < HIGH_STEPS else 0.0
            yield F.mse_loss(net(x), teacher(x).detach() + away)

    return net, losses()


def digits(seed: int, steps: int = STEPS) -> tuple[nn.Module, Iterator[Tensor]]:
    """A network and its losses on batches of images."""
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    images, labels = digit_images("train")

    def losses() -> Iterator[Tensor]:
        generator = torch.Generator().manual_seed(seed)
        for _ in range(steps):
            some = torch.randint(0, len(images), (64,), generator=generator)
            yield F.cross_entropy(net(images[some]), labels[some])

    return net, losses()


TRAININGS = {"jump": jump, "noise": noise, "digits": digits}


def adamw(net: nn.Module, moment: torch.dtype) -> torch.optim.AdamW:
    """Torch's AdamW with ``exp_avg_sq`` in a dtype, and all else in FP32."""
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3, weight_decay=0.0, foreach=False)
    for p in net.parameters():
        optimizer.state[p] = {
            "step": torch.tensor(0.0),
            "exp_avg": torch.zeros_like(p),
            "exp_avg_sq": torch.zeros_like(p, dtype=moment),
        }
    return optimizer


def train(
    name: str, seed: int, moment: torch.dtype, run: Path | None = None, steps: int = STEPS
) -> dict[str, Any]:
    """Train, recorded if a folder is given: the loss at the end, and what the audit found."""
    net, losses = TRAININGS[name](seed, steps)
    optimizer = adamw(net, moment)
    recorder = None if run is None else mpdiag.record(net, optimizer, run, operations=0).start()
    last = []
    for loss in losses:
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        last = [*last[1 - LAST :], float(loss.detach())]
    row: dict[str, Any] = {"loss": statistics.fmean(last)}
    if recorder is not None:
        recorder.close()
        found = mpdiag.audit(run)
        row["audit"] = [f.message for f in found.findings if f.code == "precision-stuck-state"]
        row["state over FP32's"] = [shadow.median for shadow in found.facts.shadows]
    if name == "digits":
        images, labels = digit_images("val")
        with torch.no_grad():
            row["held out"] = float(F.cross_entropy(net(images), labels))
    return row


def main() -> None:
    """Train all and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    table: dict[str, list[dict[str, Any]]] = {}
    for name in TRAININGS:
        table[name] = []
        for seed in range(SEEDS):
            with tempfile.TemporaryDirectory() as folder:
                half = train(name, seed, torch.bfloat16, Path(folder) / "run")
            full = train(name, seed, torch.float32)
            ratio = half["loss"] / full["loss"]
            table[name].append({"seed": seed, "fp32": full, "bf16": half, "ratio": ratio})
            print(
                f"{name} seed {seed}: FP32 {full['loss']:.4g}, BF16 {half['loss']:.4g} ({ratio:.2f}×)"
            )
            print(*half["audit"], sep="\n", flush=True)
    if options.json:
        document = {
            "date": date.today().isoformat(),
            "machine": f"{platform.machine()}, torch {torch.__version__}",
            "steps": STEPS,
            "trainings": table,
        }
        options.json.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
