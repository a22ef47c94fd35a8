"""What a run keeps of how it was started: no secrets."""

from __future__ import annotations

import sys

import pytest

from mpdiag.runs import provenance


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (["--hf-token", "abc", "--lr", "1"], ["--hf-token", "(hidden)", "--lr", "1"]),
        (["--wandb_api_key=abc"], ["--wandb_api_key=(hidden)"]),
        (["logger.wandb.api-key=abc"], ["logger.wandb.api-key=(hidden)"]),
        (["--password", "abc"], ["--password", "(hidden)"]),
        (["--token"], ["--token"]),
        (["--token", "--lr"], ["--token", "--lr"]),
        (["s3://key:word@host/data"], ["s3://(hidden)@host/data"]),
        (["--tokenizer", "bpe", "--max-tokens=5"], ["--tokenizer", "bpe", "--max-tokens=5"]),
        (["token", "ring"], ["token", "ring"]),
        (["--data", "https://host/a@b"], ["--data", "https://host/a@b"]),
    ],
)
def test_a_run_keeps_no_secret_of_the_command_line(words, shown, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["train.py", *words])
    assert provenance.arguments() == ["train.py", *shown]
