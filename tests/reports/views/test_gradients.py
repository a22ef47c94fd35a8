"""Gradients: what is drawn is what the analysis says."""

from dataclasses import replace

import made_runs as hand
import numpy as np
import pytest
from drawn_runs import layers_of, of_layers
from receipt_checks import same_numbers

from mpdiag.analysis.analyzer import analyze
from mpdiag.analysis.layers import merge_layers
from mpdiag.analysis.operations.rounding_error import rounding_error
from mpdiag.analysis.scaling.necessity import MATTERS, NEGLIGIBLE, lost_by_scale
from mpdiag.analysis.scaling.windows import late_windows
from mpdiag.display.wording import percent
from mpdiag.numerics.formats import BF16, FP8_E4M3, FP8_E5M2, FP16
from mpdiag.reports.views.gradients import frame as gradients
from mpdiag.reports.views.gradients.figure import window
from mpdiag.reports.views.gradients.pictures import Gradients
from mpdiag.reports.views.gradients.scales import scales_words


@pytest.mark.parametrize("kind", ["activation_grad", "weight_grad", "activation"])
def test_every_value_has_its_cell(analysis, kind):
    picture, layers = of_layers(analysis, kind).heat_map(3), layers_of(analysis, kind)
    heats = [trace for trace in picture.figure.data if trace.type == "heatmap"]
    drawn = np.zeros_like(np.asarray(heats[0].customdata))
    for trace in heats:
        drawn += np.where(np.isfinite(np.asarray(trace.z, float)), trace.customdata, 0)
    assert np.array_equal(drawn.sum(axis=1), layers.histograms.counts.sum(axis=-1))
    assert [str(n) for n in layers.names] == list(
        dict.fromkeys([*picture.frame["layer"], *map(str, layers.names)])
    )


def test_what_is_coloured_lost_is_what_the_analysis_calls_lost(analysis):
    layers = layers_of(analysis, "activation_grad")
    for fmt in (FP16, FP8_E4M3, FP8_E5M2):
        for exponent in (0, 5, 11):
            frame = gradients.total_frame(layers)
            fates = frame["exponent"].map(window(fmt, exponent).fate)
            lost = frame.loc[fates == "lost", "count"].sum() + layers.histograms.subnormals.sum()
            assert lost == layers.histograms.lost_to_zero(fmt, exponent).value.sum()


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


def test_a_part_of_the_training_and_its_receipts(analysis):
    """What is drawn of some steps alone says which, and its receipt takes the same ones."""
    kind, scale = "activation_grad", analysis.plan.loss_scale
    window, late = analysis.loss_scale.window, analysis.loss_scale.late
    whole = layers_of(analysis, kind)
    if window is None:
        window = late_windows(analysis.run.records.step.astype(np.int64))[0]
        rows = analysis.run.records.of_kind(kind) & window.holds(analysis.run.records.step)
        late = merge_layers(analysis.run.records, rows)
    assert late.histograms.counts.sum() < whole.histograms.counts.sum()
    part = Gradients(str(analysis.run.folder), kind, late, FP16, window, whole, scale)
    pictures = {
        "exponent": [part.heat_map(3), part.histogram(3)],
        "lost_share": [part.layer_scales(3)],
    }
    for column, made in pictures.items():
        for picture in made:
            same_numbers(picture, needed=[column])
            assert window.words in picture.caption.replace("In the", "in the")
    assert "at a loss scale of 8" in part.heat_map(3).caption.lower()


def test_each_layer_at_every_scale(analysis):
    """The picture's shares are those that the analyzer chooses the scale by."""
    layers = layers_of(analysis, "activation_grad")
    picture = of_layers(analysis, plan=analysis.plan.loss_scale).layer_scales(3)
    sums = picture.frame["sum_share"].to_numpy().reshape(len(layers), -1)
    assert np.array_equal(sums[:, -gradients.SCALES[0] :], lost_by_scale(layers, FP16))
    at = picture.frame[picture.frame["scale_exponent"] == 3]
    assert np.array_equal(at["rounding_error"], rounding_error(layers.histograms, FP16, 3))
    (cells,) = (trace for trace in picture.figure.data if trace.type == "heatmap")
    columns = [k - gradients.SCALES[0] for k in cells.x]
    over = picture.frame["overflows"].to_numpy(bool).reshape(len(layers), -1)[:, columns]
    harm = np.digitize(sums[:, columns], [NEGLIGIBLE, MATTERS], right=True)  # 0 none, 2 it matters
    upper = analysis.plan.loss_scale.upper
    free = np.array(cells.x) <= (np.inf if upper is None else np.log2(upper))
    expected = np.where(over, 3.0, np.where(free, 2 - harm, np.nan))  # nothing under the shade
    assert np.array_equal(np.asarray(cells.z), expected, equal_nan=True)


