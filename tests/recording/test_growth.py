"""Whether a layer has outgrown what the last recorded operations showed."""

import pytest
import torch
from recorded_steps import record_steps

from mpdiag.recording.growth import LayerGrowth


@pytest.mark.parametrize(
    ("sizes", "passes"),
    [
        ([1.0, 2.0, 4.0, 4.1, 5.0], [3]),  # more than four times
        ([1.0, 0.1, 0.01, 0.5], []),  # smaller, and back again
        ([1.0, 5.0, 1.0, 5.0, 19.0, 21.0], [1, 5]),  # a size that has passed is passed in turn
        ([0.0, 0.0, 1e-30], [2]),  # from nothing
    ],
)
def test_a_size_passes_what_was_recorded(sizes, passes):
    growth = LayerGrowth()
    growth.operations_recorded(0)
    found = []
    for step, size in enumerate(sizes):
        growth.note(step, [("a", size), ("b", 1.0)])
        if growth.passed:
            found.append(step)
            growth.operations_recorded(step)
    assert found == passes


@pytest.mark.parametrize(
    ("batch", "spoil", "asks"),
    [
        (lambda step: 4 if step < 25 else 64, None, True),  # more of them
        (lambda step: 4, 25, True),  # values that were never 0 are
        (lambda step: 4 + step % 9, None, False),
    ],
)
def test_operations_are_recorded_again_when_there_are_more_values_or_zeros(
    tmp_path, batch, spoil, asks
):
    def loss(model, step):
        x = torch.randn(batch(step), 6)
        if spoil is not None and step >= spoil:
            x[0] = 0
        return model(x).square().mean()

    torch.manual_seed(0)
    model = torch.nn.Linear(6, 4, bias=False)
    run = record_steps(tmp_path / "run", model, loss, 30, rate=0.01, every=1, budget=None)
    assert run.meta["operations"]["steps"] == [0, 10, *([26] * asks)]


def test_what_operations_were_recorded_of_is_known_by_its_largest_size():
    growth = LayerGrowth()
    growth.note(3, [("a", 1.0)])
    growth.operations_recorded(7)
    growth.note(5, [("a", 9.0)])  # a device is read late
    growth.note(7, [("a", 2.0)])
    growth.note(8, [("a", 30.0)])
    assert not growth.passed
    growth.note(9, [("a", 37.0)])
    assert growth.passed
