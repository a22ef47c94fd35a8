"""Tables at every width: nothing is cut, and nothing sticks out."""

from __future__ import annotations

import pytest
from calls import printed
from rich.text import Text

from mpdiag.reports.text.tables import Fitted


def filled():
    table = Fitted(
        ("operation", "module", "time", "fix"),
        "Worth most",
        "2 of 9",
        sentences=frozenset({"fix"}),
        right=frozenset({"time"}),
        spare=("module",),
    )
    table.add_row("convolution_backward", "blocks.12.projection", "50.2 %", "try another " * 6)
    table.add_row("[bold]add[/bold]", "", Text("9.0 %"), "")
    return table


@pytest.mark.parametrize("width", [30, 40, 60, 80, 120, 200])
def test_no_word_is_cut_and_no_line_too_long(width):
    text = printed(filled(), width=width)
    assert all(len(line) <= width for line in text.splitlines())
    assert "…" not in text
    for word in ("convolution_backward", "50.2 %", "another", "[bold]add[/bold]", "Worth most"):
        assert word in text


@pytest.mark.parametrize("width", range(50, 100))
def test_a_table_of_numbers_is_as_wide_as_it_may(width):
    numbers = ("|g| max", "values lost", "values lost with the scale")
    table = Fitted(("gradients of", *numbers), right=frozenset(numbers))
    table.add_row("blocks.1.attend", "2^-10.6", "< 0.01 %", "26.24 %")
    text = printed(table, width=width)
    assert len({len(line) for line in text.splitlines() if line}) == 1
    assert all(len(line) <= width for line in text.splitlines())
    assert all(word in text for word in ("blocks.1.attend", "< 0.01 %", "26.24 %", "scale"))


def test_what_matters_least_goes_first():
    assert "blocks.12" in printed(filled(), width=120)
    narrow = printed(filled(), width=70)
    assert "blocks.12" not in narrow
    assert "┃" in narrow


def test_rows_become_lines_where_no_table_fits():
    text = printed(filled(), width=44)
    assert "┃" not in text
    assert "blocks.12.projection" in text  # there is room for all of it now
    assert "fix: try another" in text
    assert "2 of 9" in text


def test_an_empty_table_is_no_error():
    assert "time" in printed(Fitted(("operation", "time")))
