"""A figure while it is being drawn: plain dictionaries, which Plotly checks once, at the end.

Plotly checks and copies at each call that adds to a figure or changes it, which takes longer than all
numbers of the figure. What is drawn here becomes a figure in one call, with the same result.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import plotly.graph_objects as go

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


class Drawing:
    """The calls of a Plotly figure that pictures are made with, and what they have gathered.

    Attributes:
        layout: The layout so far, as Plotly names its parts.
    """

    def __init__(self, layout: Mapping[str, Any]) -> None:
        """Begin with a layout and nothing drawn on it."""
        self.layout: dict[str, Any] = {}
        self._traces: list[dict[str, Any]] = []
        _merge(self.layout, layout)

    def figure(self, frames: Sequence[Mapping[str, Any]] = ()) -> go.Figure:
        """What was drawn, checked by Plotly.

        Args:
            frames: Of an animation.

        Raises:
            ValueError: If Plotly has no such part, or no such value of it.
        """
        return go.Figure({"data": self._traces, "layout": self.layout, "frames": list(frames)})

    def add_bar(self, **trace: Any) -> Drawing:
        """Bars."""
        return self._add("bar", trace)

    def add_scatter(self, **trace: Any) -> Drawing:
        """Points or lines."""
        return self._add("scatter", trace)

    def add_heatmap(self, **trace: Any) -> Drawing:
        """Coloured cells."""
        return self._add("heatmap", trace)

    def add_treemap(self, **trace: Any) -> Drawing:
        """Nested areas."""
        return self._add("treemap", trace)

    def add_shape(self, **shape: Any) -> Drawing:
        """A line or a rectangle anywhere."""
        self.layout.setdefault("shapes", []).append(shape)
        return self

    def add_annotation(self, **words: Any) -> Drawing:
        """Words anywhere."""
        self.layout.setdefault("annotations", []).append(words)
        return self

    def add_vline(self, x: float, words: Mapping[str, Any] | None = None, **shape: Any) -> Drawing:
        """A line from the bottom to the top of the plot, its words above it."""
        ends = {"x0": x, "x1": x, "y0": 0, "y1": 1}
        place = {"x": x, "y": 1, "xanchor": "center", "yanchor": "bottom"}
        return self._spanning("line", ends, place, words, _VERTICAL, shape)

    def add_hline(self, y: float, words: Mapping[str, Any] | None = None, **shape: Any) -> Drawing:
        """A line from the left to the right of the plot, its words above its right end."""
        ends = {"x0": 0, "x1": 1, "y0": y, "y1": y}
        place = {"x": 1, "y": y, "xanchor": "right", "yanchor": "bottom"}
        return self._spanning("line", ends, place, words, _HORIZONTAL, shape)

    def add_vrect(
        self, x0: float, x1: float, words: Mapping[str, Any] | None = None, **shape: Any
    ) -> Drawing:
        """A rectangle from the bottom to the top of the plot, its words in its upper right corner."""
        ends = {"x0": x0, "x1": x1, "y0": 0, "y1": 1}
        place = {"x": max(x0, x1), "y": 1, "xanchor": "right", "yanchor": "top"}
        return self._spanning("rect", ends, place, words, _VERTICAL, shape)

    def update_layout(self, **layout: Any) -> Drawing:
        """Change parts of the layout; what is not named stays."""
        _merge(self.layout, layout)
        return self

    def update_xaxes(self, **axis: Any) -> Drawing:
        """Change every x axis."""
        return self._update_axes("xaxis", axis)

    def update_yaxes(self, **axis: Any) -> Drawing:
        """Change every y axis."""
        return self._update_axes("yaxis", axis)

    def _add(self, kind: str, trace: dict[str, Any]) -> Drawing:
        self._traces.append({"type": kind, **trace})
        return self

    def _spanning(
        self,
        kind: str,
        ends: Mapping[str, float],
        place: Mapping[str, Any],
        words: Mapping[str, Any] | None,
        axes: Mapping[str, str],
        shape: Mapping[str, Any],
    ) -> Drawing:
        self.add_shape(type=kind, **ends, **axes, **shape)
        if words is not None:
            self.add_annotation(showarrow=False, **{**place, **axes, **words})
        return self

    def _update_axes(self, kind: str, axis: Mapping[str, Any]) -> Drawing:
        for name in [key for key in self.layout if key.startswith(kind)]:
            _merge(self.layout[name], axis)
        return self


_VERTICAL = {"xref": "x", "yref": "y domain"}
_HORIZONTAL = {"xref": "x domain", "yref": "y"}


def _merge(into: dict[str, Any], change: Mapping[str, Any]) -> None:
    """Change a nested dictionary in place as Plotly does: None takes a part away."""
    for key, value in change.items():
        if value is None:
            into.pop(key, None)
        elif isinstance(value, dict):
            known = into.setdefault(key, {})
            if not isinstance(known, dict):
                known = into[key] = {"text": known} if key == "title" else {}
            _merge(known, value)
        elif key == "title" and isinstance(into.get(key), dict):
            into[key]["text"] = value
        else:
            into[key] = value
