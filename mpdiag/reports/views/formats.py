"""Block formats: which layers lie below par, where a format cuts their values, what stays in BF16."""

import math
from collections.abc import Iterator, Mapping

import numpy as np
import pandas as pd

from mpdiag.analysis.blocks.choice import HARMLESS, BlockAnalysis
from mpdiag.analysis.blocks.operands import AT_PAR, OperandError
from mpdiag.display.colors import BLUE, ORANGE, SERIES, VERMILION, rgba
from mpdiag.display.wording import in_figure, layer_name, percent
from mpdiag.numerics.block_formats import BLOCK_FORMATS
from mpdiag.numerics.block_statistics import BUCKETS, first_raised
from mpdiag.reports import plotting, receipts
from mpdiag.reports.contents import RunContents
from mpdiag.reports.picture import Picture
from mpdiag.reports.views.gradients.figure import Range, histogram

_PALE, _STRONG = rgba(BLUE, 0.15), rgba(ORANGE, 0.85)
_SHADES = [[0.0, _PALE], [0.1, _PALE], [0.1, _STRONG], [1.0, VERMILION]]
_CELLS = {"colorscale": _SHADES, "zmin": 0, "zmax": 10, "xgap": 2, "ygap": 2}
"""From 0 to 10 dB below par. Operands are said to be at par up to 1 dB."""
_SYMBOLS = "circle", "x-thin-open", "square-open", "diamond-open", "triangle-up-open"


def below_par(run: str, found: Mapping[str, BlockAnalysis]) -> Picture:
    """Layers × formats, coloured by how far the layer's worst operand lies below par."""
    rows = [{"target": b.recipe.label, **row} for b in found.values() for row in b.to_json()]
    frame = pd.DataFrame(rows).astype({"sqnr_db": float})
    frame["layer"] = frame["module"].fillna("").map(layer_name)
    frame["below_db"] = frame["par_db"] - frame["sqnr_db"]
    layers, labels = (frame[name].unique().tolist() for name in ("layer", "target"))
    frame = frame.sort_values("below_db", ascending=False, kind="stable")
    frame = frame.dropna(subset="below_db").drop_duplicates(["layer", "target"])
    names = ["operand", "gemm", "sqnr_db", "par_db", "finding"]
    fig = plotting.figure(plotting.row_height(len(layers)), hovermode="closest")
    fig.add_heatmap(
        x=frame["target"],
        y=frame["layer"].map(layers.index),
        z=frame["below_db"],
        text=[f"{below:.0f}" if below >= AT_PAR else "" for below in frame["below_db"]],
        texttemplate="%{text}",
        textfont={"color": "#1b1f24"},
        customdata=frame[names].assign(layer=frame["layer"].map(in_figure)).to_numpy(),
        hovertemplate="%{customdata[5]} in %{x}<br>%{customdata[0]} of %{customdata[1]}: %{customdata[2]"
        ":.1f} dB, par %{customdata[3]:.1f} dB<br>%{customdata[4]}<extra></extra>",
        colorbar={"title": {"text": "dB below par", "side": "right"}, "thickness": 12},
        **_CELLS,
    )
    plotting.layer_axis(fig, layers)
    order = {"type": "category", "categoryorder": "array", "categoryarray": labels}
    fig.update_xaxes(**order, showgrid=False, autotickangles=[0, 90])
    worst = frame.iloc[0]
    caption = (
        "Par is the SQNR of Gaussian values in a format. Each cell is the operand of a layer that lies "
        f"farthest below. Farthest of all: {worst['operand']} of {worst['gemm']} of {worst['layer']} in "
        f"{worst['target']}, {worst['below_db']:.1f} dB ({worst['finding']})."
    )
    receipt = receipts.of_run("block_errors", run, targets=list(found))
    return Picture("below-par", "SQNR below par", caption, fig, frame, receipt)


