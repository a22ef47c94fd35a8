"""Good files of every kind that mpdiag reads, small ones, made anew."""

from __future__ import annotations

import contextlib
import gzip
import json
import sqlite3
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

_TENSOR = "ampere_fp16_s16816gemm_fp16_128x128_ldg8_f2f_stages_32x5_tn"
_SGEMM = "ampere_sgemm_128x64_nn"


def record_run(folder: Path) -> None:
    """A tiny recording with everything in it: two models' worth of layers, operations, a log."""
    import torch

    import mpdiag
    from mpdiag.runs.training_log import LogWriter, Metric, TrainingStep

    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = torch.nn.Sequential(
        torch.nn.Linear(8, 12), torch.nn.LayerNorm(12), torch.nn.Linear(12, 3)
    )
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    with mpdiag.record(model, optimizer, folder, every=1, operations=1, overwrite=True):
        for _ in range(3):
            optimizer.zero_grad()
            loss = model(torch.randn(4, 8)).exp().mean().log()
            loss.backward()
            optimizer.step()
    log = LogWriter(folder)
    for step in range(6):
        log.append(
            TrainingStep(step, 1.0 / (step + 1), 128.0, step == 2, "inf in 0", 0.5, 10**8, 0.1)
        )
    log.append(Metric("accuracy", 0.9))
    log.append({"alarm": "scale at its floor", "step_": 4})
    log.close()
    mpdiag.analyze(folder).plan.save(folder / "plan.json")
    x = torch.randn(4, 8)
    mpdiag.measure_sensitivity(model, lambda: model(x).exp().mean().log(), folder)
    skip_a_step(folder.with_name("capsule"))


def skip_a_step(folder: Path) -> None:
    """A capsule of a step that overflowed."""
    import torch

    import mpdiag
    from mpdiag.training.skips.capsule import save_capsule
    from mpdiag.training.skips.random_state import capture_random

    model, _ = capsule_model()
    facts = {
        "step": 3, "scale": 128.0, "reason": "Inf in 0", "model": "model.Net", "training": True,
        "level": "O1", "backend": "emulated", "device": "cpu",
        "plan": mpdiag.PrecisionPlan().to_json(),
    }  # fmt: skip
    batch = {"x": torch.randn(2, 4), "names": ["a", None, 1.5]}
    save_capsule(
        folder, weights=model.state_dict(), random=capture_random(), batch=batch, facts=facts
    )


def capsule_model() -> tuple[Any, Callable[[Any, Any], Any]]:
    """The capsule's model, and a loss that ignores the batch, whose content is not ours."""
    import torch

    return torch.nn.Linear(4, 2), lambda model, _batch: model(torch.ones(2, 4)).mean()


def torch_traces() -> tuple[bytes, ...]:
    """A trace of torch.profiler: plain, indented and gzipped."""
    device = {"id": 0, "name": "NVIDIA A100", "computeMajor": 8, "computeMinor": 0, "numSms": 108}
    events: list[dict[str, Any]] = [
        _event("python_function", "nn.Module: Linear_0", 0, 12),
        _event("python_function", "train.py(3): step", 0, 99),
    ]
    for i, (name, kind) in enumerate(((_TENSOR, "c10::Half"), (_SGEMM, "float")), 1):
        shapes = {"Input Dims": [[64, 32], [32, 16]], "Input type": [kind, kind]}
        more = {
            "Sequence number": i,
            "Input Strides": [[32, 1], [16, 1]],
            "Concrete Inputs": ["", ""],
        }
        events += [
            _event("cpu_op", "aten::mm", 10 * i, 8, **shapes, **more),
            _event("cuda_runtime", "cudaLaunchKernel", 10 * i + 3, 1, correlation=i),
            _event("kernel", name, 100 * i, 50, correlation=i, device=0, stream=7),
            {"ph": "s", "id": i, "pid": 7, "tid": 1, "ts": 5, "cat": "ac2g", "name": "ac2g"},
        ]
    document = {"schemaVersion": 1, "deviceProperties": [device], "traceEvents": events}
    text = json.dumps(document).encode()
    return text, json.dumps(document, indent=1).encode(), gzip.compress(text)


def _event(category: str, name: str, start: float, duration: float, **args: Any) -> dict[str, Any]:
    times = {"pid": 7, "tid": 1, "ts": start, "dur": duration}
    return {"ph": "X", "cat": category, "name": name, **times, "args": args}


