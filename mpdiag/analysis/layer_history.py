"""The history of one layer: what it lost at which step, and what to do about it."""

import difflib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpdiag.analysis.analyzer import Analysis, analyze
from mpdiag.analysis.figures import Figure
from mpdiag.analysis.layers import Layers, countable_rows, share
from mpdiag.analysis.scaling.necessity import MATTERS
from mpdiag.display.wording import scale_text, some_of
from mpdiag.errors import LayerNotFound
from mpdiag.files.documents import finite
from mpdiag.numerics.formats import FORMATS, FP16
from mpdiag.runs.run import Run, open_run

SCHEMA_VERSION = 1


@dataclass(frozen=True, eq=False)
class LayerHistory:
    """Everything recorded about one layer.

    Attributes:
        name: The layer.
        analysis: The run's analysis.
        layers: Its kinds, merged over steps.
        steps: Recorded steps of its activation gradients (weight gradients for a parameter).
        lost: Share of non-zero values FP16 loses at scale 1, by step.
        lost_scaled: The same at the recommended scale.
        absmax: Largest |gradient| by step, without the loss scale.
        swallowed: Share of its updates FP16 weights would swallow, None if it has no updates.
        roles: What it decides for the whole run, in sentences.
        fixes: What to do.
        figures: What the run's claims say of it, see ``analysis.figures``.
    """

    name: str
    analysis: Analysis
    layers: Layers
    steps: NDArray[np.int64]
    lost: NDArray[np.float64]
    lost_scaled: NDArray[np.float64]
    absmax: NDArray[np.float64]
    swallowed: float | None
    roles: tuple[str, ...]
    fixes: tuple[str, ...]
    figures: tuple[Figure, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """The document of ``mpdiag why RUN LAYER --json``; what is not finite is null."""
        rows = zip(self.steps, self.lost, self.lost_scaled, self.absmax, strict=True)
        steps = [
            {
                "step": int(step),
                "lost": float(lost),
                "lost_scaled": float(scaled),
                "absmax": float(top),
            }
            for step, lost, scaled, top in rows
        ]
        document = {
            "schema_version": SCHEMA_VERSION,
            "layer": self.name,
            "roles": list(self.roles),
            "tensors": self.layers.to_json(),
            "loss_scale": self.analysis.plan.loss_scale.recommended,
            "steps": steps,
            "swallowed": self.swallowed,
            "fixes": list(self.fixes),
            "worst": list(self.worst),
            "figures": [figure.to_json() for figure in self.figures],
        }
        plain: dict[str, Any] = finite(document)
        return plain

    @property
    def worst(self) -> tuple[str, ...]:
        """The layers whose gradients lose the most, worst first."""
        return self.analysis.figures.layers()[:6]


def explain_layer(run: str | os.PathLike[str], layer: str | None = None) -> LayerHistory:
    """Collect the history of a layer; by default, of the one that decides the loss scale.

    Raises:
        LayerNotFound: If nothing of that name was recorded; the message suggests similar names.
        InputError: If the run cannot be read.
    """
    opened = open_run(Path(run))
    analysis = analyze(opened)
    records = opened.records
    names = list(records.words["name"])
    if layer is None:
        layer = analysis.loss_scale.deciding_layer
    if layer is None:
        why = analysis.loss_scale.void or "it has no activation gradients"
        raise LayerNotFound(f"no layer of {opened.folder} decides the loss scale ({why}): name one")
    if layer not in names:
        near = _of_type(opened, layer) or difflib.get_close_matches(layer, names, n=3, cutoff=0.3)
        known = some_of([name for name in names if name], shown=5)
        hint = f"did you mean {', '.join(near)}?" if near else f"it has {known}"
        raise LayerNotFound(f"{opened.folder} has no layer {layer!r}: {hint}")
    return history_of(analysis, layer)


def history_of(analysis: Analysis, layer: str) -> LayerHistory:
    """The history of a layer that was recorded, from an analysis that is made already."""
    records = analysis.run.records
    layers = analysis.layers.select(analysis.layers.names == layer)
    kind = "activation_grad" if "activation_grad" in layers.kinds else "weight_grad"
    mine = (records.name == records.code("name", layer)) & countable_rows(records)
    rows = records.select(mine & records.of_kind(kind))  # type: ignore[arg-type]
    steps, group = np.unique(rows.step.astype(np.int64), return_inverse=True)
    h = rows.merged(group.reshape(-1), len(steps))
    exponent = int(np.log2(analysis.plan.loss_scale.recommended))
    updates = records.select(mine & records.of_kind("update"))
    changed = int(updates.changed.sum())
    fixes = [c.reason for c in analysis.plan.fp32_operations if c.module == layer]
    fixes = [f"keep it in FP32: {reason}" for reason in fixes]
    if exponent > 0 and h.nonzero.sum() and h.lost_to_zero(FP16).value.sum():
        fixes.append(f"scale the loss by {scale_text(2.0**exponent)}")
    return LayerHistory(
        name=layer,
        analysis=analysis,
        layers=layers,
        steps=steps,
        lost=share(h.lost_to_zero(FP16).value, h.nonzero),
        lost_scaled=share(h.lost_to_zero(FP16, exponent).value, h.nonzero),
        absmax=h.absmax,
        swallowed=int(updates.fact("swallowed", FP16.name).sum()) / changed if changed else None,
        roles=tuple(_roles(layer, analysis)),
        fixes=tuple(fixes),
        figures=analysis.figures.of_layer(layer),
    )


def _roles(layer: str, analysis: Analysis) -> Iterator[str]:
    """What a layer loses and decides, by the figures that the verdict is made of."""
    figures = analysis.figures
    lost, values = figures.find("layer-sum", layer), figures.find("layer-values", layer)
    if lost is not None and values is not None:
        most = " (the most of all layers)" if layer == figures.layers()[0] and lost.value else ""
        scaled, kept = figures.find("layer-values-scaled", layer), ""
        if scaled is not None:
            kept = f" ({scaled.at_scale}: {scaled.said})"
        yield (
            f"{lost.at_scale}, {FORMATS[lost.format].label} loses {lost.said} of its gradient{most}, "
            f"and {values.said} of its values{kept} {lost.where}"
        )
    lower, upper = figures.find("scale-lower", layer), figures.find("scale-upper", layer)
    if lower is not None:
        share = f"{100 * MATTERS:g} %"
        yield (
            f"it limits the loss scale from below: under {lower.said} it loses more than {share} of its "
            f"gradient {lower.where}"
        )
    if upper is not None:
        yield (
            "it limits the loss scale from above: it has the largest gradient, which overflows above "
            f"{upper.said}"
        )


def _of_type(run: Run, word: str) -> list[str]:
    """Up to three modules of a type: ``LSTM`` finds a layer that is called ``rows``."""
    return [
        str(row["name"])
        for row in run.modules()
        if row["what"] == "module" and str(row["type"]).lower() == word.lower() and row["name"]
    ][:3]
