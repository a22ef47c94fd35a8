"""A skipped step, written down and run again elsewhere."""

from __future__ import annotations

import json

import pytest
import torch
from support import backoff
from torch import nn
from typer.testing import CliRunner

import mpdiag
from mpdiag.cli import app
from mpdiag.errors import DamagedCapsule, UsageError
from mpdiag.training.capsule import load_capsule
from mpdiag.training.capsule_replay import replay_capsule

CODE = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(8, 8)
        self.drop = nn.Dropout(0.5)
        self.head = nn.Linear(8, 2)

    def forward(self, x):
        h = self.drop(self.body(x))
        h = h * h
        return self.head(h)

def build():
    return Net(), lambda model, batch: model(batch["x"]).pow(2).mean()
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    (tmp_path / "capsule_model.py").write_text(CODE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    import importlib

    return importlib.import_module("capsule_model")


def skipped(module, folder, *, gain=500.0, scale=1.0, steps=1):
    torch.manual_seed(0)
    model, loss_of = module.build()
    batch = {"x": torch.randn(4, 8) * gain, "note": [1, None]}
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    results = []
    with mpdiag.MixedPrecision(model, optimizer, backoff(scale), run=folder) as mp:
        for _ in range(steps):

            def forward(mp=mp):
                with mp.autocast():
                    return loss_of(model, batch)

            results.append(mp.step(forward(), batch=batch, replay=forward))
    return model, batch, results


def test_a_step_that_overflowed_forward_is_told_on_another_model(module, tmp_path):
    model, batch, (result,) = skipped(module, "run")
    assert result.skipped
    capsule = load_capsule("run/capsules/step000000")
    assert torch.equal(capsule.batch["x"], batch["x"])
    assert capsule.batch["note"] == [1, None]
    assert all(torch.equal(capsule.tensors[f"model.{n}"], p) for n, p in model.named_parameters())
    replayed = replay_capsule(capsule, module.build)
    first = replayed.first
    assert (first.op, first.kind, first.phase, first.module) == ("mul", "Inf", "forward", "")
    assert first.code == "h = h * h"
    assert first.dtype == "float16"
    assert first.inputs[0].highest > 256
    # Dropout drew the same mask: the random state is the step's own.
    assert (
        replayed.first == replay_capsule("run/capsules/step000000/capsule.json", module.build).first
    )


def test_a_scale_too_large_names_the_layer_that_overflowed_first(module):
    _, _, results = skipped(module, "run", gain=1.0, scale=2.0**24, steps=2)
    assert results[0].operation is None  # a single skip is the scaler's daily bread
    operation = results[1].operation
    assert operation.phase == "backward"
    assert operation.module is None  # the loss: its gradient is cast to what head put out
    assert ".pow(2)" in operation.code
    assert results[1].non_finite[0].name.startswith("head")
    assert str(operation) in results[1].reason
    replayed = replay_capsule("run/capsules/step000000", module.build)
    assert (replayed.first.phase, replayed.first.code) == ("backward", operation.code)


def test_the_command(module):
    skipped(module, "run")
    run = CliRunner().invoke(
        app, ["why", "run/capsules/step000000", "--model", "capsule_model:build"]
    )
    assert run.exit_code == 0, run.output
    assert "Inf first in mul" in " ".join(run.output.split())
    arguments = ["why", "run/capsules/step000000", "--model", "capsule_model:build", "--json"]
    document = json.loads(CliRunner().invoke(app, arguments).stdout)
    assert document["first"]["code"] == "h = h * h"


def test_no_code_is_run_that_was_not_named(module):
    skipped(module, "run")
    run = CliRunner().invoke(app, ["why", "run/capsules/step000000"])
    assert run.exit_code == 2
    assert "capsule_model.Net" in run.output
    run = CliRunner().invoke(app, ["why", "run/capsules/step000000", "--model", "nowhere:f"])
    assert run.exit_code == 2


def test_a_damaged_capsule_is_one_sentence(module, tmp_path):
    skipped(module, "run")
    folder = tmp_path / "run" / "capsules" / "step000000"
    (folder / "tensors.safetensors").write_bytes(b"nothing")
    with pytest.raises(DamagedCapsule, match="no readable capsule"):
        load_capsule(folder)
    assert CliRunner().invoke(app, ["why", str(folder)]).exit_code == 3


def test_another_model_is_refused(module):
    skipped(module, "run")
    with pytest.raises(DamagedCapsule, match=r"capsule_model\.Net"):
        replay_capsule(
            "run/capsules/step000000", lambda: (nn.Linear(3, 3), lambda m, b: m(b["x"]).sum())
        )
    with pytest.raises(UsageError):
        replay_capsule("run/capsules/step000000", lambda: 3)
