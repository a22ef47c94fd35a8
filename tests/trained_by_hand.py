"""The loop by hand that each integration is held against, and what they start from."""

import pytest
import torch
from support import batch, network
from torch import nn

import mpdiag

BATCHES = [batch(i) for i in range(6)]


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)


def by_hand(plan, steps=6, clip=None, every=1, level=None) -> nn.Module:
    """A ``network`` after some steps by a plan."""
    model = network()
    with mpdiag.MixedPrecision(model, momentum(model), plan, level=level) as mp:
        for i, (x, y) in enumerate(BATCHES[:steps]):
            with mp.autocast():
                output = model(x)
            mp.backward(nn.functional.cross_entropy(output.float(), y) / every)
            if (i + 1) % every == 0:
                mp.step(clip_norm=clip)
    return model


def same(a: nn.Module, b: nn.Module) -> bool:
    """Whether two models have the same weights and buffers, bit for bit."""
    pairs = zip(a.state_dict().values(), b.state_dict().values(), strict=True)
    return all(torch.equal(x, y) for x, y in pairs)


@pytest.fixture
def fresh():
    """Accelerate's singletons as they are in a new process, before and after."""
    from accelerate.state import AcceleratorState, GradientState

    def reset():
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()

    reset()
    yield
    reset()
