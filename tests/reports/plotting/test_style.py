"""Marks and axes that all figures share."""

from __future__ import annotations

import pytest

from mpdiag.reports.plotting.style import LETTER, MARK, figure, range_mark


@pytest.mark.parametrize(("side", "room"), [("left", 3 * LETTER), ("right", 12)])
def test_words_right_of_a_mark_at_the_edge_have_room_beyond_it(side, room):
    fig = figure()
    range_mark(fig, 4.0, "→ ∞", "red", side, line=1)
    assert fig.layout["margin"]["r"] == room
    assert fig.layout["margin"]["t"] == 12 + 2 * MARK
