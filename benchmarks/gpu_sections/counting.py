"""(a) Counting on the device: the CPU's counts, no waiting, at the speed of a copy."""

from __future__ import annotations

import functools
import os
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

import mpdiag
from gpu_sections.measuring import kernel_seconds, ratio, wait
from gpu_sections.runner import has
from mpdiag.recording.counting import device as on_device
from mpdiag.recording.counting import layout, torch_operations
from mpdiag.recording.counting.device import DeviceRows
from mpdiag.recording.counting.host import HostRows
from mpdiag.recording.counting.tensors import countable

if TYPE_CHECKING:
    from collections.abc import Callable

    from gpu_sections.child import Context

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "contiguous": lambda t: t,
    "transposed": lambda t: t[:4096].view(64, 64).t(),
    "channels last": lambda t: (
        t[:4096].view(4, 16, 8, 8).contiguous(memory_format=torch.channels_last)
    ),
    "every second": lambda t: t[::2],
    "inner block": lambda t: t[:4096].view(64, 64)[5:50, 3:40],
    "expanded": lambda t: t[:64].view(64, 1).expand(64, 7),
    "overlapping": lambda t: t.as_strided((50, 20), (10, 1)),
    "negative view": lambda t: torch.view_as_complex(t[:512].float().view(256, 2)).conj().imag,
    "complex": lambda t: torch.view_as_complex(t[:512].float().view(256, 2)),
    "sparse": lambda t: (
        t[:512].float() * (torch.arange(512, device=t.device) % 3 == 0)
    ).to_sparse(),
    "empty": lambda t: t[:0],
    "one value": lambda t: t[0],
}
COPY_SHARE = 0.5
"""By the instructions that ptxas emits; docs/gpu.md has the arithmetic."""
LAUNCHES = {"FP32": 1, "BF16": 1, "FP16": 1, "float64": 1, "update": 3, "300 tensors": 3}
"""At most; many tensors need their table on the device, too."""
LARGE = 16_000_000


def count(ctx: Context) -> None:
    """All promises of counting."""
    if not ctx.cuda:
        os.environ.setdefault("TRITON_INTERPRET", "1")
    with ctx.settling("a-counts"):
        compare_counts(ctx)
    with ctx.settling("a-updates"):
        compare_updates(ctx)
    with ctx.settling("a-triton"):
        compare_tallies(ctx)
    with ctx.settling("a-no-sync"):
        count_without_waiting(ctx)
    with ctx.settling("a-step-no-sync"):
        step_without_waiting(ctx)
    with ctx.settling("a-speed"):
        compare_with_copy(ctx)
    with ctx.settling("a-launches"):
        count_launches(ctx)


def special_values() -> torch.Tensor:
    """Every kind of value there is, and many ordinary ones; float64 (n,)."""
    generator = torch.Generator().manual_seed(7)
    ordinary = torch.randn(20_000, generator=generator, dtype=torch.float64)
    octaves = torch.randint(-60, 45, (20_000,), generator=generator).double()
    powers = torch.exp2(torch.arange(-149, 128, dtype=torch.float64))
    known = [0.0, -0.0, torch.inf, -torch.inf, torch.nan, -torch.nan, 3.4028234e38]
    fp16 = [65504, 65519.99, 65520, 65536, 2.0**-24, 2.0**-25]
    fp32 = [2.0**-126, 2.0**-126 * (1 - 2.0**-23), 2.0**-149]
    beyond = [1e-320, 1e-46, 1e39, 1e300, 448, 464, 480, 57344, 61440]
    edges = torch.tensor([*known, *fp16, *fp32, *beyond], dtype=torch.float64)
    every = [edges, powers, -powers, powers * (1 + 2.0**-23), powers * (1 - 2.0**-24)]
    return torch.cat([*every, ordinary * torch.exp2(octaves)])


def _rows(ctx: Context) -> DeviceRows:
    return DeviceRows(torch.device(ctx.device))


