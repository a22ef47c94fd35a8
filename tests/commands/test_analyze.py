"""``mpdiag analyze``: what it says of a run that is not one, and what it names next."""

import json
import os
import shlex
import shutil
import subprocess
import sys
import uuid
from collections import Counter

import pytest
from calls import run

from mpdiag.analysis.verdict.probe import Probe
from mpdiag.errors import ExitCode
from mpdiag.plan import PrecisionPlan


@pytest.fixture
def bare(trained, tmp_path):
    """A recording without a plan."""
    run = tmp_path / "bare"
    shutil.copytree(trained / "first run", run)
    (run / "plan.json").unlink(missing_ok=True)
    return run


def test_the_run_keeps_its_plan_so_that_it_can_be_exported(bare):
    refused = run("export", bare, "--to", "torch")
    assert refused.exit_code == ExitCode.INPUT
    advised = " ".join(refused.stderr.split()).partition("write one with mpdiag ")[2]
    assert run("analyze", bare).exit_code == 0
    assert run("export", bare, "--to", "torch").exit_code == 0
    (bare / "plan.json").unlink()
    assert run(*shlex.split(advised)).exit_code == 0  # what the refusal advises cures it
    assert run("export", bare, "--to", "torch").exit_code == 0


def test_a_plan_that_is_there_is_never_replaced(bare):
    own = PrecisionPlan(run="edited", level="O2")
    own.save(bare / "plan.json")
    done = run("analyze", bare)
    assert f"{bare / 'plan.json'} holds a different plan and was not replaced" in done.stderr
    assert "was not replaced" not in run("analyze", bare, "-o", bare / "p.json").stderr
    assert PrecisionPlan.load(bare) == own
    (bare / "plan.json").write_text("{")
    assert "to replace it: mpdiag analyze" in run("analyze", bare).stderr
    (bare / "plan.json").unlink()
    assert "note: " not in run("analyze", bare).stderr
    assert "note: " not in run("analyze", bare).stderr  # the same again


def test_a_probe_is_remembered(bare, monkeypatch):
    """By a later analysis and by the report; the suggestion to make one is gone."""
    probe = Probe((2.0, 1.0), (2.0, 1.0), 0, 50)
    monkeypatch.setattr("mpdiag.launching.probe.run_probe", lambda *_, **__: probe)
    told = run("analyze", bare, "--probe", "--", "train.py").stdout
    later = run("analyze", bare, "-v")
    assert run("report", bare, "-o", bare / "r.md").exit_code == 0
    for text in (told, later.stdout, (bare / "r.md").read_text()):
        assert "probe of 2 steps agrees with FP32" in " ".join(text.split())
    assert "--probe" not in later.stdout + later.stderr + (bare / "r.md").read_text()


@pytest.mark.parametrize("kind", ["recording", "search", "training"])
def test_some_runs_keep_none(bare, kind):
    meta = json.loads((bare / "meta.json").read_text())
    if kind == "search":
        (bare / "search.json").write_text("{}")
    elif kind == "recording":
        meta["state"] = "recording"
    else:
        meta["training"] = {"level": "O1"}
    (bare / "meta.json").write_text(json.dumps(meta))
    assert run("analyze", bare).exit_code == 0
    assert not (bare / "plan.json").exists()


def test_a_folder_that_cannot_be_written_is_a_note(bare, monkeypatch):
    def fail(*_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(PrecisionPlan, "save", fail)
    done = run("analyze", bare)
    assert done.exit_code == 0
    assert f"note: cannot write the plan into {bare} (Permission denied)" in done.stderr
    assert run("analyze", bare, "--json").exit_code == 0


def test_a_locale_without_our_letters_is_no_reason_to_fail(root):
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    command = [sys.executable, "-m", "mpdiag", "analyze", str(root / "sample_runs" / "digits")]
    child = subprocess.run(command, capture_output=True, env=environment, check=True)
    assert child.stdout.isascii()
    assert b"FP16 should work" in child.stdout


def test_every_file_of_a_run_at_a_url_is_transferred_once(root, monkeypatch):
    memory = pytest.importorskip("fsspec").filesystem("memory")
    url = f"/{uuid.uuid4().hex}/run"
    memory.put(str(root / "sample_runs" / "dcgan"), url, recursive=True)
    opened = Counter()
    own = type(memory)._open

    def counted(self, path, mode="rb", **options):
        opened[path.removeprefix(url)] += mode == "rb"
        return own(self, path, mode, **options)

    monkeypatch.setattr(type(memory), "_open", counted)
    done = run("analyze", f"memory://{url}", "--json")
    assert done.exit_code == 0, done.stderr
    assert {"/meta.json", "/training.jsonl", "/modules/rank00000.parquet"} <= set(opened)
    assert {path for path in opened if path.startswith("/stats/")}
    assert {path: times for path, times in opened.items() if times > 1} == {}
    memory.rm(url, recursive=True)
