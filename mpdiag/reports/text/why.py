"""What ``why`` prints: the story of one layer, or of one skipped step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.console import Group
from rich.text import Text

from mpdiag.display.wording import layer_name, magnitude, percent
from mpdiag.numerics.formats import FP16
from mpdiag.reports.text.charts import Histogram, Sparkline
from mpdiag.reports.text.tables import Fitted

if TYPE_CHECKING:
    from rich.console import RenderableType

    from mpdiag.analysis.layer_history import LayerHistory
    from mpdiag.analysis.layers import Layers


def layer_text(story: LayerHistory) -> RenderableType:
    """The report of ``mpdiag why``."""
    parts: list[RenderableType] = [Text(layer_name(story.name), style="bold")]
    parts += [Text(f"• {role}") for role in story.roles]
    numbers = ("elements", "zeros", "|x| min", "|x| max", "lost in FP16", "overflow in FP16")
    table = Fitted(("tensor", *numbers), right=frozenset(numbers))
    for row in story.layers.to_json():
        table.add_row(
            row["kind"].replace("_", " "),
            f"{row['numel']:,}",
            percent(row["zeros"] / max(1, row["numel"])),
            magnitude(row["absmin"] or 0.0),
            magnitude(row["absmax"]),
            percent(row["underflow"]),
            percent(row["overflow"]),
        )
    parts.append(table)
    if story.steps.size:
        scale = story.analysis.plan.loss_scale.recommended
        parts += [
            Text(f"values lost at scale 1, steps {story.steps[0]} to {story.steps[-1]}"),
            Sparkline(story.lost, f"{percent(story.lost[0])} → {percent(story.lost[-1])}"),
        ]
        if scale != 1:
            after = f"{percent(story.lost_scaled[0])} → {percent(story.lost_scaled[-1])}"
            parts += [
                Text(f"at the recommended scale {scale:g}"),
                Sparkline(story.lost_scaled, after),
            ]
    part: Layers = story.layers.of_kind("activation_grad", "weight_grad")
    if len(part):
        scale = story.analysis.plan.loss_scale.recommended
        parts.append(Histogram(part.histograms[0], FP16, scale))
    if story.swallowed is not None:
        parts.append(
            Text(f"FP16 weights would round away {percent(story.swallowed)} of its updates")
        )
    fixes = story.fixes or ("nothing to fix here",)
    parts += [Text(f"→ {fix}", style="green") for fix in fixes]
    return Group(*parts)


def skip_text(replayed: dict[str, Any], first: object | None) -> RenderableType:
    """The report of ``mpdiag why CAPSULE``.

    Args:
        replayed: The result of running the step again, as plain values.
        first: The first operation that went non-finite, in words; None if none did.
    """
    lines: list[RenderableType] = [
        Text(f"step {replayed['step']} at loss scale {replayed['scale']:g}", style="bold"),
        Text(f"skipped then: {replayed['reason']}"),
        Text(f"loss now: {replayed['loss']}"),
    ]
    if first is None:
        lines.append(Text("this time everything was finite", style="green"))
        return Group(*lines)
    lines.append(Text(str(first), style="red"))
    return Group(*lines)
