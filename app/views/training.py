"""FP32 against mixed precision: losses, the scale with its skips, predicted against observed."""

from __future__ import annotations

import kit
import streamlit as st

from mpdiag.analysis.replay import replay_run
from mpdiag.reports import pictures
from mpdiag.reports.frames import training

chosen = kit.current()
kit.heading("Training", chosen)
run = str(chosen.folder)
curves, replays = st.tabs(["Trainings", "Loss-scale replay"])

with curves:
    family = training.family(kit.run_name(chosen), kit.logged())
    names = st.multiselect(
        "Trainings", list(kit.logged()), default=family, key="trainings", bind="query-params"
    )
    logs = {name: kit.log(kit.logged()[name]) for name in names}
    if logs:
        left, right = st.columns(2)
        window = left.slider(
            "Running median over steps", 1, 50, 15, key="smooth", bind="query-params"
        )
        log = right.toggle("Log scale", value=True, key="loss_log", bind="query-params")
        kit.show(pictures.losses(str(kit.folder()), logs, log=log, window=window))
        st.dataframe(training.outcome_frame(logs), hide_index=True)
    else:
        st.info("Choose trainings that kept a log: `MixedPrecision(…, run=…)` writes one.")
    if kit.run_name(chosen) in kit.logged():
        own = kit.log(chosen)
        kit.show(pictures.scale_over_time(run, own))
        skips = training.steps_frame(own).query("skipped")[["step", "scale", "reason"]]
        if len(skips):
            st.dataframe(skips, hide_index=True)
        expected = training.kept_prediction(chosen.folder, own)
        if expected is not None and "training" in kit.opened(chosen).meta:
            st.markdown("##### Predicted by the plan, observed in training")
            st.dataframe(expected, hide_index=True)
        for note in own.notes:
            st.warning(kit.in_markdown(str(note)))

with replays:
    if not kit.opened(chosen).parts():
        st.info("This run holds no recorded gradients to replay; choose the recording it rests on.")
    else:
        cells = st.columns(4)
        scaler = cells[0].selectbox(
            "Scaler", ["backoff", "constant", "lognormal"], key="scaler", bind="query-params"
        )
        exponent = cells[1].number_input(
            "First scale, log2", -10, 24, 16, key="first", bind="query-params"
        )
        interval = cells[2].number_input(
            "Growth interval", 1, 100000, 2000, key="interval", bind="query-params"
        )
        backoff = cells[3].select_slider(
            "Backoff factor", [0.125, 0.25, 0.5, 0.75], 0.5, key="backoff", bind="query-params"
        )
        settings = {
            "init_scale": 2.0**exponent,
            "growth_interval": interval,
            "backoff_factor": backoff,
        }
        played = replay_run(kit.analysis(chosen).run, scaler, **settings)
        words = " ".join(f"--{k.replace('_', '-')} {v:g}" for k, v in settings.items())
        left, right = st.columns(2)
        left.metric("Recorded steps skipped", f"{played.skips} of {len(played.steps)}", border=True)
        right.metric("Scale at the end", f"{played.final_scale:g}", border=True)
        kit.show(pictures.replayed(run, played, f"--scaler {scaler} {words}"))
