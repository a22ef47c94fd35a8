"""What to do about a CPU's profile: the line that brings FP32 onto AMX, and the findings."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mpdiag.display.explanations import command_for
from mpdiag.display.wording import counted, percent
from mpdiag.hardware.flags import CONVOLUTION, IN_BF16, MEDIUM, RECURRENT

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from mpdiag.hardware.matrix_work import MatrixWork
    from mpdiag.tensorcores.cpu.onednn import OnednnLog
    from mpdiag.tensorcores.cpu.operation import CpuFacts, CpuOperation

_BF16_LINES = {
    "matmul": MEDIUM,
    "attention": MEDIUM,
    "convolution": CONVOLUTION,
    "rnn": RECURRENT,
}
_JUDGED = "mpdiag analyze RUN --target bf16 says what BF16 loses"
_WORTH = 0.05  # share of matrix time from which sizes are worth a finding
_SHOWN = 4  # sizes in a sentence; the evidence has all


def to_bf16(work: MatrixWork, dtypes: frozenset[str]) -> str:
    """The line that brings an operation onto AMX.

    The script stays in FP32: ``"high"`` changes nothing here, and training in BF16 changes more than
    the products.

    Args:
        work: Its matrix work, in a dtype that AMX lacks.
        dtypes: Those that it has.
    """
    line = _BF16_LINES.get(work.kind)
    if work.dtype == "fp32" and line is not None and "bf16" in dtypes:
        return f"{line} {IN_BF16}; {_JUDGED}"
    return f"run it in BF16 (torch.autocast): AMX multiplies {', '.join(sorted(dtypes)).upper()}"


def findings(
    judged: Sequence[CpuOperation], log: OnednnLog, device: CpuFacts
) -> tuple[dict[str, Any], ...]:
    """The findings of a profile, as documents: severity, code, message, evidence, fix."""
    return (*_of_unit(judged, log, device), *_of_sizes(judged), *_of_log(log))


def _note(severity: str, code: str, message: str, fix: str, **evidence: Any) -> dict[str, Any]:
    return {
        "severity": severity,
        "code": code,
        "message": message,
        "evidence": evidence,
        "fix": fix,
        "explained": command_for(code),
    }


def _of_unit(
    judged: Sequence[CpuOperation], log: OnednnLog, device: CpuFacts
) -> Iterator[dict[str, Any]]:
    if device.has_amx is False and not device.other_unit:
        yield _note(
            "info",
            "no-matrix-unit",
            f"{device.name} has no matrix unit (AMX)",
            "train in mixed precision on a GPU, or a Xeon with AMX",
        )
    used = any(o.verdict == "tensor_core" for o in judged)
    could = [o for o in judged if o.cause == "dtype"]
    if device.has_amx and not used and could:
        yield _note(
            "warning",
            "matrix-unit-idle",
            f"{counted(len(could), 'matrix operation')} ran in a dtype that the matrix unit lacks",
            could[0].fix,  # of the one that takes most time
            lines=sorted({_BF16_LINES.get(o.time.work.kind, "") for o in could if o.time.work}),
        )
    reduced = [p for p in log.primitives if p.reduced is not None]
    if reduced:
        formats = sorted({str(p.reduced).upper() for p in reduced})
        yield _note(
            "info",
            "fp32-multiplied-lower",
            f"FP32 products are multiplied in {' and '.join(formats)} by a setting of torch",
            _JUDGED,
            formats=formats,
            time_us=sum(p.time_us for p in reduced),
        )


def _of_sizes(judged: Sequence[CpuOperation]) -> Iterator[dict[str, Any]]:
    odd = [o for o in judged if o.faults]
    matrix_us = sum(o.time.time_us for o in judged if o.time.work is not None)
    share = sum(o.time.time_us for o in odd) / matrix_us if matrix_us else 0.0
    if share < _WORTH:
        return
    pairs = list(dict.fromkeys((f.size, f.padded) for o in odd for f in o.faults or ()))
    named = ", ".join(f"{size} → {wider}" for size, wider in pairs[:_SHOWN])
    yield _note(
        "info",
        "shapes-for-tensor-cores",
        f"{counted(len(odd), 'product')} ({percent(share)} of matrix time) "
        f"{'has' if len(odd) == 1 else 'have'} sizes that a GPU's Tensor Cores could not read at "
        f"full width: {named}{' …' if len(pairs) > _SHOWN else ''}",
        "to train on a GPU, pad them; mpdiag record and mpdiag analyze prove which fit together",
        share_of_matrix_time=share,
        sizes=[{"size": size, "padded": wider} for size, wider in pairs],
    )


def _of_log(log: OnednnLog) -> Iterator[dict[str, Any]]:
    if not log.primitives:
        yield _note(
            "info",
            "no-log",
            "oneDNN logged nothing in these steps",
            "check torch.backends.mkldnn.is_available()",
        )
    if log.damaged:
        yield _note(
            "info",
            "log-damaged",
            f"{log.damaged} lines of oneDNN's log could not be read",
            "report the line",
            lines=log.damaged,
        )