def test_why_this_scale_is_said_in_figures_of_the_plan(root):
    analysis = analyze(root / "sample_runs" / "ssd")
    layers, plan = analysis.loss_scale.late, analysis.plan.loss_scale
    frame = gradients.layer_scales_frame(layers, FP16, layers)
    exponent = int(np.log2(plan.recommended))
    said = scales_words(frame, FP16, exponent, plan, "late")
    assert "At the selected" not in said
    lost = analysis.figures.find("layer-sum")
    other = scales_words(frame, FP16, 0, plan, "late")
    assert f"At the selected 1 {lost.layer} loses {percent(lost.value)} of its gradient" in other
    # A plan without an upper end says nothing of one.
    open_end = scales_words(frame, FP16, exponent, replace(plan, upper=None), "late")
    assert "times" not in open_end


def test_a_row_is_clicked_anywhere(analysis):
    layers = layers_of(analysis, "activation_grad")
    picture = of_layers(analysis).heat_map(3, height=460, clickable=True)
    (rows,) = (trace for trace in picture.figure.data if trace.type == "bar")
    assert list(rows.customdata) == [str(name) for name in layers.names]
    cells = next(trace for trace in picture.figure.data if trace.type == "heatmap")
    assert rows.base <= min(cells.x)
    assert rows.base + rows.x[0] >= max(cells.x)
    plain = of_layers(analysis).heat_map(3)
    assert not [trace for trace in plain.figure.data if trace.type == "bar"]


def test_the_window_moves_with_the_scale():
    for exponent in (0, 7):
        held = window(FP16, exponent)
        ends = (held.zero + exponent, held.normal + exponent, held.top + exponent)
        assert ends == (-25, -14, np.log2(65520))
    fates = "lost kept kept kept kept overflow".split()
    assert [window(FP16, 0).fate(e) for e in (-26, -25, -15, -14, 15, 16)] == fates


@pytest.mark.parametrize(
    ("fmt", "exponent", "harms"),
    [
        *((FP16, 0, True), (FP16, 6, False), (BF16, 0, False), (BF16, 6, False)),
        *((FP8_E4M3, 12, True), (FP8_E4M3, 20, True), (FP8_E5M2, 6, True), (FP8_E5M2, 20, True)),
    ],
)
def test_harmful_are_the_bins_whose_rounding_moves_the_values_most(fmt, exponent, harms):
    """Against the values themselves, rounded."""
    octaves = np.arange(-36, -17)
    octaves = np.repeat(
        octaves, 2000 + (40_000 * np.exp2(-(((octaves + 24) / 3) ** 2))).astype(int)
    )
    within = np.random.default_rng(0).uniform(1, 2, octaves.size)
    values = np.ldexp(within, octaves).astype(np.float32)
    bins = ((values.view(np.int32) - 1) >> 23) - 127
    first, counts = int(bins.min()), np.bincount(bins - bins.min())
    fates = np.array(window(fmt, exponent).fates(counts.tolist(), first))
    scaled = values.astype(float) * 2.0**exponent
    squares = (fmt.round(scaled) - scaled) ** 2
    moved = np.bincount(bins - first, squares) / (scaled**2).sum()  # by bin
    some = counts > 0
    harmless = moved[some & (fates == "kept")]
    assert np.sqrt(harmless.sum()) <= 1.02 * MATTERS
    harmful = moved[some & (fates == "rounded")]
    assert not harmful.size or np.sqrt(harmless.sum() + harmful.min()) >= 0.98 * MATTERS
    assert (harmful.size > 0) == harms
