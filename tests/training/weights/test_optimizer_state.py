"""State that an optimizer has from before the model was wrapped fits its weights at every level."""

from __future__ import annotations

import pytest
import torch
from support import PRECISIONS, perceptron, take_step, trainer

KINDS = {
    "adam": lambda ps: torch.optim.Adam(ps, 1e-2, eps=1e-4),
    "momentum": lambda ps: torch.optim.SGD(ps, 0.1, momentum=0.9),
    "fused adagrad": lambda ps: torch.optim.Adagrad(ps, 0.1, eps=1e-4, fused=True),
    "foreach adam": lambda ps: torch.optim.Adam(ps, 1e-2, eps=1e-4, foreach=True),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("level", "dtype"), PRECISIONS)
def test_state_from_before_wrapping(level, dtype, kind):
    model = perceptron()
    optimizer = KINDS[kind](model.parameters())
    model(torch.ones(2, 4)).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    mp = trainer(model, optimizer, level, dtype)
    take_step(model, mp)
    for held, state in optimizer.state.items():
        assert {v.dtype for k, v in state.items() if k != "step" and v is not None} == {held.dtype}
    mp.close()
    for held, state in optimizer.state.items():
        assert held.dtype == torch.float32
        assert {v.dtype for v in state.values() if v is not None} == {torch.float32}
    model(torch.ones(2, 4)).mean().backward()
    optimizer.step()
