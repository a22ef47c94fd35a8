"""The picture of where two runs part: a cell is the furthest tensor, the cross marks the first one."""

import numpy as np

from mpdiag.analysis.difference.diff import difference
from mpdiag.analysis.difference.sides import steps_of
from mpdiag.reports.views.difference import difference_frame, difference_picture
from mpdiag.runs.trace import TraceRow


def rows(shift):
    """A step of two ranks: the second layer's output is off by a shift on rank 1."""
    values = np.ones(8)
    found = []
    for rank in (0, 1):
        for order, (module, by) in enumerate((("a", 1e-7), ("a", 2e-7), ("b", shift * rank))):
            about = (0, rank, order, "output", "forward", module, "", order, (8,), "float32")
            moved = values + by
            found.append(TraceRow(*about, moved, float(np.linalg.norm(moved)), spread=1e-6))
    return steps_of(found)


def test_a_cell_shows_the_furthest_tensor_and_the_cross_the_first_one():
    found = difference(rows(0.0), rows(0.5))
    assert (found.first.module, found.first.rank) == ("b", 1)
    frame = difference_frame(found)
    assert frame[["module", "rank"]].to_numpy().tolist() == [["a", 0], ["a", 1], ["b", 0], ["b", 1]]
    assert (frame["ratio"] == frame["difference"] / frame["tolerance"]).all()
    cells, cross = difference_picture(found).figure.data
    assert list(cells.x[1]) == ["forward 0", "forward 0", "forward 1", "forward 1"]
    assert list(cells.z) == [-3, -3, -3, 3]
    assert (list(cross.x[1]), list(cross.y)) == (["forward 1"], [1])


def test_runs_that_agree_have_no_cross():
    assert len(difference_picture(difference(rows(1e-7), rows(2e-7))).figure.data) == 1
