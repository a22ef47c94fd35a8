"""Shows the result of ``mpdiag profile``: of a GPU's trace, of a CPU, or of several ranks."""

from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from mpdiag.reports import next_commands, terminal
from mpdiag.reports.text.tables import COLOURS, EXPLAIN, Fitted
from mpdiag.tensorcores.cpu.matrix_unit import UNITS, CpuProfile
from mpdiag.tensorcores.profile_comparison import ProfileComparison
from mpdiag.tensorcores.reports.gpu_profile import change_text, profile_text
from mpdiag.tensorcores.summary import milliseconds, percent
from mpdiag.tensorcores.timeline.ranks import RankComparison
from mpdiag.tensorcores.trace_profile import Profile


def show_profile(
    result: Profile | CpuProfile,
    against: Path | None = None,
    change: ProfileComparison | None = None,
    *,
    as_json: bool,
    verbose: bool = False,
) -> dict[str, Any]:
    """Print a profile, and what changed since an earlier trace if there is one.

    Args:
        result: What was measured.
        against: The earlier trace.
        change: What changed since then.
        as_json: One JSON document instead of text; the change stands in it as ``against``.
        verbose: Every table, not only what decides.

    Returns:
        The JSON document, which is also what ``--strict`` looks at.
    """
    document = result.to_json()
    if change is not None:
        document["against"] = change.to_json()
    if as_json:
        terminal.show_json(document)
        return document
    if isinstance(result, Profile):
        if change is not None:
            terminal.show(change_text(change), "")
        terminal.show(profile_text(result, verbose=verbose))
        terminal.name_next(*next_commands.after_profile(result.path, against))
    else:
        terminal.show(cpu_profile_text(result))
        terminal.name_next(*next_commands.DOCTOR)
    return document


SHOWN = 10


def cpu_profile_text(profile: CpuProfile) -> RenderableType:
    """The whole report."""
    used = profile.tensor_core_fraction > 0
    parts: list[RenderableType] = [
        Text(profile.verdict, style="bold green" if used else "bold yellow"),
        Text(
            f"{profile.device.name}, {profile.steps} steps, "
            f"{profile.time_us / 1000:.1f} ms in operators; source: oneDNN's log",
            style="dim",
        ),
    ]
    for f in profile.findings:
        parts.append(Text.assemble((f"{f['severity']}: ", COLOURS[f["severity"]]), f["message"]))
        parts.append(Padding(Text(f"{f['fix']}  [{f['code']}]", style="dim"), (0, 0, 0, 2)))
    if profile.findings:
        parts.append(Text(EXPLAIN, style="dim"))
    table = Fitted(
        ("operation", "module", "M × N × K", "dtype", "time", "where", "what to do"),
        "Operations by time",
        sentences=frozenset({"what to do"}),
        right=frozenset({"time"}),
        lead=2,
    )
    whole, said = profile.time_us or 1.0, set[str]()
    for operation in profile.operations[:SHOWN]:
        o, work = operation.time, operation.time.work
        fix = "as above" if operation.fix and operation.fix in said else operation.fix
        said.add(fix)
        table.add_row(
            o.op.removeprefix("aten::"),
            o.module,
            f"{work.m} × {work.n} × {work.k}" if work else "",
            (work.dtype or "") if work else "",
            percent(o.time_us / whole),
            UNITS[operation.verdict],
            fix,
        )
    return Group(*parts, table)


RANKS = ("rank", "length", "own", "computing", "exposed", "overlapped", "idle", "Tensor Cores")
LEGEND = (
    "own: time outside exposed collectives; exposed, overlapped: collectives without and with "
    "computing at the same time; Tensor Cores: share of the whole trace's kernel time"
)
MOST = 16
"""Ranks shown; of more, the slowest ones."""


def rank_text(found: RankComparison) -> RenderableType:
    """The verdict, and a row for each rank."""
    table = Fitted(
        RANKS,
        f"Step {found.step}" if found.step else "Whole traces",
        LEGEND,
        right=frozenset(RANKS[1:]),
        boxed=False,
    )
    rows = rank_rows(found)
    for row in rows[:MOST]:
        table.add_row(*row)
    if len(rows) > MOST:
        table.title += f", the {MOST} slowest of {len(rows)} ranks"
    return Group(Text(found.verdict, style="bold"), table)


def rank_rows(found: RankComparison) -> list[list[str]]:
    """A row for each rank, by number; the slowest ones first where there are many."""
    ranks = list(found.ranks)
    if len(ranks) > MOST:
        ranks.sort(key=lambda r: -r.own_us)
    rows = []
    for r in ranks:
        step = r.step
        overlapped = max(0.0, step.collective_us - step.exposed_us)
        times = [step.wall_us, r.own_us, step.compute_us, step.exposed_us, overlapped, step.idle_us]
        label = f"{r.rank} slowest" if r is found.slowest else str(r.rank)
        rows.append([label, *map(milliseconds, times), percent(r.tensor_core_fraction)])
    return rows
