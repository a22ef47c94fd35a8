"""What ``analyze --target`` and ``why --target`` print for a block recipe."""

import math
from collections.abc import Iterator
from itertools import product

from rich.console import RenderableType
from rich.text import Text

from mpdiag.analysis.analyzer import Analysis
from mpdiag.analysis.blocks.choice import HARMLESS, BlockAnalysis
from mpdiag.analysis.blocks.effects import LayerEffect, local_name
from mpdiag.analysis.blocks.operands import OperandError
from mpdiag.analysis.verdict.probe import Probe
from mpdiag.display.wording import layer_name, percent, some_of
from mpdiag.numerics.block_recipes import OPERANDS, WIDE
from mpdiag.plan import BlockLayer
from mpdiag.reports.text.tables import Fitted, titled_rows
from mpdiag.runs.block_operands import BlockOperand

TOP = 8
"""Layers that are shown without ``-v``, which shows all."""


def blocks_text(analysis: Analysis, *, verbose: bool = False) -> Iterator[RenderableType]:
    """What to print, part by part: the verdict, the layers with the most effect, the choice."""
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
    for finding in analysis.findings:
        if finding.severity != "info" and not finding.code.startswith("probe-"):
            rows.add_row("In BF16", Text(finding.message))
    if analysis.probe is not None:
        rows.add_row("Probe", Text(_probed(analysis.probe, found)))
    rows.add_row("Not checked", Text("; ".join(analysis.verdict.not_examined)))
    yield rows


def _probed(probe: Probe, found: BlockAnalysis) -> str:
    """What a probe showed, beside the estimate."""
    rise, expected = probe.rise, found.plan.evidence.get("rise")
    words = probe.describe()
    if not math.isnan(rise):
        words += f"; the loss is {percent(abs(rise))} {'higher' if rise > 0 else 'lower'}"
        words += "" if expected is None else f" (expected: {percent(expected)} higher)"
    return words


def _layers(found: BlockAnalysis, count: int) -> RenderableType:
    known = [e for e in found.effects if e.kind in ("linear", "grouped", "experts")]
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
        layer = found.layer(e)
        table.add_row(layer_name(layer.name), *_figures(e, whole), _formats(found, layer))
    return table


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
            reasons.setdefault(layer.reason, []).append(layer.name)
    for reason, names in reasons.items():
        yield "Stay in BF16", f"{some_of(list(dict.fromkeys(names)))}: {reason}"
    hidden = {*evidence.get("not_recorded", ())} - {layer.module for layer in found.plan.layers}
    if hidden:
        yield "Stay in BF16", f"{some_of(sorted(hidden))}: mpdiag could not record the operands"
    if ragged := found.plan.ragged:
        words = f"pad the tokens (of experts: of each) to multiples of {found.recipe.multiple}"
        yield "Padding", f"{words}: {some_of(ragged)}"


def block_layer_text(found: BlockAnalysis, module: str) -> Iterator[RenderableType]:
    """One module in a block recipe: every operand, what its products compute in, and why."""
    yield Text(layer_name(module), "bold")
    figures = ("SQNR", "par", "zeros")
    table = Fitted(
        ("product", "operand", "format", *figures, "finding"),
        right=frozenset(figures),
        sentences=frozenset({"finding"}),
        lead=3,
        boxed=False,
    )
    alike: dict[tuple[str, str, str], list[OperandError]] = {}
    for one in found.of(module):
        key = _place(one.operand), one.operand.gemm, one.operand.operand
        alike.setdefault(key, []).append(one)
    places = dict.fromkeys(place for place, _, _ in alike)
    for place, (gemm, roles) in product(places, OPERANDS.items()):
        for some in filter(None, (alike.get((place, gemm, role)) for role in roles)):
            one = min(some, key=lambda o: (math.isnan(o.sqnr_db), o.sqnr_db))
            table.add_row(
                f"{place} {gemm}" if len(places) > 1 else gemm,
                one.operand.operand,
                str(one.format),
                _decibels(one),
                f"{one.format.par_db:.1f}",
                "-" if math.isnan(one.sqnr_db) else percent(one.zeros),
                one.finding,
            )
    worst = "; of the experts, the lowest SQNR" if any(len(o) > 1 for o in alike.values()) else ""
    if table.rows:
        yield table
        yield Text(
            f"SQNR in dB of {found.recipe.label}: an interval of 90 % where it was sampled, ≈ of a "
            f"single tile{worst}; par: of Gaussian values",
            "dim",
        )
    ranked = sorted((o.rise for o in found.effects if not math.isnan(o.rise)), reverse=True)
    for layer in found.choices(module):
        name = f"{layer_name(layer.name)} in " if len(places) > 1 else ""
        yield Text(f"→ {name}{_formats(found, layer)}: {layer.reason}", "green")
        rise = layer.evidence.get("rise")
        if rise is not None:
            yield Text(
                f"  quantised alone, it raises the loss by an estimated {percent(rise)} "
                f"(number {ranked.index(rise) + 1} of {len(ranked)})"
            )


def _place(one: BlockOperand) -> str:
    """Which product of its module an operand is of."""
    if one.product == "attention":
        return ("Q·K", "P·V")[one.call]
    name = local_name(one.module or "", one.parameter, one.product).removesuffix("_weight")
    return name or f"{one.product} {one.call}"


def _decibels(one: OperandError) -> str:
    if math.isnan(one.sqnr_db):
        return "-"
    if one.low_db == one.high_db:
        return f"{one.sqnr_db:.1f}"
    if math.isnan(one.low_db):
        return f"≈{one.sqnr_db:.1f}"
    return f"{one.low_db:.1f}–{one.high_db:.1f}"
