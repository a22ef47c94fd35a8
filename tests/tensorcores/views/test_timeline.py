"""A step on the clock: every block in its place, idle time with its cause, ranks side by side."""

from dataclasses import replace

import pytest
from tensorcores.traces import SGEMM, kernel, launch, write

from mpdiag.tensorcores.opened_trace import Piece, StepPieces, open_traces, traces_beside
from mpdiag.tensorcores.timeline.host_spans import Gap
from mpdiag.tensorcores.timeline.sweep import Window
from mpdiag.tensorcores.views import tensor_cores, timeline

WORDS = tensor_cores.unit_names({"device": {"generation": "ampere"}})


def step(*pieces, end=1000.0, left_out=0):
    window = Window("7", 0.0, end, {}, 800.0, 0.0, 800.0, 0.0, 0.0, {"loader": 200.0})
    return StepPieces(window, tuple(Piece(*p) for p in pieces), left_out, 3.0 * left_out)


WORK = step(
    (0.0, 100.0, "7", "tensor_core", "<b>gemm</b>"),
    (100.1, 300.0, "7", "tensor_core", "longest"),
    (400.2, 100.0, "7", "cuda_core", "sgemm"),
    (450.0, 50.0, "9", "copy", ""),
    (700.0, 300.0, "7", "other", "add"),
)
GAPS = [Gap(500.2, 700.0, "loader", "sgemm", "add", "next")]


def test_blocks_join_neighbours_and_leave_gaps_with_their_cause():
    frame = timeline.block_frame(WORK, GAPS)
    rows = frame[["lane", "kind", "start_us", "kernels", "longest"]].values.tolist()
    assert rows == [
        ["stream 7", "tensor_core", 0.0, 2, "longest"],
        ["stream 7", "cuda_core", 400.2, 1, "sgemm"],
        ["stream 7", "other", 700.0, 1, "add"],
        ["stream 9", "copy", 450.0, 1, ""],
        ["idle", "loader", 500.2, 0, ""],
    ]
    assert frame["duration_us"].tolist() == pytest.approx([400.1, 100.0, 300.0, 50.0, 199.8])
    fig = timeline.timeline_figure(frame, 1000.0, WORDS)
    names = [trace.name for trace in fig.data]
    assert names[:3] == ["Tensor Cores", "CUDA cores", "not matrix work"]
    assert "idle: waiting for data" in names
    shapes = {trace.name: trace.marker.pattern.shape for trace in fig.data}
    assert shapes["idle: waiting for data"]  # hatched: no colour alone says it
    hostile = timeline.timeline_figure(timeline.block_frame(step(*WORK.pieces[:1]), []), 1e3, WORDS)
    assert "<b>" not in hostile.to_json().replace("\\u003c", "<")
    caption = timeline.timeline_caption(WORK)
    assert caption.startswith("Step 7: 1.0 ms from its first kernel on, 20.0 % of it idle")
    assert "mostly waiting for data: 200 µs" in caption


def test_what_runs_on_from_the_step_before_is_no_idle_time():
    late = step((400.0, 600.0, "7", "other", "add"))
    frame = timeline.block_frame(replace(late, busy_until_us=300.0), [])
    (idle,) = frame[frame["lane"] == "idle"].to_dict("records")
    assert (idle["start_us"], idle["duration_us"]) == (300.0, 100.0)


def test_idle_time_that_is_not_among_the_kept_gaps_is_not_called_unknown():
    frame = timeline.block_frame(WORK, [])
    assert frame["kind"].tolist()[-1] == "shorter"
    names = [trace.name for trace in timeline.timeline_figure(frame, 1000.0, WORDS).data]
    assert names[-1] == "idle: shorter gaps"


def test_every_gap_of_a_drawn_step_has_its_cause(tmp_path):
    """Many gaps of one length: a list of the ten longest would not tell of most of them."""
    events: list[object] = []
    for i in range(60):
        events += [launch(i + 1, 30 * i), kernel(SGEMM, i + 1, 10) | {"ts": 30 * i + 2}]
    path = write(tmp_path / "trace.json", events)
    opened = open_traces([path])
    frame = timeline.block_frame(opened.steps[0], opened.gaps)
    idle = frame[frame["lane"] == "idle"]
    assert (idle["kind"] == "host").sum() == len(idle) == 59
    assert len(opened.document["timeline"]["longest_gaps"]) == 10


def test_where_pieces_are_left_out_no_idle_time_is_drawn():
    work = step(*WORK.pieces, left_out=2)
    assert "idle" not in set(timeline.block_frame(work, GAPS)["lane"])
    assert "2 shorter pieces of 6 µs together are not drawn" in timeline.timeline_caption(work)


def test_the_sample_s_step_and_its_receipt(root):
    path = root / "sample_runs" / "gpu-sample" / "trace.json.gz"
    opened = open_traces([path])
    assert opened.name == path.name
    picture = timeline.timeline(str(path), opened.steps[1], opened.gaps, WORDS)
    kinds = set(picture.frame["kind"])
    assert {"tensor_core", "cuda_core", "layout", "loader", "wait"} <= kinds
    names: dict[str, object] = {}
    exec(picture.receipt, names)
    frame = names["frame"]
    pieces = opened.steps[1].pieces
    assert frame["duration_us"].tolist() == [p.duration_us for p in pieces]
    assert frame["name"].tolist() == [p.name for p in pieces]
    assert traces_beside(path.parent) == [path]
