"""JAX's and rocprof's Chrome JSON: processes are devices, threads are streams."""

from __future__ import annotations

import gzip
import json

import pytest

from mpdiag.errors import DamagedTrace
from mpdiag.tensorcores.events import HostOperation, Kernel
from mpdiag.tensorcores.readers.recognition import read


def name(kind, said, pid, tid=None):
    place = {"pid": pid} if tid is None else {"pid": pid, "tid": tid}
    return {"ph": "M", "name": kind, **place, "args": {"name": said}}


def run(said, pid, tid, ts, dur, **args):
    return {"ph": "X", "name": said, "pid": pid, "tid": tid, "ts": ts, "dur": dur, "args": args}


# What jax.profiler.trace writes beside the XSpace: https://docs.jax.dev/en/latest/profiling.html
JAX = [
    {}, name("process_name", "/device:GPU:0", 1), name("process_name", "/host:CPU", 701),
    name("thread_name", "Stream #20(Compute)", 1, 20), name("thread_name", "XLA Ops", 1, 21),
    run("gemm_fusion_dot_1", 1, 20, 5.5, 60.0, hlo_op="gemm_fusion_dot.1", correlation_id="9"),
    run("gemm_fusion_dot_1", 1, 21, 5.5, 60.0), run("MemcpyH2D", 1, 20, 70, 3),
    run("python", 701, 3, 0, 1000), run("no time", 1, 20, "x", 1),
]  # fmt: skip
# rocprof --hip-trace: https://rocm.docs.amd.com/projects/rocprofiler/en/latest/how-to/using-rocprof.html
ROCPROF = [
    name("process_name", "CPU HIP API", 2), name("process_name", "GPU0", 6),
    {"ph": "X", "name": "mine(float*)", "pid": 6, "tid": 1, "ts": "1000", "dur": "25",
     "args": {"BeginNs": "1000000", "EndNs": "1025000"}},
    {"ph": "X", "name": "hipLaunchKernel", "pid": 2, "tid": 1, "ts": "900", "dur": "9"},
]  # fmt: skip


def written(path, events, **top):
    data = json.dumps({**top, "traceEvents": events}).encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


def test_jax(tmp_path):
    path = tmp_path / "host.trace.json.gz"
    trace = read(written(path, JAX, displayTimeUnit="ns", metadata={"highres-ticks": True}))
    events = list(trace)
    (kernel,) = (e for e in events if isinstance(e, Kernel))
    assert (kernel.name, kernel.start_us, kernel.duration_us) == ("gemm_fusion_dot_1", 5.5, 60)
    assert [e.name for e in events if isinstance(e, HostOperation)] == ["gemm_fusion_dot.1"]
    assert trace.source == "xla"


def test_rocprof(tmp_path):
    (kernel,) = read(written(tmp_path / "results.json", ROCPROF))
    assert (kernel.name, kernel.duration_us, kernel.device) == ("mine(float*)", 25, 0)


def test_another_programs_events_are_given_up_after_a_while(tmp_path, monkeypatch):
    monkeypatch.setattr("mpdiag.tensorcores.readers.torch_trace.MANY", 50)
    page = {"ph": "X", "cat": "toplevel", "name": "RunTask", "pid": 1, "tid": 1, "ts": 1, "dur": 2}
    events = [page] * 60 + ["not read"]
    with pytest.raises(DamagedTrace, match="profiler or JAX"):
        list(read(written(tmp_path / "a.json", events)))
    assert len(list(read(written(tmp_path / "b.json", JAX + events)))) == 3
    ours = page | {"cat": "user_annotation"}
    list(read(written(tmp_path / "c.json", [ours, *events])))


@pytest.mark.parametrize("place", [{"pid": {}}, {"pid": [1]}, {"tid": {"a": 1}}])
def test_runs_at_places_that_are_no_place_are_left_out(tmp_path, place):
    long = name("process_name", f"/device:GPU:{'9' * 5000}", 3)
    damaged = [event | place for event in JAX[3:]]
    trace = read(written(tmp_path / "trace.json", [*JAX, *damaged, long]))
    assert len([event for event in trace if isinstance(event, Kernel)]) == 1
