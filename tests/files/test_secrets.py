"""Secrets in command lines and texts are hidden; what only looks like one is not."""

from __future__ import annotations

import pytest

from mpdiag.files.secrets import HIDDEN, shown_arguments, without_secrets

SECRET = "HUSH123"
SECRET_FORMS = [
    f"--token {SECRET}",
    f"--token={SECRET}",
    f"--token -{SECRET}",
    f"--token {SECRET} {SECRET}2",
    f"--tokens {SECRET}",
    f"--TOKEN {SECRET}",
    f"--hf_token {SECRET}",
    f"--hf.token {SECRET}",
    f"--hfToken {SECRET}",
    f"--access-token {SECRET}",
    f"--auth-token {SECRET}",
    f"--auth {SECRET}",
    f"--bearer {SECRET}",
    f"--api-key {SECRET}",
    f"--apikey {SECRET}",
    f"--apiKey {SECRET}",
    f"--key {SECRET}",
    f"--wandb-key {SECRET}",
    f"--secret-key {SECRET}",
    f"--aws_secret_key {SECRET}",
    f"--clientSecret {SECRET}",
    f"--pwd {SECRET}",
    f"--pass {SECRET}",
    f"--passwd {SECRET}",
    "--password 123456",
    f"--credentials {SECRET}",
    f"--credential-json {SECRET}",
    f"--sas {SECRET}",
    f"--signature {SECRET}",
    f"WANDB_API_KEY={SECRET}",
    f"logger.api_key={SECRET}",
    f"+logger.key={SECRET}",
    f'--cfg|{{"token": "{SECRET}"}}',
    f"--url https://u:{SECRET}@h/x",
    f"--url https://u:p@{SECRET}@h/x",
    f"--url https://u:a/{SECRET}@h/x",
    f"--url=https://{SECRET}@h/x",
    f"--url https://h/x?sv=1&sig={SECRET}",
    f"--url https://h/x?token={SECRET}",
    f"--url https://h/x?X-Amz-Signature={SECRET}&n=1",
    f"--url https://h/x?blob={SECRET}",
    f"--header|Authorization: Bearer {SECRET}",
    f"--header|authorization:{SECRET}",
    f"--dsn postgresql+psycopg2://u:{SECRET}@h",
    f"--dsn|host=h user=u password={SECRET}",
    f"--conn AccountKey={SECRET};Endpoint=x",
]
HARMLESS_FORMS = [
    "--max-tokens 512",
    "--max-tokens=512",
    "--max_new_tokens 64",
    "--tokens-per-batch 4096",
    "--num-keys 8",
    "--num_keys=8",
    "--tokenizer bpe",
    "--tokenizer-path data/tok.json",
    "--detokenize",
    "--passes 3",
    "--pass 2",
    "--compass north",
    "--bypass layer",
    "--key-dim 64",
    "--key_dim=64",
    "--monkey see",
    "--keyboard qwerty",
    "--keypoints 17",
    "--pad-token <pad>",
    "--eos_token </s>",
    "--mask-token [MASK]",
    "--class-token true",
    "--use-auth-token false",
    "--token-dropout 0.1",
    "--sort-key length",
    "--primary-key id",
    "--author me",
    "--authors=you",
    "--signal 15",
    "--design flat",
    "--sigma 0.5",
    "--secretary none",
    "--lr 1e-3",
    "--lr=1e-3",
    "--data s3://bucket/key/part",
    "--data https://host:8080/pkg@1.0",
    "--data https://h/x?page=3",
    "--out runs/token-ring",
    "token ring",
    "model.optim.lr=0.1",
    "+trainer.max_steps=100",
    '--cfg|{"layers": 4, "name": "gpt"}',
    "--ratio 16:9",
    "--time 12:30",
]


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
