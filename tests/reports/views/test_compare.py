"""Two runs side by side, and the receipt of their largest values."""

from __future__ import annotations

from receipt_checks import same_numbers

from mpdiag.reports.views import compare


def test_two_runs_side_by_side(analysis):
    run, kind = str(analysis.run.folder), "weight_grad"
    sides = (analysis.layers, analysis.layers)
    picture = compare.side_by_side(run, run, sides, ("a", "b"), kind, "absmax")
    same_numbers(picture, needed=["name", "absmax_a", "absmax_b", "octaves"])
    assert (picture.frame["octaves"] == 0).all()
    assert compare.apart(*sides) == (0, 0)
