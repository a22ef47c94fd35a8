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


@pytest.mark.parametrize(
    ("read", "text", "error", "words"),
    [
        *(
            (read_sensitivities, text, DamagedRun, "measure again or delete it")
            for text in ("", "{", "[]", "null", '{"schema_version": 1}', "[" * 10_000)
        ),
        (read_sensitivities, '{"schema_version": 2}', NewerSchema, "upgrade"),
        (read_profile, None, RunNotFound, "has no profile.json"),
        (read_profile, "{", DamagedRun, "is damaged"),
        (read_profile, "[]", DamagedRun, "is not a profile"),
        (read_profile, '{"kernels": [1]}', DamagedRun, "is not a profile"),
        (read_profile, '{"schema_version": 2}', NewerSchema, "newer mpdiag"),
    ],
)
def test_what_is_no_document_is_damage(tmp_path, read, text, error, words):
    if text is not None:
        (tmp_path / (SENSITIVITY if read is read_sensitivities else "profile.json")).write_text(
            text
        )
    with pytest.raises(error, match=words):
        read(tmp_path)
