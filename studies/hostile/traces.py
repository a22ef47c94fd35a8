"""Good traces of every program that mpdiag reads, small ones, made anew."""

from __future__ import annotations

import contextlib
import gzip
import json
import sqlite3
from typing import Any

_TENSOR = "ampere_fp16_s16816gemm_fp16_128x128_ldg8_f2f_stages_32x5_tn"
_SGEMM = "ampere_sgemm_128x64_nn"
_MFMA = "Cijk_Alik_Bljk_BBS_BH_MT128x128x32_MI32x32x8x1_SN_1LDSB0_ISA942"


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


def rocprof_document() -> bytes:
    """rocprofv3's JSON."""
    info = {"agent_id": {"handle": 91}, "kernel_id": 4, "dispatch_id": 1}
    dispatch = {"start_timestamp": 1000, "end_timestamp": 3000, "dispatch_info": info}
    counted = {"dispatch_data": dispatch, "records": [{"counter_id": {"handle": 7}, "value": 3.0}]}
    agent = {"id": {"handle": 91}, "type": 2, "name": "gfx942", "product_name": "MI300X"}
    process = {
        "metadata": {"pid": 1},
        "agents": [{"id": {"handle": 90}, "type": 1, "name": "AMD EPYC"}, agent],
        "counters": [{"id": {"handle": 7}, "name": "SQ_INSTS_VALU_MFMA_MOPS_BF16"}],
        "kernel_symbols": [
            {"kernel_id": 4, "kernel_name": f"{_MFMA}.kd", "formatted_kernel_name": _MFMA}
        ],
        "callback_records": {"counter_collection": [counted]},
        "buffer_records": {"hip_api": [{"size": 64}], "kernel_dispatch": [dispatch] * 2},
    }
    return json.dumps({"rocprofiler-sdk-tool": [process]}).encode()


def kernel_tables() -> tuple[bytes, ...]:
    """rocprofv3's tables: kernels, their counters, their sums."""
    runs = (
        '"Kind","Agent_Id","Dispatch_Id","Kernel_Id","Kernel_Name","Start_Timestamp","End_Timestamp"\n'
        f'"KERNEL_DISPATCH","Agent 7",101,49,"{_MFMA}.kd",1551401624448000,1551401624459500\n'
    )
    counters = (
        '"Correlation_Id","Dispatch_Id","Agent_Id","Kernel_Name","Counter_Name","Counter_Value",'
        '"Start_Timestamp","End_Timestamp"\n'
        f'1,1,4,"{_MFMA}","SQ_INSTS_VALU_MFMA_MOPS_BF16",7.0,1000,1500\n'
    )
    sums = (
        '"Name","Calls","TotalDurationNs","AverageNs","Percentage","MinNs","MaxNs","StdDev"\n'
        f'"{_MFMA}",24,10650240,443760.0,88.70,441120,449280,2048.5\n'
    )
    return tuple(text.encode() for text in (runs, counters, sums))
