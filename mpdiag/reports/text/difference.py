"""What ``diff`` prints: where two runs part, or how far below rounding they stay."""

import math
from collections.abc import Iterator
from pathlib import Path

from rich.console import Group, RenderableType
from rich.text import Text

from mpdiag.analysis.difference.alignment import Edit
from mpdiag.analysis.difference.diff import Culprit, RunDifference
from mpdiag.display.wording import counted, percent, spoken_layer

_SHOWN = 3
"""Edits of the graph that are listed."""


def difference_text(found: RunDifference, a: Path, b: Path) -> RenderableType:
    """The whole report of ``mpdiag diff``."""
    title, lines = difference_lines(found, a, b)
    style = {False: "bold red", True: "bold green", None: "bold yellow"}[found.agree]
    return Group(Text(title, style), *map(Text, lines))


def difference_lines(found: RunDifference, a: Path, b: Path) -> tuple[str, list[str]]:
    """What was found in one sentence, and the sentences below it."""
    if found.first is not None:
        title = f"{a} and {b} differ beyond rounding at step {found.first.step}"
        lines = list(_where(found.first, found.before))
    elif found.agree:
        others = ["settings of optimizers"] if found.settings else []
        others += ["arguments of operations"] if any(e.side == "both" for e in found.edits) else []
        but = f", but {' and '.join(others)} differ" if others else ""
        title = f"{a} and {b} agree: rounding explains every difference{but}"
        lines = list(_agreement(found))
    else:
        title = f"{a} and {b} cannot be compared"
        lines = ["They have no tensor in common."]
    if found.cut_off is not None:
        lines = [] if found.agree is None else lines
        lines.append(
            f"Cannot say from step {found.cut_off} on: the weights are too far apart by then."
        )
    if found.coarse is not None:
        pair, share = found.coarse.pair, found.coarse.apart.tolerance
        what = f"{pair.b.name or pair.b.kind} in {_module(pair.b.module)}"
        dtypes = " and ".join(dict.fromkeys((pair.a.dtype, pair.b.dtype)))
        size = percent(share, 0)
        lines.append(f"Rounding alone may change {what} by {size} of its size ({dtypes}).")
    lines[:0] = [f"Optimizer: {said}." for said in found.settings]
    lines += [f"Environment: {', '.join(found.environment)}."] if found.environment else []
    lines += _edits(found)
    lines += [f"Not compared: {reason}." for reason in found.missing]
    return title, lines


def _where(first: Culprit, before: int) -> Iterator[str]:
    op = "an operation" if first.op == "operation" else first.op
    what = {
        "input": "the models are given different data",
        "weight": f"the runs begin with different values of {spoken_layer(first.name)}",
        "weight_grad": f"the gradient of {spoken_layer(first.name)}"
        if first.name
        else "all gradients, by one factor",
        "updated_weight": f"the optimizer's update of {spoken_layer(first.name)}",
    }.get(first.kind, f"{op} in {_module(first.module)}, {first.phase} pass")
    line = f"{first.file}:{first.line}"
    line = f"from {line} on" if first.op == "operation" else line
    place = f" ({line})" if first.file else ""
    rank = "" if first.rank is None else f", rank {first.rank}"
    yield f"First: {what}{rank}{place}"
    if first.code:
        yield f"    {first.code}"
    if first.fp8:
        yield f"{first.fp8}'s values there have 8 mantissas at most, as FP8's; the other's have more."
    elif math.isfinite(first.difference):
        allowed = f"{first.tolerance:.2g}" if first.tolerance else "none"
        yield f"Difference {first.difference:.2g} of the values' size; rounding explains {allowed}."
    else:
        yield "One side has another shape there, no value, or one that is not finite."
    if before:
        yield f"Compared before it: {counted(before, 'tensor')}. Rounding explains their differences."


def _module(name: str | None) -> str:
    return "the code outside the model" if name is None else spoken_layer(name)


def _agreement(found: RunDifference) -> Iterator[str]:
    compared = found.to_json()["compared"]
    different = compared["different"]
    yield (
        f"{counted(compared['tensors'], 'tensor')} compared up to step {found.last_step}, "
        f"{different or 'none'} of them different."
    )
    if different:
        yield (
            f"The largest difference is {compared['largest_ratio']:.2g} of its tolerance, the median "
            f"one {compared['median_ratio']:.2g}."
        )
    if compared["largest_ratio"] > 1.0:  # or there were a first difference
        yield "Tensors of few values may be up to twice their tolerance apart by chance."


def _edits(found: RunDifference) -> Iterator[str]:
    for edit in found.edits[:_SHOWN]:
        yield f"Edited in {_module(edit.module)}, {edit.phase} pass: {_edit(edit)}"
    if len(found.edits) > _SHOWN:
        yield f"{counted(len(found.edits) - _SHOWN, 'more edit')} of the graph: --json lists all."


def _edit(edit: Edit) -> str:
    if edit.side == "both":
        return edit.op
    times = f" ({len(edit.tensors)} times)" if len(edit.tensors) > 1 else ""
    return f"only {'A' if edit.side == 'a' else 'B'} has {edit.op}{times}"
