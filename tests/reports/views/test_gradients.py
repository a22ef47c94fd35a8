"""Gradients: the numbers are the analysis's, and each receipt gives the same without mpdiag."""

from __future__ import annotations

from dataclasses import replace

import made_runs as hand
import numpy as np
import pytest
from receipt_checks import same_numbers

from mpdiag.analysis.analyzer import analyze
from mpdiag.analysis.layers import Layers, merge_layers
from mpdiag.analysis.operations.rounding_error import rounding_error
from mpdiag.analysis.scaling.necessity import MATTERS, NEGLIGIBLE, lost_by_scale
from mpdiag.analysis.scaling.windows import late_windows
from mpdiag.display.wording import percent
from mpdiag.numerics.formats import BF16, FP8_E4M3, FP8_E5M2, FP16
from mpdiag.reports.views import operations, updates
from mpdiag.reports.views.gradients import frame as gradients
from mpdiag.reports.views.gradients import pictures
from mpdiag.reports.views.gradients.figure import fate, window
from mpdiag.reports.views.gradients.scales import layer_scales_frame, scales_words


def layers_of(analysis, kind):
    return gradients.in_model_order(analysis.layers.of_kind(kind), analysis.run.modules())


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


def test_a_part_of_the_training_and_its_receipts(analysis):
    """What is drawn of some steps alone says which, and its receipt takes the same ones."""
    kind, run = "activation_grad", str(analysis.run.folder)
    window, late = analysis.loss_scale.window, analysis.loss_scale.late
    whole = layers_of(analysis, kind)
    if window is None:
        window = late_windows(analysis.run.records.step.astype(np.int64))[0]
        rows = analysis.run.records.of_kind(kind) & window.holds(analysis.run.records.step)
        late = merge_layers(analysis.run.records, rows)
    assert late.histograms.counts.sum() < whole.histograms.counts.sum()
    shown = (run, late, kind, FP16, 3)
    heat = pictures.heat_map(*shown, window=window)
    same_numbers(heat, needed=["layer", "exponent", "count"])
    same_numbers(pictures.one_histogram(*shown, window=window), needed=["exponent", "count"])
    lost = pictures.consequences(*shown, window=window)
    same_numbers(lost, needed=["layer", "lost", "lost_share", "overflow", "absmax"])
    scale = analysis.plan.loss_scale
    every = pictures.every_scale(*shown, scale, window=window, whole=whole)
    same_numbers(every, needed=["scale_exponent", "lost_share", "overflow_layers"])
    table = pictures.layer_scales(*shown, scale, window=window, whole=whole)
    same_numbers(table, needed=["layer", "scale_exponent", "lost_share", "sum_share", "overflows"])
    for words in (heat.caption, lost.caption, every.caption, table.caption):
        assert window.words in words.replace("In the", "in the")
    for words in (heat.caption, lost.title):
        assert "at a loss scale of 8" in words.lower()


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


def test_each_layer_at_every_scale_and_its_receipt(analysis):
    """The picture's shares are those that the analyzer chooses the scale by."""
    layers = layers_of(analysis, "activation_grad")
    plan, run = analysis.plan.loss_scale, str(analysis.run.folder)
    picture = pictures.layer_scales(run, layers, "activation_grad", FP16, 3, plan)
    needed = ["layer", "scale_exponent", "lost_share", "sum_share", "overflows"]
    same_numbers(picture, needed=needed)
    sums = picture.frame["sum_share"].to_numpy().reshape(len(layers), -1)
    assert np.array_equal(sums[:, -gradients.SCALES[0] :], lost_by_scale(layers, FP16))
    at = picture.frame[picture.frame["scale_exponent"] == 3]
    assert np.array_equal(at["rounding_error"], rounding_error(layers.histograms, FP16, 3))
    (cells,) = (trace for trace in picture.figure.data if trace.type == "heatmap")
    columns = [k - gradients.SCALES[0] for k in cells.x]
    over = picture.frame["overflows"].to_numpy(bool).reshape(len(layers), -1)[:, columns]
    harm = np.digitize(sums[:, columns], [NEGLIGIBLE, MATTERS], right=True)  # 0 none, 2 it matters
    assert np.array_equal(np.asarray(cells.z), np.where(over, 3, 2 - harm))


