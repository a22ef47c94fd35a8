"""The heat map of the gradients before and after the loss scale, on one axis: only the range moves."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from mpdiag.analysis.figures.figure import at_scale
from mpdiag.numerics.formats import half_of
from mpdiag.reports.plotting import exponent_axis
from mpdiag.reports.views.gradients.figure import VALUES
from mpdiag.reports.views.gradients.frame import in_model_order
from mpdiag.reports.views.gradients.pictures import heat_map

if TYPE_CHECKING:
    from markupsafe import Markup

    from mpdiag.analysis.figures.figure import Key
    from mpdiag.reports.contents import RunContents
    from mpdiag.reports.picture import Picture

KEY = "heat-map"
"""Of the picture that the report's other figures leave out, as it stands here."""


@dataclass(frozen=True, eq=False)
class BeforeAfter:
    """Pictures of one subject, of which a page shows one at a time.

    Attributes:
        title: Of all of them.
        labels: What each shows, for the switch.
        figures: Each with its data, as a template takes them.
    """

    title: str
    labels: tuple[str, ...]
    figures: tuple[tuple[Picture, Markup], ...]


def heat_maps(contents: RunContents) -> list[tuple[str, Picture]]:
    """The gradients without a loss scale and at the plan's, each with a label.

    Returns:
        One alone where the plan has no scale; none where no activation gradient was recorded.
    """
    analysis = contents.analysis
    layers = in_model_order(analysis.layers.of_kind("activation_grad"), contents.modules)
    if not len(layers):
        return []
    fmt = half_of(analysis.target)
    planned = int(np.log2(analysis.plan.loss_scale.recommended))
    keys: dict[int, Key] = {0: "all-values"}
    if planned:
        keys[planned] = "all-values-scaled"
    found: list[tuple[str, Picture]] = []
    for exponent, key in keys.items():
        picture = heat_map(str(contents.folder), layers, "activation_grad", fmt, exponent)
        phrase = at_scale(2.0**exponent)
        said = analysis.figures.find(key)
        lost = "" if said is None else f": {said.said} become 0"
        label = f"{phrase[:1].upper()}{phrase[1:]}{lost}"
        found.append((label, replace(picture, key=f"{KEY}-{len(found)}")))
    _share_axis([picture for _, picture in found])
    return found


def _share_axis(pictures: list[Picture]) -> None:
    """Give all figures the widest axis of any, so that only the format's range moves."""
    ranges = [picture.figure.layout.xaxis.range for picture in pictures]
    known = [r for r in ranges if r is not None]
    if len(known) < len(pictures):
        return
    low, high = min(int(r[0]) for r in known), max(int(r[1]) for r in known)
    for picture in pictures:
        exponent_axis(picture.figure, low, high, VALUES)
