"""A profile in the shape of ``mpdiag profile --json``, small enough to add up by hand."""

from __future__ import annotations

KERNEL = {
    "calls": 10,
    "instruction": None,
    "dtype": "fp16",
    "evidence": "the name",
    "alignment": None,
    "op": "aten::mm",
    "module": "head",
    "shapes": [[33, 64], [64, 65]],
}
OPERATION = {
    "op": "aten::mm",
    "dtype": "fp16",
    "aligned": False,
    "amdahl_bound": 1.0,
    "fix": None,
    "cause": None,
}
PEAKS = {
    "tensor_tflops": {"fp16": 500.0, "tf32": 250.0},
    "cuda_tflops": {"fp32": 50.0},
    "bandwidth_gbps": 2000.0,
    "source": "a datasheet",
}
"""Rates of a device that is easy to reckon with."""


def profile() -> dict[str, object]:
    """600 µs on Tensor Cores, 200 on CUDA cores, 150 of layout changes, 50 unknown."""
    times = [
        ("sm90_xmma_gemm_f16f16_tensor", "tensor_core", 600.0),
        ("<b>simt_sgemm</b>", "cuda_core", 200.0),
        ("nchwToNhwcKernel", "layout", 150.0),
        ("mystery", "unknown", 50.0),
    ]
    return {
        "schema_version": 1,
        "source": "trace.json",
        "device": {"name": "H100"},
        "kernel_time_us": 1000.0,
        "tensor_core_fraction": 0.6,
        "matrix_cuda_core_fraction": 0.2,
        "layout_fraction": 0.15,
        "unknown_fraction": 0.05,
        "kernels": [{**KERNEL, "name": n, "verdict": v, "time_us": t} for n, v, t in times],
        "operations": [
            {**OPERATION, "module": "body", "m": 64, "n": 64, "k": 64, "time_us": 600.0},
            {
                **OPERATION,
                "module": "<i>head</i>",
                "m": 33,
                "n": 65,
                "k": 64,
                "time_us": 200.0,
                "cause": "N is odd",
                "fix": "pad N to 72",
                "amdahl_bound": 1.25,
            },
            {
                **OPERATION,
                "module": "stem",
                "m": 8,
                "n": 8,
                "k": 3,
                "time_us": 150.0,
                "cause": "layout",
                "fix": "channels_last",
                "amdahl_bound": 1.0 / 0.85,
            },
        ],
        "findings": [{"severity": "warning", "code": "x", "message": "<u>look</u>", "fix": "pad"}],
    }


def profile_with_work(**device: object) -> dict[str, object]:
    """Body: 10 calls of 4 GFLOP over 10 MB in 600 µs; head: 1 of 2 MFLOP over 1 MB in 200 µs."""
    document = profile()
    work = {"phase": "forward", "batch": 1, "kernel": "<b>gemm</b>"}
    known = [
        {**work, "verdict": "tensor_core", "flops": 4e9, "bytes": 10e6, "calls": 10},
        {**work, "verdict": "cuda_core", "flops": 2e6, "bytes": 1e6, "calls": 1, "dtype": "fp32"},
        {"verdict": "layout", "flops": None, "bytes": None, "calls": 1},
    ]
    rows = [{**row, **more} for row, more in zip(document["operations"], known, strict=True)]
    return {**document, "operations": rows, "device": {"name": "H100", "peaks": PEAKS, **device}}


def profile_with_use() -> dict[str, object]:
    """Who could have used Tensor Cores, a group of causes, and two steps of 100 µs."""
    flags = [
        {"eligible": True, "used": True, "tflops": 200.0, "peak_share": 0.5, "phase": "forward"},
        {"eligible": None, "used": None, "tflops": None, "peak_share": None},
        {"eligible": False, "used": False},
    ]
    times = {"tensor_core": 60.0, "layout": 10.0, "helper": 5.0, "other": 3.0}
    steps = [
        {"name": str(i), "wall_us": 100.0, "idle_us": 22.0, "kernel_us": times} for i in (3, 4)
    ]
    group = {"cause": "tf32_off", "label": "TF32 off", "operations": 5, "fraction": 0.62}
    document = profile_with_work()
    rows = zip(document["operations"], flags, strict=True)
    return document | {
        "operations": [row | more for row, more in rows],
        "summary": ["Eligible: 60 %", "2 steps: 0.1 ms"],
        "causes": [group | {"amdahl_bound": 1 / 0.38, "fix": "allow <b>TF32</b>"}],
        "timeline": {"steps": steps},
    }
