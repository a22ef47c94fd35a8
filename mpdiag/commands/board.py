"""``mpdiag board``: a run on TensorBoard or W&B."""

from typing import Annotated

from typer import Option

from mpdiag.commands.shared.options import Board, RunArgument


def board(
    run: RunArgument,
    to: Annotated[Board, Option("--to", help="The board to write to.")] = "tensorboard",
    output: Annotated[
        str | None,
        Option(
            "--output",
            "-o",
            metavar="WHERE",
            help="TensorBoard's folder of runs, or W&B's project.",
        ),
    ] = None,
) -> None:
    """Put a run on TensorBoard or W&B. Histograms, shares lost, loss and scale."""
    from mpdiag.integrations.boards import write_board
    from mpdiag.reports import next_commands, terminal
    from mpdiag.runs.run import open_run

    written, where = write_board(open_run(run), to, output)
    terminal.show(f"{written} histograms and scalars written to {where}")
    terminal.name_next(*next_commands.after_board(to, where))
