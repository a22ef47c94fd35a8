"""Whether a layer has outgrown what the last recorded operations showed."""

import pytest
import torch

import mpdiag
from mpdiag.recording.growth import LayerGrowth
from mpdiag.runs.run import open_run


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
    torch.manual_seed(0)
    model = torch.nn.Linear(6, 4, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with mpdiag.record(model, optimizer, tmp_path / "run", every=1, budget=None):
        for step in range(30):
            x = torch.randn(batch(step), 6)
            if spoil is not None and step >= spoil:
                x[0] = 0
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
    assert open_run(tmp_path / "run").meta["operations"]["steps"] == [0, 10, *([26] * asks)]


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
