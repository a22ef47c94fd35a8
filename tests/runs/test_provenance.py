"""What a run keeps of how it was started: no secrets."""

from __future__ import annotations

import sys

from mpdiag.runs import provenance


def test_a_run_keeps_no_secret_of_the_command_line(monkeypatch):
    words = ["train.py", "--token", "abc", "--data", "https://host/a@b"]
    monkeypatch.setattr(sys, "argv", words)
    assert provenance.arguments() == [*words[:2], "(hidden)", *words[3:]]
