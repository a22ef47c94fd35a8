"""``mpdiag audit``: which dtype everything in a training has, and what that does."""

from typing import Annotated

import typer
from typer import Argument, Option

from mpdiag.commands.shared import options
from mpdiag.errors import UsageError
from mpdiag.files.paths import AnyPath, place

COMMAND_CLASS = options.ScriptApart


def audit(
    context: typer.Context,
    run: Annotated[
        AnyPath | None, Argument(metavar="RUN", parser=place, help="A recorded run, or its URL.")
    ] = None,
    arguments: Annotated[
        list[str] | None, Argument(metavar="ARGS", help="The arguments of the script after --.")
    ] = None,
    as_json: options.JsonOption = False,
    strict: options.StrictOption = False,
    steps: Annotated[
        int, Option(min=1, metavar="N", help="Steps of a script to run before it is stopped.")
    ] = 3,
    verbose: Annotated[
        bool, Option("--verbose", "-v", help="Every group of parameters, however many.")
    ] = False,
) -> None:
    """Say which dtype everything has. Weights, gradients, sums, optimizer states, and the effects."""
    from mpdiag.launching.audited_script import first_steps
    from mpdiag.precision.audit import audit as audit_run
    from mpdiag.reports import terminal
    from mpdiag.reports.text.audit import audit_text

    script = context.meta["script"]
    if (run is None) == (script is None) or script == [] or arguments:
        raise UsageError("give a run or a script: mpdiag audit RUN, mpdiag audit -- script.py ARGS")
    if script:
        with (
            terminal.waiting("running the first steps of the script"),
            first_steps(script, steps) as recorded,
        ):
            found = audit_run(recorded)
    elif run is not None:
        found = audit_run(run)
    if as_json:
        terminal.show_json(found.to_json())
    else:
        terminal.show(*audit_text(found, verbose=verbose))
    options.exit_on_findings(strict, (finding.severity for finding in found.findings))