def database() -> bytes:
    """An export of nsys."""
    with contextlib.closing(sqlite3.connect(":memory:")) as base:
        base.executescript(
            "CREATE TABLE StringIds (id INTEGER, value TEXT);"
            "CREATE TABLE TARGET_INFO_GPU (id INT, name TEXT, computeMajor INT, computeMinor INT,"
            " smCount INT, totalMemory INT);"
            "CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (start INT, end INT, deviceId INT, streamId INT,"
            " correlationId INT, demangledName INT, shortName INT, graphNodeId INT);"
            "CREATE TABLE CUPTI_ACTIVITY_KIND_RUNTIME (start INT, end INT, globalTid INT,"
            " correlationId INT, nameId INT);"
            "CREATE TABLE GPU_METRICS (typeId INT, metricId INT, value REAL);"
            "CREATE TABLE TARGET_INFO_GPU_METRICS (typeId INT, metricId INT, metricName TEXT);"
        )
        names = [(1, _TENSOR), (2, _SGEMM), (3, "cudaLaunchKernel_v7000"), (4, "gemm")]
        base.executemany("INSERT INTO StringIds VALUES (?, ?)", names)
        base.execute(
            "INSERT INTO TARGET_INFO_GPU VALUES (0, 'NVIDIA A100', 8, 0, 108, 85000000000)"
        )
        for i in range(8):
            row = (1000 * i, 1000 * i + 500, 0, 7, i, 1 + i % 2, 4, None)
            base.execute(
                f"INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES ({','.join('?' * 8)})", row
            )
            launch = (1000 * i - 90, 1000 * i - 80, 5, i, 3)
            base.execute("INSERT INTO CUPTI_ACTIVITY_KIND_RUNTIME VALUES (?, ?, ?, ?, ?)", launch)
            base.execute("INSERT INTO GPU_METRICS VALUES (1, 1, ?)", (10.0 * i,))
        base.execute("INSERT INTO TARGET_INFO_GPU_METRICS VALUES (1, 1, 'Tensor Active [%]')")
        base.commit()
        return base.serialize()


def ncu_tables() -> tuple[bytes, ...]:
    """Counters of ncu, a row for each metric and a column for each."""
    head = '"ID","Process ID","Kernel Name","CC","Section Name",'
    head += '"Metric Name","Metric Unit","Metric Value"'
    lines = ["==PROF== Connected to process 7", "64 64 64 1 10.0 0.0524288", head]
    metrics = (
        ("gpu__time_duration.sum", "usecond", "10.5"),
        ("sm__inst_executed_pipe_tensor.sum", "inst", "4,096"),
        ("smsp__cycles_elapsed.avg.per_second", "cycle/nsecond", "1.41"),
    )
    for i, name in enumerate((_TENSOR, _SGEMM)):
        lines += [f'"{i}","7","{name}","8.0","Command","{m}","{u}","{v}"' for m, u, v in metrics]
    wide = [
        '"ID","Kernel Name","CC","gpu__time_duration.sum","sm__inst_executed_pipe_tensor.sum"',
        '"","","","usecond","inst"',
        *(f'"{i}","{name}","8.0","1{i}.5","4,096"' for i, name in enumerate((_TENSOR, _SGEMM))),
    ]
    return "\n".join(lines).encode(), "\n".join(wide).encode()


def nvprof_tables() -> tuple[bytes, ...]:
    """A GPU trace of nvprof and its summary."""
    trace = [
        "==7== NVPROF is profiling process 7",
        "==7== Profiling result:",
        '"Start","Duration","Grid X","Device","Context","Stream","Name","Correlation_ID"',
        "s,us,,,,,,",
        f'0.1,25.5,8,"Tesla V100","1","7","{_SGEMM} [12]",12',
        '0.2,75.5,8,"Tesla V100","1","7","volta_fp16_s884gemm_fp16_128x64_ldg8_f2f_nn [13]",13',
        '0.3,5.5,8,"Tesla V100","1","7","[CUDA memcpy HtoD]",14',
    ]
    summary = [
        '"Type","Time(%)","Time","Calls","Avg","Min","Max","Name"',
        ",%,ms,,us,us,us,",
        f'"GPU activities",80.0,12.5,100,125.0,1.0,200.0,"{_SGEMM}"',
        '"API calls",80.0,12.5,100,125.0,1.0,200.0,"cudaLaunchKernel"',
    ]
    return "\n".join(trace).encode(), "\n".join(summary).encode()


def search_state() -> bytes:
    """A search's file, as ``sensitivity.search_state`` writes it."""
    from mpdiag.sensitivity.ranking import Fp32Candidate
    from mpdiag.sensitivity.search_state import Probe, SearchState

    found = [Fp32Candidate("0", "linear"), Fp32Candidate("1", "layer_norm")]
    with tempfile.TemporaryDirectory() as folder:
        state = SearchState({"level": "O1", "seeds": 2}, Path(folder) / "search.json")
        state.reference.update({0: (0.9, 1.5), 1: (0.8, 1.25)})
        state.candidates += [(c, float(i)) for i, c in enumerate(found)]
        state.probes.append(Probe(frozenset(found), (0.9, float("nan")), True, 2.5))
        state.save()
        return (Path(folder) / "search.json").read_bytes()


def baseline(run: Path) -> bytes:
    """A comparison's baseline, of a run."""
    from mpdiag.analysis.comparison.groups import read_group, save_baseline

    with tempfile.TemporaryDirectory() as folder:
        save_baseline(read_group(run), Path(folder) / "baseline.json")
        return (Path(folder) / "baseline.json").read_bytes()
