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


@pytest.mark.parametrize("name", ["torch", "lightning", "caffe2", "json", "numpy", "mpdiag"])
def test_a_file_that_would_hide_a_package_is_refused_with_a_name_that_would_not(
    plan, tmp_path, name
):
    words = ("export", plan, "--to", "torch", "-o")
    refused = run(*words, tmp_path / f"{name}.py")
    assert refused.exit_code == ExitCode.USAGE
    assert not (tmp_path / f"{name}.py").exists()
    better = tmp_path / f"plan_{name}.py"
    assert f"name it {better}" in " ".join(refused.stderr.split())
    assert run(*words, better).exit_code == ExitCode.OK


def test_any_other_name_is_taken_and_the_one_suggested_is_one_of_them(plan, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "settings.py").write_text("")  # a module here, which nothing hides
    for name in ("settings.py", "torch.json", "my torch.py", "no_such_package.py"):
        assert run("export", plan, "--to", "torch", "-o", name).exit_code == ExitCode.OK
    for framework in ("torch", "lightning", "accelerate", "keras", "caffe2"):
        suggested = run("export", plan, "--to", framework).stderr.splitlines()[-1]
        words = suggested.removeprefix("next: mpdiag ").split()
        assert words[-2:-1] == ["-o"]
        assert run(*words).exit_code == ExitCode.OK
        assert words[-1].startswith("plan_")


def test_a_plan_that_cannot_be_read(plan):
    plan.write_text("{")
    assert run("export", plan, "--to", "torch").exit_code == ExitCode.INPUT
    plan.write_text(json.dumps({"schema_version": 99}))
    assert run("export", plan, "--to", "torch").exit_code == ExitCode.INPUT
