"""Every figure: its numbers are the analysis's, and its receipt gives the same without mpdiag."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import made_runs as hand
import numpy as np
import pandas as pd
import pytest

from mpdiag.analysis.analyzer import analyze
from mpdiag.analysis.layers import Layers
from mpdiag.analysis.operations.rules import OperationFinding
from mpdiag.analysis.scaling.replay import replay_run
from mpdiag.numerics.formats import BF16, FP8_E4M3, FP8_E5M2, FP16
from mpdiag.reports import pictures
from mpdiag.reports.figures.gradients import fate, window
from mpdiag.reports.frames import comparing, gradients, operations, training, updates
from mpdiag.runs.training_log import read_log


@pytest.fixture(scope="module", params=["digits", "by hand", "two ranks", "scaled"])
def analysis(request, root, tmp_path_factory):
    if request.param == "digits":
        return analyze(root / "sample_runs" / "digits")
    folder = tmp_path_factory.mktemp("runs") / "hand"
    options = {"two ranks": {"world_size": 2}, "scaled": {"scale": 4.0}}
    return analyze(hand.write_run(folder, **options.get(request.param, {})))


def layers_of(analysis, kind):
    return gradients.in_model_order(analysis.layers.of_kind(kind), analysis.run.modules())


KEYS = ("run", "layer", "parameter", "name", "step", "exponent", "scale_exponent")


def same_numbers(picture, *, needed=()):
    """The receipt's table against the picture's, in the columns that both have."""
    names: dict[str, object] = {}
    exec(compile(picture.receipt, f"{picture.key}.py", "exec"), names)
    found = names["frame"]
    columns = [c for c in found.columns if c in picture.frame.columns]
    assert set(needed) <= set(columns), columns
    keys = [c for c in KEYS if c in columns]
    tables = [t[columns].sort_values(keys, ignore_index=True) for t in (picture.frame, found)]
    assert len(tables[0]) > 0
    pd.testing.assert_frame_equal(*tables, check_dtype=False, rtol=1e-12)
    assert not re.search(r"^(import|from) mpdiag", picture.receipt, re.MULTILINE)


@pytest.mark.parametrize("kind", ["activation_grad", "weight_grad", "activation"])
def test_the_heat_map_and_its_receipt(analysis, kind):
    layers = layers_of(analysis, kind)
    run = str(analysis.run.folder)
    picture = pictures.heat_map(run, layers, kind, FP16, 3)
    same_numbers(picture, needed=["layer", "exponent", "count"])
    heats = [trace for trace in picture.figure.data if trace.type == "heatmap"]
    drawn = np.zeros_like(np.asarray(heats[0].customdata))
    for trace in heats:
        drawn += np.where(np.isfinite(np.asarray(trace.z, float)), trace.customdata, 0)
    h = layers.histograms
    assert np.array_equal(drawn.sum(axis=1), h.counts.sum(axis=-1))
    assert [str(n) for n in layers.names] == list(
        dict.fromkeys([*picture.frame["layer"], *map(str, layers.names)])
    )


def test_what_is_coloured_lost_is_what_the_analysis_calls_lost(analysis):
    layers = layers_of(analysis, "activation_grad")
    for fmt in (FP16, FP8_E4M3, FP8_E5M2):
        for exponent in (0, 5, 11):
            frame = gradients.total_frame(layers)
            fates = frame["exponent"].map(lambda e: fate(int(e), fmt, exponent))  # noqa: B023
            lost = frame.loc[fates == "lost", "count"].sum() + layers.histograms.subnormals.sum()
            assert lost == layers.histograms.lost_to_zero(fmt, exponent).value.sum()


@pytest.mark.parametrize("fmt", [FP16, BF16, FP8_E4M3, FP8_E5M2], ids=lambda f: f.name)
@pytest.mark.parametrize("exponent", [0, 4, 17])
def test_the_consequences_and_their_receipt(analysis, fmt, exponent):
    layers = layers_of(analysis, "activation_grad")
    run = str(analysis.run.folder)
    picture = pictures.consequences(run, layers, "activation_grad", fmt, exponent)
    if fmt is BF16 and layers.histograms.subnormals.sum():
        assert "a lower bound" in picture.receipt
    else:
        same_numbers(picture, needed=["layer", "lost", "lost_share", "overflow", "absmax"])


def test_losses_are_those_of_rounding_the_values_themselves(tmp_path):
    layers = analyze(hand.write_run(tmp_path / "run")).layers.of_kind("activation_grad")
    frame = gradients.scale_frame(layers, FP16, 6).set_index("layer")
    for name in hand.NAMES:
        parts = [hand.values_of(name, "activation_grad", step) for step in range(hand.STEPS)]
        values = np.concatenate(parts)
        with np.errstate(over="ignore", under="ignore"):
            rounded = (values * np.float32(64)).astype(np.float16)
        assert frame.loc[name, "lost"] == ((rounded == 0) & (values != 0)).sum()
        assert frame.loc[name, "nonzero"] == (values != 0).sum()
        assert frame.loc[name, "absmax"] == values.max()


def test_every_scale_and_its_receipt(analysis):
    layers = layers_of(analysis, "activation_grad")
    plan = analysis.plan.loss_scale
    run = str(analysis.run.folder)
    picture = pictures.every_scale(run, layers, "activation_grad", FP16, 3, plan)
    same_numbers(picture, needed=["scale_exponent", "lost_share", "overflow_layers"])
    line = next(t for t in picture.figure.data if str(t.name).startswith("values lost"))
    assert list(line.y) == list(picture.frame["lost_share"])
    at = picture.frame.set_index("scale_exponent").loc[int(np.log2(plan.recommended))]
    assert at["lost_share"] == pytest.approx(analysis.loss_scale.underflow_after)


def test_a_histogram_with_its_zeros(analysis):
    layers = layers_of(analysis, "activation_grad")
    name = str(layers.names[-1])
    run = str(analysis.run.folder)
    for layer in (None, name):
        picture = pictures.one_histogram(run, layers, "activation_grad", FP16, 3, layer=layer)
        same_numbers(picture, needed=["exponent", "count"])
        bars = {str(t.name).split(":")[0]: sum(t.y) for t in picture.figure.data}
        part = layers.histograms if layer is None else layers.histograms[len(layers) - 1]
        assert bars.pop("already 0") == np.sum(part.zeros)
        assert sum(bars.values()) == part.counts.sum()


def test_one_layer_over_time(analysis):
    layers = layers_of(analysis, "activation_grad")
    name, records = str(layers.names[-1]), analysis.run.records
    run = str(analysis.run.folder)
    picture = pictures.over_time(run, records, "activation_grad", name, FP16, 3)
    same_numbers(picture, needed=["step", "exponent", "count"])
    assert picture.frame["count"].sum() == layers.histograms[len(layers) - 1].counts.sum()
    losses = gradients.time_loss_frame(records, "activation_grad", name, FP16, 0)
    assert losses["step"].is_monotonic_increasing
    assert losses["absmax"].max() == layers.histograms.absmax[-1]


def test_updates_and_their_receipts(analysis):
    records, run = analysis.run.records, str(analysis.run.folder)
    table = pictures.swallowed(run, records)
    same_numbers(table, needed=["parameter", "changed", "fp16_share", "beyond_2048"])
    share = table.frame["swallowed_fp16"].sum() / table.frame["changed"].sum()
    assert share == pytest.approx(analysis.plan.master_weights.swallowed_fraction)
    worst = str(table.frame["parameter"].iloc[0])
    for parameter in (None, worst):
        same_numbers(pictures.ratios(run, records, parameter), needed=["exponent", "count"])
        over_time = pictures.swallowed_over_time(run, records, parameter)
        same_numbers(over_time, needed=["step", "changed", "fp16_share", "bf16_share"])
    ratios = updates.ratio_frame(records)
    beyond = ratios.loc[ratios["exponent"] >= 11, "count"].sum()
    expected = (table.frame["beyond_2048"] * table.frame["changed"]).sum()
    assert beyond == pytest.approx(expected)


def test_output_ranges(analysis):
    run = str(analysis.run.folder)
    picture = pictures.output_ranges(run, layers_of(analysis, "activation"))
    same_numbers(picture, needed=["name", "absmin", "absmax"])


def test_two_runs_side_by_side(analysis):
    run, kind = str(analysis.run.folder), "weight_grad"
    sides = (analysis.layers, analysis.layers)
    picture = pictures.side_by_side(run, run, sides, ("a", "b"), kind, "absmax")
    same_numbers(picture, needed=["name", "absmax_a", "absmax_b", "octaves"])
    assert (picture.frame["octaves"] == 0).all()
    assert comparing.apart(*sides) == (0, 0)


# -- trainings -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def logs(root):
    names = ("digits", "digits-fp16-plan", "digits-fp16-no-scale")
    return {name: read_log(root / "sample_runs" / name) for name in names}


def test_losses_and_scales_and_their_receipts(root, logs):
    folder = str(root / "sample_runs")
    losses = pictures.losses(folder, logs, log=True, window=5)
    same_numbers(losses, needed=["run", "step", "loss"])
    assert len(losses.frame) == sum(len(log.steps) for log in logs.values())
    raw = next(trace for trace in losses.figure.data if not trace.showlegend)
    assert list(raw.y) == [step.loss for step in logs["digits"].steps]
    same_numbers(pictures.scales(folder, logs), needed=["run", "step", "scale", "skipped"])


def test_skips_infinities_and_torn_lines(tmp_path):
    lines = [
        {"step": 0, "loss": 1.5, "scale": 4.0, "skipped": False, "reason": ""},
        {"step": 1, "loss": "inf", "scale": 4.0, "skipped": True, "reason": "<b>overflow</b>"},
        {"step": 2, "loss": "nan", "scale": 2.0, "skipped": False, "reason": ""},
        {"metric": "accuracy", "value": 0.5, "higher_is_better": True},
    ]
    (tmp_path / "run").mkdir()
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (tmp_path / "run" / "training.jsonl").write_text(text)
    logs = {"run": read_log(tmp_path / "run")}
    same_numbers(pictures.losses(str(tmp_path), logs), needed=["loss"])
    scales = pictures.scales(str(tmp_path), logs)
    same_numbers(scales, needed=["skipped"])
    (cross,) = [t for t in scales.figure.data if str(t.name).startswith("skipped")]
    assert list(cross.x) == [1]
    assert list(cross.customdata) == ["&lt;b&gt;overflow&lt;/b&gt;"]
    (row,) = training.outcome_frame(logs).to_dict("records")
    assert (row["accuracy"], row["skipped"], row["last_scale"]) == (0.5, 1, 2.0)


def test_drift_is_drawn_where_it_was_alarmed(tmp_path):
    log = tmp_path / "<b>run" / "training.jsonl"
    log.parent.mkdir()
    rows = [{"step": i, "loss": 1.0, "scale": 1.0, "gradient_norm": 2.0**-i} for i in range(4)]
    rows[2]["gradient_norm"] = None
    alarm = {"alarm": "underflow", "step": 2, "predicted": 0.1, "observed": 0.7, "message": "<i>0"}
    lines = [*rows, alarm, {"stopped": "it diverged"}]
    log.write_text("".join(json.dumps(line) + "\n" for line in lines))
    logs = {"<b>run": read_log(log.parent)}
    picture = pictures.drift(str(tmp_path), logs)
    same_numbers(picture, needed=["run", "step", "gradient_norm"])
    assert list(picture.frame["step"]) == [0, 1, 3]  # what was not logged is no 0
    mark = picture.figure.data[-1]
    assert (list(mark.x), mark.name) == ([2], "alarms (1)")
    assert mark.y[0] in (0.5, 0.125)  # at its neighbour's height
    assert "&lt;i&gt;0" in mark.customdata[0]
    assert training.remarks(logs) == ["<b>run: it diverged"]
    none = pictures.drift(str(tmp_path), {})
    assert none.figure.layout.annotations[0].text == "no norm of gradients was logged"


def test_predicted_beside_observed(root, logs):
    folders = {name: root / "sample_runs" / name for name in logs}
    frame = training.predictions_frame(folders, logs)
    assert set(frame["run"]) == {"digits-fp16-plan", "digits-fp16-no-scale"}  # not the recording
    observed = frame.set_index(["run", "what"])["observed"]
    assert observed["digits-fp16-plan", "share of steps skipped"] == 0


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("ssd", ["ssd", "ssd-fp16-plan"]),
        ("ssd-fp16-plan", ["ssd", "ssd-fp16-plan"]),
        ("ssd-2", ["ssd-2"]),
        ("other", []),
    ],
)
def test_a_family_of_trainings(name, expected):
    known = ["ssd-fp16-plan", "ssd", "ssd-2", "digits", "digits-fp16-plan"]
    assert training.family(name, known) == expected


def test_the_replay_is_the_analysis_own(analysis):
    played = replay_run(analysis.run, "backoff", init_scale=2.0**24)
    picture = pictures.replayed("RUN", played, "--scaler backoff")
    assert picture.frame["overflow"].sum() == played.skips > 0
    line = next(t for t in picture.figure.data if t.name == "loss scale")
    assert list(line.y) == list(played.scale)
    assert "'mpdiag', 'replay', 'RUN', '--scaler', 'backoff', '--json'" in picture.receipt


# -- corners ---------------------------------------------------------------------------------------


def test_the_window_moves_with_the_scale():
    assert window(FP16, 0) == (-25, -14, np.log2(65520))
    assert window(FP16, 7) == (-32, -21, np.log2(65520) - 7)
    assert [fate(e, FP16, 0) for e in (-26, -25, -15, -14, 15, 16)] == [
        "lost",
        "subnormal",
        "subnormal",
        "kept",
        "kept",
        "overflow",
    ]


def test_nothing_recorded_is_a_sentence_and_no_error(analysis):
    none = Layers(
        analysis.layers.kinds[:0],
        analysis.layers.names[:0],
        analysis.layers.histograms[np.arange(0)],
        analysis.layers.steps[:0],
    )
    picture = pictures.heat_map("RUN", none, "activation_grad", FP16, 0)
    assert picture.figure.layout.annotations[0].text == "no non-zero values"
    assert pictures.consequences("RUN", none, "activation_grad", FP16, 0).frame.empty
    assert gradients.summary(gradients.scale_frame(none, FP16, 0)).overflow_layers == 0
    assert pictures.output_ranges("RUN", none).figure.layout.annotations[0].text


def test_names_are_text_in_figures(tmp_path):
    analysis = analyze(hand.write_run(tmp_path / "run"))
    layers = layers_of(analysis, "activation_grad")
    run = str(tmp_path / "run")
    for picture in (
        pictures.heat_map(run, layers, "activation_grad", FP16, 0),
        pictures.consequences(run, layers, "activation_grad", FP16, 0),
        pictures.swallowed(run, analysis.run.records),
        pictures.output_ranges(run, layers_of(analysis, "activation")),
    ):
        text = picture.figure.to_json()
        assert "<img" not in text
        assert "<script" not in text
        assert "&lt;img" in text.replace("\\u0026", "&")


def test_layers_are_found_by_a_part_of_their_name(analysis):
    layers = layers_of(analysis, "activation_grad")
    assert len(pictures.found(layers, "")) == len(layers)
    assert list(pictures.found(layers, "THE MODEL").names) == [""]
    assert len(pictures.found(layers, "no such layer")) == 0


def test_operations_with_their_line(analysis):
    found = OperationFinding(
        code="overflow",
        op="exp",
        aten="aten::exp",
        module="",
        where="model.py:12",
        text="x.exp()",
        reason="it reaches 1e5",
        fix="keep it in FP32",
        without="infinite",
    )
    (row,) = operations.proven_frame(replace(analysis, operations=(found,))).to_dict("records")
    assert (row["operation"], row["module"], row["line"]) == ("exp", "(the model)", "model.py:12")
    assert operations.proven_frame(replace(analysis, operations=())).empty
    table = operations.operations_frame(analysis)
    assert len(table) == len(analysis.plan.fp32_operations)
