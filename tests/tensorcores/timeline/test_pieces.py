"""The pieces of a step, against its own sums."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mpdiag.tensorcores.timeline import pieces
from mpdiag.tensorcores.timeline.pieces import chosen_steps, read_pieces
from mpdiag.tensorcores.trace_analysis import profile_trace


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
    monkeypatch.setattr(pieces, "MOST", 20)
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
