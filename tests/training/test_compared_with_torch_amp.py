"""The documentation's table against torch.amp: each answer is what torch.amp and mpdiag do here."""

from __future__ import annotations

import math
import warnings

import pytest
import torch
from support import backoff, constant
from torch import nn

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


def finite(model):
    return all(bool(torch.isfinite(t).all()) for t in model.state_dict().values())


def batch_norm_stays():
    answers = []
    x = torch.full((4, 2), INF)
    for make in (torchs, ours):
        model = nn.BatchNorm1d(2)
        optimizer, scaler = make(model)
        if make is torchs:
            take(optimizer, scaler, model(x).sum())
        else:
            scaler.step(model(x).sum())
        answers.append(finite(model))
    return answers


def nan_after_unscale():
    answers = []
    for make in (torchs, ours):
        model = nn.Linear(2, 1)
        optimizer, scaler = make(model)
        scaler = scaler if make is torchs else scaler.scaler()
        scaler.scale(model(torch.ones(1, 2)).sum()).backward()
        scaler.unscale_(optimizer)
        model.weight.grad.fill_(NAN)
        scaler.step(optimizer)
        answers.append(finite(model))
    return answers


def accumulation_weighs_alike():
    answers = []
    for make in (torchs, ours):
        model = nn.Linear(1, 1, bias=False)
        optimizer, scaler = make(model)
        scaler = scaler if make is torchs else scaler.scaler()
        for _ in range(2):
            scaler.scale(model(torch.ones(1, 1)).sum()).backward()
            scaler.update(128.0)
        scaler.unscale_(optimizer)
        answers.append(model.weight.grad.item() == 2.0)
    return answers


def fp16_loss(shape):
    loss = torch.full(shape, 2.0, dtype=torch.float16)
    model = nn.Linear(1, 1)
    _, theirs = torchs(model, 2.0**16)
    _, mp = ours(model, constant(2.0**16))
    return [bool(torch.isfinite(scale(loss)).all()) for scale in (theirs.scale, mp.scale)]


def tiny_scale():
    answers = []
    model = nn.Linear(2, 1)
    take(*torchs(model, 2.0**-140), model(torch.ones(1, 2)).sum())
    answers.append(finite(model))
    model = nn.Linear(2, 1)
    _, mp = ours(model, overrides=mpdiag.PrecisionOverrides(loss_scale=2.0**-140))
    mp.step(model(torch.ones(1, 2)).sum())
    return [*answers, finite(model)]


def cast_anew():
    answers = []
    x = torch.ones(1, 2)
    for make in (torchs, ours):
        model = nn.Linear(2, 1)
        overrides = mpdiag.PrecisionOverrides(dtype="bf16")
        options = {"lr": 10.0} if make is torchs else {"lr": 10.0, "overrides": overrides}
        optimizer, scaler = make(model, **options)
        context = torch.autocast("cpu", torch.bfloat16) if make is torchs else scaler.autocast()
        with context:
            before = model(x).item()
            loss = model(x).float().sum()
            take(optimizer, scaler, loss) if make is torchs else scaler.step(loss)
            answers.append(model(x).item() != before)
    return answers


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


def scheduler_is_quiet():
    answers = []
    for make in (torchs, ours):
        model = nn.Linear(2, 1)
        optimizer, scaler = make(model)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        loss = model(torch.full((1, 2), INF)).sum()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            take(optimizer, scaler, loss) if make is torchs else scaler.step(loss)
            scheduler.step()
        answers.append(not caught)
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
    "a skipped step leaves batch norm's running statistics as they were": batch_norm_stays,
    "what becomes NaN after `unscale_` (clipping, a hook) is not stepped": nan_after_unscale,
    "a change of scale within an accumulation weighs every part alike": accumulation_weighs_alike,
    "an FP16 loss of no dimension does not overflow at a large scale": lambda: fp16_loss(()),
    "an FP16 loss of one dimension or more does not, either": lambda: fp16_loss((1,)),
    "scales of 2^-128 and below do not make weights infinite": tiny_scale,
    "weights are cast anew when an optimizer steps inside autocast": cast_anew,
    "a skip says which parameter or layer, Inf or NaN, forward or backward, on which rank": says_what,
    "a replay tells a scale too large from a format too small from a model that diverges": (
        tells_scale_from_model
    ),
    "steps that no scale could save, or eight at one scale, stop with a diagnosis": stops,
    "constant scales check and skip": constant_scales_check,
    "infinity on one rank skips on all, with or without DDP": RAN_ON_TWO_RANKS,
    "a scheduler stepped after a skip does not warn": scheduler_is_quiet,
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