def _row(rows: Any, tensor: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Counts and extremes of one tensor, as the recorder counts it."""
    ready = countable(tensor)
    if isinstance(ready, str):
        raise TypeError(ready)
    row = rows.count(ready.values, ready.repeat, ready.zeros)
    raw = rows.read()
    return np.asarray(raw.counts[[row]][0]), np.asarray(raw.extremes[row])


def compare_counts(ctx: Context) -> None:
    """Every dtype in every layout, against the counter of the CPU."""
    values = special_values()
    here, there = HostRows(), _rows(ctx)
    wrong: list[str] = []
    compared = 0
    for dtype in DTYPES:
        host = values.to(dtype)
        device = host.to(ctx.device)
        for name, lay in LAYOUTS.items():
            expected, found = _row(here, lay(host)), _row(there, lay(device))
            compared += int(expected[0][: layout.RAW].sum())
            if not all(np.array_equal(e, f) for e, f in zip(expected, found, strict=True)):
                wrong.append(f"{str(dtype).removeprefix('torch.')} {name}")
    large = torch.randn(ctx.sized(1 << 25, 1 << 23, 1 << 17) + 3, device=ctx.device) * 1e-4
    expected, found = _row(here, large.cpu()), _row(there, large)
    if not all(np.array_equal(e, f) for e, f in zip(expected, found, strict=True)):
        wrong.append(f"{len(large):,} values")
    cases = len(DTYPES) * len(LAYOUTS) + 1
    figure = f"{cases - len(wrong)} of {cases} tensors equal, {compared + len(large):,} values"
    ctx.check("a-counts", not wrong, figure, reason=", ".join(wrong[:8]), wrong=wrong)


def compare_updates(ctx: Context) -> None:
    """Updates of every size, down to none, against the counter of the CPU."""
    wrong = []
    scales = (0.0, 1e-45, 1e-9, 1e-6, 1e-4, 1e-3, 1e-2, 1.0, 1e9)
    generator = torch.Generator().manual_seed(3)
    for scale in scales:
        before = torch.randn(50_001, generator=generator)
        before[:10] = 0
        octaves = torch.randint(-6, 6, before.shape, generator=generator)
        change = torch.randn(before.shape, generator=generator) * scale
        after = before + change * torch.exp2(octaves)
        after[5:50] = before[5:50]
        found = []
        for rows, place in ((HostRows(), "cpu"), (_rows(ctx), ctx.device)):
            pair = before.to(place), after.to(place)
            weight, update, fact = rows.count_many_updates([pair])[0]
            raw = rows.read()
            pairs = np.asarray(raw.counts[[weight, update]]), raw.extremes[[weight, update]]
            found.append((*pairs, raw.facts[fact], np.asarray(raw.ratios[[fact]])))
        if not all(np.array_equal(a, b) for a, b in zip(*found, strict=True)):
            wrong.append(f"{scale:g}")
    figure = f"{len(scales) - len(wrong)} of {len(scales)} update sizes equal"
    reason = f"updates of size {', '.join(wrong)} differ" if wrong else ""
    ctx.check("a-updates", not wrong, figure, reason=reason)


def compare_tallies(ctx: Context) -> None:
    """The Triton kernel against plain torch operations."""
    if not has("triton"):
        ctx.skip("Triton is not installed, so plain torch operations count", "a-triton")
        return
    from mpdiag.recording.counting import triton_kernels

    device = torch.device(ctx.device)
    if ctx.cuda and on_device.why_not_triton(device):
        ctx.skip(f"{on_device.why_not_triton(device)}, so plain torch operations count", "a-triton")
        return
    used = on_device.best_counter(device).name
    wrong = []
    sizes = (1, 4095, 4096, 4097, ctx.sized(1 << 24, 1 << 22, 9000) + 17)
    for size in sizes:
        values = special_values().float().repeat(-(-size // 20_000))[:size].to(device)
        results = []
        for counter in (triton_kernels.COUNTER, torch_operations.COUNTER):
            rows = DeviceRows(device, counter=counter)
            try:
                found = [_row(rows, values.to(dtype)) for dtype in DTYPES]
            except Exception as error:
                if type(error).__name__ != "InterpreterError":
                    raise
                ctx.skip(f"Triton's interpreter fails: {error}", "a-triton")
                return
            results.append([part for pair in found for part in pair])
        if not all(np.array_equal(a, b) for a, b in zip(*results, strict=True)):
            wrong.append(f"{size:,} values")
    held = not wrong and (used == "Triton" or not ctx.cuda)
    figure = f"{used} counts; {len(sizes) - len(wrong)} of {len(sizes)} sizes equal"
    ctx.check("a-triton", held, figure, reason=", ".join(wrong))


def count_without_waiting(ctx: Context) -> None:
    """Counts and updates while waiting is an error."""
    rows = _rows(ctx)
    tensors = [torch.randn(100_000, device=ctx.device).to(dtype) for dtype in DTYPES]
    before = torch.randn(100_000, device=ctx.device)
    after = before * 1.001

    def all_of_it() -> None:
        for tensor in tensors:
            rows.count(tensor)
            rows.count(tensor, 3, 5)
        rows.count_many([(tensor, 1, 0) for tensor in tensors])
        rows.count_many_updates([(before, after), (after, before)])
        rows.clear()

    all_of_it()  # compiles
    wait(ctx.device)
    if not ctx.cuda:
        ctx.check("a-no-sync", True, "ran", reason="a CPU is never waited for")
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        all_of_it()
        reason = ""
    except RuntimeError as error:
        if "synchroniz" not in str(error):
            raise
        reason = str(error).splitlines()[0]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    figure = "no wait" if not reason else "waits"
    ctx.check("a-no-sync", not reason, figure, reason=reason)


def step_without_waiting(ctx: Context) -> None:
    """Recorded steps while waiting is an error; the recorder swallows errors, and notes them."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.LayerNorm(64), nn.Linear(64, 8))
    model.to(ctx.device)
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
    x = torch.randn(32, 64, device=ctx.device)

    def step() -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    reason = ""
    for _ in range(3):
        step()
    with (
        ctx.folder() as folder,
        mpdiag.record(model, optimizer, folder / "run", every=1, operations=0) as recorder,
    ):
        for _ in range(6):  # the first and the fifth write a part
            step()
        wait(ctx.device)
        if ctx.cuda:
            torch.cuda.set_sync_debug_mode("error")
        try:
            for _ in range(4):
                step()
        except RuntimeError as error:
            reason = str(error).splitlines()[0]
        finally:
            if ctx.cuda:
                torch.cuda.set_sync_debug_mode("default")
    if not reason and recorder.failures:
        first = recorder.failures[0]
        reason = f"{first.get('where')}: {first.get('error')}"
    figure = f"{recorder.steps_recorded} steps recorded"
    ctx.check("a-step-no-sync", not reason, figure, reason=reason)


def compare_with_copy(ctx: Context) -> None:
    """Bytes read a second, over what a copy reads and writes."""
    sizes = ctx.sized(
        (1_000_000, LARGE, 4 * LARGE, 8 * LARGE), (1_000_000, LARGE), (10_000, 100_000)
    )
    shares: dict[str, float] = {}
    worst = 1e9
    for size in sizes:
        normal = torch.randn(size, device=ctx.device) * 1e-3
        target = torch.empty_like(normal)
        copied = 8 * size / kernel_seconds(lambda t=target, s=normal: t.copy_(s), ctx.device)
        cases = {
            "FP32": normal,
            "ReLU": normal.relu(),
            "wide": normal * torch.exp2(torch.randint(-25, 25, (size,), device=ctx.device)),
            "BF16": normal.bfloat16(),
        }
        for name, values in cases.items():
            rate = values.element_size() * size / kernel_seconds(_counter(ctx, values), ctx.device)
            shares[f"{size:,} {name}"] = round(rate / copied, 3)
            if size >= sizes[-1] or size >= LARGE:
                worst = min(worst, rate / copied) if name in ("FP32", "ReLU") else worst
        shares[f"{size:,} copy GB/s"] = round(copied / 1e9, 1)
    shares |= compare_many(ctx)
    figure = f"{ratio(worst)} of the copy bandwidth at its worst from 16 M FP32 values on"
    ctx.check("a-speed", worst >= COPY_SHARE, figure, shares=shares)


def _counter(ctx: Context, values: torch.Tensor) -> Callable[[], None]:
    """Counts a tensor; the rows are cleared now and then, so that they stay few."""
    rows = _rows(ctx)
    calls = 0

    def run() -> None:
        nonlocal calls
        calls += 1
        rows.count(values)
        if calls % 200 == 0:
            rows.clear()

    return run


def compare_many(ctx: Context) -> dict[str, float]:
    """Microseconds of 300 small tensors, one after another and all at once."""
    tensors = [(torch.randn(1000, device=ctx.device), 1, 0) for _ in range(ctx.sized(300, 300, 4))]
    rows = _rows(ctx)

    def singly() -> None:
        for tensor in tensors:
            rows.count(*tensor)
        rows.clear()

    def together() -> None:
        rows.count_many(tensors)
        rows.clear()

    times = {"singly": singly, "at once": together}
    return {
        f"{len(tensors)} tensors of 1,000 values {name}, us": round(
            1e6 * kernel_seconds(run, ctx.device), 1
        )
        for name, run in times.items()
    }


def count_launches(ctx: Context) -> None:
    """Launches of a counted tensor, of an update, and of many tensors, by torch.profiler."""
    if not ctx.cuda:
        ctx.skip("launches are counted on a GPU alone", "a-launches")
        return
    before = torch.randn(100_000, device=ctx.device)
    after = before * 1.001
    small = [(torch.randn(1000, device=ctx.device), 1, 0) for _ in range(300)]
    rows = DeviceRows(torch.device(ctx.device), capacity=8192)  # growing is a launch, too
    values = dict(zip(("FP32", "BF16", "FP16", "float64"), DTYPES, strict=True))
    cases: dict[str, Callable[[], object]] = {
        name: functools.partial(rows.count, before.to(dtype)) for name, dtype in values.items()
    }
    cases["update"] = lambda: rows.count_many_updates([(before, after)])
    cases["300 tensors"] = lambda: rows.count_many(small)
    found = {name: _launches(ctx, run) for name, run in cases.items()}
    figure = ", ".join(f"{name} {count:g}" for name, count in found.items())
    held = all(0 < found[name] <= most for name, most in LAUNCHES.items())
    ctx.check("a-launches", held, f"launches: {figure}", launches=found)


def _launches(ctx: Context, run: Callable[[], object]) -> float:
    from torch.profiler import ProfilerActivity, profile

    run()
    wait(ctx.device)
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        for _ in range(10):
            run()
        wait(ctx.device)
    starts = ("cudaLaunchKernel", "cuLaunchKernel", "cudaMemsetAsync", "cudaMemcpyAsync")
    return sum(e.name.startswith(starts) for e in seen.events()) / 10
