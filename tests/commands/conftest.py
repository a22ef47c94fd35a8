"""Runs that tests of several commands share."""

import json

import pytest
from support import record_and_train


@pytest.fixture
def folder(tmp_path):
    """A folder of runs: two that list, one that is damaged, one of a newer schema, and no run."""
    metas = {
        "old": {"schema_version": 1, "state": "finished", "created": "2025-01-01T00:00:00+00:00"},
        "[red]new": {"schema_version": 1, "state": "recording", "created": "2025-02-01T00:00:00"},
        "newer": {"schema_version": 99},
        "damaged": None,
    }
    for name, meta in metas.items():
        (tmp_path / name).mkdir()
        text = "{" if meta is None else json.dumps(meta)
        (tmp_path / name / "meta.json").write_text(text)
    (tmp_path / "no run").mkdir()
    return tmp_path


@pytest.fixture(scope="session")
def trained(tmp_path_factory):
    """A recording and a training by its plan, in a folder whose name must be quoted."""
    folder = tmp_path_factory.mktemp("trained") / "Übung 1" / "runs"
    record_and_train(folder / "first run", folder / "second")
    return folder
