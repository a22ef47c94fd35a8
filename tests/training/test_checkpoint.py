"""Killed at any step and resumed, training is bit for bit the uninterrupted one."""

from __future__ import annotations

import io
import signal
import textwrap

import pytest
import torch
from support import backoff, batch, network
from torch import nn

import mpdiag
from mpdiag.errors import StateMismatch, UsageError

STEPS = 6


def build(level, plan=None):
    torch.manual_seed(0)
    body = network()
    model = nn.Sequential(body, nn.Dropout(0.2))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    return model, mpdiag.MixedPrecision(
        model, optimizer, plan or backoff(64.0, growth_interval=2), level=level
    )


def advance(model, mp, first, last):
    for step in range(first, last):
        x, y = batch(step)
        with mp.autocast():
            loss = nn.functional.cross_entropy(model(x), y) * (float("nan") if step == 2 else 1.0)
        mp.step(loss, clip_norm=1.0)


def final(model, mp):
    state = mp.state_dict()
    return [*state["models"][0].values(), *state["masters"][0].values()], mp.loss_scaler


@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
@pytest.mark.parametrize("stop", range(1, STEPS))
def test_resumed_at_any_step_training_is_bit_identical(level, stop):
    model, mp = build(level)
    advance(model, mp, 0, STEPS)
    whole, scaler = final(model, mp)

    model, mp = build(level)
    advance(model, mp, 0, stop)
    file = io.BytesIO()
    torch.save(mp.state_dict(), file)
    file.seek(0)
    mp.close()
    torch.manual_seed(99)
    model, mp = build(level)
    mp.load_state_dict(torch.load(file, weights_only=True))  # plain values and tensors only
    advance(model, mp, stop, STEPS)
    resumed, resumed_scaler = final(model, mp)
    assert resumed_scaler == scaler
    assert all(torch.equal(a, b) for a, b in zip(whole, resumed, strict=True))


def test_a_state_in_the_middle_of_an_accumulation_is_refused():
    model, mp = build("O1")
    x, y = batch()
    with mp.autocast():
        loss = nn.functional.cross_entropy(model(x), y)
    mp.backward(loss)
    with pytest.raises(UsageError, match="accumulation"):
        mp.state_dict()
    mp.step()
    mp.state_dict()


def test_a_damaged_state_is_refused_in_a_sentence():
    _, mp = build("O1")
    state = mp.state_dict()
    with pytest.raises(StateMismatch, match="unknown here"):
        mp.load_state_dict({**state, "scaler": {"method": "mystery"}})
    with pytest.raises(StateMismatch, match="cannot be read"):
        mp.load_state_dict({**state, "scaler": {"method": "backoff", "init_scale": -1.0}})
    with pytest.raises(StateMismatch, match="2 models"):
        mp.load_state_dict({**state, "models": state["models"] * 2})


SCRIPT = """
import os, signal, sys, torch
sys.path.insert(0, {tests!r})
from support import backoff, batch, network
from torch import nn
import mpdiag
torch.set_num_threads(1)
folder, kill_at = sys.argv[1], int(sys.argv[2])
model = network()
optimizer = torch.optim.Adam(model.parameters(), 1e-2)
mp = mpdiag.MixedPrecision(model, optimizer, backoff(64.0, growth_interval=2), level="O2")
path = os.path.join(folder, "state.pt")
if os.path.exists(path):
    mp.load_state_dict(torch.load(path, weights_only=True))
while mp.steps < 6:
    x, y = batch(mp.steps)
    with mp.autocast():
        loss = nn.functional.cross_entropy(model(x), y)
    mp.step(loss)
    torch.save(mp.state_dict(), path + ".new")
    os.replace(path + ".new", path)
    if mp.steps == kill_at:
        os.kill(os.getpid(), signal.SIGKILL)
torch.save(mp.fp32_state_dict(), os.path.join(folder, "final.pt"))
"""


def test_a_process_killed_and_started_again_ends_with_the_same_weights(tmp_path, root, fork_server):
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(SCRIPT).format(tests=str(root / "tests")))

    def run(folder, kill_at):
        folder.mkdir(exist_ok=True)
        return fork_server("python", script, folder, kill_at, cwd=tmp_path).code

    assert run(tmp_path / "whole", 0) == 0
    assert run(tmp_path / "killed", 3) == -signal.SIGKILL
    assert run(tmp_path / "killed", 0) == 0
    whole, killed = (
        torch.load(tmp_path / n / "final.pt", weights_only=True) for n in ("whole", "killed")
    )
    assert all(torch.equal(whole[n], killed[n]) for n in whole)
