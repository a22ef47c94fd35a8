"""Tables at every width: nothing is cut, and nothing sticks out."""

from pathlib import Path

import pytest
from calls import printed
from goldens import assert_as_kept
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


def test_columns_go_and_rows_become_lines_as_room_is_lost():
    text = "\n".join(printed(filled(), width=width) for width in (120, 70, 44))
    assert_as_kept(Path(__file__).with_name("tables.txt"), text)


def test_an_empty_table_is_no_error():
    assert "time" in printed(Fitted(("operation", "time")))
