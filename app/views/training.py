"""FP32 against mixed precision: losses, the scale with its skips, predicted against observed."""

from __future__ import annotations

import plan_in_training
import run_cache
import run_folder
import streamlit as st
import widgets
from run_list import family

from mpdiag.analysis.comparison.compare import unused_precision
from mpdiag.analysis.scaling.replay import replay_run
from mpdiag.display.wording import in_markdown, scale_text
from mpdiag.numerics.loss_scalers import SCALERS, Backoff, scaler_class
from mpdiag.plan import FILE as PLAN
from mpdiag.plan import PrecisionPlan
from mpdiag.reports.views.training import Trainings

chosen = run_folder.current()
widgets.heading("Training", chosen)
run = str(chosen.folder)
curves, replays = st.tabs(["Trainings", "Loss-scale replay"], key="tab", bind="query-params")

with curves:
    logged = run_folder.logged_beside(chosen)
    folder = str(run_folder.place_of(chosen))
    names = st.multiselect(
        "Trainings",
        list(logged),
        default=family(chosen.folder.resolve().name, logged),
        key="trainings",
        bind="query-params",
    )
    logs = {name: run_cache.log(logged[name]) for name in names}
    for name in names:
        unused = unused_precision(run_folder.opened(logged[name]).meta)
        if unused:
            words = f"{name} {unused}, so its curve shows nothing about half precision."
            st.error(in_markdown(words), icon=":material/error:")
    if logs:
        left, right = st.columns(2, vertical_alignment="bottom")
        window = left.slider(
            "Running median over steps", 1, 50, 15, key="smooth", bind="query-params"
        )
        log = right.toggle("Log scale", value=True, key="loss_log", bind="query-params")
        shown = Trainings(folder, logs, run_folder.places(chosen))
        widgets.show(shown.losses(log=log, window=window))
        widgets.table(shown.outcomes())
        widgets.show(shown.scales())
        skips = shown.steps.query("skipped")
        if len(skips):
            widgets.table(skips[["run", "step", "scale", "reason"]])
        if len(shown.norms):
            widgets.show(shown.drift())
        if len(shown.alarms):
            widgets.table(shown.alarms)
        # A recording keeps the plan that was made from it: its own log is no training by that plan.
        plans = {
            name: PrecisionPlan.load(logged[name].folder / PLAN)
            for name in names
            if run_folder.opened(logged[name]).meta.get("training")
            and (logged[name].folder / PLAN).is_file()
        }
        expected, others = plan_in_training.predictions(plans, logs)
        if len(expected):
            st.header("Predicted by the plan, observed in training", anchor=False)
            widgets.table(expected)
        for words in others:
            st.caption(in_markdown(words))
        widgets.remarks(plan_in_training.remarks(logs))
    else:
        st.info("Select trainings with a log. `MixedPrecision(…, run=…)` writes one.")

with replays:
    if not run_folder.opened(chosen).parts():
        st.info(
            "This run has no recorded gradients to replay. Select the recording that its plan was "
            "made from."
        )
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
        played = replay_run(run_cache.analysis(chosen).run, scaler, **settings)
        known = scaler_class(scaler).setting_names()
        words = " ".join(
            f"--{k.replace('_', '-')} {v:g}" for k, v in settings.items() if k in known
        )
        left, right = st.columns(2)
        left.metric("Recorded steps skipped", f"{played.skips} of {len(played.steps)}", border=True)
        right.metric("Scale at the end", scale_text(played.final_scale), border=True)
        widgets.show(plan_in_training.replayed(run, played, f"--scaler {scaler} {words}"))
