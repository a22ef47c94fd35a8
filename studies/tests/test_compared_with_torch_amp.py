"""The documentation's table against torch.amp: each answer is what torch.amp and mpdiag do here."""

from __future__ import annotations

import math
import warnings

import pytest
import torch
from conformance.behaviours import forward, loops, loss_scale, steppers
from conformance.behaviours.everything import CHAPTERS
from conformance.outcomes import outcome_of
from conformance.subjects.ours import Ours
from support import backoff, constant
from torch import nn
from torch_amp import TorchAmp

import mpdiag
from mpdiag.errors import TrainingDiverged

INF, NAN = math.inf, math.nan


def torchs(model, scale=64.0, lr=0.1, **settings):
    scaler = torch.amp.GradScaler("cpu", init_scale=scale, **settings)
    return torch.optim.SGD(model.parameters(), lr), scaler


def ours(model, plan=None, lr=0.1, **options):
    optimizer = torch.optim.SGD(model.parameters(), lr)
    return optimizer, mpdiag.MixedPrecision(model, optimizer, plan or backoff(64.0), **options)


def take(optimizer, scaler, loss):
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()


def holds(check):
    """What torch.amp and mpdiag do about a behaviour of the conformance table."""
    (behaviour,) = [b for c in CHAPTERS for b in c.behaviours if b.check is check]
    return lambda: [outcome_of(behaviour, s).kind == "holds" for s in (TorchAmp(), Ours("O1"))]


def finite(model):
    return all(bool(torch.isfinite(t).all()) for t in model.state_dict().values())


def fp16_loss(shape):
    loss = torch.full(shape, 2.0, dtype=torch.float16)
    model = nn.Linear(1, 1)
    _, theirs = torchs(model, 2.0**16)
    _, mp = ours(model, constant(2.0**16))
    return [bool(torch.isfinite(scale(loss)).all()) for scale in (theirs.scale, mp.scale)]


def says_what():
    model = nn.Linear(2, 1)
    x = torch.full((1, 2), NAN)
    optimizer, scaler = torchs(model)
    scaler.scale(model(x).sum()).backward()
    said = scaler.step(optimizer)
    _, mp = ours(nn.Linear(2, 1))
    result = mp.step(mp.context.wrapped.models[0](x).sum())
    return [said is not None, "NaN in the forward pass" in result.reason]


def tells_scale_from_model():
    _, mp = ours(model := nn.Linear(2, 1))

    def loss_of():
        return model(torch.full((1, 2), NAN)).sum()

    told = mp.step(loss_of(), replay=loss_of).cause == "model"
    return [any("cause" in n or "replay" in n for n in dir(torch.amp.GradScaler)), told]


def stops():
    model = nn.Linear(2, 1)
    x = torch.full((1, 2), NAN)
    optimizer, scaler = torchs(model)
    for _ in range(300):
        take(optimizer, scaler, model(x).sum())  # the scale ends at 0
    _, mp = ours(model)
    with pytest.raises(TrainingDiverged):
        while True:
            mp.step(model(x).sum())
    return [scaler.get_scale() > 0, True]


def constant_scales_check():
    answers = []
    for make in (torchs, ours):
        model = nn.Linear(2, 1)
        optimizer, scaler = make(model) if make is torchs else ours(model, constant(64.0))
        scaler = scaler if make is torchs else scaler.scaler()
        scaler.scale(model(torch.full((1, 2), INF)).sum()).backward()
        scaler.step(optimizer)
        scaler.update(64.0) if make is torchs else scaler.update()
        answers.append(finite(model) and scaler.get_scale() == 64.0)
    return answers


def same_operations_everywhere():
    """CUDA's lists keep softmax in FP32."""
    x = torch.ones(2, 2, dtype=torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        theirs = torch.softmax(x, 0).dtype
    _, mp = ours(nn.Linear(1, 1), overrides=mpdiag.PrecisionOverrides(dtype="bf16"))
    with mp.autocast():
        return [dtype == torch.float32 for dtype in (theirs, torch.softmax(x, 0).dtype)]


RAN_ON_TWO_RANKS = "tests/training/test_distributed.py"
ROWS = {
    "a skipped step leaves batch norm's running statistics as they were": (
        holds(forward.batch_norm_after_a_skip)
    ),
    "what becomes NaN after `unscale_` (clipping, a hook) is not stepped": (
        holds(loss_scale.nan_after_unscale_is_not_stepped)
    ),
    "a change of scale within an accumulation weighs every part alike": (
        holds(loops.a_change_of_scale_within_an_accumulation)
    ),
    "an FP16 loss of no dimension does not overflow at a large scale": lambda: fp16_loss(()),
    "an FP16 loss of one dimension or more does not, either": lambda: fp16_loss((1,)),
    "scales of 2^-128 and below do not make weights infinite": (
        holds(loss_scale.a_scale_that_falls_without_end)
    ),
    "weights are cast again when an optimizer steps inside autocast": (
        holds(forward.a_step_inside_the_context)
    ),
    "a skip says which parameter or layer, Inf or NaN, forward or backward, on which rank": says_what,
    "a replay tells a scale too large from a format too small from a model that diverges": (
        tells_scale_from_model
    ),
    "steps that no scale could save, or eight at one scale, stop with a diagnosis": stops,
    "constant scales check and skip": constant_scales_check,
    "infinity on one rank skips on all, with or without DDP": RAN_ON_TWO_RANKS,
    "a scheduler stepped after a skip does not warn": (holds(steppers.a_scheduler_after_a_skip)),
    "the same operations are cast on CPU and CUDA": same_operations_everywhere,
}


def documented(root):
    text = (root / "docs" / "training.md").read_text(encoding="utf-8")
    table = text.split("## Compared with torch.amp")[1].split("\n## ")[0]
    rows = [line.strip("| ").split(" | ") for line in table.splitlines() if line.startswith("| ")]
    return {row[0]: row[1:] for row in rows if row[0] != "behaviour"}


def test_every_row_is_run(root):
    assert list(documented(root)) == list(ROWS)


@pytest.mark.parametrize("row", [row for row, run in ROWS.items() if callable(run)])
def test_torch_amp_and_mpdiag_do_what_the_table_says(row, root):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs, own = ROWS[row]()
    told = ["yes" if answer else "no" for answer in (theirs, own)]
    assert documented(root)[row] == told
