"""``mpdiag export``: text, file, JSON, and its exit codes."""

import json

import pytest
from calls import run
from support import backoff

from mpdiag.errors import ExitCode


@pytest.fixture
def plan(tmp_path):
    backoff(64.0).save(tmp_path / "plan.json")
    return tmp_path / "plan.json"


def test_a_file(plan, tmp_path):
    result = run("export", plan, "--to", "deepspeed", "-o", tmp_path / "ds.json")
    assert (result.exit_code, result.stdout) == (ExitCode.OK, "")
    assert json.loads((tmp_path / "ds.json").read_text())["fp16"]["initial_scale_power"] == 6
    assert "note: " in result.stderr
    printed = run("export", plan.parent, "--to", "deepspeed")  # of the folder of the plan
    assert json.loads(printed.stdout)["fp16"]["enabled"]
    assert "opt level" in printed.stderr


def test_one_json_document(plan):
    document = json.loads(run("export", plan, "--to", "keras", "--json").stdout)
    assert document["settings"]["initial_scale"] == 64.0
    assert {"schema_version", "framework", "language", "notes", "text"} <= set(document)


def test_a_plan_that_cannot_be_read(plan):
    plan.write_text("{")
    assert run("export", plan, "--to", "torch").exit_code == ExitCode.INPUT
    plan.write_text(json.dumps({"schema_version": 99}))
    assert run("export", plan, "--to", "torch").exit_code == ExitCode.INPUT
