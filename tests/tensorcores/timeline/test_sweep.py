"""The GPU's time: by hand, and by brute force over every microsecond."""

import json
import math
from itertools import pairwise
from pathlib import Path

import pytest
from goldens import assert_as_kept
from hypothesis import given
from hypothesis import strategies as st
from tensorcores.traces import ADD, SGEMM, TENSOR, kernel, launch, op, real, step, write

from mpdiag.tensorcores.collected import PORTION, DiskBuffer
from mpdiag.tensorcores.events import HostSpan
from mpdiag.tensorcores.timeline.host_spans import find_steps
from mpdiag.tensorcores.timeline.sweep import Activity, make_timeline
from mpdiag.tensorcores.trace_analysis import profile_trace

LOADER = "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"
NCCL = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"


def work(start, end, launched=math.nan, kind="tensor_core", stream=7, name="k"):
    return Activity(start, end, launched, stream, kind, name)


def marked(*bounds):
    return [
        HostSpan("step", f"ProfilerStep#{i}", a, b) for i, (a, b) in enumerate(pairwise(bounds))
    ]


lengths = st.tuples(
    st.integers(0, 60), st.integers(1, 15), st.sampled_from(["tensor_core", "collective", "copy"])
)


@given(st.lists(lengths, min_size=1, max_size=12), st.integers(1, 59))
def test_unions_and_gaps_are_those_of_every_microsecond(drawn, second_step):
    # A kernel is launched when it starts, so that steps are cut at the first start from then on.
    works = sorted(work(a, a + n, a, kind) for a, n, kind in drawn)
    found = make_timeline(works, marked(-1, second_step, 1000))
    first = [w for w in works if w.start_us < second_step]
    second = [w for w in works if w.start_us >= second_step]
    own = [max(w.end_us for w in part) for part in (first, second) if part]
    cuts = [part[0].start_us for part in (first, second) if part] + own[-1:]
    for window, (a, b) in zip(found.steps, pairwise(cuts), strict=True):

        def ran(t, *kinds):
            return any(w.start_us <= t < w.end_us and w.kind in kinds for w in works)

        inside = range(a, b)
        compute = {t for t in inside if ran(t, "tensor_core")}
        collective = {t for t in inside if ran(t, "collective")}
        busy = compute | collective | {t for t in inside if ran(t, "copy")}
        assert window.wall_us == b - a
        assert window.busy_us == len(busy)
        assert (window.compute_us, window.collective_us) == (len(compute), len(collective))
        assert window.exposed_us == len(collective - compute)
        assert sum(window.gaps.values()) == pytest.approx(window.idle_us)
    assert sum(found.whole.gaps.values()) == pytest.approx(found.whole.idle_us)
    assert found.whole.busy_us >= sum(window.busy_us for window in found.steps)


@pytest.mark.parametrize(
    ("launched", "span", "cause", "host"),
    [
        (5.0, None, "queued", ""),
        (90.0, None, "host", ""),
        (90.0, HostSpan("wait", "cudaStreamSynchronize", 4.0, 12.0), "wait", "cudaStreamSynchronize"),
        (90.0, HostSpan("wait", "cudaStreamSynchronize", 2.0, 4.0), "host", ""),
        (90.0, HostSpan("loader", LOADER, 20.0, 80.0), "loader", LOADER),
        (90.0, HostSpan("loader", LOADER, 20.0, 30.0), "host", ""),
        (math.nan, None, "unknown", ""),
    ],
)  # fmt: skip
def test_what_the_host_did_before_a_gap(launched, span, cause, host):
    found = make_timeline([work(0, 10, -1), work(95, 99, launched)], [span] if span else [])
    (gap,) = found.longest
    assert (gap.cause, gap.host, gap.duration_us) == (cause, host, 85)
    assert found.whole.gaps[cause] == found.whole.idle_us == 85


def test_the_longest_gaps_are_kept_longest_first():
    lengths = [3, 40, 7, 1, 22, 9, 15, 2, 31, 8, 12, 5, 27]
    starts = [0]
    for n in lengths:
        starts.append(starts[-1] + 10 + n)
    found = make_timeline([work(a, a + 10, name=str(i)) for i, a in enumerate(starts)], [])
    assert [g.duration_us for g in found.longest] == sorted(lengths, reverse=True)[:10]
    assert (found.longest[0].before, found.longest[0].after) == ("1", "2")
    assert found.whole.gaps["unknown"] == sum(lengths)


