"""What commands print and notebooks show, kept word for word in ``tests/data/printed``."""

from pathlib import Path

import pytest
from goldens import assert_as_kept
from html_reader import Page
from typer.testing import CliRunner

import mpdiag
from mpdiag.cli import app
from mpdiag.version import __version__

KEPT = Path(__file__).parents[1] / "data" / "printed"
GOLDENS = dict(
    line.split("\t")
    for line in Path(__file__).with_name("printed.tsv").read_text(encoding="utf-8").splitlines()
)
"""File -> words of the command; its output, or the file that it writes."""


@pytest.mark.parametrize("name", GOLDENS)
def test_word_for_word(printed, monkeypatch, name):
    monkeypatch.chdir(printed)
    monkeypatch.setenv("COLUMNS", "100")
    result = CliRunner().invoke(app, GOLDENS[name].split())
    assert result.exit_code == 0, result.output
    text = Path("out.md").read_text(encoding="utf-8") if name.endswith(".md") else result.output
    assert_as_kept(
        KEPT / name, text.replace(__version__, "VERSION").replace(str(printed), "FOLDER")
    )


@pytest.mark.parametrize("name", [n for n in GOLDENS if n.endswith(".txt")])
def test_nothing_is_cut_at_any_width(printed, monkeypatch, name):
    """An ellipsis is what rich puts where a table or a sentence does not fit."""
    monkeypatch.chdir(printed)
    for width in (30, 80):
        monkeypatch.setenv("COLUMNS", str(width))
        shown = CliRunner().invoke(app, GOLDENS[name].split()).stdout
        assert "…" not in shown
        assert all(len(line) <= width for line in shown.splitlines())


def test_what_notebooks_show(printed):
    """Of each object its words, the next step among them, how many pictures, and its repr."""
    ssd, digits = (mpdiag.analyze(printed / name) for name in ("ssd", "digits"))
    compared = mpdiag.compare(printed / "ssd", printed / "ssd-fp16-plan")
    parts = []
    for thing in (ssd.run, ssd, ssd.plan, digits, digits.plan, compared):
        html = thing._repr_html_()
        assert len(html) < 100_000
        parts += [repr(thing), Page(html).text, f"{html.count('<svg')} pictures"]
    assert_as_kept(KEPT / "notebook.txt", "\n".join(parts).replace(str(printed), "FOLDER"))
