"""What is no trace is named and refused at once, however large it is."""

from __future__ import annotations

import contextlib
import gzip
import sqlite3
import time

import pytest

from mpdiag.errors import DamagedTrace, ExitCode
from mpdiag.tensorcores.readers import recognition
from mpdiag.tensorcores.readers.recognition import read

# https://docs.pytorch.org/docs/stable/profiler.html: key_averages().table(), export_stacks()
AVERAGES = """-------  ------------  ------------
   Name    Self CPU %      Self CUDA %
-------  ------------  ------------
aten::mm        10.0%          90.0%
"""
STACKS = "train.py(10): <module>;train.py(5): step;aten_mm 120\ntrain.py(10): <module>;aten_add 3\n"

JAX = """{"traceEvents": [{}, {"ph": "M", "name": "process_name", "args": {"name": "/device:GPU:0"}},
{"ph": "X", "name": "gemm_fusion_dot_1", "pid": 1, "tid": 20, "ts": 5.5, "dur": 60}]}
"""
NCU_PRINTED = """==PROF== Connected to process 1322765 (/tmp/wmma)
  void mma<16>(const __half *, float *) (1, 1, 1)x(32, 1, 1), Context 1, Stream 7, Device 0, CC 12.0
    gpu__time_duration.sum                     us         3.52
"""


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (AVERAGES, "key_averages.*export_chrome_trace"),
        (STACKS, "export_stacks.*export_chrome_trace"),
        (
            "Time (%),Total Time (ns),Num Calls,Avg (ns),Name\n99,9,3,3,cudaLaunchKernel\n",
            "API calls",
        ),
        ("Time (%)  Total Time (ns)  Instances  Name\n 90  100  5  gemm\n", "--format csv"),
        ('"Domain","Function","Process_Id"\n"HIP","hipMalloc",5\n', "kernel_trace.csv"),
        ('"Kind","Direction","Source_Agent_Id"\n"MEMORY_COPY","H2D",5\n', "kernel_trace.csv"),
        ('"Device","Kernel","Invocations","Metric Name","Min"\n"V100","k",1,"x",0\n', "no times"),
        ('[{"Time (%)": 9, "Total Time (ns)": 9, "Name": "k"}]', "--format csv"),
        ('"#","Address","Source","Live Registers"\n1,0,"MOV",5\n', "source page of ncu"),
        (JAX, "JAX or TensorFlow.*nsys export --type sqlite"),
        ('{"traceEvents": [{"ph": "M", "args": {"name": "6 GPU0"}}]}', "rocprof, .*rocprofv3"),
        ('{"data": ["", "gemm"]}\n{"CudaEvent": {"startNs": "1"}}\n', "JSON lines.*sqlite"),
        ('{"data": ["' + "x" * 100_000, "JSON lines.*sqlite"),
        (NCU_PRINTED, "what ncu prints.*ncu --import FILE --csv"),
        ('"Index","KernelName","gpu-id","BeginNs","EndNs"\n0,"k",0,1,2\n', "rocprofv3"),
        ("Dispatch_ID,GPU_ID,Kernel_Name,Start_Timestamp,End_Timestamp\n1,0,k,1,2\n", "rocprofv3"),
        ("Dispatch_ID,Kernel_Name,GPU_ID,SQ_INSTS_MFMA\n0,attn_fwd,4,5\n", "rocprofiler-compute"),
        ('{"nbformat": 4, "cells": []}', "is JSON but no trace"),
        ("[1, 2, 3]", "is JSON but no trace"),
        ("name,age\nann,7\n", "is not a trace of"),
        ("Name;Kind\nann;7\n", "is not a trace of"),
    ],
)
def test_what_is_said(tmp_path, text, words):
    path = tmp_path / "a"
    for data in (text.encode(), gzip.compress(text.encode())):
        path.write_bytes(data)
        with pytest.raises(DamagedTrace, match=words) as told:
            list(read(path))
        assert "\n" not in str(told.value)
        assert told.value.exit_code == ExitCode.INPUT


@pytest.mark.parametrize(
    ("name", "head", "words"),
    [
        ("a.zip", b"PK\3\4rest", "is compressed: unpack it first"),
        ("a.json.zst", b"\x28\xb5\x2f\xfdrest", "is compressed"),
        ("a.nsys-rep", b"\0\1\2", "nsys export --type sqlite"),
        ("a.ncu-rep", b"NVR\0rest", "ncu --import FILE --csv"),
        ("a.xplane.pb", b"\x0a\x03abc", "nsys profile --trace=cuda"),
        ("a", b"\x0a\x15\x08\x07\x12\x0d/device:GPU:0", "nsys profile --trace=cuda"),
        ("a.csv", b"Time (%),Total Time (ns),Count,Operation\n", "is a summary by nsys stats"),
        ("train.py", b"import torch\n", "mpdiag profile -- "),
        ("a.txt", b"hello\n", "is not a trace of"),
    ],
)
def test_what_is_not_a_trace_is_named(tmp_path, name, head, words):
    (tmp_path / name).write_bytes(head)
    with pytest.raises(DamagedTrace) as told:
        read(tmp_path / name)
    assert words in str(told.value)


def test_a_database_of_rocprofv3_is_named(tmp_path):
    path = tmp_path / "out.db"
    with contextlib.closing(sqlite3.connect(path)) as base:
        base.execute("CREATE TABLE `rocpd_kernel_dispatch_1a` (id INTEGER)")
    with pytest.raises(DamagedTrace, match="rocprofv3 --kernel-trace --output-format csv"):
        list(read(path))


OBJECTS = b'{"name": "x", "values": [1, 2, 3]}, '
CHROME = (
    b'{"ph": "X", "cat": "toplevel", "name": "RunTask", "pid": 1, "tid": 1, "ts": 1, "dur": 2},'
)


@pytest.mark.parametrize(
    ("start", "part"),
    [
        (b'{"rows": [', OBJECTS), (b"[", OBJECTS), (b'{"traceEvents": [', CHROME), (b"[", CHROME),
        (b'{"traceEvents": [', bytes(range(256))), (b"", b"name,duration,age\n1,2,3\n"),
        (b"", bytes(range(256))),
    ],
    ids=["objects", "list", "chrome", "chrome-list", "damaged", "csv", "binary"],
)  # fmt: skip
def test_a_large_file_is_refused_in_under_a_second(tmp_path, start, part):
    path = tmp_path / "large"
    with path.open("wb") as file:
        file.write(start + part * (1 + (1 << 20) // len(part)))
        file.truncate(1 << 31)  # the rest is a hole
    begun = time.process_time()
    with pytest.raises(DamagedTrace):
        list(read(path))
    assert time.process_time() - begun < 1


def test_events_behind_a_long_beginning_are_found(tmp_path, monkeypatch):
    monkeypatch.setattr(recognition, "HEAD", 100)
    monkeypatch.setattr(recognition, "TABLE", 100)
    monkeypatch.setattr(recognition, "SEARCHED", 5000)
    path = tmp_path / "a.json"
    event = '{"ph": "X", "cat": "kernel", "name": "k", "ts": 1, "dur": 2}'
    for filler, found in ((3000, True), (9000, False)):
        path.write_text(f'{{"a": "{"x" * filler}", "traceEvents": [{event}]}}', encoding="utf-8")
        if found:
            assert [k.name for k in read(path)] == ["k"]
        else:
            with pytest.raises(DamagedTrace):
                read(path)
