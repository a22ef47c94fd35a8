"""What ``mpdiag profile`` prints of a trace: the verdict, what is worth most, kernels by time."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from mpdiag.display.wording import counted, kernel_label
from mpdiag.reports.text.tables import EXPLAIN, Fitted
from mpdiag.tensorcores import summary
from mpdiag.tensorcores.causes import JudgedOperation
from mpdiag.tensorcores.profile_comparison import ProfileComparison
from mpdiag.tensorcores.roofline import speedup
from mpdiag.tensorcores.timeline.sweep import Timeline
from mpdiag.tensorcores.trace_profile import KernelTime, Profile
from mpdiag.tensorcores.work.traced_operation import OperationTime

SHOWN = 10
FEW = 4
"""Matrix operations beside no cause and no finding; each takes the place of one."""
MANY_CAUSES = 3
"""Causes and findings that fill the screen without a table."""
UNLINKED = "(not linked) "
SHOWN_CAUSES = 4
OPERATIONS_TITLE = "Biggest potential speedups"
OPERATIONS = (
    *("operation", "module", "M × N × K", "dtype", "time", "TFLOP/s", "at most", "cause", "fix"),
)
FUSED_TITLE = "Kernels that inductor fused"
FUSED = ("kernel", "time", "operations", "modules", "lines")
KERNELS = ("kernel", "calls", "time", "ran on", "instruction", "dtype", "align")
CLASSES = ("class", "before", "now", "before, ms", "now, ms")
MOVES = ("operation", "module", "M × N × K", "before", "now", "a call", "gain")
_COLOURS = {"error": "bold red", "warning": "yellow", "info": "cyan"}
_WORDS = {
    "tensor_core": "Tensor Cores",
    "cuda_core": "CUDA cores",
    "helper": "helper kernel",
    "layout": "layout conversion",
    "other": "not matrix work",
    "unknown": "unknown",
}


def profile_text(profile: Profile, *, verbose: bool = False) -> RenderableType:
    """The report: what decides, in few lines; with ``verbose`` every table.

    The causes come first, each with one bound for all its operations, then single operations.
    """
    parts: list[RenderableType] = [
        Text(profile.verdict, style="bold green" if is_good(profile) else "bold yellow"),
        Text(provenance(profile), style="dim"),
        *map(Text, profile.sentences),
    ]
    groups = profile.cause_groups
    if not verbose:
        groups = [g for g in groups if g.share >= summary.LEAST][:SHOWN_CAUSES]
    for group in groups:
        parts.append(Text(group.sentence, style="bold cyan"))
        parts.append(_advice(group.advice))
    found = profile.findings if verbose else not_said(profile, groups)
    for finding in found:
        head = (f"{finding['severity']}: ", _COLOURS[finding["severity"]])
        parts.append(Text.assemble(head, finding["message"]))
        parts.append(_advice(f"{finding['fix']}  [{finding['code']}]"))
    if found:
        parts.append(Text(EXPLAIN, style="dim"))
    if verbose:
        parts += [Text(""), _operations(profile)] if profile.operations else []
        parts += [Text(""), _kernels(profile)]
        if profile.timeline is not None:
            parts += _times(profile.timeline)
    if fused := fused_rows(profile):
        parts += [Text(""), _fused(fused, SHOWN if verbose else FEW)]
    if not verbose:
        said = len(groups) + len(found)
        if said < MANY_CAUSES:
            parts += [Text(""), _matrix_operations(profile, FEW - said)]
        left = len(profile.findings) - len(found)
        notes = f", {counted(left, 'more finding')}" if left else ""
        parts.append(Text(f"With -v: operations, kernels, steps, gaps{notes}", style="dim"))
    return Group(*parts)


def _advice(words: str) -> RenderableType:
    return Padding(Text(words, style="dim"), (0, 0, 0, 2), expand=False)


_SAID = {
    "matrix-on-cuda-cores": frozenset(
        {"tf32_off", "dtype", "library_choice", "alignment", "matrix_vector", "memory_bound"}
    ),
    "misaligned": frozenset({"alignment"}),
    "layout-conversions": frozenset({"layout"}),
}
"""Findings that a group of operations says already, by its cause."""


def not_said(
    profile: Profile, groups: Sequence[summary.CauseGroup], *, notes: bool = False
) -> list[dict[str, Any]]:
    """Findings that the shown groups do not say already; ``notes`` adds those of severity ``info``."""
    causes = {group.cause: group.share for group in groups}

    def said(finding: dict[str, Any]) -> bool:
        if finding["code"] == "older-generation":  # the kernels of odd sizes are older ones
            return causes.get("alignment", 0.0) >= float(finding["evidence"]["fraction"])
        return not causes.keys().isdisjoint(_SAID.get(finding["code"], frozenset()))

    return [f for f in profile.findings if (notes or f["severity"] != "info") and not said(f)]


def _times(timeline: Timeline) -> list[RenderableType]:
    """Tables of steps and gaps."""
    parts: list[RenderableType] = []
    if timeline.steps:
        table = Fitted(
            summary.STEPS,
            "Steps",
            right=frozenset(summary.STEPS[1:]),
            spare=("collective", "unknown"),
        )
        parts += [Text(""), _filled(table, summary.step_rows(timeline))]
    if timeline.longest:
        table = Fitted(
            summary.GAPS,
            "Longest gaps",
            names=frozenset({"next kernel"}),
            right=frozenset(summary.GAPS[:2]),
            lead=3,
        )
        rows = [[*row[:-1], _plain(kernel_label(row[-1]))] for row in summary.gap_rows(timeline)]
        parts += [Text(""), _filled(table, rows)]
    return parts


def change_text(change: ProfileComparison) -> RenderableType:
    """What changed since another trace."""
    parts: list[RenderableType] = [
        Text(change.verdict, style="bold green" if change.gained else "bold yellow")
    ]
    table = Fitted(CLASSES, "Kernel time by class", right=frozenset(CLASSES[1:]))
    parts.append(_filled(table, class_rows(change)))
    if change.moves:
        table = Fitted(MOVES, "What moved", right=frozenset({"a call", "gain"}), lead=3)
        parts.append(_filled(table, move_rows(change)))
    return Group(*parts)


def _filled(table: Fitted, rows: Sequence[Sequence[str]], most: int = SHOWN) -> Fitted:
    """The table with its first rows, and how many more there are."""
    for cells in rows[:most]:
        table.add_row(*cells)
    if len(rows) > most:
        table.caption = f"{most} of {len(rows)}; all with --json"
    return table


def class_rows(change: ProfileComparison) -> list[list[str]]:
    """Each class of kernels that either trace has: share and time, before and now."""
    shown = [name for name in _WORDS if change.before[name] or change.now[name]]
    return [
        [
            _WORDS[name],
            *(summary.percent(side[name]) for side in (change.before, change.now)),
            *(f"{side[name] * side['time_us'] / 1000:.1f}" for side in (change.before, change.now)),
        ]
        for name in shown
    ]


def move_rows(change: ProfileComparison) -> list[list[str]]:
    """Each operation whose class changed."""
    return [
        [
            move.op.removeprefix("aten::"),
            move.module,
            move.size,
            _WORDS[move.before],
            _WORDS[move.now],
            f"{move.before_us:.1f} → {move.now_us:.1f} µs",
            f"{move.gain:.2f}×",
        ]
        for move in change.moves
    ]


def is_good(profile: Profile) -> bool:
    """Whether more time is on Tensor Cores than may be kept off them."""
    return profile.fraction("tensor_core") > profile.fraction("cuda_core", "unknown")


def provenance(profile: Profile) -> str:
    """The trace, where it is from, and how much there is in it."""
    device = profile.device.name if profile.device and profile.device.name else "unknown GPU"
    return (
        f"{Path(profile.path).name}: {profile.source}, {device}, "
        f"{profile.kernel_time_us / 1000:.1f} ms in kernels, "
        f"{summary.percent(profile.linked_fraction)} linked to operations"
        + (f"; {profile.generated}" if profile.generated else "")
    )


def _operations(profile: Profile) -> RenderableType:
    table = Fitted(
        OPERATIONS,
        OPERATIONS_TITLE,
        sentences=frozenset({"fix"}),
        names=frozenset({"operation"}),
        right=frozenset({"time", "at most", "TFLOP/s"}),
        lead=2,
    )
    return _filled(table, operation_rows(profile))


def _matrix_operations(profile: Profile, most: int) -> RenderableType:
    """The first matrix operations, by what could be gained; kernels where there are none."""
    found = [j for j in profile.operations if j.eligible is not False or j.operation.work]
    rows = [_operation_row([judged], profile) for judged in found]
    if not rows:
        return _kernels(profile)
    kept = [i for i, name in enumerate(OPERATIONS) if name not in ("fix", "at most")]
    table = Fitted(
        tuple(OPERATIONS[i] for i in kept),
        "Matrix operations",
        names=frozenset({"operation"}),
        right=frozenset({"time", "TFLOP/s"}),
        spare=("dtype", "module"),
        lead=2,
        boxed=False,
    )
    cells = [[row[i].replace(" × ", "×") for i in kept] for row in rows]
    for row, judged in zip(cells, found, strict=True):
        row[0] = _plain(_operation_name(judged.operation).removeprefix(UNLINKED))
    return _filled(table, cells, most)


def operation_rows(profile: Profile, cause: str | None = None) -> list[list[str]]:
    """The operations, those worth most first; of one cause, where one is given."""
    rows = _together(
        [j for j in profile.operations if cause is None or (j.cause == cause and j.affected_us > 0)]
    )
    return [_operation_row(members, profile) for members in rows]


def _together(operations: Sequence[JudgedOperation]) -> list[list[JudgedOperation]]:
    """Rows of the table: operations that are not matrix work share one row per operation."""
    rows: dict[object, list[JudgedOperation]] = {}
    for i, judged in enumerate(operations):
        key = i if judged.operation.work else (judged.operation.op, judged.cause)
        rows.setdefault(key, []).append(judged)
    worth = {
        id(row): sum(j.affected_us if j.win_us is None else j.win_us for j in row)
        for row in rows.values()
    }
    return sorted(rows.values(), key=lambda row: -worth[id(row)])


def _operation_row(members: list[JudgedOperation], profile: Profile) -> list[str]:
    first, whole = members[0], profile.kernel_time_us
    o, work = first.operation, first.operation.work
    affected = sum(j.affected_us for j in members)
    bound = speedup(affected / (profile.run_us or whole)) if whole else 1.0
    modules = o.module if len(members) == 1 else f"{len(members)} modules"
    return [
        _plain(_operation_name(o)),
        modules,
        " × ".join(str(n or "?") for n in (work.m, work.n, work.k)) if work and work.m else "",
        o.dtype or "",
        summary.percent(sum(j.operation.time_us for j in members) / whole if whole else 0.0),
        summary.rate_text(first.rate) if len(members) == 1 else "",
        f"{bound:.2f}×" if bound < summary.MANY else "–",
        summary.in_words_of(
            summary.SHORT.get(first.cause, first.cause.replace("_", " ")), amd=profile.is_amd
        ),
        first.fix,
    ]


def _operation_name(o: OperationTime) -> str:
    """Its name; of kernels that no operation is known for, the kernel's."""
    if o.op.startswith(UNLINKED) and o.kernel:
        return f"{UNLINKED}{kernel_label(o.kernel)}"
    return o.op.removeprefix("aten::")


