"""(e) Tensor Cores: the verdict on each case against the rate that CUDA events measure."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

import mpdiag
from gpu_sections import matrix_cases, programs
from gpu_sections.measuring import kernel_seconds, ratio, seconds_of, tf32
from mpdiag.errors import MpdiagError
from mpdiag.hardware.devices import DeviceFacts
from mpdiag.plan import Fp32Choice, PrecisionPlan
from mpdiag.tensorcores.trace_analysis import profile_trace

if TYPE_CHECKING:
    from gpu_sections.child import Context

MARGIN = 1.1
"""So much faster than CUDA cores can be is proof; see ``mpdiag.tensorcores.kernel_evidence``."""
LINKED = 0.9
NAMED = 0.5
"""Share of the proven cases that the profile must have an answer for; "unknown" is none."""
RESERVED = 8.0
"""Seconds of the part that are kept for what follows the verdicts."""
TRACE_BYTES = 3_000_000
TRACE_SECONDS = 8.0
"""What keeping a trace takes at most; it is left out where less is left."""
UNSEEN = "torch.profiler sees no kernel on this machine, with or without mpdiag"


def judge(ctx: Context) -> None:
    """Verdicts, padding, and the trainer's line."""
    with ctx.settling("e-verdicts", "e-padding", "e-trainer"):
        if not kernels_are_seen(ctx):
            ctx.skip(UNSEEN, "e-verdicts", "e-padding", "e-trainer")
            return
    with ctx.settling("e-verdicts"):
        compare_verdicts(ctx)
    with ctx.settling("e-padding"):
        pad(ctx)
    with ctx.settling("e-trainer"):
        ask_the_trainer(ctx)


def kernels_are_seen(ctx: Context) -> bool:
    """Whether torch.profiler alone sees a kernel: without that, nothing about mpdiag is tested."""
    if not ctx.cuda:
        return True
    from torch.profiler import ProfilerActivity, profile

    a = torch.randn(64, 64, device="cuda")
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        a @ a
        torch.cuda.synchronize()
    return any(event.device_type == torch.autograd.DeviceType.CUDA for event in seen.events())


def device_facts(ctx: Context) -> DeviceFacts:
    """The card as mpdiag knows it; in a rehearsal one that it stands in for."""
    if not ctx.cuda:
        return DeviceFacts("NVIDIA A100-SXM4-80GB", (8, 0))
    found = torch.cuda.get_device_properties(0)
    return DeviceFacts(found.name, (found.major, found.minor))


def profiled(ctx: Context, run: Any, model: nn.Module | None = None) -> dict[str, Any]:
    """The profile of two calls; in a rehearsal that of a generated trace."""
    if not ctx.cuda:
        return stand_in(ctx)
    with mpdiag.profile(model, steps=2, warmup=1) as p:
        for _ in range(3):
            run()
            p.step()
    found: dict[str, Any] = p.result.to_json()
    return found


_stand_in: dict[str, Any] = {}


def stand_in(ctx: Context) -> dict[str, Any]:
    """The profile of the trace that ``benchmarks/traces.py`` generates, and no oneDNN log."""
    if not _stand_in:
        from traces import generate

        with ctx.folder() as folder:
            path = folder / "trace.json"
            path.write_text(json.dumps(generate()), encoding="utf-8")
            _stand_in.update(profile_trace(path).to_json())
    return _stand_in


