"""One table of figures: terminal, JSON, Markdown and HTML are held against each other."""

import base64
import html
import json
import math
import re

import numpy as np
import pytest
from calls import printed
from row_buffer import UpdateCounts, write_rows

from mpdiag.analysis.analyzer import analyze
from mpdiag.analysis.figures import LISTED
from mpdiag.analysis.layer_history import explain_layer
from mpdiag.analysis.layers import merge_layers
from mpdiag.display.wording import MODEL, scale_text
from mpdiag.numerics.formats import FP16
from mpdiag.reports.documents.write import write_report
from mpdiag.reports.text.analysis import analysis_text
from mpdiag.reports.text.why import layer_text
from mpdiag.reports.views.gradients.frame import scale_frame

SHARE = r"(< 0\.01 %|[\d.]+ %)"
CLAIMS = (
    (rf"loses {SHARE} of the gradient's sum in (the model|[^\s;]+)[ ;]", "layer-sum"),
    (rf"loses the most[^:;]*: {SHARE} of its gradient ", "layer-sum"),
    (rf"FP16 loses {SHARE} of (the model|[^\s;]+)'s gradient ", "layer-sum"),
    (rf"FP16 loses {SHARE} of its gradient[ ,]", "layer-sum"),
    (rf"at a loss scale of [\d,]+, it loses {SHARE}", "layer-sum-scaled"),
    (rf"loses {SHARE} of the gradient's values in (the model|[^\s;]+)[ ;]", "layer-values"),
    (rf"loses {SHARE} of (the model|\S+)'s gradient on average ", "replayed-sum"),
    (rf"at most {SHARE} of all steps", "overflow-bound"),
    (rf"{SHARE} of all activation gradients' values over all", "all-values"),
    (rf"{SHARE} of the recorded updates", "updates-swallowed"),
    (rf"would miss {SHARE} of the total weight change", "path-stalled"),
    (rf"loses {SHARE} of all weight gradients", "all-weights-sum"),
    (rf"rounds {SHARE} of (\S+)'s sum to 0", "weights-vanished"),
)
UNNAMED = re.compile(
    r"\b(this|that|the recommended|the plan's) (loss )?scale\b(?!, \d)", re.IGNORECASE
)
RUNS = ("denoiser", "digits", "early and late")


def write_early_and_late(folder):
    """Large gradients first, small ones in the last fifth: its windows differ by orders of magnitude."""
    rows = []
    for step in range(100):
        generator = np.random.default_rng(step)
        for name, early, late in (("first", -20.0, -30.0), ("second", -12.0, -27.5)):
            values = np.exp2(generator.normal(late if step >= 80 else early, 2.0, 300))
            rows.append((step, "activation_grad", name, values))
        rows.append((step, "weight_grad", "first.weight", [2.0**-6, 2.0**-12]))
        update = {"update": UpdateCounts(40, 7, 7, 1, 2, -2, (20, 18))}
        rows.append((step, "update", "first.weight", np.exp2(np.linspace(-20, -3, 40)), update))
    modules = [
        {"name": name, "what": "module", "type": "Linear", "recorded": True}
        for name in ("first", "second")
    ]
    return write_rows(folder, rows, modules, steps=100)


@pytest.fixture(scope="module", params=RUNS)
def analysis(request, root, tmp_path_factory):
    if request.param in RUNS[:2]:
        return analyze(root / "sample_runs" / request.param)
    return analyze(write_early_and_late(tmp_path_factory.mktemp("made") / "run"))


@pytest.fixture(scope="module")
def page(analysis, tmp_path_factory):
    """The HTML report."""
    path = write_report(analysis.run.folder, tmp_path_factory.mktemp("report") / "report.html")
    return path.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def surfaces(analysis, page, tmp_path_factory):
    """The words of each surface that makes claims, white space collapsed."""
    bare = re.sub(r"<(style|script|pre).*?</\1>|<[^>]*>", " ", page, flags=re.DOTALL)
    markdown = write_report(analysis.run.folder, tmp_path_factory.mktemp("md") / "report.md")
    found = {
        "terminal": printed(analysis_text(analysis)),
        "why": printed(layer_text(explain_layer(analysis.run.folder))),
        "html": html.unescape(bare),
        "md": markdown.read_text(encoding="utf-8").replace("\\", ""),
        "json": " ".join(strings(json.loads(json.dumps(analysis.to_json(), allow_nan=False)))),
    }
    return {name: " ".join(text.split()) for name, text in found.items()}


def strings(document):
    if isinstance(document, str):
        yield document
    elif isinstance(document, dict | list):
        for item in document.values() if isinstance(document, dict) else document:
            yield from strings(item)


def check_claims(analysis, text):
    """Each claim that a text makes against the table; which figures it makes claims with."""
    seen = set()
    for pattern, key in CLAIMS:
        for found in re.finditer(pattern, text):
            layer = found[2] if found.re.groups > 1 else None
            if layer is None and key.startswith("layer-"):
                layer = analysis.figures.deciding
            figure = analysis.figures.find(key, "" if layer == "the model" else layer)
            assert figure is not None, (key, found[0])
            assert found[1] == figure.said, (key, found[0])
            seen.add(key)
    return seen


