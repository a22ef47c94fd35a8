"""What ``why`` and ``replay`` print: one layer, one skipped step, a scaler step by step."""

from typing import Any

import numpy as np
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
            Text(f"gradient values lost in FP16 {at_scale(at)}, {when}"),
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
        lines.append(Text("everything is finite when the step runs again", style="green"))
        return Group(*lines)
    lines.append(Text(str(first), style="red"))
    return Group(*lines)


def replay_text(played: Replay) -> RenderableType:
    """The report of ``mpdiag replay``: its answer, then the steps in which something changes."""
    answer = Group(*(Text(line, "bold") for line in _replay_answer(played)))
    document: dict[str, Any] = played.to_json()
    steps = document["steps"]
    changing = [
        row
        for before, row in zip([None, *steps], steps, strict=False)
        if before is None or row["overflow"] or row["scale"] != before["scale"]
    ]
    if len(changing) == 1 and not document["skips"]:
        return answer
    shown = changing
    legend = "scale changes and skipped steps; all steps with --json"
    if len(changing) > ENDS * 2:
        shown = [*changing[:ENDS], *changing[-ENDS:]]
        legend = f"the first and the last {ENDS} of {len(changing)} {legend}"
    numbers = ("step", "scale", "|g| max", "values lost")
    columns = (*numbers, *(["skipped"] if document["skips"] else []))
    table = Fitted(columns, right=frozenset(numbers))
    for row in shown:
        cells = (
            str(row["step"]),
            scale_text(row["scale"]),
            "not finite" if row["absmax"] is None else magnitude(row["absmax"]),
            percent(row["lost"]),
            "skipped" if row["overflow"] else "",
        )
        table.add_row(*cells[: len(columns)])
    return Group(answer, table, Text(legend, "dim"))


def _replay_answer(played: Replay) -> list[str]:
    """What the scaler would have done: skips, scale, and what FP16 would lose at most."""
    began, ended = scale_text(played.scale[0]), scale_text(played.final_scale)
    settled = bool((played.scale == played.final_scale).all())
    scale = f"stays at {began}" if settled else f"begins at {began} and ends at {ended}"
    skips = f"{played.skips} of {counted(played.steps.size, 'recorded step')}"
    answer = [f"The scaler skips {skips}. The loss scale {scale}."]
    if np.isnan(played.lost).all():
        return answer
    worst = int(np.nanargmax(played.lost))
    if not played.lost[worst]:
        return [*answer, "FP16 loses none of the activation gradients."]
    lost = percent(float(played.lost[worst]))
    most = lost.replace("<", "under") if "<" in lost else f"at most {lost}"
    which = f"(step {played.steps[worst]})"
    return [*answer, f"FP16 loses {most} of a step's activation gradients {which}."]
