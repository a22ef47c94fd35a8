"""Shows the result of ``mpdiag profile``, of a GPU's trace or of a CPU."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mpdiag.reports import next_commands, terminal
from mpdiag.tensorcores.reports.cpu_profile import cpu_profile_text
from mpdiag.tensorcores.reports.gpu_profile import change_text, profile_text
from mpdiag.tensorcores.trace_profile import Profile

if TYPE_CHECKING:
    from pathlib import Path

    from mpdiag.tensorcores.cpu.matrix_unit import CpuProfile
    from mpdiag.tensorcores.profile_comparison import ProfileComparison


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
