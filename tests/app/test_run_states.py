"""Runs that are being written, were killed, are damaged or of a newer version."""

from __future__ import annotations

import json
import shutil
from datetime import datetime, timezone

import made_runs as hand
import pytest
from app_pages import words

ALL = "over all recorded steps"
pytestmark = pytest.mark.filterwarnings("default")  # Streamlit's own, of being run bare


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
        meta = json.loads((run / "meta.json").read_text())
        moment = datetime.now(timezone.utc).isoformat()
        (run / "meta.json").write_text(json.dumps({**meta, "updated": moment, **facts}))

    write(state="recording", steps_recorded=20, steps_seen=20)
    test = opened(tmp_path, "gradients", steps=ALL)
    assert "recording, last written" in words(test)
    so_far = test.info[0].value.replace("\\", "")
    assert "Recording in progress: 20 steps so far, 20 of them recorded" in so_far
    assert "So far: Expected from the recording" in so_far
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
