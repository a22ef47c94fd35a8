"""Documents of a run: there and back, and what is refused."""

import json
from dataclasses import replace

import pytest

from mpdiag.errors import DamagedRun, NewerSchema, RunNotFound
from mpdiag.runs.results import (
    SENSITIVITY,
    OperationSensitivity,
    Sensitivities,
    by_weight,
    read_profile,
    read_sensitivities,
)

ROW = OperationSensitivity(
    "head", "softmax", 2, 0.25, 0.5, 0.125, 0.75, "head.weight", 0.0625, finite=True
)
OVERFLOWED = replace(ROW, op="pow", loss_error=None, gradient_error=None, finite=False)


def test_every_field_goes_there_and_back(tmp_path):
    stored = Sensitivities("bf16", 64.0, (ROW, OVERFLOWED))
    stored.save(tmp_path / "run")
    assert read_sensitivities(tmp_path / "run") == stored
    text = (tmp_path / "run" / SENSITIVITY).read_text()
    assert json.loads(text)["operations"][1]["gradient_error"] is None  # no NaN, no Infinity


def test_what_is_not_finite_is_most_sensitive():
    larger = replace(ROW, op="mm", gradient_error=0.5)
    assert [row.op for row in by_weight([ROW, larger, OVERFLOWED])] == ["pow", "mm", "softmax"]


WRONG = [
    *[{"calls": "2"}, {"calls": True}, {"finite": None}, {"module": None}],
    *[{"gradient_error": "0.1"}, {"loss_error": 1e999}, {"worst_gradient": 3}],
]


@pytest.mark.parametrize("change", WRONG, ids=str)
def test_a_row_with_something_else_in_it_is_damage(tmp_path, change):
    assert read_sensitivities(tmp_path) is None  # no file is no error
    Sensitivities("fp16", 1.0, (ROW,)).save(tmp_path)
    document = json.loads((tmp_path / SENSITIVITY).read_text())
    document["operations"][0].update(change)
    (tmp_path / SENSITIVITY).write_text(json.dumps(document))
    with pytest.raises(DamagedRun, match="is damaged"):
        read_sensitivities(tmp_path)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"schema_version": 1}', "[" * 10_000])
def test_what_is_no_document_is_damage(tmp_path, text):
    (tmp_path / SENSITIVITY).write_text(text)
    with pytest.raises(DamagedRun, match="measure again or delete it"):
        read_sensitivities(tmp_path)


def test_a_newer_schema_says_so(tmp_path):
    (tmp_path / SENSITIVITY).write_text('{"schema_version": 2}')
    with pytest.raises(NewerSchema, match="upgrade"):
        read_sensitivities(tmp_path)


@pytest.mark.parametrize(
    ("text", "error", "words"),
    [
        (None, RunNotFound, "has no profile.json"),
        ("{", DamagedRun, "is damaged"),
        ("[]", DamagedRun, "is not a profile"),
        ('{"kernels": [1]}', DamagedRun, "is not a profile"),
        ('{"schema_version": 2}', NewerSchema, "newer mpdiag"),
    ],
)
def test_a_profile_that_cannot_be_read(tmp_path, text, error, words):
    if text is not None:
        (tmp_path / "profile.json").write_text(text)
    with pytest.raises(error, match=words):
        read_profile(tmp_path)
