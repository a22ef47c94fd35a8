"""Whether a layer has outgrown what the last recorded operations showed."""

import pytest

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
