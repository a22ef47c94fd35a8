"""Traces as the dashboard opens them: ranks together, the slowest shown; what is refused."""

import json

import pytest
from opened_trace import open_traces, traces_beside
from tensorcores.timeline.test_ranks import trace

from mpdiag.errors import InputError, UsageError
from mpdiag.runs.writer import _MADE


def test_the_slowest_of_several_ranks_is_shown(tmp_path):
    paths = [trace(tmp_path / f"{r}.json", r, c) for r, c in ((0, 40), (1, 70))]
    opened = open_traces(paths)
    assert opened.name == "1.json"
    assert opened.ranks["slowest"] == 1
    assert open_traces(paths[:1]).ranks is None


def test_what_is_no_trace_or_of_another_run_is_a_sentence(tmp_path):
    notes = tmp_path / "notes.json"
    notes.write_text("no trace")
    with pytest.raises(InputError, match="is not a trace"):
        open_traces([notes])
    same = [trace(tmp_path / name, 0, 40) for name in ("a.json", "b.json")]
    with pytest.raises(UsageError, match="both of rank 0"):
        open_traces(same)


def test_the_files_of_a_run_are_no_traces(tmp_path):
    made = ("meta.json", "precision.json", "profile.json", "training.jsonl", "report.html")
    for name in (*made, *_MADE):
        (tmp_path / name).write_text(json.dumps({}))
    (tmp_path / "stats").mkdir()
    kept = trace(tmp_path / "step.json", 0, 40)
    assert traces_beside(tmp_path) == [kept]
