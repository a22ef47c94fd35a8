"""Names and numbers as people read them."""

from __future__ import annotations

import pytest

from mpdiag.reports.formatting import in_markdown, percent


@pytest.mark.parametrize(
    ("share", "words"),
    [(0.0, "0 %"), (1e-5, "< 0.01 %"), (0.1234, "12.34 %"), (1.0, "100.00 %"), (float("nan"), "–")],
)
def test_shares(share, words):
    assert percent(share) == words


def test_no_line_ends_inside_a_cell_of_markdown():
    assert in_markdown("a\r\nb|c\rd") == "a  b\\|c d"
