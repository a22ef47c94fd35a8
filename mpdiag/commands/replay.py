"""``mpdiag replay``: a loss scaler over a recorded run."""

from typing import Annotated

import typer
from typer import Option

from mpdiag.commands.shared.options import JsonOption, RunArgument, given_words
from mpdiag.errors import UsageError
from mpdiag.numerics.loss_scalers import SCALERS, Backoff, scaler_class


def _known(name: str) -> str:
    """Refuse the name of a scaler that does not exist."""
    try:
        scaler_class(name)
    except UsageError as error:
        raise typer.BadParameter(str(error)) from None
    return name


_SETTINGS = (
    *("init_scale", "growth_factor", "backoff_factor", "growth_interval", "hysteresis"),
    *("min_scale", "max_scale"),
)
"""Parameters that are settings of scalers; not every scaler has each."""

# A string that is checked when the command runs: a Literal would fix the list at import.
ScalerOption = Annotated[
    str,
    Option(
        metavar="NAME",
        parser=_known,
        autocompletion=lambda: list(SCALERS),
        help=f"The loss scaler to run: {', '.join(SCALERS)}.",
    ),
]


def replay(
    context: typer.Context,
    run: RunArgument,
    scaler: ScalerOption = Backoff.name,
    init_scale: Annotated[
        float | None, Option(metavar="SCALE", help="First loss scale. Default: the scaler's own.")
    ] = None,
    growth_factor: Annotated[
        float, Option(metavar="FACTOR", help="Factor on the scale after the growth interval.")
    ] = 2.0,
    backoff_factor: Annotated[
        float, Option(metavar="FACTOR", help="Factor on the scale after an overflow.")
    ] = 0.5,
    growth_interval: Annotated[
        int, Option(metavar="N", help="Steps without overflow before the scale grows.")
    ] = 2000,
    min_scale: Annotated[
        float | None, Option(metavar="SCALE", help="Smallest loss scale. Default: 1.")
    ] = None,
    max_scale: Annotated[
        float | None, Option(metavar="SCALE", help="Largest loss scale. Default: 2^24.")
    ] = None,
    hysteresis: Annotated[
        int, Option(metavar="N", help="Overflows in a row before the scale backs off.")
    ] = 1,
    as_json: JsonOption = False,
) -> None:
    """Run a loss scaler over a recorded run. Shows scale, skips and lost values."""
    from mpdiag.analysis.scaling.replay import replay_run
    from mpdiag.reports import next_commands, terminal
    from mpdiag.reports.text.why import replay_text

    known = scaler_class(scaler).setting_names()
    typed = given_words(context)
    for name in _SETTINGS:
        if name in typed and name not in known:
            raise UsageError(f"the {scaler} scaler has no {typed[name]}: leave it out")
    played = replay_run(
        run,
        scaler,
        init_scale=init_scale,
        growth_factor=growth_factor,
        backoff_factor=backoff_factor,
        growth_interval=growth_interval,
        hysteresis=hysteresis,
        min_scale=min_scale,
        max_scale=max_scale,
    )
    if as_json:
        terminal.show_json(played.to_json())
    else:
        terminal.show(replay_text(played))
        terminal.name_next(*next_commands.after_replay(run))
