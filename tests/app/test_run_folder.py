"""The folder of runs behind the pages: how often it is read."""

from __future__ import annotations

import json
import shutil

import pytest
from app_pages import commands

from mpdiag.runs import run as runs
from mpdiag.runs import training_log

pytestmark = pytest.mark.filterwarnings("default")  # Streamlit's own, of being run bare


def counting(monkeypatch, module, name):
    """Note the calls of a function, wherever it was imported."""
    import run_folder

    calls, before = [], getattr(module, name)

    def counted(*given):
        calls.append(given)
        return before(*given)

    monkeypatch.setattr(module, name, counted)
    if hasattr(run_folder, name):
        monkeypatch.setattr(run_folder, name, counted)
    return calls


def test_runs_are_listed_once_for_each_state_of_the_folder(opened, root, tmp_path, monkeypatch):
    for name in ("ssd", "digits"):
        shutil.copytree(root / "sample_runs" / name, tmp_path / name)
    opened(tmp_path)  # which finds the app's modules
    calls = counting(monkeypatch, runs, "list_runs")
    shutil.copytree(root / "sample_runs" / "gpt", tmp_path / "gpt")
    test = opened(tmp_path, "overview", run="ssd")
    test.switch_page("views/gradients.py").run()
    assert len(calls) == 1
    assert "gpt" in test.sidebar.selectbox[0].options
    meta = tmp_path / "gpt" / "meta.json"
    meta.write_text(json.dumps(json.loads(meta.read_text()) | {"steps_seen": 12_345}))
    test = opened(tmp_path, "overview", run="gpt")
    assert len(calls) == 2
    assert any("12,345 steps recorded" in caption.value for caption in test.caption)
    shutil.rmtree(tmp_path / "gpt")
    assert "gpt" not in opened(tmp_path).sidebar.selectbox[0].options


def test_what_to_run_next_reads_the_logs_once(opened, root, tmp_path, monkeypatch):
    for name in ("ssd", "ssd-fp16-plan"):
        shutil.copytree(root / "sample_runs" / name, tmp_path / name)
    first = opened(tmp_path, "overview", run="ssd")
    calls = counting(monkeypatch, training_log, "read_log")
    again = opened(tmp_path, "overview", run="ssd")
    assert not calls
    assert commands(again) == commands(first) != []
    log = tmp_path / "ssd-fp16-plan" / training_log.FILE
    log.write_text("")  # nothing to compare any more
    changed = opened(tmp_path, "overview", run="ssd")
    assert not any(command.startswith("mpdiag compare") for command in commands(changed))
