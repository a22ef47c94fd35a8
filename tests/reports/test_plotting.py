"""A drawing becomes the figure that Plotly's own calls make."""

import json

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import pytest

from mpdiag.reports.plotting import LETTER, MARK, Drawing, figure, range_mark, run_styles

LAYOUT = {
    "template": "none",
    "margin": {"l": 8, "t": 16},
    "xaxis": {"zeroline": False},
    "yaxis": {},
}


def draw(fig):
    """The calls that pictures are made with, as Plotly has them."""
    series = pd.Series([1.5, 2.5], index=[7, 9])
    fig.add_bar(x=series, y=[0, 1], marker={"color": "#123456"}, name="a")
    fig.add_scatter(x=[None], y=[None], mode="markers", line={"width": 2})
    fig.add_heatmap(z=np.array([[0.5, np.nan]]), text=np.array([["p", "q"]]))
    fig.update_layout(margin={"t": 40}, legend={"x": 0}, hovermode="closest")
    fig.update_xaxes(title="bytes", range=[0, 3])
    fig.update_yaxes(tickvals=[0, 1], ticktext=["first", "second"])
    fig.update_yaxes(ticktext=["one", "two"], showgrid=False)
    fig.add_vline(2, line={"color": "#abcdef", "dash": "dot"})
    fig.add_vrect(0.5, 1.5, fillcolor="#00ff00", opacity=0.2, line_width=0)
    fig.add_shape(type="rect", x0=0, x1=1, y0=0, y1=1, yref="paper")
    fig.add_annotation(x=1, y=1, yref="paper", text="here", showarrow=False)
    return fig


def test_the_same_figure_as_plotly_makes():
    expected = draw(go.Figure().update_layout(**LAYOUT))
    ours = json.loads(draw(Drawing(LAYOUT)).figure().to_json())
    assert ours == json.loads(expected.to_json())


@pytest.mark.parametrize(
    ("call", "ends", "position"),
    [
        ("add_vline", (2,), "top"),
        ("add_hline", (3,), "top right"),
    ],
)
def test_words_of_lines_stand_where_plotly_puts_them(call, ends, position):
    expected = go.Figure().update_layout(**LAYOUT)
    words = {"text": "words", "font": {"size": 11}}
    getattr(expected, call)(*ends, annotation=words, annotation_position=position)
    drawn = Drawing(LAYOUT)
    getattr(drawn, call)(*ends, words={"text": "words", "font": {"size": 11}})
    for part in ("annotations", "shapes"):
        ours, theirs = (getattr(f.layout, part)[0] for f in (drawn.figure(), expected))
        assert ours.to_plotly_json() == theirs.to_plotly_json()


def test_none_takes_a_part_away_and_a_title_may_be_changed():
    drawn = Drawing(LAYOUT).update_xaxes(title="bytes").update_xaxes(title={"font": {"size": 9}})
    assert drawn.figure().layout.xaxis.title.to_plotly_json() == {
        "text": "bytes",
        "font": {"size": 9},
    }
    drawn.update_xaxes(title="words")
    assert drawn.figure().layout.xaxis.title.text == "words"
    assert drawn.update_xaxes(title=None).figure().layout.xaxis.title.text is None


def test_every_axis_is_changed_and_the_given_layout_is_not():
    given = {**LAYOUT, "yaxis2": {"nticks": 3}}
    made = Drawing(given).update_yaxes(showgrid=False).figure()
    assert (made.layout.yaxis.showgrid, made.layout.yaxis2.showgrid) == (False, False)
    assert given["yaxis2"] == {"nticks": 3}
    assert LAYOUT["yaxis"] == {}


def test_plotly_refuses_what_it_does_not_know():
    with pytest.raises(ValueError, match="Invalid property"):
        figure(colour="red").figure()


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
