"""What figures share: a style that Plotly accepts, marks with room for their words, colours of runs."""

import pytest

from mpdiag.reports.plotting import LETTER, MARK, figure, range_mark, run_styles


def test_plotly_refuses_what_it_does_not_know():
    with pytest.raises(ValueError, match="Invalid property"):
        figure(colour="red")


@pytest.mark.parametrize(("side", "room"), [("left", 3 * LETTER), ("right", 12)])
def test_words_right_of_a_mark_at_the_edge_have_room_beyond_it(side, room):
    fig = figure()
    range_mark(fig, 4.0, "→ ∞", "red", side, line=1)
    assert fig.layout["margin"]["r"] == room
    assert fig.layout["margin"]["t"] == 12 + 2 * MARK


def test_runs_of_a_figure_are_told_apart_and_keep_their_place():
    places = {"a": 0, "b": 1, "c": 0, "far": 8}
    styles = run_styles(["b", "c", "far", "new"], places)
    assert styles["b"] == run_styles(["b"], places)["b"]
    assert styles["far"] == run_styles(["far"], places)["far"]
    assert len({tuple(style.items()) for style in styles.values()}) == 4
    assert run_styles(["c"], places) != run_styles(["far"], places)
