"""Tables at every width: nothing is cut, and nothing sticks out."""

from __future__ import annotations

import io

import pytest
from rich.console import Console
from rich.text import Text

from mpdiag.reports.text.tables import Fitted


def drawn(table, width):
    console = Console(width=width, file=io.StringIO(), color_system=None)
    console.print(table)
    return console.file.getvalue()


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
    text = drawn(filled(), width)
    assert all(len(line) <= width for line in text.splitlines())
    assert "…" not in text
    for word in ("convolution_backward", "50.2 %", "another", "[bold]add[/bold]", "Worth most"):
        assert word in text


@pytest.mark.parametrize("width", range(50, 100))
def test_a_table_of_numbers_is_as_wide_as_it_may(width):
    numbers = ("|g| max", "values lost", "values lost with the scale")
    table = Fitted(("gradients of", *numbers), right=frozenset(numbers))
    table.add_row("blocks.1.attend", "2^-10.6", "< 0.01 %", "26.24 %")
    text = drawn(table, width)
    assert len({len(line) for line in text.splitlines() if line}) == 1
    assert all(len(line) <= width for line in text.splitlines())
    assert all(word in text for word in ("blocks.1.attend", "< 0.01 %", "26.24 %", "scale"))


def test_what_matters_least_goes_first():
    assert "blocks.12" in drawn(filled(), 120)
    narrow = drawn(filled(), 70)
    assert "blocks.12" not in narrow
    assert "┃" in narrow


def test_rows_become_lines_where_no_table_fits():
    text = drawn(filled(), 44)
    assert "┃" not in text
    assert "blocks.12.projection" in text  # there is room for all of it now
    assert "fix: try another" in text
    assert "2 of 9" in text


def test_an_empty_table_is_no_error():
    assert "time" in drawn(Fitted(("operation", "time")), 80)
