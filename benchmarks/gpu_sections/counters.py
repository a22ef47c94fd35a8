"""(e) Hardware counters: what ncu counts on the Tensor pipe, against the kernels' names."""

from __future__ import annotations

import shutil
import sys
from typing import TYPE_CHECKING, Any

from gpu_sections import programs
from mpdiag.errors import MpdiagError
from mpdiag.tensorcores import kernel_evidence
from mpdiag.tensorcores.trace_analysis import profile_trace

if TYPE_CHECKING:
    from pathlib import Path

    from gpu_sections.child import Context

METRICS = (
    "sm__inst_executed_pipe_tensor.sum,gpu__time_duration.sum",
    "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active,gpu__time_duration.sum",
)
"""The second where a card does not have the first."""
ENOUGH = 15.0
"""Seconds below which ncu is not started: Python, torch and its own start take that long."""
OUT_OF_TIME = "no time was left for another metric"
SAMPLE = """"ID","Process ID","Process Name","Host Name","Kernel Name","Context","Stream",\
"Block Size","Grid Size","Device","CC","Section Name","Metric Name","Metric Unit","Metric Value"
"0","1","python","host","ampere_bf16_s16816gemm_bf16_128x128_ldg8_f2f_nn","1","7","(256, 1, 1)",\
"(8, 8, 1)","0","8.0","Command line profiler metrics","sm__inst_executed_pipe_tensor.sum","inst",\
"1,048,576"
"1","1","python","host","volta_sgemm_128x64_nn","1","7","(128, 1, 1)","(8, 8, 1)","0","8.0",\
"Command line profiler metrics","sm__inst_executed_pipe_tensor.sum","inst","0"
"""
"""What stands in for ncu in a rehearsal."""


def compare(ctx: Context) -> None:
    """The promise of counters; clocks stay as they are."""
    with ctx.settling("e-counters"), ctx.folder() as folder:
        path = folder / "counters.csv"
        if not ctx.cuda:
            path.write_text(SAMPLE, encoding="utf-8")
            check(ctx, path)
            return
        program = shutil.which("ncu")
        if program is None:
            ctx.skip("ncu is not on the PATH", "e-counters")
            return
        said = ""
        for metrics in METRICS:
            said = capture(ctx, program, metrics, path) if ctx.left > ENOUGH else OUT_OF_TIME
            try:
                if check(ctx, path):
                    return
            except MpdiagError as error:  # no table, or no kernel in it
                said = said or str(error)
        ctx.skip(f"ncu reads no counters here: {said}", "e-counters")


def capture(ctx: Context, program: str, metrics: str, path: Path) -> str:
    """Run the cases under ncu; returns the last lines it said."""
    words = [program, "--csv", "--metrics", metrics, "--clock-control", "none"]
    words += [
        "--launch-count",
        "300",
        "--profile-from-start",
        "off",
        "--target-processes",
        "all",
        "--log-file",
        str(path),
    ]
    words += [sys.executable, "-m", "gpu_sections.matrix_cases", "once"]
    ran = programs.run(words, ctx.left - 2)
    if ran.code is None:
        return "it did not end in time"
    log = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
    complaints = [
        line
        for line in (ran.out + ran.err + log).splitlines()
        if "ERROR" in line or "Error" in line
    ]
    return " ".join(complaints[-2:])[:300] or f"exit code {ran.code}"


def check(ctx: Context, path: Path) -> bool:
    """Kernel by kernel: the name's verdict, and the counter's; False if nothing was counted."""
    profile = profile_trace(path)
    rows: list[dict[str, Any]] = []
    against, unknown = [], []
    for kernel in profile.kernels:
        if kernel.measured is None:
            continue
        row = {"kernel": kernel.name[:160], "name says": kernel.facts.verdict}
        rows.append(row | {"counters": kernel.measured.text, "used": kernel.measured.tensor_core})
        if kernel_evidence.contradicts(kernel.facts, kernel.measured):
            against.append(kernel.name[:80])
        elif kernel.facts.verdict == "unknown" and kernel.measured.tensor_core:
            unknown.append(kernel.name[:80])
    if not rows:  # the metric is n/a on this card
        return False
    figure = (
        f"{len(rows)} kernels, {len(against)} contradicted, {len(unknown)} unnamed on Tensor Cores"
    )
    reason = "; ".join([*against[:3], *(f"unknown: {name}" for name in unknown[:3])])
    ctx.check("e-counters", not against, figure, reason=reason, kernels=rows)
    return True
