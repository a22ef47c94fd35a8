"""``mpdiag fingerprint``: a traced run in one small file."""

from pathlib import Path
from typing import Annotated

from typer import Option

from mpdiag.commands.shared.options import RunArgument
from mpdiag.files.paths import AnyPath, place


def fingerprint(
    run: RunArgument,
    output: Annotated[
        AnyPath | None,
        Option("--output", "-o", metavar="FILE", parser=place, help="Default: NAME.fingerprint"),
    ] = None,
) -> None:
    """Write a traced run as one small file. For mpdiag diff in CI, under 1 MB."""
    from mpdiag.analysis.difference.fingerprint import fingerprint_bytes
    from mpdiag.files.atomic import atomic_path, writing
    from mpdiag.reports import next_commands, terminal
    from mpdiag.runs.run import open_run

    opened = open_run(run)
    content = fingerprint_bytes(opened)
    path = output or Path(f"{opened.name}.fingerprint")
    with writing(path), atomic_path(path) as partial:
        partial.write_bytes(content)
    terminal.show(f"{path} written ({len(content) / 1e3:.0f} kB)")
    terminal.name_next(*next_commands.hold_against(path, run, "--strict"))
