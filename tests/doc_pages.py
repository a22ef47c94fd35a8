"""The pages of the documentation, and what their code blocks leave behind."""

import importlib.util
import re
import shlex
import warnings
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
import torch
from sybil import Sybil
from sybil.parsers.markdown import PythonCodeBlockParser
from torch import nn

import mpdiag

ROOT = Path(__file__).resolve().parents[1]
PAGES = (
    "README.md",
    "CONTRIBUTING.md",
    *sorted(str(p.relative_to(ROOT)) for p in (ROOT / "docs").rglob("*.md")),
)
SYBIL = Sybil([PythonCodeBlockParser()])


@dataclass(frozen=True)
class Ran:
    """What a page's Python blocks left behind: their names, their folder, what they printed."""

    names: dict[str, Any]
    folder: Path
    printed: list[tuple[Any, ...]]


def script(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(f"docs_{name}", ROOT / "docs" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def text(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def blocks(page: str, language: str) -> list[str]:
    found = re.findall(r"^```(\w*)\n(.*?)^```", text(page), flags=re.MULTILINE | re.DOTALL)
    return [code for name, code in found if name == language]


@cache
def ran(page: str) -> Ran:
    """Run a page's Python blocks, from the first to the last, once."""
    folder = Path(mkdtemp(prefix="mpdiag-docs-"))
    names, printed = training()
    recorded = 'mpdiag.record(model, optimizer, "runs/mine")' in "".join(blocks(page, "python"))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            if not recorded:
                with mpdiag.record(names["model"], names["optimizer"], "runs/mine"):
                    names["train"]()
                names["plan"] = mpdiag.analyze("runs/mine").plan
            names["mpdiag"] = mpdiag
            document = SYBIL.parse(ROOT / page)
            document.namespace.update(names)
            for example in document.examples():
                example.evaluate()
            trainer = document.namespace.get("mp")
            if trainer is not None:
                trainer.close()
    return Ran(document.namespace, folder, printed)


def training() -> tuple[dict[str, Any], list[tuple[Any, ...]]]:
    """A small training under the names that the blocks use."""
    built = []

    def build():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 14), nn.Tanh(), nn.Linear(14, 2))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        built.append(model)
        return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2)

    model, optimizer, scheduler = build()
    pushes = torch.logspace(-34, -20, 128, base=2).view(64, 2)  # around FP16's lower end

    def train(model=model, optimizer=optimizer, scheduler=None):
        for _ in range(5):
            optimizer.zero_grad()
            (model(torch.randn(64, 8)) * pushes).sum().backward()
            optimizer.step()

    printed: list[tuple[Any, ...]] = []
    batches = [(torch.randn(64, 8), torch.randn(64, 2)) for _ in range(4)]
    return {
        "model": model,
        "optimizer": optimizer,
        "build": build,
        "built": built,
        "train": train,
        "loader": batches,
        "x": batches[0][0],
        "y": batches[0][1],
        "loss_fn": lambda output, _: (output * pushes).sum(),  # as recorded
        "scheduler": scheduler,
        "print": lambda *words: printed.append(words),
    }, printed


def shell_lines(page: str) -> list[str]:
    """The commands of a page's shell blocks, and of the steps of a CI job."""
    lines = [line for block in blocks(page, "shell") for line in block.splitlines()]
    steps = [line for block in blocks(page, "yaml") for line in block.splitlines()]
    lines += [line.partition("run:")[2] for line in steps if "run:" in line]
    return [part.strip() for line in lines for part in line.split("&&") if part.strip()]


def inline_commands(page: str) -> list[str]:
    """Commands that stand in a sentence."""
    prose = re.sub(r"^```.*?^```", "", text(page), flags=re.MULTILINE | re.DOTALL)
    spans = [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", prose)]
    return [s for s in spans if s.startswith(("mpdiag ", "python ", "make ")) and "=" not in s]


def words(line: str) -> list[str]:
    return shlex.split(line.partition(" >")[0], comments=True)
