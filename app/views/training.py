"""FP32 against mixed precision: losses, the scale with its skips, predicted against observed."""

from __future__ import annotations

import kit
import streamlit as st

from mpdiag.analysis.scaling.replay import replay_run
from mpdiag.numerics.loss_scalers import SCALERS, Backoff
from mpdiag.reports import pictures
from mpdiag.reports.frames import training
from mpdiag.reports.words import in_markdown

chosen = kit.current()
kit.heading("Training", chosen)
run = str(chosen.folder)
curves, replays = st.tabs(["Trainings", "Loss-scale replay"], key="tab", bind="query-params")

with curves:
    logged = kit.logged()
    names = st.multiselect(
        "Trainings",
        list(logged),
        default=training.family(kit.run_name(chosen), logged),
        key="trainings",
        bind="query-params",
    )
    logs = {name: kit.log(logged[name]) for name in names}
    if logs:
        left, right = st.columns(2, vertical_alignment="bottom")
        window = left.slider(
            "Running median over steps", 1, 50, 15, key="smooth", bind="query-params"
        )
        log = right.toggle("Log scale", value=True, key="loss_log", bind="query-params")
        kit.show(pictures.losses(str(kit.folder()), logs, log=log, window=window))
        kit.table(training.outcome_frame(logs))
        kit.show(pictures.scales(str(kit.folder()), logs))
        skips = training.scales_frame(logs).query("skipped")
        if len(skips):
            kit.table(skips.drop(columns="skipped"))
        if len(training.norms_frame(logs)):
            kit.show(pictures.drift(str(kit.folder()), logs))
        alarms = training.alarms_frame(logs)
        if len(alarms):
            kit.table(alarms)
        expected = training.predictions_frame({name: logged[name].folder for name in names}, logs)
        if len(expected):
            st.markdown("##### Predicted by the plan, observed in training")
            kit.table(expected)
        for remark in training.remarks(logs):
            st.warning(in_markdown(remark))
    else:
        st.info("Choose trainings that kept a log: `MixedPrecision(…, run=…)` writes one.")

with replays:
    if not kit.opened(chosen).parts():
        st.info("This run holds no recorded gradients to replay; choose the recording it rests on.")
    else:
        cells = st.columns(4, vertical_alignment="bottom")
        scaler = cells[0].selectbox(
            "Scaler",
            list(SCALERS),
            list(SCALERS).index(Backoff.name),
            key="scaler",
            bind="query-params",
        )
        exponent = cells[1].number_input(
            "First scale, log2", 0, 24, 16, key="first", bind="query-params"
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
