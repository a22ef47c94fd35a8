"""What ``analyze --target`` and ``why --target`` print for a block recipe."""

import math
from collections.abc import Iterator

from rich.console import RenderableType
from rich.text import Text

from mpdiag.analysis.analyzer import Analysis
from mpdiag.analysis.blocks.choice import HARMLESS, BlockAnalysis
from mpdiag.analysis.blocks.effects import LayerEffect
from mpdiag.analysis.blocks.operands import OperandError
from mpdiag.display.wording import counted, layer_name, percent
from mpdiag.numerics.block_recipes import WIDE
from mpdiag.plan import BlockLayer
from mpdiag.reports.text.tables import Fitted, titled_rows

TOP = 8
"""Layers that are shown without ``-v``, which shows all."""


def blocks_text(analysis: Analysis, *, verbose: bool = False) -> Iterator[RenderableType]:
    """What to print, part by part: the verdict, the layers with the most effect, the choice.

    Args:
        analysis: For a block recipe.
        verbose: Show all layers.
    """
    found = analysis.blocks
    if found is None:
        return
    level = analysis.verdict.level
    yield Text(analysis.verdict.text, "bold red" if level == "cannot" else "bold")
    yield Text("")
    yield _layers(found, len(found.effects) if verbose else TOP)
    rows = titled_rows()
    for title, words in _summary(found):
        rows.add_row(title, Text(words))
    rows.add_row("Not checked", Text("; ".join(analysis.verdict.not_examined)))
    yield rows


def _layers(found: BlockAnalysis, count: int) -> RenderableType:
    known = [e for e in found.effects if e.kind in ("linear", "grouped")]
    ranked = sorted(known, key=lambda e: (math.isnan(e.rise), -e.rise))
    figures = ("loss rises by", "output error", "wgrad error", "FLOPs")
    table = Fitted(
        ("layer", *figures, "in"),
        right=frozenset(figures),
        names=frozenset({"layer"}),
        spare=("FLOPs", "wgrad error"),
        boxed=False,
        caption="" if len(ranked) <= count else f"and {len(ranked) - count} more with -v",
    )
    whole = sum(e.flops for e in found.effects)
    for e in ranked[:count]:
        table.add_row(_name(e), *_figures(e, whole), _formats(found, found.layer(e)))
    return table


def _name(e: LayerEffect) -> str:
    return layer_name(e.module if e.kind == "linear" else f"{e.module}.{e.parameter}")


def _figures(e: LayerEffect, whole: float) -> tuple[str, str, str, str]:
    shares = (e.rise, e.output_error, e.wgrad_error)
    said = ["not known" if math.isnan(share) else percent(share) for share in shares]
    return said[0], said[1], said[2], percent(e.flops / whole if whole else 0.0)


def _formats(found: BlockAnalysis, layer: BlockLayer) -> str:
    """What a layer computes in: one format, or that of the forward pass and wgrad's."""
    if not layer.quantised:
        return "BF16"
    label = found.recipe.label
    return label if layer.wgrad != WIDE else f"{label}, wgrad in BF16"


def _summary(found: BlockAnalysis) -> Iterator[tuple[str, str]]:
    evidence = found.plan.evidence
    rise, everything = evidence.get("rise"), evidence.get("rise_all_quantised")
    if rise is not None and everything is not None:
        words = f"rises by an estimated {percent(rise)} (limit: {percent(HARMLESS)})"
        yield (
            "Loss",
            words + ("" if rise == everything else f"; with all layers {percent(everything)}"),
        )
    rules = "; ".join(f"{b.name}: {percent(b.left)}" for b in found.baselines if b.kept)
    if rules:
        yield "Other rules", f"at the same FLOPs in BF16, the loss rises by: {rules}"
    yield "Operands", "; ".join(found.patterns())
    reasons: dict[str, list[str]] = {}
    for layer in found.plan.layers:
        if not layer.quantised:
            reasons.setdefault(layer.reason, []).append(layer_name(layer.module))
    for reason, names in reasons.items():
        shown = ", ".join(dict.fromkeys(names[:4])) + (" …" if len(names) > 4 else "")
        yield "Stay in BF16", f"{shown}: {reason}"
    ragged = sum("tokens_padded" in layer.evidence for layer in found.plan.layers)
    if ragged:
        words = f"pad each expert's tokens to multiples of {found.recipe.multiple}"
        yield "Padding", f"{words}: {counted(ragged, 'expert weight')} get others"


def block_layer_text(found: BlockAnalysis, module: str) -> Iterator[RenderableType]:
    """One module in a block recipe: every operand, what its products compute in, and why."""
    yield Text(layer_name(module), "bold")
    figures = ("SQNR", "par", "zeros")
    table = Fitted(
        ("product", "operand", "format", *figures, "finding"),
        right=frozenset(figures),
        sentences=frozenset({"finding"}),
        caption=f"SQNR in dB of {found.recipe.label}; par: of Gaussian values; an interval of 90 % "
        "where tiles were sampled",
        lead=3,
        boxed=False,
    )
    for one in found.of(module):
        expert = "" if one.operand.expert is None else f" {one.operand.expert}"
        table.add_row(
            f"{one.operand.gemm}{expert}",
            one.operand.operand,
            str(one.format),
            _decibels(one),
            f"{one.format.par_db:.1f}",
            percent(one.zeros),
            one.finding,
        )
    yield table
    for e in (e for e in found.effects if e.module == module):
        ranked = sorted((o.rise for o in found.effects if not math.isnan(o.rise)), reverse=True)
        if not math.isnan(e.rise):
            yield Text(
                f"quantised alone, {_name(e)} raises the loss by an estimated {percent(e.rise)} "
                f"(number {ranked.index(e.rise) + 1} of {len(ranked)})"
            )
    for layer in found.choices(module):
        yield Text(f"→ {_formats(found, layer)}: {layer.reason}", "green")


def _decibels(one: OperandError) -> str:
    if math.isnan(one.sqnr_db):
        return "-"
    if one.low_db == one.high_db or math.isnan(one.low_db):
        return f"{one.sqnr_db:.1f}"
    return f"{one.low_db:.1f}–{one.high_db:.1f}"