def test_each_figure_is_what_its_window_scale_and_layer_say(analysis):
    """Counted anew from the rows, by nothing but what the figure says of itself."""
    records = analysis.run.records
    for figure in analysis.figures:
        if figure.kind != "activation_grad" or figure.key in ("replayed-sum", "scale-lower"):
            continue
        rows = records.of_kind("activation_grad") & figure.window.holds(records.step)
        layers = merge_layers(records, rows)
        if figure.layer is not None:
            at = int(np.flatnonzero(layers.names == figure.layer)[0])
        h = layers.histograms.merged() if figure.layer is None else layers.histograms[at]
        k = round(math.log2(figure.scale))
        if figure.counted == "values":
            truth = h.lost_to_zero(FP16, k).value / h.nonzero
        else:
            truth = h.abs_sum(FP16.zero_exponent - k).value / h.abs_sum().value
        assert figure.value == pytest.approx(float(truth), rel=1e-12), figure
        assert figure.window.recorded == len(np.unique(records.step[rows]))


def test_the_ends_of_the_interval_are_set_by_the_layers_that_are_named(analysis):
    lower, upper = (analysis.figures.find(f"scale-{end}") for end in ("lower", "upper"))
    plan = analysis.plan.loss_scale
    assert upper.value == plan.upper
    assert upper.layer == analysis.loss_scale.limiting_layer
    if lower is None:
        assert plan.lower <= 1
        return
    assert lower.value == plan.lower
    records = analysis.run.records
    rows = records.of_kind("activation_grad") & lower.window.holds(records.step)
    rows &= records.name == records.code("name", lower.layer)
    h = merge_layers(records, rows).histograms[0]
    for k, enough in (
        (round(math.log2(plan.lower)), True),
        (round(math.log2(plan.lower)) - 1, False),
    ):
        lost = float(h.abs_sum(FP16.zero_exponent - k).value / h.abs_sum().value)
        assert (lost <= 0.01) == enough


def test_a_made_run_has_windows_that_differ_much(tmp_path):
    """Or the comparison of surfaces would show nothing."""
    analysis = analyze(write_early_and_late(tmp_path / "run"))
    figure = analysis.figures.find("layer-sum")
    assert figure.window.name == "the last fifth of the training"
    rows = merge_layers(analysis.run.records, analysis.run.records.of_kind("activation_grad"))
    pooled = scale_frame(rows, FP16, 0).set_index("layer").loc[figure.layer, "sum_share"]
    assert figure.value > 10 * pooled


def test_json_holds_the_table_and_no_more_layers_than_are_shown(analysis):
    document = json.loads(json.dumps(analysis.to_json(), allow_nan=False))["figures"]
    assert {f["key"] for f in document} == {f.key for f in analysis.figures}
    assert len({f["layer"] for f in document if f["key"] == "layer-sum"}) <= LISTED + 3
    for found in document:
        figure = analysis.figures.find(found["key"], found["layer"])
        assert found["value"] == figure.value
        assert found["loss_scale"] == figure.scale
        assert found["window"]["recorded"] == figure.window.recorded


def test_every_surface_says_the_table_s_figures(analysis, surfaces):
    always = {"overflow-bound", "updates-swallowed", "path-stalled", "layer-sum"}
    expected = {
        "terminal": {*always, "all-values"},
        "html": always,
        "md": always,
        "json": always,
        "why": {"layer-sum"},
    }
    for name, text in surfaces.items():
        seen = check_claims(analysis, text)
        assert expected[name] <= seen, name


def test_no_surface_speaks_of_a_scale_without_its_number(surfaces):
    for name, text in surfaces.items():
        assert not UNNAMED.search(text), (name, UNNAMED.search(text))


def test_the_layers_of_each_table_are_those_of_the_verdict(analysis, surfaces):
    figures = analysis.figures
    first = figures.find("layer-sum")
    keys = ("layer-values", "layer-sum")
    scaled = figures.find("layer-values-scaled")
    for layer in figures.layers()[:8]:
        values, sums = (figures.said(key, layer) for key in keys)
        after = f" │ {figures.said('layer-values-scaled', layer)}" if scaled else ""
        row = re.search(
            rf"│ {re.escape(layer)} │ [^│]* │ {values} │ {sums}{after} │",
            surfaces["terminal"],
        )
        assert row, layer
        assert f"| {layer or MODEL} | {sums} | {values} |" in surfaces["md"]
    for name in ("terminal", "md", "html"):
        assert first.where in surfaces[name]
    if scaled is not None:
        for name in ("terminal", "md"):
            assert f"at a loss scale of {scale_text(scaled.scale)}" in surfaces[name]


def test_the_report_s_figures_draw_the_table(analysis, page):
    figures, first = analysis.figures, analysis.figures.find("layer-sum")
    cells = drawn(page, "layer-scales")[0]
    shares = np.reshape(cells["customdata"], (-1, len(cells["x"]), 2))  # of Σ|x|, of the values
    unscaled = shares[:, list(cells["x"]).index(0)]
    assert unscaled[:, 0].max() == first.value
    names = [html.unescape(row[0]) for row in cells["text"]]
    assert len(names) == len(figures.layers())
    for name, (lost, values) in zip(names, unscaled, strict=True):
        layer = "" if name == MODEL else name
        assert values == figures.find("layer-values", layer).value
        assert lost == figures.find("layer-sum", layer).value
    section = re.search(r'<section id="layer-scales">(.*?)</section>', page, re.DOTALL)[1]
    words = html.unescape(re.sub(r"<[^>]*>", " ", section))
    assert first.where in words


def drawn(page, key):
    """The traces of a figure of the page, their numbers as lists."""
    data = json.loads(re.search(rf'id="data-{key}">(.*?)</script>', page, re.DOTALL)[1])["data"]
    return [{name: numbers(value) for name, value in trace.items()} for trace in data]


def numbers(value):
    """Plotly writes long arrays in base64."""
    if isinstance(value, dict) and "bdata" in value:
        return np.frombuffer(base64.b64decode(value["bdata"]), np.dtype(value["dtype"])).tolist()
    return value
