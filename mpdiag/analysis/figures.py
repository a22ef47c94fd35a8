"""One table of every figure that a claim of an analysis is made with.

A figure without its window and its loss scale is easily taken for another one: a layer may lose 29 % of
its gradients' sum late in the training, and 6 % over all of it. So each figure is computed once, with
what is counted, where and at which scale, and sentences, reports and the dashboard take it from here.
"""

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np

from mpdiag.analysis.layers import Layers, share
from mpdiag.analysis.scaling.windows import Window
from mpdiag.display.wording import percent, scale_text
from mpdiag.files.documents import finite
from mpdiag.numerics.formats import FloatFormat
from mpdiag.plan import MasterWeightsPlan
from mpdiag.runs.schema import Kind

Key = Literal[
    "layer-sum",
    "layer-values",
    "layer-sum-scaled",
    "layer-values-scaled",
    "all-values",
    "all-values-scaled",
    "all-weights-sum",
    "replayed-sum",
    "overflowing-steps",
    "overflowing-unscaled",
    "overflow-bound",
    "scale-lower",
    "scale-upper",
    "updates-swallowed",
    "path-stalled",
    "weights-vanished",
]
"""What a figure stands for; ``docs/analysis.md`` explains each."""
Counted = Literal["sum", "values", "steps", "updates", "path", "weights", "loss scale"]
LISTED = 8
"""Layers that ``analyze --json`` lists in the table, those that lose most; ``why`` has any other."""


@dataclass(frozen=True)
class Figure:
    """One figure of a claim.

    Attributes:
        key: What it stands for.
        value: A share from 0 to 1; of ``loss scale`` a scale.
        counted: What it is a share of: a gradient's sum Σ|g|, its non-zero values, recorded steps,
            changed weights (``updates``), Σ|Δw| (``path``), a parameter's Σ|w| (``weights``).
        window: The steps it is of.
        format: The format that loses it.
        scale: The loss scale; None where none applies, or it changes from step to step.
        layer: The layer or parameter; None for all together.
        kind: The kind of its tensors; None for several.
        count, of: The numbers it is a share of, where they are whole ones; else None.
        bound: ``at most`` or ``at least``, where it is a bound; else empty.
        confidence: Of the bound, where it is statistical.
    """

    key: Key
    value: float
    counted: Counted
    window: Window
    format: str
    scale: float | None = None
    layer: str | None = None
    kind: Kind | None = None
    count: int | None = None
    of: int | None = None
    bound: Literal["", "at most", "at least"] = ""
    confidence: float | None = None

    @property
    def said(self) -> str:
        """The figure as every surface writes it."""
        return scale_text(self.value) if self.counted == "loss scale" else percent(self.value)

    @property
    def where(self) -> str:
        """Its window as a phrase, with its recorded steps."""
        return self.window.words

    @property
    def at_scale(self) -> str:
        """Its loss scale as a phrase; empty where there is none."""
        return "" if self.scale is None else at_scale(self.scale)

    def to_json(self) -> dict[str, Any]:
        """An entry of ``figures`` in ``mpdiag analyze --json``."""
        document = asdict(self)
        document["loss_scale"] = document.pop("scale")
        plain: dict[str, Any] = finite(document)
        return plain


def at_scale(scale: float) -> str:
    """A loss scale as a phrase: 1 is none."""
    return "without a loss scale" if scale == 1 else f"at a loss scale of {scale_text(scale)}"