def _kernels(profile: Profile) -> RenderableType:
    table = Fitted(
        KERNELS,
        "Kernels by time",
        names=frozenset({"kernel"}),
        right=frozenset({"calls", "time"}),
        spare=("align",),
    )
    return _filled(table, kernel_rows(profile))


def kernel_rows(profile: Profile) -> list[list[str]]:
    """The kernels, the longest first."""
    return [_kernel_row(places, profile) for places in _by_name(profile)]


def _by_name(profile: Profile) -> list[list[KernelTime]]:
    """The kernels of each name, the longest first."""
    names: dict[str, list[KernelTime]] = {}
    for kernel in profile.kernels:
        names.setdefault(kernel.name, []).append(kernel)
    return sorted(names.values(), key=lambda row: -sum(k.time_us for k in row))


def _fused(rows: Sequence[Sequence[str]], most: int) -> RenderableType:
    table = Fitted(
        FUSED,
        FUSED_TITLE,
        sentences=frozenset({"operations", "modules", "lines"}),
        names=frozenset({"kernel"}),
        right=frozenset({"time"}),
        lead=2,
    )
    return _filled(table, rows, most)


def fused_rows(profile: Profile) -> list[list[str]]:
    """What inductor fused into each kernel, the longest first; lines without their folder."""
    rows = []
    for places in _by_name(profile):
        fused = places[0].fused
        if fused is not None:
            name, _, share, *_ = _kernel_row(places, profile)
            several = f" (in {fused.graphs} graphs)" if fused.graphs > 1 else ""
            rows.append(
                [
                    f"{name}{several}",
                    share,
                    ", ".join(op.removeprefix("aten.") for op in fused.operations),
                    ", ".join(fused.modules),
                    "; ".join(f"{Path(s.file).name}:{s.line} {s.code}" for s in fused.lines),
                ]
            )
    return rows


def _kernel_row(places: list[KernelTime], profile: Profile) -> list[str]:
    first, whole = places[0], profile.kernel_time_us
    facts = first.facts
    where = _WORDS[facts.verdict]
    measured = next((k for k in places if k.measured is not None), None)
    if measured is not None and measured.measured is not None:
        where = f"{_WORDS[measured.measured_verdict]} ({measured.measured.kind})"
    return [
        _plain(kernel_label(first.name)),
        f"{sum(k.calls for k in places):,}",
        summary.percent(sum(k.time_us for k in places) / whole if whole else 0.0),
        summary.in_words_of(where, amd=profile.is_amd),
        facts.instruction,
        facts.dtype,
        "" if facts.alignment is None else str(facts.alignment),
    ]


def _plain(name: str) -> str:
    return " ".join(name.removeprefix("void ").split())
