"""Pictures of characters: they fit, and their columns still add up."""

import numpy as np
import pytest
from calls import printed

from mpdiag.numerics.formats import FP16
from mpdiag.numerics.histograms import ExponentHistogram
from mpdiag.reports.text.charts import (
    LOST,
    Histogram,
    Sparkline,
    _count_words,
    sparkline,
)


@pytest.fixture
def wide():
    """Values over a hundred powers of two."""
    exponents = np.random.default_rng(0).uniform(-110, 12, 4000)
    return ExponentHistogram.of(np.exp2(exponents).astype(np.float32))


@pytest.mark.parametrize("width", [40, 80, 120, 200])
def test_a_histogram_fits_the_terminal(wide, width):
    lines = printed(Histogram(wide, FP16, 64.0), width=width).splitlines()
    assert max(map(len, lines)) <= width
    assert sum("FP16" in line for line in lines if "━" in line) == 2
    bars = lines[:8]
    assert len({len(line.rstrip()) for line in bars[-1:]}) == 1
    assert lines[8].strip() == "─" * len(lines[8].strip())  # the axis is one line


@pytest.mark.parametrize("width", [40, 60, 120])
def test_red_ends_where_the_format_does(wide, width):
    text = Histogram(wide, FP16).drawn(width)
    line = text.split("\n")[7]
    red = sum(span.end - span.start for span in line.spans if span.style == LOST)
    window = next(part.plain for part in text.split("\n") if "scale 1" in part.plain)
    assert window.count("·") == red


def test_a_narrow_run_has_a_column_for_each_power():
    h = ExponentHistogram.of(np.float32([2.0**-20, 2.0**-21, 1.0]))
    axis = Histogram(h, FP16).drawn(80).split("\n")[9].plain
    assert "-24" in axis
    assert axis.index("-16") - axis.index("-24") == 8


def test_a_long_course_keeps_its_peaks():
    values = np.zeros(1000)
    values[503] = 1.0
    line = sparkline(values, 60)
    assert len(line) == 60
    assert line.count("█") == 1
    assert sparkline([0.0, 0.5, 1.0], 60) == " ▄█"
    (row,) = printed(Sparkline(values, "0 % → 0 %"), width=50).splitlines()
    assert len(row) <= 50
    assert sparkline([0.0, 0.0064, 0.0219], 60) == " ▂█"  # a small share is not blank
    assert sparkline([0.0, 0.0], 60) == "  "


def test_nothing_is_a_sentence():
    assert (
        Histogram(ExponentHistogram.of(np.float32([0.0])), FP16).drawn().plain.startswith("no non")
    )


@pytest.mark.parametrize(
    ("count", "label"), [(1.0, "1"), (4_870.0, "5,000"), (9.6e4, "1×10^5"), (2.2e7, "2×10^7")]
)
def test_counts_beside_the_bars_are_written_as_people_write_them(count, label):
    assert _count_words(count) == label
