"""``mpdiag why``: what one layer loses, or why a step was skipped."""

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from mpdiag.commands.shared import options
from mpdiag.errors import UsageError
from mpdiag.files.paths import place
from mpdiag.runs.run import META

CAPSULE = "capsule.json"
"""The file by which a skip capsule is known; ``training`` writes it."""


def why(
    run: Annotated[
        Path,
        Argument(metavar="RUN", parser=place, help="The run's folder, its URL, or a skip capsule."),
    ],
    layer: Annotated[
        str | None, Argument(metavar="LAYER", help="A module or parameter of the run.")
    ] = None,
    model: Annotated[
        str | None,
        Option(
            metavar="PACKAGE.MODULE:FUNCTION",
            help="For a capsule: the function that returns the model and a loss function.",
        ),
    ] = None,
    target: Annotated[
        options.BlockTarget | None,
        Option("--target", help="Explain the layer in this block format (record --blocks)."),
    ] = None,
    as_json: options.JsonOption = False,
) -> None:
    """Explain one layer, or a skipped step. Without LAYER, the layer that loses most."""
    if (run / META).is_file() or not _is_capsule(run):
        if model is not None:
            raise UsageError(f"--model is for a skip capsule, and {run} is not one: leave it out")
        if target is None:
            _explain_layer(run, layer, as_json)
        else:
            _explain_blocks(run, layer, target, as_json)
        return
    if given := layer or (target and "--target"):
        raise UsageError(f"{run} is a skip capsule, which has no layers to name: leave {given} out")
    _explain_skip(run, model, as_json)


def _is_capsule(path: Path) -> bool:
    """Whether a path is a skip capsule; a run, or what is nothing at all, costs no torch."""
    folder = path if path.is_dir() else path.parent
    return (folder / CAPSULE).is_file()


def _explain_layer(run: Path, layer: str | None, as_json: bool) -> None:
    from mpdiag.analysis.layer_history import explain_layer
    from mpdiag.reports import next_commands, terminal
    from mpdiag.reports.text.why import layer_text

    story = explain_layer(run, layer)
    if as_json:
        terminal.show_json(story.to_json())
        return
    terminal.show(layer_text(story))
    others = ", ".join(name for name in story.worst if name and name != story.name)
    if layer is None:
        following = f"; next: {others}" if others else ""
        loses = "loses most" if story.lost.any() else "decides the loss scale and loses nothing"
        terminal.remark(f"this layer {loses}{following if story.lost.any() else ''}")
    terminal.name_next(*next_commands.after_layer(story.analysis, run))


def _explain_blocks(run: Path, layer: str | None, target: str, as_json: bool) -> None:
    from mpdiag.analysis.blocks.story import explain_blocks
    from mpdiag.reports import next_commands, terminal
    from mpdiag.reports.text.blocks import block_layer_text

    story = explain_blocks(run, layer, target)
    if as_json:
        terminal.show_json(story.to_json())
        return
    terminal.show(*block_layer_text(story.blocks, story.module))
    terminal.name_next(*next_commands.decide(run, target))


def _explain_skip(capsule: Path, model: str | None, as_json: bool) -> None:
    from mpdiag.reports import next_commands, terminal
    from mpdiag.reports.text.why import skip_text
    from mpdiag.training.skips.capsule import load_capsule
    from mpdiag.training.skips.capsule_replay import builder_named, replay_capsule

    loaded = load_capsule(capsule)
    if model is None:
        raise UsageError(
            "to run the step again, pass --model package.module:function, a function that returns "
            f"the {loaded.document.get('model')} and a loss function"
        )
    replayed = replay_capsule(loaded, builder_named(model))
    if as_json:
        terminal.show_json(replayed.to_json())
    else:
        terminal.show(skip_text(replayed.to_json(), replayed.first))
        terminal.name_next(*next_commands.after_skip(capsule))