@dataclass(frozen=True)
class FigureTable:
    """The figures of an analysis.

    Attributes:
        figures: Those of layers in order, the layer that loses most of its sum first.
        deciding: The layer that decides whether a loss scale is needed; None if none does.
    """

    figures: tuple[Figure, ...] = ()
    deciding: str | None = None

    def __iter__(self) -> Iterator[Figure]:
        return iter(self.figures)

    def __add__(self, other: "FigureTable") -> "FigureTable":
        deciding = other.deciding if self.deciding is None else self.deciding
        return FigureTable(self.figures + other.figures, deciding)

    def find(self, key: Key, layer: str | None = None) -> Figure | None:
        """The figure of a key, of one layer if it is named; None if there is none."""
        return next(
            (f for f in self.figures if f.key == key and (layer is None or f.layer == layer)), None
        )

    def said(self, key: Key, layer: str | None = None) -> str:
        """A figure in words, a dash if there is none."""
        found = self.find(key, layer)
        return percent(float("nan")) if found is None else found.said

    @property
    def all_steps(self) -> str:
        """All recorded steps, as a phrase."""
        found = self.find("all-values")
        return "over all recorded steps" if found is None else found.where

    def of_layer(self, layer: str) -> tuple[Figure, ...]:
        """All figures of a layer."""
        return tuple(f for f in self.figures if f.layer == layer)

    def layers(self) -> tuple[str, ...]:
        """The layers with judged activation gradients, the one that loses most first."""
        return tuple(f.layer or "" for f in self.figures if f.key == "layer-sum")

    def to_json(self) -> list[dict[str, Any]]:
        """The ``figures`` of ``mpdiag analyze --json``: of layers, those that decide or lose most."""
        named = {f.layer for f in self.figures if not f.key.startswith("layer-")}
        listed = {*self.layers()[:LISTED], self.deciding, *named}
        return [
            f.to_json() for f in self.figures if not f.key.startswith("layer-") or f.layer in listed
        ]


EMPTY = FigureTable()
"""The figures of an analysis that makes no claim."""


def layer_figures(
    late: Layers, window: Window, target: FloatFormat, exponent: int
) -> Iterator[Figure]:
    """What each layer's activation gradients lose to zero, the layer that loses most first.

    Args:
        late: The gradients of the window.
        window: The part of the training that decides.
        target: The format.
        exponent: log2 of the plan's loss scale; at 0 there is nothing to say of it.
    """
    if len(late) == 0:
        return
    keys: list[tuple[Key, Key, int]] = [("layer-sum", "layer-values", 0)]
    if exponent:
        keys.append(("layer-sum-scaled", "layer-values-scaled", exponent))
    h = late.histograms
    whole, nonzero = h.abs_sum().value, h.nonzero
    columns = [
        (
            share(h.abs_sum(target.zero_exponent - k).value, whole),
            share(h.lost_to_zero(target, k).value, nonzero),
        )
        for _, _, k in keys
    ]
    for i in np.argsort(-columns[0][0], kind="stable").tolist():
        for (of_sum, of_values, k), (sums, values) in zip(keys, columns, strict=True):
            where = {
                "window": window,
                "format": target.name,
                "scale": math.ldexp(1.0, k),
                "layer": str(late.names[i]),
                "kind": "activation_grad",
            }
            yield Figure(of_sum, float(sums[i]), "sum", **where)  # type: ignore[arg-type]
            yield Figure(of_values, float(values[i]), "values", **where)  # type: ignore[arg-type]


def pooled_figure(layers: Layers, window: Window, target: FloatFormat, exponent: int) -> Figure:
    """Share of all layers' non-zero activation gradients that is lost to zero at 2^exponent."""
    h = layers.of_kind("activation_grad").histograms
    lost, nonzero = int(h.lost_to_zero(target, exponent).value.sum()), int(h.nonzero.sum())
    return Figure(
        "all-values-scaled" if exponent else "all-values",
        float(share(lost, nonzero)),
        "values",
        window,
        target.name,
        scale=math.ldexp(1.0, exponent),
        kind="activation_grad",
        count=lost,
        of=nonzero,
    )


def update_figures(masters: MasterWeightsPlan, window: Window) -> FigureTable:
    """What 16-bit weights would not take of the recorded updates; empty if there were none."""
    known = masters.evidence
    if not known.get("changed"):
        return FigureTable()
    held = str(known["format"])
    return FigureTable(
        (
            Figure(
                "updates-swallowed",
                masters.swallowed_fraction,
                "updates",
                window,
                held,
                kind="update",
                count=known["swallowed"],
                of=known["changed"],
            ),
            Figure("path-stalled", known["path_stalled"], "path", window, held, kind="update"),
            *_vanished_weights(masters, window, held),
        )
    )


def _vanished_weights(masters: MasterWeightsPlan, window: Window, held: str) -> Iterator[Figure]:
    """The share of a parameter that a format makes 0, where masters are needed for it."""
    parameter = masters.evidence.get("vanishing_parameter")
    if parameter is not None:
        yield Figure(
            "weights-vanished",
            masters.evidence["weights_vanished"],
            "weights",
            window,
            held,
            layer=parameter,
            kind="weight",
        )
