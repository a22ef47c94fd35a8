"""Traces as the dashboard opens them: ranks together, the slowest shown; what is refused."""

import json
from dataclasses import replace

import pytest
from tensorcores.timeline.test_ranks import trace

from mpdiag.errors import InputError, UsageError
from mpdiag.tensorcores import opened_trace
from mpdiag.tensorcores.opened_trace import chosen_steps, open_traces, read_pieces, traces_beside
from mpdiag.tensorcores.trace_analysis import profile_trace
from mpdiag.tensorcores.views import timeline


def test_the_slowest_of_several_ranks_is_shown(tmp_path):
    paths = [trace(tmp_path / f"{r}.json", r, c) for r, c in ((0, 40), (1, 70))]
    opened = open_traces(paths)
    assert opened.name == "1.json"
    assert opened.ranks["slowest"] == 1
    assert [work.step.name for work in opened.steps] == ["5", "6"]
    frame = timeline.block_frame(opened.steps[1], opened.gaps)
    assert "collective" in set(frame["kind"])
    picture = timeline.ranks(opened.ranks)
    assert list(picture.frame["rank"]) == ["0", "1"]
    parts = picture.frame[list(timeline.RANK_PARTS)].sum(axis=1)
    assert parts.tolist() == pytest.approx(picture.frame["wall_us"].tolist())
    assert "for rank 1" in picture.caption
    compile(picture.receipt, "receipt.py", "exec")
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
    for name in ("meta.json", "plan.json", "profile.json", "training.jsonl", "report.html"):
        (tmp_path / name).write_text(json.dumps({}))
    (tmp_path / "stats").mkdir()
    kept = trace(tmp_path / "step.json", 0, 40)
    assert traces_beside(tmp_path) == [kept]


@pytest.fixture(scope="module")
def sample(root):
    path = root / "sample_runs" / "gpu-sample" / "trace.json.gz"
    return path, profile_trace(path).timeline


def test_the_pieces_of_each_step_add_up_to_its_sums(sample):
    path, timeline = sample
    found = read_pieces(path, chosen_steps(timeline))
    assert [work.step for work in found] == list(timeline.steps)
    for work in found:
        assert work.left_out == 0
        spent = sum(p.duration_us for p in work.pieces)
        assert spent == pytest.approx(sum(work.step.kernel_us.values()))
        starts = [p.start_us for p in work.pieces]
        assert starts == sorted(starts)
        assert work.step.start_us <= starts[0]
        assert starts[-1] < work.step.end_us
        kinds = {p.kind for p in work.pieces}
        assert kinds == {kind for kind, spent in work.step.kernel_us.items() if spent}


def test_of_a_longer_step_the_longest_pieces_are_kept(sample, monkeypatch):
    path, timeline = sample
    (whole,) = read_pieces(path, timeline.steps[:1])
    monkeypatch.setattr(opened_trace, "MOST", 20)
    (cut,) = read_pieces(path, timeline.steps[:1])
    assert (len(cut.pieces), cut.left_out) == (20, len(whole.pieces) - 20)
    shortest = min(p.duration_us for p in cut.pieces)
    assert sorted(p.duration_us for p in whole.pieces)[-20] == shortest
    spent = sum(p.duration_us for p in cut.pieces) + cut.left_out_us
    assert spent == pytest.approx(sum(p.duration_us for p in whole.pieces))


def test_of_many_steps_the_first_the_longest_and_the_usual_are_drawn(sample):
    _, timeline = sample
    few = chosen_steps(timeline, 3)
    assert timeline.steps[0] in few
    assert timeline.usual_step in few
    assert max(timeline.steps, key=lambda step: step.wall_us) in few
    assert len(few) <= 3


def test_a_window_knows_until_when_earlier_work_runs_in_it(sample):
    path, timeline = sample
    first = timeline.steps[0]
    (whole,) = read_pieces(path, [first])
    long = max(whole.pieces, key=lambda piece: piece.duration_us)
    end = long.start_us + long.duration_us
    cut = replace(first, start_us=long.start_us + long.duration_us / 2)
    (late,) = read_pieces(path, [cut])
    assert late.busy_until_us == pytest.approx(end)
    _, second = read_pieces(path, [replace(first, end_us=cut.start_us), cut])
    assert second.busy_until_us == late.busy_until_us
    assert whole.busy_until_us < cut.start_us
