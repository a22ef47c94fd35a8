"""Names and numbers as people read them."""

from __future__ import annotations

import pytest

from mpdiag.display.wording import counted, in_markdown, percent


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ((0, "layer"), "0 layers"),
        ((1, "layer"), "1 layer"),
        ((2, "layer"), "2 layers"),
        ((1234, "layer"), "1,234 layers"),
        ((1, "operation or module", "operations or modules"), "1 operation or module"),
        ((2, "operation or module", "operations or modules"), "2 operations or modules"),
    ],
)
def test_counted(asked, words):
    assert counted(*asked) == words


@pytest.mark.parametrize(
    ("share", "words"),
    [
        (0.0, "0 %"),
        (1e-5, "< 0.01 %"),
        (0.1234, "12.34 %"),
        (float("nan"), "–"),
        (0.9999, "99.99 %"),
        (0.99999, "> 99.99 %"),
        (1.0, "100 %"),
        (1 - 1e-12, "100 %"),
        (1.5, "150.00 %"),
    ],
)
def test_shares(share, words):
    assert percent(share) == words


def test_no_line_ends_inside_a_cell_of_markdown():
    assert in_markdown("a\r\nb|c\rd") == "a  b\\|c d"
