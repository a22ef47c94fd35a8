"""How many files and functions of the package does one act of a user enter?

    python studies/entered.py

Each act runs once to warm up, and is then watched by ``sys.setprofile``: distinct files of ``mpdiag/``
and distinct functions in them that this thread calls. Figures in ``studies/results/entered.json``.
"""

from __future__ import annotations

import functools
import json
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from typer.testing import CliRunner

import mpdiag
from mpdiag.cli import app

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = str(Path(mpdiag.__file__).parent)
RESULTS = ROOT / "studies" / "results" / "entered.json"
SAMPLE = ROOT / "sample_runs"


def entered(act: Callable[[], object]) -> tuple[int, int]:
    """Distinct files and functions of the package that an act enters."""
    functions: set[tuple[str, int]] = set()

    def note(frame: FrameType, event: str, _argument: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(PACKAGE):
            functions.add((code.co_filename, code.co_firstlineno))

    sys.setprofile(note)
    try:
        act()
    finally:
        sys.setprofile(None)
    return len({file for file, _ in functions}), len(functions)


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))


def a_trained_step(level: str) -> tuple[int, int]:
    """``mp.step(loss)`` in BF16; the step after the 20th, for the first ones look more closely."""
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    fixed = mpdiag.PrecisionOverrides(dtype="bf16", loss_scale=1.0)
    plan = mpdiag.PrecisionPlan()
    with mpdiag.MixedPrecision(net, optimizer, plan, level=level, overrides=fixed) as mp:
        for i in range(30):
            with mp.autocast():
                loss = net(torch.ones(4, 8)).square().mean()
            if i < 29:
                mp.step(loss)
        return entered(lambda: mp.step(loss))


def a_recorded_step() -> tuple[int, int]:
    """Forward pass, backward pass and the optimizer's step of a small network."""
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), 0.1)

    def step() -> None:
        optimizer.zero_grad()
        net(torch.ones(4, 8)).square().mean().backward()
        optimizer.step()

    with (
        tempfile.TemporaryDirectory() as folder,
        mpdiag.record(net, optimizer, Path(folder) / "run", every=1, operations=0),
    ):
        for _ in range(5):
            step()
        return entered(step)


def a_heat_map() -> tuple[int, int]:
    """What a notebook shows of an analysis: the layers as a heat map, findings, the plan."""
    analysis = mpdiag.analyze(SAMPLE / "ssd")
    act = analysis._repr_html_
    act()
    return entered(act)


def a_trace() -> tuple[int, int]:
    """``mpdiag profile TRACE --json``, of a trace of torch.profiler."""
    words = ["profile", str(SAMPLE / "gpu-sample" / "trace.json.gz"), "--json"]
    act = functools.partial(CliRunner().invoke, app, words)
    assert act().exit_code == 0
    return entered(act)


ACTS: dict[str, Callable[[], tuple[int, int]]] = {
    "mp.step(loss) at O1": lambda: a_trained_step("O1"),
    "mp.step(loss) at O2": lambda: a_trained_step("O2"),
    "a recorded step": a_recorded_step,
    "an analysis in a notebook": a_heat_map,
    "a trace": a_trace,
}


def main() -> None:
    counts = {name: act() for name, act in ACTS.items()}
    for name, (files, functions) in counts.items():
        print(f"{name:26} {files:3} files  {functions:4} functions")
    RESULTS.write_text(json.dumps(counts, indent=1) + "\n")


if __name__ == "__main__":
    main()
