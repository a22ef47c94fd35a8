"""The interval that ``mpdiag compare`` prints, drawn against its margin, and the losses beside it."""

import math

import comparison as view
import pytest
from receipt_checks import same_numbers

from mpdiag.analysis.comparison.compare import compare_groups
from mpdiag.analysis.comparison.groups import SeedGroup, SeedTraining, read_group


def group(name, values, *, metric="accuracy", losses=(1.0, 0.5)):
    steps = dict(enumerate(losses))
    return SeedGroup(
        name,
        tuple(
            SeedTraining(f"{name}{seed}", seed, {metric: value}, {metric: True}, steps)
            for seed, value in enumerate(values)
        ),
    )


REFERENCE = group("fp32", [0.9, 0.901, 0.899, 0.9])
CASES = {
    "equivalent": [0.9005, 0.9015, 0.8995, 0.9004],
    "different": [0.85, 0.851, 0.849, 0.85],
    "inconclusive": [0.905, 0.9, 0.899, 0.91],
}


@pytest.mark.parametrize("verdict", CASES)
def test_the_figure_shows_what_compare_says(verdict):
    comparison = compare_groups(REFERENCE, group("fp16", CASES[verdict]))
    (metric,) = comparison.metrics
    assert metric.result.verdict == verdict
    frame = view.metric_frame(comparison)
    assert frame.loc[0, ["low", "high", "margin"]].tolist() == [
        metric.result.low,
        metric.result.high,
        metric.result.margin,
    ]
    fig = view.interval_figure(frame)
    (marks,) = [trace for trace in fig.data if trace.mode == "markers"]
    (line,) = [trace for trace in fig.data if trace.mode == "lines"]
    assert marks.name == verdict
    places = [metric.result.low / metric.result.margin, metric.result.high / metric.result.margin]
    assert [x for x in line.x if x is not None] == [max(-view.REACH, p) for p in places]
    words = view.metric_sentence(metric)
    ends = {
        "equivalent": "within the margin: equivalent",
        "different": "beyond the margin: different",
    }
    assert ends.get(verdict, "undecided") in words
    assert "90 % interval" in words


def test_names_are_text_and_nothing_is_written_as_a_power():
    odd = "<b>accuracy</b>"
    comparison = compare_groups(group("a", [1e-6], metric=odd), group("b", [1.2e-6], metric=odd))
    shown = view.intervals("a", "b", comparison).figure.to_json().replace("\\u003c", "<")
    assert "<b>accuracy" not in shown
    assert view.signed(6.63e-5) == "+0.0000663"
    assert view.signed(-1234.5) == "-1234"
    assert view.signed(0.0) == "+0"
    assert view.signed(math.inf) == "+inf"


def test_losses_of_all_sides_and_their_receipt(root):
    paths = {n: str(root / "sample_runs" / n) for n in ("ssd", "ssd-fp16-plan")}
    sides = [view.Side(name, "", read_group(path)) for name, path in paths.items()]
    comparison = compare_groups(*(side.group for side in sides))
    picture = view.side_losses(sides, paths, comparison)
    same_numbers(picture, needed=["side", "run", "step", "loss"])
    curve = comparison.curve
    assert f"({curve.steps:,} common steps)" in picture.caption
    assert f"at step {curve.worst_step}" in picture.caption
    assert view.side_losses([], {}, None).figure.layout.annotations  # which says why it is empty


def test_in_which_format_a_run_was_trained():
    assert view.trained_in({}) == "FP32 recording"
    assert view.trained_in({"training": {"dtype": "bfloat16", "level": "O2"}}) == "BF16, level O2"
    assert view.trained_in({"training": {"dtype": "fp16", "level": "O0"}}) == "FP32"