def compare_verdicts(ctx: Context) -> None:
    """Each case: what the profile says, and what the rate proves."""
    facts = device_facts(ctx)
    rows, wrong, unknown = [], [], []
    for case in matrix_cases.cases(ctx.device, ctx.sized("full", "full", "tiny")):
        if ctx.left < ctx.sized(RESERVED, RESERVED, 0):
            ctx.note(f"verdicts: no time left from {case.name} on")
            break
        try:
            run = case.make()
            rate = case.flops / kernel_seconds(run, ctx.device)
            document = profiled(ctx, run)
        except (RuntimeError, NotImplementedError) as error:
            if "CUDA error" in str(error):
                raise
            text = " ".join(str(error).split())[:120]
            ctx.note(f"{case.name} does not run: {text}")
            continue
        except MpdiagError as error:  # of one case; the others can still be judged
            wrong.append(f"{case.name} (the profile failed: {str(error)[:120]})")
            continue
        row = verdict_of(case, rate, document, facts)
        rows.append(row)
        if row["said"] in ("unknown", "none"):
            unknown.append(case.name)
        elif row["agrees"] is False:
            wrong.append(f"{case.name} ({row['said']}, {row['tflops']:g} TFLOP/s)")
    proven = sum(row["proof"] is not None for row in rows)
    agreed = sum(bool(row["agrees"]) for row in rows)
    named = sum(row["agrees"] is not None for row in rows)
    figure = f"{agreed} of {proven} proven cases agree, {len(unknown)} of all {len(rows)} unknown"
    reason = "; ".join([*wrong[:6], *([f"unknown: {', '.join(unknown)}"] if unknown else [])])
    if facts.peaks is None and ctx.cuda:
        reason += f"; no peak rates are known for {facts.name}"
    held = not wrong and named >= NAMED * proven
    ctx.check("e-verdicts", held if proven else None, figure, reason=reason, cases=rows)


def verdict_of(
    case: matrix_cases.Case, rate: float, document: dict[str, Any], facts: DeviceFacts
) -> dict[str, Any]:
    """One case: ``proof`` by its rate or its flags, what the profile ``said``, whether both agree.

    ``agrees`` is None where nothing is proved, or the profile does not say.
    """
    said = _largest(document, "")
    if said == "unknown":
        said = _largest(document, "_witnessed")
    by_name = {k["name"]: k["verdict"] for k in document["kernels"][:4]}
    limit = facts.peaks.cuda_rate(case.dtype) if facts.peaks else float("inf")
    proof = None
    if rate > MARGIN * limit and case.dense:
        proof = "tensor_core"
    elif case.never:
        proof = "cuda_core"
    agrees = None if proof is None or said in ("unknown", "none") else said == proof
    row = {"case": case.name, "tflops": round(rate / 1e12, 2), "said": said, "proof": proof}
    return row | {"agrees": agrees, "kernels": by_name}


def _largest(document: dict[str, Any], ending: str) -> str:
    """The verdict on most of the matrix work: by names alone, or with other witnesses."""
    shares = {
        "tensor_core": document[f"tensor_core_fraction{ending}"],
        "cuda_core": document[f"matrix_cuda_core_fraction{ending}"],
        "unknown": document[f"unknown_fraction{ending}"],
    }
    return max(shares, key=lambda k: shares[k]) if any(shares.values()) else "none"


def pad(ctx: Context) -> None:
    """A linear layer of an odd width, its profile's bound, and the same layer padded."""
    odd, even = ctx.sized((4095, 4096), (4095, 4096), (63, 64))
    rows = ctx.sized(8192, 8192, 64)
    tf32(on=True)

    def layer(width: int) -> tuple[nn.Module, Any]:
        model = nn.Linear(width, width, bias=False, device=ctx.device, dtype=torch.bfloat16)
        x, g = (torch.randn(rows, width, device=ctx.device).bfloat16() for _ in range(2))

        def run() -> None:
            model(x).backward(g)

        return model, run

    model, run = layer(odd)
    document = profiled(ctx, run, model)
    before = seconds_of(run, ctx.sized(20, 10, 2), ctx.device)
    _, padded = layer(even)
    padded()
    after = seconds_of(padded, ctx.sized(20, 10, 2), ctx.device)
    found = [o for o in document["operations"] if o["cause"] == "alignment"]
    measured = before / after
    if ctx.cuda and not found:
        fastest = f"measured {ratio(measured)}"
        held = measured < 1.1
        ctx.check("e-padding", held, f"no operation is called misaligned; {fastest}")
        return
    whole = sum(o["affected_us"] for o in found)
    bound = document["kernel_time_us"] / max(document["kernel_time_us"] - whole, 1e-9)
    win = sum(o["win_us"] or 0 for o in found)
    predicted = document["kernel_time_us"] / max(document["kernel_time_us"] - win, 1e-9)
    held = measured <= 1.05 * bound and measured - 1 >= 0.5 * (predicted - 1)
    figure = f"predicted {ratio(predicted)}, bound {ratio(bound)}, measured {ratio(measured)}"
    ctx.check("e-padding", held, figure, predicted=predicted, bound=bound, measured=measured)


