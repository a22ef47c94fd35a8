"""``mpdiag why``: what one layer loses, or why a step was skipped."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mpdiag.commands.shared.options import JsonOption
from mpdiag.errors import UsageError
from mpdiag.files.paths import place
from mpdiag.runs.run import META


def why(
    run: Annotated[
        Path,
        typer.Argument(
            metavar="RUN", parser=place, help="The run's folder, its URL, or a skip capsule."
        ),
    ],
    layer: Annotated[
        str | None, typer.Argument(metavar="[LAYER]", help="A module or parameter of the run.")
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            metavar="PACKAGE.MODULE:FUNCTION",
            help="For a capsule: the function that returns the model and a loss function.",
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Explain one layer, or a skipped step. Without LAYER, the layer that loses most."""
    if layer is None and (model is not None or as_json or not (run / META).is_file()):
        _explain_skip(run, model, as_json)
        return
    if model is not None or as_json:
        message = "--model and --json need a capsule: give them without LAYER"
        raise UsageError(message)
    from mpdiag.analysis.layer_history import explain_layer
    from mpdiag.reports import terminal
    from mpdiag.reports.text.why import layer_text

    story = explain_layer(run, layer)
    terminal.show(layer_text(story))
    if layer is None:
        others = ", ".join(name for name in story.worst if name and name != story.name)
        terminal.remark(f"this layer loses most; the next ones are: {others}")
    terminal.name_next("mpdiag", "replay", run)


def _explain_skip(capsule: Path, model: str | None, as_json: bool) -> None:
    from mpdiag.reports import terminal
    from mpdiag.reports.text.why import skip_text
    from mpdiag.training.skips.capsule import is_capsule, load_capsule
    from mpdiag.training.skips.capsule_replay import builder_named, replay_capsule

    if not is_capsule(capsule):
        message = f"{capsule} is not a skip capsule; for a run, name a LAYER too"
        raise typer.BadParameter(message, param_hint="RUN")
    loaded = load_capsule(capsule)
    if model is None:
        message = (
            f"to run the step again, the code of its {loaded.document.get('model')} is needed: pass "
            "--model package.module:function, which returns the model and a loss function"
        )
        raise UsageError(message)
    replayed = replay_capsule(loaded, builder_named(model))
    if as_json:
        terminal.show_json(replayed.to_json())
    else:
        terminal.show(skip_text(replayed.to_json(), replayed.first))
        terminal.name_next("mpdiag", "compare", "--help")
