"""What a comparison finds beside its verdict."""

from __future__ import annotations

import torch
from support import batch, network
from torch import nn

import mpdiag


def test_trainings_of_unequal_length_are_a_finding(tmp_path):
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with mpdiag.record(model, optimizer, tmp_path / "first"):
        for i in range(3):
            x, y = batch(i)
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    plan = mpdiag.analyze(tmp_path / "first").plan
    with mpdiag.MixedPrecision(model, optimizer, plan, run=tmp_path / "second") as mp:
        x, y = batch()
        mp.step(nn.functional.cross_entropy(model(x), y))
    codes = [f.code for f in mpdiag.compare(tmp_path / "first", tmp_path / "second").findings]
    assert "lengths-differ" in codes
