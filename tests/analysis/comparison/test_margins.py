"""How much of a difference does not matter, by the kind of metric."""

import csv
from pathlib import Path

import pytest

from mpdiag.analysis.comparison.margins import (
    default_margin,
    given_margin,
    metric_kind,
    parse_margins,
)
from mpdiag.errors import UsageError


def rows(column):
    """Of each metric of the table for which it states a kind, or a margin."""
    with Path(__file__).with_name("margins.tsv").open(encoding="utf-8", newline="") as file:
        return [
            (row["metric"], float(row["value"]), row["better"] == "more", row[column])
            for row in csv.DictReader(file, delimiter="\t")
            if row[column]
        ]


@pytest.mark.parametrize(("name", "value", "higher", "kind"), rows("kind"))
def test_the_kind_is_told_from_name_direction_and_values(name, value, higher, kind):
    assert metric_kind(name, [value], higher_is_better=higher) == kind


@pytest.mark.parametrize(("name", "value", "higher", "width"), rows("margin"))
def test_the_margin_is_that_of_the_kind(name, value, higher, width):
    found = default_margin(name, [value], [], higher_is_better=higher).width
    assert found == pytest.approx(float(width))


def test_margins_are_given_for_all_or_by_name():
    names = ["accuracy", "loss"]
    assert parse_margins([]) is None
    assert parse_margins(["0.5"]) == 0.5
    assert parse_margins(["mAP@IoU=0.5=0.01", "loss=2"]) == {"mAP@IoU=0.5": 0.01, "loss": 2.0}
    assert given_margin(None, "loss", names) is None
    assert given_margin(0.5, "loss", names).width == 0.5
    assert given_margin({"loss": 2.0}, "loss", names).given
    assert given_margin({"loss": 2.0}, "accuracy", names) is None


def test_what_is_no_margin_is_refused():
    for texts in (["much"], ["loss="], ["0.1", "0.2"], ["0.1", "loss=2"]):
        with pytest.raises(UsageError, match="--margin"):
            parse_margins(texts)
    with pytest.raises(UsageError, match="did you mean accuracy"):
        given_margin({"acuracy": 0.1}, "accuracy", ["accuracy"])
    for senseless in (0.0, -1.0, float("nan")):
        with pytest.raises(UsageError, match="above 0"):
            given_margin({"accuracy": senseless}, "accuracy", ["accuracy"])
