"""Can this train in mixed precision, with what scale, what stays in FP32, what does it win?"""

from __future__ import annotations

import json

import kit
import streamlit as st

from mpdiag.reports.frames.verdict import facts, formats_frame, levels_frame
from mpdiag.reports.words import in_markdown, sentence

chosen = kit.current()
kit.heading("Verdict", chosen)
analysis = kit.analysis(chosen)
plan = analysis.plan
worst = {finding.severity for finding in analysis.findings}
box = st.error if "error" in worst else st.warning if plan.loss_scale.needed else st.success
box(f"**{in_markdown(analysis.verdict)}**", icon=":material/gavel:")

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

left, right = st.columns(2, gap="large")
with left:
    st.subheader("Why", anchor=False)
    st.markdown(f"**Loss scale.** {in_markdown(sentence(plan.loss_scale.reason))}")
    scale = str(int(plan.loss_scale.recommended).bit_length() - 1)
    kit.link("gradients", "See it in the gradients", scale=scale)
    st.markdown(f"**Master weights.** {in_markdown(sentence(plan.master_weights.reason))}")
    kit.link("updates", "See it in the updates")
    number = len(plan.fp32_operations)
    words = (
        f"{number} modules stay in FP32, each for a reason." if number else "None stays in FP32."
    )
    st.markdown(f"**Operations.** {words}")
    kit.link("operations", "See which and why")
with right:
    st.subheader("Findings", anchor=False)
    if not analysis.findings:
        st.markdown("Nothing to warn of.")
    for finding in analysis.findings:
        show = {"error": st.error, "warning": st.warning, "info": st.info}[finding.severity]
        show(f"{in_markdown(sentence(finding.message))}  \n→ {in_markdown(sentence(finding.fix))}")

st.subheader("What it wins", anchor=False)
st.caption("Predicted by counting: weights, gradients, optimizer state and stored activations.")
st.dataframe(levels_frame(plan), hide_index=True)
st.subheader("Values lost, by format", anchor=False)
st.caption("FP16 gradients at the recommended loss scale; FP8 with a scale for each layer.")
st.dataframe(
    formats_frame(analysis.formats).style.format("{:.3%}", na_rep="–"),
)
st.download_button(
    "Download the plan",
    data=json.dumps(plan.to_json(), indent=2, ensure_ascii=False),
    file_name="plan.json",
    mime="application/json",
    icon=":material/download:",
    on_click="ignore",
)
