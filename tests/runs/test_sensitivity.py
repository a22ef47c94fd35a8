"""``sensitivity.json``: there and back, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from mpdiag.errors import DamagedRun, NewerSchema
from mpdiag.runs.sensitivity import (
    FILE,
    OperationSensitivity,
    Sensitivities,
    by_weight,
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
    text = (tmp_path / "run" / FILE).read_text()
    assert json.loads(text)["operations"][1]["gradient_error"] is None  # no NaN, no Infinity


def test_no_file_is_no_error(tmp_path):
    assert read_sensitivities(tmp_path) is None


def test_what_is_not_finite_is_most_sensitive():
    larger = replace(ROW, op="mm", gradient_error=0.5)
    assert [row.op for row in by_weight([ROW, larger, OVERFLOWED])] == ["pow", "mm", "softmax"]


@pytest.mark.parametrize(
    "change",
    [
        {"calls": "2"},
        {"calls": True},
        {"finite": None},
        {"module": None},
        {"gradient_error": "0.1"},
        {"loss_error": 1e999},
        {"worst_gradient": 3},
    ],
)
def test_a_row_with_something_else_in_it_is_damage(tmp_path, change):
    Sensitivities("fp16", 1.0, (ROW,)).save(tmp_path)
    document = json.loads((tmp_path / FILE).read_text())
    document["operations"][0].update(change)
    (tmp_path / FILE).write_text(json.dumps(document))
    with pytest.raises(DamagedRun, match="is damaged"):
        read_sensitivities(tmp_path)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"schema_version": 1}', "[" * 10_000])
def test_what_is_no_document_is_damage(tmp_path, text):
    (tmp_path / FILE).write_text(text)
    with pytest.raises(DamagedRun, match="measure again or delete it"):
        read_sensitivities(tmp_path)


def test_a_newer_schema_says_so(tmp_path):
    (tmp_path / FILE).write_text('{"schema_version": 2}')
    with pytest.raises(NewerSchema, match="upgrade"):
        read_sensitivities(tmp_path)
