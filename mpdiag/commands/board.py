"""``mpdiag board``: a run on TensorBoard, W&B or MLflow, or as lines of JSON."""

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
            help="TensorBoard's folder, W&B's project, MLflow's experiment or the file of JSON.",
        ),
    ] = None,
) -> None:
    """Put a run on a board. Series, loss and scale."""
    from mpdiag.integrations.boards import write_board
    from mpdiag.reports import next_commands, terminal
    from mpdiag.runs.run import open_run

    written, where = write_board(open_run(run), to, output)
    terminal.show(f"{written} scalars written to {where}")
    terminal.name_next(*next_commands.after_board(to, where))
