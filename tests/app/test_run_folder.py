"""The folder of runs behind the pages: how often it is read, and what is not whole in it."""

import errno
import importlib
import io
import json
import shutil
from datetime import datetime, timezone
from pathlib import Path
from unittest.mock import Mock

import made_runs as hand
import pytest
from app_pages import commands, words

from mpdiag.runs import run as runs
from mpdiag.runs import training_log
from mpdiag.runs.results import add_to_meta

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
    add_to_meta(tmp_path / "gpt", steps_seen=12_345)
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


def test_damaged_and_newer_runs_say_so_and_the_others_open(opened, root, tmp_path):
    shutil.copytree(root / "sample_runs" / "digits", tmp_path / "digits")
    for name, text in (("torn", '{"schema_'), ("newer", '{"schema_version": 99}')):
        (tmp_path / name).mkdir()
        (tmp_path / name / "meta.json").write_text(text)
    broken = tmp_path / "broken"
    shutil.copytree(root / "sample_runs" / "digits", broken)
    next((broken / "stats").iterdir()).write_bytes(b"PAR1 no more")
    shown = words(opened(tmp_path)).replace("\\", "")
    assert "torn/meta.json is damaged" in shown
    assert "was written by a newer mpdiag" in shown
    for name, said in (
        ("torn", "is damaged"),
        ("newer", "newer mpdiag"),
        ("broken", "is damaged"),
    ):
        test = opened(tmp_path, "gradients", run=name)
        assert not test.exception
        assert said in words(test)
    assert opened(tmp_path, "gradients", run="digits").get("plotly_chart")


def test_a_run_that_is_still_recording_grows(opened, root, tmp_path):
    run = tmp_path / "live"
    shutil.copytree(root / "sample_runs" / "digits", run)
    parts = sorted((run / "stats").iterdir())
    later = parts[-1].read_bytes()
    parts[-1].unlink()

    def write(**facts):
        add_to_meta(run, updated=datetime.now(timezone.utc).isoformat(), **facts)

    write(state="recording", steps_recorded=20, steps_seen=20)
    test = opened(tmp_path, "gradients", steps="over all recorded steps")
    assert "recording, last written" in words(test)
    so_far = test.info[0].value.replace("\\", "")
    assert "Recording in progress: 20 steps so far, 20 of them recorded" in so_far
    assert "So far: FP16 should work" in so_far
    assert "was killed" not in so_far
    before = test.dataframe[0].value["values"].sum()
    parts[-1].write_bytes(later)
    write(state="complete", steps_recorded=34, steps_seen=300)
    test.run()
    assert "34 of 300 steps recorded" in words(test)
    assert "in progress" not in words(test)
    assert test.dataframe[0].value["values"].sum() > before


def test_a_rank_that_writes_its_last_word_late_is_not_called_killed_for_ever(opened, tmp_path):
    hand.write_run(tmp_path / "runs" / "two", world_size=2)
    last_word = tmp_path / "runs" / "two" / "ranks" / "rank00001.json"
    document = json.loads(last_word.read_text()) | {"rank": 1}
    last_word.write_text(json.dumps(document | {"state": "recording"}))
    test = opened(tmp_path / "runs", "verdict", run="two")
    assert "rank 1 of 2 was killed" in words(test).replace("\\", "").lower()
    last_word.write_text(json.dumps(document))
    assert "was killed" not in words(test.run()).replace("\\", "").lower()
    assert not test.exception


def test_a_recording_in_its_first_steps_is_no_error(opened, tmp_path):
    (tmp_path / "new").mkdir()
    moment = datetime.now(timezone.utc).isoformat()
    meta = {"schema_version": 2, "state": "recording", "created": moment, "updated": moment}
    (tmp_path / "new" / "meta.json").write_text(json.dumps(meta))
    test = opened(tmp_path, "overview")
    assert not test.error
    assert any("holds no statistics yet" in info.value for info in test.info)
    (tmp_path / "new" / "meta.json").write_text(json.dumps({**meta, "state": "complete"}))
    assert "no step was recorded" in opened(tmp_path, "overview").error[0].value


pytest.importorskip("streamlit.testing.v1", reason="needs Streamlit, of the extra `app`")


def test_of_the_files_beside_a_profile_the_first_trace_is_shown(opened, root, tmp_path):
    run = shutil.copytree(root / "sample_runs" / "gpu-sample", tmp_path / "run")
    (run / "log.txt").write_text("epoch 1")
    test = opened(folder=tmp_path, view="tensor_cores", run="run")
    assert not test.error
    assert test.selectbox(key="trace-run").value == "trace.json.gz"
    (run / "trace.json.gz").write_bytes(b"another state of the file")
    test.run()
    assert "is not a trace" in test.error[0].value
    again = opened(folder=tmp_path, view="tensor_cores", run="run")
    assert not again.error
    assert again.selectbox(key="trace-run").value == "profile.json"


@pytest.mark.parametrize(
    "name", ["..", "../../x.json", "/etc/x.json", "a\0b", "ä" * 300, "", "\ud800"]
)
def test_an_uploaded_file_of_any_name_stays_in_its_folder(root, tmp_path, monkeypatch, name):
    monkeypatch.syspath_prepend(str(root / "app"))
    traces = importlib.import_module("traces")
    file = io.BytesIO(b"{}")
    file.name = name
    path = traces._written(tmp_path / "0", file)
    assert path.parent == tmp_path / "0"
    assert path.read_bytes() == b"{}"
    full_disk = Mock(side_effect=OSError(errno.ENOSPC, "No space left on device"))
    monkeypatch.setattr(traces.shutil, "copyfileobj", full_disk)
    assert "No space left" in traces._read([file])


@pytest.mark.parametrize(("marked", "opened"), [("", "b"), ("b", "a"), ("a b", "b")])
def test_what_a_search_recorded_for_itself_is_not_opened_first(root, monkeypatch, marked, opened):
    monkeypatch.syspath_prepend(str(root / "app"))
    run_folder = importlib.import_module("run_folder")
    items = [
        runs.Listing(Path(name), runs.Run(Path(name), {"steps_recorded": 9} | meta), None)
        for name in ("b", "a")  # the newest first
        for meta in [{"made_for": "search"} if name in marked.split() else {}]
    ]
    assert run_folder.first(items).folder.name == opened
