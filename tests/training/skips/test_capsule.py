"""A skipped step, written down and run again elsewhere."""

import json
import math
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import calls
import pytest
import torch
from safetensors.torch import load_file, save_file
from schemas import assert_described
from script_processes import scripts
from support import backoff, planned, wrapped
from torch import nn

import mpdiag
import mpdiag.runs.training_log
from mpdiag.emulation.random_bits import CounterGenerator
from mpdiag.errors import DamagedCapsule, UsageError
from mpdiag.training.skips.capsule import load_capsule
from mpdiag.training.skips.capsule_replay import replay_capsule

CAPSULE = "run/capsules/step000000"


@pytest.fixture
def module(tmp_path, monkeypatch):
    (tmp_path / "capsule_model.py").write_text(scripts(__file__)["code"])
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    import importlib

    return importlib.import_module("capsule_model")


def skipped(module, folder, *, gain=500.0, scale=1.0, steps=1, batch=None):
    torch.manual_seed(0)
    model, loss_of = module.build()
    batch = batch or {"x": torch.randn(4, 8) * gain, "note": [1, None]}
    results = []
    with wrapped(model, backoff(scale), run=folder) as mp:
        for _ in range(steps):

            def forward(mp=mp):
                with mp.autocast():
                    return loss_of(model, batch)

            results.append(mp.step(forward(), batch=batch, replay=forward))
    return model, batch, results


def test_a_step_that_overflowed_forward_is_told_on_another_model(module, tmp_path):
    model, batch, (result,) = skipped(module, "run")
    assert result.skipped
    capsule = load_capsule(CAPSULE)
    assert torch.equal(capsule.batch["x"], batch["x"])
    assert capsule.batch["note"] == [1, None]
    assert all(torch.equal(capsule.tensors[f"model.{n}"], p) for n, p in model.named_parameters())
    replayed = replay_capsule(capsule, module.build)
    first = replayed.first
    assert (first.op, first.kind, first.phase, first.module) == ("mul", "Inf", "forward", "")
    assert first.code == "h = h * h"
    assert first.dtype == "float16"
    assert first.inputs[0].highest > 256
    assert (
        replayed.first == replay_capsule("run/capsules/step000000/capsule.json", module.build).first
    )


def test_dropout_draws_the_same_again(module):
    """In the trials that look for the cause, and in the capsule: the random state is the step's."""
    torch.manual_seed(0)
    model, loss_of = module.build()
    batch, losses = {"x": torch.randn(4, 8)}, []
    with wrapped(model, backoff(2.0**24), run="run") as mp:

        def forward():
            with mp.autocast():
                losses.append(loss_of(model, batch))
            return losses[-1]

        for _ in range(2):
            result = mp.step(forward(), batch=batch, replay=forward)
            assert result.skipped
    first, mixed, _plain, second, again, _, located = (float(loss.detach()) for loss in losses)
    assert first == mixed != second == again == located
    assert replay_capsule(CAPSULE, module.build).loss == first
    assert replay_capsule("run/capsules/step000001", module.build).loss == second


def test_a_step_in_a_block_format_draws_the_same_bits_again(tmp_path, monkeypatch):
    drawn, bits, model = [], CounterGenerator.bits, nn.Linear(16, 16)
    monkeypatch.setattr(CounterGenerator, "bits", lambda *x: drawn.append(bits(*x)) or drawn[-1])
    with wrapped(model, planned("nvfp4", ("", "weight", "linear")), run=tmp_path) as mp:
        for x in (1.0, math.inf):
            drawn.clear()
            batch = torch.full((16, 16), x)
            with mp.autocast():
                loss = model(batch).sum()
            mp.step(loss, batch=batch)
    first = list(drawn)
    replay_capsule(tmp_path / "capsules/step000001", lambda: (model, lambda m, x: m(x).sum()))
    assert len(drawn) > len(first)
    assert all(map(torch.equal, drawn[len(first) :], first))


@pytest.mark.parametrize("place", ["run", "memory://capsules/run"])
def test_a_batch_of_any_numbers_in_any_place(module, place):
    batch = {"x": torch.full((4, 8), 1e4), "limits": (float("inf"), -float("inf")), "n": 3}
    _, _, (result,) = skipped(module, place, batch=batch)
    assert result.skipped
    found = load_capsule(f"{place}/capsules/step000000").batch
    assert torch.equal(found.pop("x"), batch.pop("x"))
    assert found == batch


def test_what_no_capsule_can_hold_is_refused_before_a_step_is_skipped(module):
    model, loss_of = module.build()
    x = torch.randn(4, 8)

    def step(batch, **options):
        with wrapped(model, backoff(1.0), **options) as mp:
            with mp.autocast():
                loss = loss_of(model, {"x": x})
            mp.step(loss, batch=batch)

    with pytest.raises(UsageError, match="run="):
        step({"x": x})
    with pytest.raises(UsageError, match="not object"):
        step({"x": object()}, run="run")
    step({"x": x}, run="run2")


