"""``mpdiag mismatch``: why two forward passes of a model give different log-probabilities."""

import contextlib
import sys
from typing import Annotated

import typer
from typer import Option

from mpdiag.commands.shared.options import JsonOption, ScriptApart, ScriptWords
from mpdiag.errors import UsageError
from mpdiag.files.paths import AnyPath, place

COMMAND_CLASS = ScriptApart
FUNCTION = "mismatch_inputs"


def mismatch(
    context: typer.Context,
    words: ScriptWords = None,
    budget: Annotated[
        float, Option(min=0.0, max=1.0, metavar="SHARE", help="Parameters that may stay in FP32.")
    ] = 0.1,
    run: Annotated[
        AnyPath | None,
        Option(metavar="RUN", parser=place, help="A recording, for the loss scale of FP16."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Compare two forward passes of a model. The script defines mismatch_inputs()."""
    from mpdiag.launching.script import call_in, parse
    from mpdiag.reports import terminal
    from mpdiag.reports.text.mismatch import mismatch_text
    from mpdiag.sensitivity.forward_mismatch import mismatch as compare_passes

    if words:
        raise UsageError("write the script after --: mpdiag mismatch -- script.py ARGS")
    script = parse(context.meta["script"] or [])
    with contextlib.redirect_stdout(sys.stderr):  # the script may print
        given = call_in(script, FUNCTION)
        if not isinstance(given, tuple) or len(given) != 3:
            raise UsageError(f"{FUNCTION}() must return (model_a, model_b, batch)")
        with terminal.waiting("comparing two forward passes"):
            found = compare_passes(*given, budget=budget, recording=run)
    if as_json:
        terminal.show_json(found.to_json())
    else:
        terminal.show(*mismatch_text(found))
