"""Templates: what they are given is escaped, and what they lack is an error."""

import pytest
from jinja2 import TemplateNotFound, UndefinedError

from mpdiag.display.rendering import environment, render, render_macro

EVIL = "<script>alert('x')</script>\"&"


def templates(root):
    found = sorted((root / "mpdiag").rglob("*.j2"))
    return [str(path.relative_to(root / "mpdiag")) for path in found]


def test_every_template_is_found_and_compiles(root):
    pages = [name for name in templates(root) if not name.startswith("exports/")]  # those are text
    assert len(pages) >= 5
    for name in pages:
        assert environment().get_template(name)


def test_no_template_turns_escaping_off(root):
    for name in templates(root):
        text = (root / "mpdiag" / name).read_text(encoding="utf-8")
        assert "| safe" not in text
        assert "autoescape" not in text


def test_text_is_escaped_and_html_is_not_escaped_twice():
    note = render_macro("display/templates/notebook.html.j2", "note", EVIL)
    assert "<script>" not in note
    assert "&lt;script&gt;" in note
    card = render_macro("display/templates/notebook.html.j2", "card", EVIL, [note, EVIL], EVIL)
    assert str(note) in card
    assert "<script>" not in card


def test_a_value_that_is_missing_is_an_error():
    with pytest.raises(UndefinedError, match="title"):
        render("reports/templates/page.html.j2", plotly="")
    with pytest.raises(TemplateNotFound):
        render("reports/templates/none.html.j2")
