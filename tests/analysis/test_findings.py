"""Findings about the recording itself: what was not as the analysis expects."""

from __future__ import annotations

import pytest
import torch
from support import batch, network
from torch import nn

import mpdiag


def record(run, model, steps=3, *, step=True, dtype=torch.float32):
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with mpdiag.record(model, optimizer, run):
        for i in range(steps):
            x, y = batch(i)
            nn.functional.cross_entropy(model(x.to(dtype)), y).backward()
            if step:
                optimizer.step()


def test_a_loop_that_never_steps_is_a_finding(tmp_path):
    record(tmp_path / "run", network(), step=False)
    codes = {f.code for f in mpdiag.analyze(tmp_path / "run").findings}
    assert "no-optimizer-step" in codes


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_a_recording_of_something_else_than_fp32_is_a_finding(tmp_path, dtype):
    record(tmp_path / "run", network().to(dtype), dtype=dtype)
    findings = {f.code: f for f in mpdiag.analyze(tmp_path / "run").findings}
    assert str(dtype).removeprefix("torch.") in findings["not-fp32"].message