def test_a_full_disk_does_not_end_training(module, monkeypatch):
    fail = Mock(side_effect=OSError(28, "No space left on device"))
    monkeypatch.setattr("mpdiag.training.skips.capsule.save_capsule", fail)
    with pytest.warns(RuntimeWarning, match=r"cannot write the capsule .*No space left"):
        _, _, results = skipped(module, "run")
    assert results[0].skipped
    assert [s.skipped for s in mpdiag.runs.training_log.read_log("run").steps] == [True]


def test_a_scale_too_large_names_the_layer_that_overflowed_first(module):
    _, _, results = skipped(module, "run", gain=1.0, scale=2.0**24, steps=2)
    assert results[0].operation is None  # a single skip is the scaler's daily bread
    operation = results[1].operation
    assert operation.phase == "backward"
    assert operation.module is None  # the loss: its gradient is cast to what head put out
    assert ".pow(2)" in operation.code
    assert results[1].non_finite[0].name.startswith("head")
    assert str(operation) in results[1].reason
    replayed = replay_capsule(CAPSULE, module.build)
    assert (replayed.first.phase, replayed.first.code) == ("backward", operation.code)


def test_the_command_runs_the_code_that_was_named(module):
    skipped(module, "run")
    named = ("why", CAPSULE, "--model")
    done = calls.run(*named, "capsule_model:build")
    assert done.exit_code == 0, done.output
    assert "Inf first in mul" in " ".join(done.output.split())
    document = json.loads(calls.run(*named, "capsule_model:build", "--json").stdout)
    assert_described("why", document)
    assert document["first"]["code"] == "h = h * h"
    done = calls.run("why", CAPSULE)
    assert done.exit_code == 2
    assert "capsule_model.Net" in done.output
    assert calls.run(*named, "nowhere:f").exit_code == 2


FIELDS = ("plan", "training", "level", "backend", "model", "reason")
UNREADABLE = [
    *(("capsule.json", {field: None}) for field in FIELDS),
    *(("capsule.json", {field: 7}) for field in FIELDS[2:]),
    ("capsule.json", {"weights": "../step000000"}),
    ("tensors.safetensors", b"nothing"),
]
UNUSABLE = [
    ("capsule.json", {"level": "O9"}),
    ("capsule.json", {"scale": -1.0}),
    ("capsule.json", {"plan": {}}),
    ("capsule.json", {"plan": {"schema_version": 1, "a": 2}}),
    ("tensors.safetensors", {"random.cpu": None}),
    ("tensors.safetensors", {"random.cpu": torch.zeros(3, dtype=torch.uint8)}),
    ("tensors.safetensors", {"random.cpu": torch.zeros(5056)}),
]


@pytest.mark.parametrize(("name", "change"), [*UNREADABLE, *UNUSABLE])
def test_a_damaged_capsule_is_one_sentence(module, name, change):
    """What is None is taken out."""
    skipped(module, "run")
    path = Path(CAPSULE) / name
    if isinstance(change, bytes):
        path.write_bytes(change)
    else:
        whole = load_file(path) if name.startswith("tensors") else json.loads(path.read_text())
        changed = {k: v for k, v in (whole | change).items() if v is not None or k not in change}
        if name.startswith("tensors"):
            save_file(changed, path)
        else:
            path.write_text(json.dumps(changed))
    if (name, change) in UNREADABLE[:-1] or isinstance(change, bytes):
        with pytest.raises(DamagedCapsule, match="not a readable capsule"):
            load_capsule(CAPSULE)
        assert calls.run("why", CAPSULE).exit_code == 3
    else:
        with pytest.raises(DamagedCapsule, match=CAPSULE):
            replay_capsule(CAPSULE, module.build)


def test_another_model_is_refused(module):
    skipped(module, "run")
    with pytest.raises(DamagedCapsule, match=r"capsule_model\.Net"):
        replay_capsule(CAPSULE, lambda: (nn.Linear(3, 3), lambda m, b: m(b["x"]).sum()))
    with pytest.raises(UsageError):
        replay_capsule(CAPSULE, lambda: 3)


def test_a_stage_of_a_pipeline_is_replayed_with_its_own_weights(module):
    model, batch, _ = skipped(module, "run")
    with wrapped(model, backoff(1.0), run="stage") as mp:
        with mp.autocast():
            result = mp.step(module.build()[1](model, batch))
        mp._capsules.write(batch, replace(result, rank=1))
    stage = Path(f"{CAPSULE}-rank00001")
    Path("stage/capsules/step000000-rank00001").rename(stage)
    assert "weights" not in load_capsule(stage).document
    small = load_file(f"{CAPSULE}/tensors.safetensors")
    save_file({**small, "batch.0": small["batch.0"] * 0}, f"{CAPSULE}/tensors.safetensors")
    assert replay_capsule(CAPSULE, module.build).first.rank == 1
    assert replay_capsule(stage, module.build).first is not None
    other = {n.replace("model.", "model.stage."): t for n, t in small.items()}
    save_file(other, stage / "tensors.safetensors")
    assert replay_capsule(CAPSULE, module.build).first is None