def choices(run: str, found: Mapping[str, BlockAnalysis]) -> Picture:
    """What the plan leaves in each format, beside rules of thumb at the same cost."""
    rows = []
    for blocks in found.values():
        evidence, label = blocks.plan.evidence, blocks.recipe.label
        rows.append((label, "this plan", evidence["rise"]))
        rows.append((label, "nothing in BF16", evidence["rise_all_quantised"]))
        rows += [(label, rule.name, rule.left) for rule in blocks.baselines if rule.kept]
    frame = pd.DataFrame(rows, columns=["format", "rule", "rise"])
    fig = plotting.figure(160 + 30 * len(found))
    rules = frame[frame["rise"] > 0].groupby("rule", sort=False)
    for (rule, some), symbol, colour in zip(rules, _SYMBOLS, SERIES, strict=False):
        fig.marks(
            some["rise"], some["format"], str(rule), colour, "%{y}: %{x:.2g}", mark=(symbol, 11)
        )
    plotting.log10_axis(fig, frame["rise"], "x")
    fig.update_xaxes(type="log", title="estimated rise of the loss, as a share of it")
    fig.update_yaxes(autorange="reversed")
    caption = (
        "A mark is the estimated rise of the loss by the layers that a rule does not keep in BF16. The "
        f"plan stops at {percent(HARMLESS)}, or at its budget. If it spends FLOPs, rules of thumb spend "
        "as many. Nothing was trained in these formats."
    )
    receipt = receipts.of_run("block_choices", run, targets=list(found))
    return Picture("block-choices", "The plan and rules of thumb", caption, fig, frame, receipt)


def depths(run: str, one: OperandError) -> Picture:
    """Where an operand's values lie in units of their block's scale, with the range of an MX format."""
    fmt, row = BLOCK_FORMATS[one.format.format], one.operand
    assert fmt.scale_rounding is not None
    octaves = np.add.reduceat(row.depths.counts, [0, *range(8, BUCKETS, 4)], axis=1)
    raised = np.arange(len(octaves)) >= first_raised(fmt.element, fmt.scale_rounding)
    exponents = (fmt.element.max_exponent - raised)[:, None] - np.arange(octaves.shape[1])
    frame = pd.DataFrame({"exponent": exponents.ravel(), "count": octaves.ravel()})
    frame = frame[frame["count"] > 0].groupby("exponent", as_index=False).sum()
    ends = fmt.element.zero_exponent, fmt.element.min_exponent, math.inf
    held = Range(*ends, judged=False, axis="value / scale of its block")
    caption = (
        f"Values divided by the scale of their block of 32{', not rotated' * one.format.rotated}. "
        f"{percent(one.zeros)} of the values other than 0 become 0. SQNR {one.sqnr_db:.1f} dB, par "
        f"{one.format.par_db:.1f} dB: {one.finding}."
    )
    title = f"{layer_name(row.module or '')}, {row.operand} of {row.gemm}, in {one.format.format}"
    figure = histogram(frame, row.depths.zeros, held, log=True)
    words = {"place": [row.module, row.gemm, row.operand], "raised": raised.tolist()}
    receipt = receipts.of_run("block_depths", run, top=fmt.element.max_exponent, **words)
    return Picture("block-depths", title, caption, figure, frame, receipt)


def drawn(blocks: BlockAnalysis) -> list[OperandError]:
    """The operands in MX formats, for depths count from an MX scale; the farthest below par first."""
    is_mx = BLOCK_FORMATS[blocks.recipe.weight.format].scale_rounding is not None
    known = [one for one in blocks.operands if is_mx and math.isfinite(one.sqnr_db)]
    return sorted(known, key=lambda one: one.sqnr_db - one.format.par_db)


def reported(contents: RunContents) -> Iterator[Picture]:
    """What the HTML report shows of a run with recorded operands."""
    found, run = contents.blocks, str(contents.folder)
    if found:
        yield below_par(run, found)
        yield choices(run, found)
        yield from (depths(run, one) for one in drawn(found["mxfp8"])[:1])
