"""What ``mpdiag profile`` prints of a CPU: the verdict first, then what took most time."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Group
from rich.padding import Padding
from rich.text import Text

from mpdiag.display.wording import percent
from mpdiag.reports.text.findings import COLOURS, EXPLAIN
from mpdiag.reports.text.tables import Fitted
from mpdiag.tensorcores.cpu.operation import UNITS

if TYPE_CHECKING:
    from rich.console import RenderableType

    from mpdiag.tensorcores.cpu.matrix_unit import CpuProfile

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
    whole = profile.time_us or 1.0
    for operation in profile.operations[:SHOWN]:
        o, work = operation.time, operation.time.work
        table.add_row(
            o.op.removeprefix("aten::"),
            o.module,
            f"{work.m} × {work.n} × {work.k}" if work else "",
            (work.dtype or "") if work else "",
            percent(o.time_us / whole, 1),
            UNITS[operation.verdict],
            operation.fix,
        )
    return Group(*parts, table)
