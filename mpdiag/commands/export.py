"""``mpdiag export``: a plan as the settings of another framework."""

import sys
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from mpdiag.commands.shared.examples import FRAMEWORKS
from mpdiag.commands.shared.options import JsonOption, refuse_shadow
from mpdiag.errors import UsageError
from mpdiag.files.atomic import writing


def export(
    plan: Annotated[Path, Argument(metavar="PLAN", help="A plan file, or the run that holds one.")],
    to: Annotated[
        str,
        Option(
            "--to",
            metavar="NAME",
            autocompletion=lambda: list(FRAMEWORKS),
            help="The framework to write for; the names are listed below.",
        ),
    ],
    output: Annotated[
        Path | None, Option("--output", "-o", metavar="FILE", help="Write to this file.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Write a plan as another framework's settings. Says what they cannot hold."""
    from mpdiag.exports.registry import export_plan
    from mpdiag.plan import PrecisionPlan
    from mpdiag.reports import next_commands, terminal

    if output is not None:
        refuse_shadow(output)
    loaded = PrecisionPlan.load(plan)
    written = export_plan(loaded, to)
    if output is not None and output.exists() and output.samefile(plan):
        raise UsageError(f"{output} is the plan itself: choose another file with -o")
    if output is not None:
        with writing(output):
            output.write_text(written.text, encoding="utf-8")
    if as_json:
        terminal.show_json(written.to_json())
        return
    if output is None:
        sys.stdout.write(written.text)
    if output is not None or written.language == "json":
        for note in written.notes:
            terminal.remark(note)
    terminal.name_next(*next_commands.after_export(loaded, plan, output, written))
