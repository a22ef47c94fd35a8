"""``mpdiag diff``: where two runs part beyond rounding."""

from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from mpdiag.commands.shared.options import JsonOption, refuse_suffix
from mpdiag.errors import ExitCode
from mpdiag.files.paths import place


def diff(
    a: Annotated[Path, Argument(metavar="A", parser=place, help="A run recorded with --trace.")],
    b: Annotated[
        Path, Argument(metavar="B", parser=place, help="Another one, or a fingerprint of one.")
    ],
    as_json: JsonOption = False,
    output: Annotated[
        Path | None, Option("--output", "-o", metavar="FILE", help="Draw it into an .html file.")
    ] = None,
    strict: Annotated[
        bool, Option("--strict", help="Exit with 1 if the runs part, or cannot be compared.")
    ] = False,
) -> None:
    """Say where two runs part. Module, operation and line, beyond rounding."""
    from mpdiag.analysis.difference.compared import diff as compare_traces
    from mpdiag.reports import next_commands, terminal
    from mpdiag.reports.documents.write import write_difference
    from mpdiag.reports.text.difference import difference_text

    if output is not None:
        refuse_suffix(output, "a comparison", (".html", ".htm"))
    found = compare_traces(a, b)
    if output is not None:
        write_difference(found, a, b, output)
    if as_json:
        terminal.show_json(found.to_json())
    else:
        terminal.show(difference_text(found, a, b))
        if found.first is not None and output is None:
            terminal.name_next(*next_commands.hold_against(a, b, "-o", "difference.html"))
    if strict and found.agree is not True:
        raise typer.Exit(ExitCode.FINDINGS)
