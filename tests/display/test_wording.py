"""Numbers of things in words."""

from __future__ import annotations

import pytest

from mpdiag.display.wording import counted


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
