"""Block formats: which layers lie below par, where a format cuts their values, what stays in BF16."""

from __future__ import annotations

import run_cache
import run_folder
import streamlit as st
import widgets
from layer_links import take_word, unless_set

from mpdiag.display.wording import layer_name
from mpdiag.numerics.block_recipes import BLOCK_RECIPES
from mpdiag.reports.views.formats import below_par, choices, depths, drawn

chosen = run_folder.current()
widgets.heading("Formats", chosen)
found = run_cache.once(chosen, "formats", make=lambda: run_cache.contents(chosen).blocks)
run = str(chosen.folder)
mx = [name for name in found if drawn(found[name])]


@st.fragment
def operand() -> None:
    """The values of one operand in the units of a format's scale."""
    take_word("recipe", mx)
    left, middle, right = st.columns([1.4, 1.5, 1.5], vertical_alignment="bottom")
    target = left.segmented_control(
        "Format",
        mx,
        required=True,
        **unless_set("recipe", default=mx[0]),
        format_func=lambda name: BLOCK_RECIPES[name].label,
        key="recipe",
        bind="query-params",
    )
    known = {}
    for one in drawn(found[target]):
        row = one.operand
        known.setdefault(layer_name(row.module or ""), {}).setdefault(
            f"{row.operand} of {row.gemm}", one
        )
    layer = middle.selectbox("Layer", list(known), key="operand_layer", bind="query-params")
    words = right.selectbox("Operand", list(known[layer]), key="operand", bind="query-params")
    widgets.show(depths(run, known[layer][words]))


if not mx:
    st.info("This run has no operands of matrix products. Record it again with --blocks.")
else:
    widgets.show(below_par(run, found))
    operand()
    widgets.show(choices(run, found))
