"""The same trainings on two machines, and what ``mpdiag diff`` says of their recordings.

    python studies/two_machines.py record FOLDER [--device cuda] [--only REGEX]
    python studies/two_machines.py judge HERE THERE [--json FILE]

Seven models train two steps in FP32, TF32, BF16 and FP16, sound; and in FP32 and BF16 with a fault
drawn by chance (see ``diff_faults``). Weights and batches are drawn on the CPU, so that both machines
start alike; only the folders travel. ``judge`` compares each of THERE with HERE's sound FP32: the clean
ones should agree, and in the others the module that holds the fault should be named.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from dataclasses import asdict
from pathlib import Path

import torch
import torch.nn.functional as F

sys.path.extend(str(Path(__file__).resolve().parents[1] / name) for name in ("", "benchmarks"))

import diff_faults
from diff_faults import Fault, Row, drawn, judged, plant
from gpu_sections.models import Cnn, Gpt

import mpdiag

FORMATS = ("fp32", "tf32", "bf16", "fp16")
FAULTY = ("fp32", "bf16")
SEED = 1_000_000
LARGER = {
    "wide gpt": (lambda: Gpt(2000, 64, 256, 4, 4), (4, 64), 2000),
    "deep cnn": (lambda: Cnn(16, (1, 1, 1, 1), 100), (8, 3, 64, 64), 100),
}
"""A model, its batch's shape, its classes: larger than those of ``diff_faults``."""
MODELS = (*diff_faults.MODELS, *LARGER)


def model_of(name: str) -> torch.nn.Module:
    """A model with the same weights each time, on the CPU."""
    torch.manual_seed(SEED)
    return LARGER[name][0]() if name in LARGER else diff_faults.MODELS[name](False)


def batch_of(name: str, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The batch of a step, on the CPU."""
    if name not in LARGER:
        return diff_faults.data(name, step, SEED)
    _, shape, classes = LARGER[name]
    draw = torch.Generator().manual_seed(SEED + step)
    if len(shape) == 2:
        words = torch.randint(classes, (shape[0], shape[1] + 1), generator=draw)
        return words[:, :-1], words[:, 1:]
    return torch.randn(shape, generator=draw), torch.randint(classes, shape[:1], generator=draw)


def trainings() -> list[tuple[str, str, Fault | None]]:
    """Model, format and fault of each; the sound ones first."""
    sound = [(name, form, None) for name in MODELS for form in FORMATS]
    return sound + [
        (name, form, drawn(SEED, name, form)) for name in diff_faults.MODELS for form in FAULTY
    ]


def folder_of(name: str, form: str, fault: Fault | None) -> str:
    """Where a training is recorded."""
    return "-".join((name.replace(" ", "_"), form, *(["fault"] if fault else [])))


def train(name: str, form: str, fault: Fault | None, device: str, folder: Path) -> None:
    """Two steps, recorded with a trace."""
    for backend in (torch.backends.cuda.matmul, torch.backends.cudnn):
        backend.allow_tf32 = form == "tf32"
    model = model_of(name)
    plant(model, fault)
    model.to(device)
    held = [p for p in model.parameters() if not hasattr(p, "stale")]
    optimizer = torch.optim.AdamW(held, 1e-3)
    low = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(form)
    scale = diff_faults.SCALE
    batches = [batch_of(name, step) for step in range(2)]
    with (
        torch.device(device),  # what a model makes of its own
        mpdiag.record(model, optimizer, folder, trace=True, max_steps=2, operations=1) as recorder,
    ):
        for batch in batches:
            x, y = (t.to(device) for t in batch)
            with torch.autocast(device, low or torch.bfloat16, enabled=low is not None):
                loss = F.cross_entropy(model(x).flatten(0, -2), y.flatten())
            if fault is not None and fault.module == "(loss)":
                loss = loss * diff_faults.OUTSIDE[fault.name]
            optimizer.zero_grad()
            (loss * scale).backward()
            for p in model.parameters():
                if p.grad is not None:
                    p.grad /= scale
            optimizer.step()
    if recorder.failures:
        print(f"{folder.name}: {recorder.failures}", flush=True)


def record(folder: Path, device: str, only: str) -> None:
    """Record every training with this in its folder's name into FOLDER."""
    torch.set_num_threads(1)
    for name, form, fault in trainings():
        began = time.monotonic()
        place = folder / folder_of(name, form, fault)
        if not re.search(only, place.name):
            continue
        try:
            train(name, form, fault, device, place)
        except Exception as error:  # noqa: BLE001 - the others are wanted, too
            print(f"{place.name}: {type(error).__name__}: {error}", flush=True)
        print(f"{place.name} {time.monotonic() - began:.1f} s", flush=True)


def judge(here: Path, there: Path, json_file: Path | None) -> None:
    """Compare, print a line for each pair, and sum up."""
    rows = []
    for name, form, fault in trainings():
        other = there / folder_of(name, form, fault)
        if not other.exists():
            print("none", other.name)
            continue
        row = Row(
            "two machines", SEED, name, form, *((fault.name, fault.module) if fault else ("", ""))
        )
        found = judged(row, fault, here / folder_of(name, "fp32", None), other)
        rows.append(found)
        print("ok  " if found.right else "MISS", found, flush=True)
    faults, clean = [r for r in rows if r.fault], [r for r in rows if not r.fault]
    print(
        f"named {sum(r.right for r in faults)} of {len(faults)}, "
        f"clean pairs that agree {sum(r.right for r in clean)} of {len(clean)}, "
        f"largest ratio {max((r.largest or 0.0 for r in clean), default=0.0):.2g}"
    )
    if json_file:
        json_file.write_text(json.dumps([asdict(r) for r in rows], indent=1) + "\n")


def main() -> None:
    """Record, or judge."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("work", choices=("record", "judge"))
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--only", default="", help="a regular expression")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.work == "record":
        record(options.folders[0], options.device, options.only)
    else:
        judge(options.folders[0], options.folders[1], options.json)


if __name__ == "__main__":
    main()
