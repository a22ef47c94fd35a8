"""Every picture of a recording: its receipt gives its numbers without mpdiag, and names are text."""

import json
from dataclasses import replace

import comparison
import pytest
from drawn_runs import of_layers
from layer_course import Layer
from plan_in_training import replayed
from plotly.utils import PlotlyJSONEncoder
from proven_operations import proven_frame
from receipt_checks import same_numbers

from mpdiag.analysis.operations.rules import OperationFinding
from mpdiag.analysis.scaling.replay import replay_run
from mpdiag.display.wording import percent
from mpdiag.numerics.formats import FP8_E4M3, FP16
from mpdiag.reports.contents import read_contents
from mpdiag.reports.views import operations
from mpdiag.reports.views.updates import Updates

GRAD = "activation_grad"


def nothing(analysis):
    return replace(of_layers(analysis), layers=analysis.layers.of_kind("no such kind"))


def layer(analysis, fmt=FP16, exponent=3, name=None):
    last = str(of_layers(analysis).names[-1]) if name is None else name
    return Layer(str(analysis.run.folder), analysis.run.records, GRAD, last, fmt, exponent)


def updates(analysis):
    return Updates(str(analysis.run.folder), analysis.run.records)


def sensitive(analysis):
    run = str(analysis.run.folder)
    return operations.sensitivity(run, operations.ranking(read_contents(analysis)))


def worst(analysis):
    return str(updates(analysis).by_parameter["parameter"].iloc[0])


CELLS = ["layer", "exponent", "count"]
OVER_STEPS, BINS = ["step", "exponent", "count"], ["exponent", "count"]
COURSE = ["step", "lost_share", "sum_share", "lost_share_scaled", "sum_share_scaled", "absmax"]
BY_SCALE = ["layer", "scale_exponent", "lost_share", "sum_share", "overflows"]
PICTURES = {
    "heat map": (lambda a: of_layers(a).heat_map(3), CELLS),
    "heat map, weights": (lambda a: of_layers(a, "weight_grad").heat_map(3), CELLS),
    "heat map, activations": (lambda a: of_layers(a, "activation").heat_map(0), CELLS),
    "layer scales": (lambda a: of_layers(a, plan=a.plan.loss_scale).layer_scales(3), BY_SCALE),
    "histogram": (lambda a: of_layers(a).histogram(3), BINS),
    "histogram of one": (lambda a: of_layers(a).histogram(3, layer=layer(a).name), BINS),
    "over time": (lambda a: layer(a).over_time(), OVER_STEPS),
    "course": (lambda a: layer(a).course(), COURSE),
    "course, E4M3": (lambda a: layer(a, FP8_E4M3, 0).course(), COURSE),
    "ratios": (lambda a: updates(a).ratios(), BINS),
    "ratios of one": (lambda a: updates(a).ratios(worst(a)), BINS),
    "sensitivity": (sensitive, ["module"]),
}
"""How each is made of an analysis, and the columns that its receipt has to give."""


def shown(figure):
    """All of a figure that a browser may read as HTML: names that only pages read are left out."""
    document = figure.to_plotly_json()
    for trace in document["data"]:
        for part in ("ids", "parents"):
            trace.pop(part, None)
        if "customdata" not in str(trace.get("hovertemplate")):
            trace.pop("customdata", None)
    return json.dumps(document, cls=PlotlyJSONEncoder)


@pytest.mark.parametrize("name", PICTURES)
def test_a_receipt_gives_the_numbers_of_its_picture(analysis, name):
    make, needed = PICTURES[name]
    picture = make(analysis)
    same_numbers(picture, needed=needed)
    text = shown(picture.figure)
    assert "<img" not in text  # as the names of the run by hand have it
    assert "<script" not in text
    assert picture.key
    assert picture.title
    assert picture.caption


@pytest.mark.parametrize(
    "make",
    [
        lambda a: nothing(a).heat_map(0),
        lambda a: nothing(a).layer_scales(0),
        lambda a: nothing(a).histogram(0),
        lambda a: layer(a, name="no such layer").over_time(),
        lambda a: layer(a, name="no such layer").course(),
        lambda a: updates(a).ratios("no such parameter"),
    ],
)
def test_nothing_recorded_is_a_sentence_and_no_error(analysis, make):
    picture = make(analysis)
    assert picture.frame.empty
    assert picture.figure.layout.annotations[0].text


def test_the_replay_is_the_analysis_own(analysis):
    played = replay_run(analysis.run, "backoff", init_scale=2.0**24)
    picture = replayed("RUN", played, "--scaler backoff")
    assert picture.frame["overflow"].sum() == played.skips > 0
    line = next(t for t in picture.figure.data if t.name == "loss scale")
    assert list(line.y) == list(played.scale)
    assert "'mpdiag', 'replay', 'RUN', '--scaler', 'backoff', '--json'" in picture.receipt


def test_the_same_run_beside_itself_has_not_moved(analysis):
    frame = comparison.comparison_frame(analysis.layers, analysis.layers)
    assert (frame["octaves"].dropna() == 0).all()
    assert len(frame) == len(analysis.layers)
    assert comparison.apart(analysis.layers, analysis.layers) == (0, 0)


def test_updates_are_the_plan_s_and_their_captions_say_them(analysis):
    shown = updates(analysis)
    table, ratios = shown.by_parameter, shown.ratios()
    share = table["swallowed_fp16"].sum() / table["changed"].sum()
    assert share == pytest.approx(analysis.plan.master_weights.swallowed_fraction)
    beyond = ratios.frame.loc[ratios.frame["exponent"] >= 11, "count"].sum()
    expected = (table["beyond_2048"] * table["changed"]).sum()
    assert beyond == pytest.approx(expected)
    counts = [ratios.frame.loc[ratios.frame["exponent"] >= k, "count"].sum() for k in (11, 12)]
    said = [percent(count / ratios.frame["count"].sum()) for count in counts]
    assert all(words in ratios.caption for words in said)
    if table["fp16_share"].max() > 0:
        assert percent(table["fp16_share"].max()) in ratios.caption
    assert shown.ratios("no such parameter").caption.startswith("Over all recorded steps. ")


def test_operations_with_their_line(analysis):
    found = OperationFinding(
        code="overflow",
        op="exp",
        aten="aten::exp",
        module="",
        where="model.py:12",
        text="x.exp()",
        reason="it reaches 1e5",
        instead="subtract",
        without="infinite",
    )
    (row,) = proven_frame(replace(analysis, operations=(found,))).to_dict("records")
    assert (row["operation"], row["module"], row["line"]) == ("exp", "(the model)", "model.py:12")
    assert proven_frame(replace(analysis, operations=())).empty
    table = operations.operations_frame(analysis)
    assert len(table) == len(analysis.plan.fp32_operations)
