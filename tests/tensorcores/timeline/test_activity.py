"""What the timeline takes from an export of nsys: launches, waits and copies beside the kernels."""

from __future__ import annotations

import sqlite3
from dataclasses import replace

import pytest

from mpdiag.tensorcores import opened_trace
from mpdiag.tensorcores.events import Copy, HostSpan
from mpdiag.tensorcores.opened_trace import chosen_steps, read_pieces
from mpdiag.tensorcores.readers.recognition import read
from mpdiag.tensorcores.trace_analysis import profile_trace


def export(path):
    base = sqlite3.connect(path)
    base.executescript(
        """
        CREATE TABLE StringIds (id INTEGER, value TEXT);
        CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (start INTEGER, end INTEGER, deviceId INTEGER,
            streamId INTEGER, correlationId INTEGER, demangledName INTEGER);
        CREATE TABLE CUPTI_ACTIVITY_KIND_MEMCPY (start INTEGER, end INTEGER, deviceId INTEGER,
            streamId INTEGER, correlationId INTEGER, bytes INTEGER);
        CREATE TABLE CUPTI_ACTIVITY_KIND_MEMSET (start INTEGER, end INTEGER);
        CREATE TABLE CUPTI_ACTIVITY_KIND_RUNTIME (start INTEGER, end INTEGER, globalTid INTEGER,
            correlationId INTEGER, nameId INTEGER);
        INSERT INTO StringIds VALUES (1, 'volta_sgemm_64x64_tn'), (2, 'cudaLaunchKernel_v7000'),
            (3, 'cudaMemcpyAsync_v3020'), (4, 'cudaStreamSynchronize_v3020'), (5, 'cudaMalloc_v3020');
        INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES (1000, 5000, 0, 7, 11, 1),
            (30000, 40000, 0, 7, 13, 1);
        INSERT INTO CUPTI_ACTIVITY_KIND_MEMCPY VALUES (5000, 15000, 0, 7, 12, 64),
            ('damaged', 1, 0, 7, 12, 64);
        INSERT INTO CUPTI_ACTIVITY_KIND_RUNTIME VALUES (500, 600, 5, 11, 2), (700, 800, 5, 12, 3),
            (900, 16000, 5, 0, 4), (25000, 25100, 5, 13, 2), (1, 2, 5, 9, 5);
        """
    )
    base.commit()
    base.close()
    return path


def test_copies_and_waits_of_nsys(tmp_path):
    path = export(tmp_path / "report.sqlite")
    events = list(read(path))
    assert [e for e in events if isinstance(e, Copy)] == [Copy(5.0, 10.0, 0, 7, 12)]
    assert [e for e in events if isinstance(e, HostSpan)] == [
        HostSpan("wait", "cudaStreamSynchronize", 0.9, 16.0)
    ]
    found = profile_trace(path).timeline
    assert (found.whole.wall_us, found.whole.copying_us, found.whole.idle_us) == (39, 10, 15)
    (gap,) = found.longest
    assert (gap.cause, gap.host, gap.start_us) == ("wait", "cudaStreamSynchronize", 15.0)
    assert "copies alone 25.6 %" in " ".join(profile_trace(path).to_json()["summary"])


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
