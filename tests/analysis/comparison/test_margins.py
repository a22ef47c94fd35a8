"""How much of a difference does not matter, by the kind of metric."""

from __future__ import annotations

import pytest

from mpdiag.analysis.comparison.margins import (
    default_margin,
    given_margin,
    metric_kind,
    parse_margins,
)
from mpdiag.errors import UsageError


@pytest.mark.parametrize(
    ("name", "value", "higher", "kind"),
    [
        ("accuracy", 0.99, True, "score"),
        ("val_acc@1", 0.7, True, "score"),
        ("Top-5 accuracy (%)", 92.1, True, "score"),
        ("mAP@0.5", 0.8, True, "score"),
        ("BLEU", 27.3, True, "score"),
        ("words right", 0.99, True, "score"),
        ("valIoU", 0.4, True, "score"),
        ("accuracy", 0.99, False, "unknown"),  # less is better: something else of this name
        ("accuracy", -3.0, True, "unknown"),
        ("WER", 0.08, False, "error rate"),
        ("syllable error rate", 0.05, False, "error rate"),
        ("final loss", 2.3, False, "loss"),
        ("valLoss", 2.3, False, "loss"),
        ("perplexity", 310.0, False, "loss"),
        ("bits per character", 3.7, False, "loss"),
        ("Fréchet distance", 1.2, False, "loss"),
        ("RMSE", 0.2, False, "loss"),
        ("loss", -0.3, False, "unknown"),  # 2 % of a mean around 0 means nothing
        ("PSNR (dB)", 25.5, True, "decibel"),
        ("SI-SDR", -4.0, True, "decibel"),
        ("reward", 200.0, True, "unknown"),
        ("map_size", 0.3, False, "unknown"),
        ("steps per second", 30.0, True, "unknown"),
    ],
)
def test_the_kind_is_told_from_name_direction_and_values(name, value, higher, kind):
    assert metric_kind(name, [value], higher_is_better=higher) == kind


@pytest.mark.parametrize(
    ("name", "value", "higher", "width"),
    [
        # 2 % of the mean is 0.0198 here: more than the whole error, so .975 was equal to .990.
        ("accuracy", 0.99, True, 0.001),
        ("accuracy", 0.95, True, 0.0025),
        ("accuracy", 0.76, True, 0.005),
        ("accuracy", 0.04, True, 0.002),
        ("accuracy", 1.0, True, 0.001),
        ("WER", 0.05, False, 0.0025),
        ("accuracy", 95.0, True, 0.25),  # percent
        ("BLEU", 27.3, True, 0.5),
        ("loss", 3.0, False, 0.06),
        ("loss", 0.0, False, 0.02),
        ("PSNR", 25.0, True, 0.1),
    ],
)
def test_the_margin_is_that_of_the_kind(name, value, higher, width):
    found = default_margin(name, [value], [], higher_is_better=higher).width
    assert found == pytest.approx(width)


def test_an_unknown_metric_gets_a_provisional_margin():
    found = default_margin("reward", [200.0], [10.0], higher_is_better=True)
    assert (found.width, found.provisional, found.given) == (4.0, True, False)


def test_margins_are_given_for_all_or_by_name():
    names = ["accuracy", "loss"]
    assert parse_margins([]) is None
    assert parse_margins(["0.5"]) == 0.5
    assert parse_margins(["mAP@IoU=0.5=0.01", "loss=2"]) == {"mAP@IoU=0.5": 0.01, "loss": 2.0}
    assert given_margin(None, "loss", names) is None
    assert given_margin(0.5, "loss", names).width == 0.5
    assert given_margin({"loss": 2.0}, "loss", names).given
    assert given_margin({"loss": 2.0}, "accuracy", names) is None


@pytest.mark.parametrize("texts", [["much"], ["loss="], ["0.1", "0.2"], ["0.1", "loss=2"]])
def test_other_texts_are_refused(texts):
    with pytest.raises(UsageError, match="--margin"):
        parse_margins(texts)


def test_a_margin_of_a_metric_that_is_not_compared_is_refused():
    with pytest.raises(UsageError, match="did you mean accuracy"):
        given_margin({"acuracy": 0.1}, "accuracy", ["accuracy"])
    for senseless in (0.0, -1.0, float("nan")):
        with pytest.raises(UsageError, match="above 0"):
            given_margin({"accuracy": senseless}, "accuracy", ["accuracy"])
