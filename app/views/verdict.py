"""Can this train in mixed precision, with what scale, what stays in FP32, what does it save?"""

from __future__ import annotations

import json
import math

import run_cache
import run_folder
import streamlit as st
import widgets

from mpdiag.display.wording import counted, in_markdown, percent, sentence
from mpdiag.reports.text.analysis import fp16_or_bf16, grounds
from mpdiag.reports.views.verdict import MEMORY, facts, formats_frame, formats_note, levels_frame

chosen = run_folder.current()
widgets.heading("Verdict", chosen)
analysis = run_cache.analysis(chosen)
plan = analysis.plan
widgets.verdict_box(analysis, chosen)
for title, clauses in grounds(analysis.verdict):
    st.markdown(f"**{title}.** {in_markdown(sentence(clauses))}")

for column, fact in zip(st.columns(4), facts(analysis), strict=True):
    column.metric(
        fact.label,
        fact.value,
        fact.note,
        delta_color="off",
        delta_arrow="off",
        border=True,
        help=in_markdown(fact.meaning),
    )


if choice := fp16_or_bf16(analysis):
    st.header("FP16 or BF16?", anchor=False)
    st.markdown(f"**{in_markdown(choice.text)}**")
    for title, words in choice.grounds.items():
        st.markdown(f"**{title}.** {in_markdown(words)}")


def why() -> None:
    """What the plan decides, with a link to what shows it."""
    st.markdown(f"**Loss scale.** {in_markdown(sentence(plan.loss_scale.reason))}")
    scale = str(round(math.log2(plan.loss_scale.recommended)))
    widgets.link("gradients", "See it in the gradients", scale=scale)
    st.markdown(f"**Master weights.** {in_markdown(sentence(plan.master_weights.reason))}")
    widgets.link("updates", "See it in the updates")
    number = len({choice.module for choice in plan.fp32_operations})
    words = (
        counted(number, "module stays", "modules stay") + " in FP32."
        if number
        else "Only autocast's own list stays in FP32."
    )
    st.markdown(f"**Operations.** {words}")
    widgets.link("operations", "See which and why")


left, right = st.columns(2, gap="large")
with left:
    st.header("Why", anchor=False)
    if analysis.advises:
        why()
    else:
        st.markdown("The recording allows no answer.")
reasons = [sentence(why) for why in (plan.loss_scale.reason, plan.master_weights.reason)]
with right:
    st.header("Findings", anchor=False)
    if not analysis.findings:
        st.markdown("No findings.")
    for finding in analysis.findings:
        show = {"error": st.error, "warning": st.warning, "info": st.info}[finding.severity]
        said = sentence(finding.message)
        if analysis.advises and said in reasons:
            said = sentence(finding.headline)  # “Why” says the rest
        fix = f"  \n→ {in_markdown(sentence(finding.fix))}" if finding.fix else ""
        show(in_markdown(said) + fix)
        widgets.explain(finding.code)

st.header("Memory saved", anchor=False)
st.caption(MEMORY)
levels = levels_frame(plan)
levels["memory (MB)"] = levels["memory (MB)"].map("{:,.1f}".format)
levels["possible"] = levels["possible"].map({True: "yes", False: "no"})
st.table(levels, hide_index=True)  # not a grid: its last column is a sentence, shown whole
st.header("Lost and rounded, by format", anchor=False)
st.caption(in_markdown(formats_note(analysis)))
st.dataframe(formats_frame(analysis.formats).map(percent))
st.download_button(
    "Download the plan",
    data=json.dumps(plan.to_json(), indent=2, ensure_ascii=False),
    file_name=f"{chosen.folder.resolve().name}-plan.json",
    mime="application/json",
    icon=":material/download:",
    on_click="ignore",
)
