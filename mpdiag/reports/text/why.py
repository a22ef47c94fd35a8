"""What ``why`` and ``replay`` print: one layer, one skipped step, a scaler step by step."""

from typing import Any

from rich.console import Group, RenderableType
from rich.table import Column, Table
from rich.text import Text

from mpdiag.analysis.figures import at_scale
from mpdiag.analysis.layer_history import LayerHistory
from mpdiag.analysis.layers import Layers
from mpdiag.analysis.scaling.replay import Replay
from mpdiag.display.wording import KIND_NAMES, counted, layer_name, magnitude, percent, scale_text
from mpdiag.numerics.formats import FP16
from mpdiag.reports.text.charts import Histogram, Sparkline
from mpdiag.reports.text.tables import Fitted

ENDS = 20
"""Steps that ``replay`` shows of each end of a longer recording."""


def layer_text(story: LayerHistory) -> RenderableType:
    """The report of ``mpdiag why``."""
    parts: list[RenderableType] = [Text(layer_name(story.name), style="bold")]
    numbers = ("elements", "zeros", "|x| min", "|x| max", "values lost", "overflow")
    steps = story.analysis.figures.all_steps
    table = Fitted(
        ("tensor", *numbers),
        caption=f"lost, overflow: in FP16 without a loss scale, {steps}",
        right=frozenset(numbers),
        spare=("|x| min", "|x| max"),
        boxed=False,
    )
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
        parts += _over_time(story)
    part: Layers = story.layers.of_kind("activation_grad", "weight_grad")
    if len(part):
        scale = story.analysis.plan.loss_scale.recommended
        kind = KIND_NAMES[part.kinds[0]]
        parts += [Text(f"its {kind} {steps}"), Histogram(part.histograms[0], FP16, scale)]
    if story.swallowed is not None:
        parts.append(
            Text(
                f"FP16 weights would round away {percent(story.swallowed)} of its recorded updates"
            )
        )
    parts += [_item("•", role) for role in story.roles]  # last, where a small terminal shows it
    fixes = story.fixes or ("nothing to fix here",)
    parts += [_item("→", fix, "green") for fix in fixes]
    return Group(*parts)


def _item(mark: str, words: str, style: str = "") -> Table:
    """A sentence whose lines begin below each other, right of its mark."""
    grid = Table.grid("", Column(overflow="fold"), padding=(0, 1))
    grid.add_row(Text(mark, style), Text(words, style))
    return grid


def _over_time(story: LayerHistory) -> list[RenderableType]:
    """Shares of its values lost from step to step, without a scale and at the plan's."""
    scale = story.analysis.plan.loss_scale.recommended
    first, last = int(story.steps[0]), int(story.steps[-1])
    when = f"steps {first} to {last}" if last > first else f"step {first}"
    parts: list[RenderableType] = []
    for lost, at in ((story.lost, 1.0), (story.lost_scaled, scale)):
        if at == scale and parts and scale == 1:
            break
        words = f"{percent(lost[0])} → {percent(lost[-1])}, at most {percent(float(lost.max()))}"
        words = words if last > first else percent(lost[0])
        parts += [
            Text(f"its gradients' values lost in FP16 {at_scale(at)}, {when}"),
            Sparkline(lost, words),
        ]
    return parts


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


def replay_text(played: Replay) -> RenderableType:
    """The report of ``mpdiag replay``."""
    document: dict[str, Any] = played.to_json()
    steps = document["steps"]
    columns = ("step", "scale", "|g| max", "values lost", *([""] if document["skips"] else []))
    table = Fitted(columns, right=frozenset(columns))
    shown = steps
    if len(steps) > ENDS * 2:
        shown = [*steps[:ENDS], *steps[-ENDS:]]
        table.caption = f"the first and the last {ENDS} of {len(steps)} steps: all with --json"
    for row in shown:
        cells = (
            str(row["step"]),
            scale_text(row["scale"]),
            "not finite" if row["absmax"] is None else magnitude(row["absmax"]),
            percent(row["lost"]),
            "skipped" if row["overflow"] else "",
        )
        table.add_row(*cells[: len(columns)])
    title = Text("Loss-scale replay over the recorded steps", style="bold")
    legend = Text("lost: of all activation gradients' values in FP16, at the step's scale", "dim")
    skipped = f"{document['skips']} of {counted(len(steps), 'recorded step')} skipped"
    return Group(title, table, legend, Text(skipped, "bold"))