def test_why_this_scale_is_said_in_figures_of_the_plan(root):
    analysis = analyze(root / "sample_runs" / "ssd")
    layers, plan = analysis.loss_scale.late, analysis.plan.loss_scale
    frame = layer_scales_frame(layers, FP16)
    exponent = int(np.log2(plan.recommended))
    said = scales_words(frame, FP16, exponent, plan, "late")
    after = max(f.value for f in analysis.figures if f.key == "layer-sum-scaled")
    assert f"loses most, {percent(after)} of its sum" in said
    assert f"may grow {int(plan.upper / plan.recommended):,} times" in said
    assert "At the selected" not in said
    lost = analysis.figures.find("layer-sum")
    other = scales_words(frame, FP16, 0, plan, "late")
    assert f"At the selected 1 {lost.layer} loses {percent(lost.value)} of its sum" in other
    # A plan without an upper end says nothing of one.
    open_end = scales_words(frame, FP16, exponent, replace(plan, upper=None), "late")
    assert "times" not in open_end


def test_a_row_is_clicked_anywhere(analysis):
    layers = layers_of(analysis, "activation_grad")
    picture = pictures.heat_map(
        "RUN", layers, "activation_grad", FP16, 3, height=460, clickable=True
    )
    (rows,) = (trace for trace in picture.figure.data if trace.type == "bar")
    assert list(rows.customdata) == [str(name) for name in layers.names]
    cells = next(trace for trace in picture.figure.data if trace.type == "heatmap")
    assert rows.base <= min(cells.x)
    assert rows.base + rows.x[0] >= max(cells.x)
    plain = pictures.heat_map("RUN", layers, "activation_grad", FP16, 3)
    assert not [trace for trace in plain.figure.data if trace.type == "bar"]


def test_the_line_of_facts(analysis):
    layers = layers_of(analysis, "activation_grad")
    plan = analysis.plan.loss_scale
    for exponent in (0, 3, 24):
        found = gradients.summary(gradients.scale_frame(layers, FP16, exponent))
        line = pictures.facts(layers, layers, FP16, exponent, scale=plan)
        words = pictures.heat_map_words(layers, FP16, exponent, None)
        assert f"makes {percent(found.lost_share)} of the non-zero values 0" in words
        assert f"{percent(found.lost_share)} of" not in line  # said once
        assert ("no layer overflows" in line) == (found.overflow_layers == 0)
        low, high = gradients.recommended_interval(plan)
        assert ("inside the plan's" in line) == (low <= exponent <= high)
    assert "interval" not in pictures.facts(layers, layers, FP8_E4M3, 3)


def test_a_line_that_another_one_covers_is_not_named(analysis):
    layers, plan = layers_of(analysis, "activation_grad"), analysis.plan.loss_scale
    recommended = int(np.log2(plan.recommended))
    for exponent in (recommended, recommended + 1):
        shown = ("RUN", layers, "activation_grad", FP16, exponent, plan)
        assert ("dashed" in pictures.every_scale(*shown).caption) == (exponent != recommended)


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
    assert operations.output_ranges("RUN", none).figure.layout.annotations[0].text


def test_names_are_text_in_figures(tmp_path):
    analysis = analyze(hand.write_run(tmp_path / "run"))
    layers = layers_of(analysis, "activation_grad")
    run = str(tmp_path / "run")
    for picture in (
        pictures.heat_map(run, layers, "activation_grad", FP16, 0),
        pictures.consequences(run, layers, "activation_grad", FP16, 0),
        updates.swallowed(run, analysis.run.records),
        operations.output_ranges(run, layers_of(analysis, "activation")),
    ):
        text = picture.figure.to_json()
        assert "<img" not in text
        assert "<script" not in text
        assert "&lt;img" in text.replace("\\u0026", "&")


def test_layers_are_found_by_a_part_of_their_name(analysis):
    layers = layers_of(analysis, "activation_grad")
    assert len(gradients.layers_named(layers, "")) == len(layers)
    assert list(gradients.layers_named(layers, "THE MODEL").names) == [""]
    assert len(gradients.layers_named(layers, "no such layer")) == 0