def ask_the_trainer(ctx: Context) -> None:
    """The one line in FP16, and where every module is forced to FP32 with TF32 off."""
    found = []
    for forced in (False, True):
        tf32(on=not forced)
        torch.manual_seed(0)
        side = ctx.sized(2048, 2048, 16)
        layers = (nn.Linear(side, side), nn.ReLU(), nn.Linear(side, side))
        model = nn.Sequential(*layers).to(ctx.device)
        optimizer = torch.optim.SGD(model.parameters(), 1e-4)
        choices = tuple(Fp32Choice("", name) for name in ("0", "2")) if forced else ()
        plan = PrecisionPlan(fp32_operations=choices)
        x = torch.randn(side, side, device=ctx.device)
        with mpdiag.MixedPrecision(model, optimizer, plan, level="O1") as mp:
            for _ in range(9):
                with mp.autocast():
                    loss = model(x).square().mean()
                mp.step(loss)
            found.append(mp.tensor_cores)
    tf32(on=True)
    if not ctx.cuda:
        held = found == [None, None]
        ctx.check("e-trainer", held, "no line without a GPU")
        return
    used, forced_use = found
    held = used is not None and used.in_use is True
    held = held and forced_use is not None and forced_use.in_use is False
    held = held and "(tf32_off)" in forced_use.message
    figure = " / ".join(u.message if u else "no answer" for u in found)
    ctx.check("e-trainer", held, figure)


def run_command(ctx: Context) -> None:
    """``mpdiag profile -- script.py`` on an unmodified training; its trace is kept where it is small."""
    with ctx.settling("e-command"), ctx.folder() as folder:
        capture(ctx, folder)
    if ctx.cuda and (ctx.quick or ctx.left < TRACE_SECONDS):
        ctx.note("no trace was kept: there was no time for it")
    elif ctx.cuda:
        with ctx.settling():
            keep_trace(ctx)


def capture(ctx: Context, folder: Path) -> None:
    """The command, as one types it, and what its JSON says."""
    script = Path(matrix_cases.__file__).with_name("script.py")
    options = ("--json", "--steps", 1, "--warmup", 3)
    words = programs.mpdiag("profile", *options, "--", script, ctx.device)
    ran = programs.run(words, ctx.left, folder)
    if ran.code is None:
        ctx.skip("the command did not end in time", "e-command")
        return
    if ran.code and not kernels_are_seen(ctx):
        ctx.skip(UNSEEN, "e-command")
        return
    ran.expect_success()
    document = json.loads(ran.out)
    if not ctx.cuda:
        ctx.check("e-command", True, f"{document['source']} captured")
        return
    linked, used = document["linked_fraction"], document["tensor_core_fraction"]
    native = document["native_generation_fraction"]
    figure = f"{linked:.0%} linked, {used:.0%} on Tensor Cores, device {_name(document)}"
    held = linked >= LINKED and used > 0.05
    ctx.check("e-command", held, figure, linked=linked, used=used, native=native)


def _name(document: dict[str, Any]) -> str:
    return str((document.get("device") or {}).get("name"))


def keep_trace(ctx: Context) -> None:
    """A small trace of a few training steps, compressed, for the sample runs."""
    from gpu_sections.script import Network, train_step
    from mpdiag.tensorcores.step_profiler import StepProfiler

    with ctx.folder() as folder:
        model = Network().to("cuda")
        optimizer = torch.optim.AdamW(model.parameters())
        with StepProfiler(model, steps=1, warmup=2, folder=folder) as p:
            for _ in range(3):
                train_step(model, optimizer, "cuda")
                p.step()
        packed = ctx.keep / "trace.json.gz"
        whole = json.loads((folder / "trace.json").read_text(encoding="utf-8"))
        # Other keys may name files and hosts.
        known = ("schemaVersion", "deviceProperties", "displayTimeUnit", "baseTimeNanoseconds")
        trace = {k: whole[k] for k in (*known, "traceEvents") if k in whole}
        with gzip.open(packed, "wt", encoding="utf-8") as target:
            json.dump(trace, target)
        if packed.stat().st_size > TRACE_BYTES:
            packed.unlink()
            ctx.note("the trace is too large to keep")
