"""Traces as torch.profiler writes them, of the events a test wants; and real ones, where they are."""

import json
import os
from pathlib import Path

import pytest


def gpu(name, capability, processors):
    major, minor = capability
    return {
        "id": 0, "name": name, "computeMajor": major, "computeMinor": minor, "numSms": processors
    }  # fmt: skip


A100 = gpu("NVIDIA A100-SXM4-80GB", (8, 0), 108)
H100 = gpu("NVIDIA H100 80GB HBM3", (9, 0), 132)
FALLBACK = "cutlass_75_tensorop_bf16_s1688gemm_bf16_128x128_tn_align1"
TENSOR = "ampere_fp16_s16816gemm_fp16_128x128_ldg8_f2f_stages_32x5_tn"
SGEMM = "ampere_sgemm_128x64_nn"
ADD = "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float> >(int)"


def op(name, start, end, thread=1, **args):
    return {
        "ph": "X", "cat": "cpu_op", "name": name, "pid": 7, "tid": thread,
        "ts": start, "dur": end - start, "args": args,
    }  # fmt: skip


def product(m, n, k, start, end, dtype="c10::Half", **args):
    shapes = {"Input Dims": [[m, k], [k, n]], "Input type": [dtype, dtype]}
    return op("aten::mm", start, end, **shapes, **args)


def module(name, start, end, thread=1):
    return op("nn.Module: " + name, start, end, thread) | {"cat": "python_function"}


def launch(correlation, at, thread=1, name="cudaLaunchKernel"):
    return {
        "ph": "X", "cat": "cuda_runtime", "name": name, "pid": 7, "tid": thread,
        "ts": at, "dur": 1, "args": {"correlation": correlation, "External id": 999},
    }  # fmt: skip


def kernel(name, correlation, duration, **args):
    return {
        "ph": "X", "cat": "kernel", "name": name, "pid": 0, "tid": 7, "ts": 1000 + correlation,
        "dur": duration, "args": {"device": 0, "stream": 7, "correlation": correlation, **args},
    }  # fmt: skip


def arrow(i):
    return {"ph": "s", "id": i, "pid": 7, "tid": 1, "ts": 5, "cat": "ac2g", "name": "ac2g"}


def write(path, events, device=A100, **top):
    document = {"schemaVersion": 1, "deviceProperties": [device], **top, "traceEvents": events}
    path.write_text(json.dumps(document), encoding="utf-8")
    return path


def step():
    """A product on Tensor Cores, one that is not, an addition: 60, 30 and 10 µs."""
    return [
        product(256, 256, 256, 0, 10), launch(1, 5), kernel(TENSOR, 1, 60), arrow(1),
        product(256, 256, 256, 20, 30, dtype="float"), launch(2, 25), kernel(SGEMM, 2, 30),
        op("aten::add", 40, 50), launch(3, 45), kernel(ADD, 3, 10),
    ]  # fmt: skip


def real(name):
    """A trace of the shared folder; skips where it is not."""
    beside = Path(__file__).resolve().parents[2].parent / "shared" / "traces"
    folder = Path(os.environ.get("MPDIAG_TRACES", beside))
    if not (folder / name).is_file():
        pytest.skip(f"no {name} in {folder}: set MPDIAG_TRACES to the folder of real traces")
    return folder / name