def test_optimizer_steps_mark_steps_where_nothing_else_does():
    calls = [
        HostSpan("optimizer", "Optimizer.step#SGD.step", 10.0 * i, 10.0 * i + 2) for i in (1, 2, 3)
    ]
    other = HostSpan("optimizer", "Optimizer.step#Adam.step", 13.0, 14.0)
    marks = find_steps([*calls, other])
    assert (marks.source, marks.names) == ("optimizer", ("0", "1", "2"))
    assert [marks.of(t) for t in (0.0, 11.9, 12.5, 22.5, 40.0)] == [0, 0, 1, 2, None]
    assert find_steps(calls[:1]).source == ""
    assert find_steps([*calls, *marked(0, 50)]).source == "profiler"
    assert make_timeline([work(0, 1, 0)], []).usual_step is None


def test_a_trace_with_steps_waits_and_copies(tmp_path):
    def at(event, ts):
        return event | {"ts": ts}

    events = [
        op("ProfilerStep#3", 0, 100) | {"cat": "user_annotation"},
        op("ProfilerStep#4", 100, 300) | {"cat": "user_annotation"},
        launch(1, 5), at(kernel(TENSOR, 1, 20), 10),
        launch(2, 6), at(kernel(ADD, 2, 10), 30),
        op("cudaStreamSynchronize", 20, 45) | {"cat": "cuda_runtime"},
        launch(3, 110, name="cudaMemcpyAsync"),
        at(kernel("Memcpy HtoD", 3, 30), 120) | {"cat": "gpu_memcpy"},
        launch(4, 112), at(kernel(SGEMM, 4, 50), 150),
        at(kernel(NCCL, 5, 20, stream=9), 190),
    ]  # fmt: skip
    document = profile_trace(write(tmp_path / "t.json", events)).to_json()
    kept = {key: document[key] for key in ("timeline", "summary")}  # no launch of the collective
    assert_as_kept(Path(__file__).with_name("steps.json"), json.dumps(kept, indent=1))


def test_older_traces_have_the_marks_among_their_operations(tmp_path):
    events = [op(f"ProfilerStep#{i}", 1000 * i, 1000 * i + 1000) for i in (0, 1)]
    steps = profile_trace(write(tmp_path / "t.json", [*step(), *events])).timeline.steps
    assert [s.name for s in steps] == ["0"]


def test_sums_of_runs_have_no_timeline(tmp_path):
    path = tmp_path / "n.csv"
    head = '"Type","Time(%)","Time","Calls","Avg","Min","Max","Name"\n,%,ms,,ms,ms,ms,\n'
    path.write_text(head + '"GPU activities",100,4,2,2,2,2,"ampere_sgemm_128x64_nn"\n')
    assert profile_trace(path).to_json()["timeline"] is None


def test_the_real_traces():
    def timeline(name):
        return profile_trace(real(name)).timeline

    ddp = timeline("a100_ddp_rank0.json.gz")
    assert [s.name for s in ddp.steps] == ["550", "551", "552", "553", "554"]
    assert ddp.steps[1].wall_us == pytest.approx(216_437, rel=1e-3)
    assert 0.8 < ddp.whole.exposed_us / ddp.whole.collective_us <= 1
    resnet = timeline("v100_resnet50_fp32.json.gz")
    assert max(resnet.whole.gaps, key=lambda c: resnet.whole.gaps[c]) == "loader"
    assert len(resnet.steps) == 6
    assert timeline("rtx2080ti_linear_fp32.json.gz").marks.source == "optimizer"
    assert timeline("mi210_kernels_only.json.gz").steps == ()


def test_records_come_in_order_whatever_order_they_came_in():
    buffer = DiskBuffer("<dd")
    try:
        for i in range(3 * PORTION + 100):
            at = float(i ^ 5 if i % 7 else (i * 2654435761) % (3 * PORTION))
            buffer.add(at, at, at, float(i))
        found = list(buffer.in_order())
        assert [a for a, _ in found] == sorted(a for a, _ in found)
        assert {int(i) for _, i in found} == set(range(3 * PORTION + 100))
    finally:
        buffer.close()
