"""Secrets in command lines and texts are hidden; what only looks like one is not."""

import sys
from pathlib import Path

import pytest

from mpdiag.files.secrets import HIDDEN, shown_arguments, without_secrets
from mpdiag.runs import provenance

SECRET = "HUSH123"
SECRET_FORMS, HARMLESS_FORMS = (
    Path(__file__).with_name(f"{name}_words.txt").read_text().splitlines()
    for name in ("secret", "harmless")
)
"""Command lines, one a row; the secret in one is ``SECRET``, or a password in digits."""


def words(form: str) -> list[str]:
    """A form's words; one with blanks inside stands behind a bar."""
    option, bar, value = form.partition("|")
    return [option, value] if bar else form.split()


@pytest.mark.parametrize("form", SECRET_FORMS)
def test_a_secret_is_hidden(form):
    shown = shown_arguments(words(form))
    assert not [word for word in shown if SECRET in word or "123456" in word]
    assert any(HIDDEN in word for word in shown)
    assert len(shown) == len(words(form))


@pytest.mark.parametrize("form", HARMLESS_FORMS)
def test_what_is_no_secret_stays_readable(form):
    assert shown_arguments(words(form)) == words(form)


def test_there_are_enough_forms():
    assert min(len(SECRET_FORMS), len(HARMLESS_FORMS)) >= 40


def test_the_words_after_a_secret_are_read_again():
    line = ["--token", SECRET, "--lr", "0.1", "data"]
    assert shown_arguments(line) == ["--token", HIDDEN, "--lr", "0.1", "data"]


def test_a_message_shows_no_login_and_no_query():
    text = f"cannot read https://me:{SECRET}@host/run?sig={SECRET} (404)"
    assert without_secrets(text) == f"cannot read https://{HIDDEN}@host/run?sig={HIDDEN} (404)"


def test_a_run_keeps_no_secret_of_the_command_line(monkeypatch):
    words = ["train.py", "--token", "abc", "--data", "https://host/a@b"]
    monkeypatch.setattr(sys, "argv", words)
    assert provenance.arguments() == [*words[:2], "(hidden)", *words[3:]]
