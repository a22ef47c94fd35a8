"""``mpdiag profile``: whether matrix work ran on Tensor Cores."""

from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from mpdiag.commands.shared import options
from mpdiag.errors import UsageError

COMMAND_CLASS = options.ScriptApart


def profile(
    context: typer.Context,
    trace: Annotated[
        Path | None,
        Argument(
            metavar="TRACE",
            help="A trace of torch.profiler, nsys, ncu, nvprof or rocprofv3, a folder with one per "
            "rank, or - for stdin.",
        ),
    ] = None,
    arguments: Annotated[
        list[str] | None,
        Argument(metavar="ARGS", help="More ranks' traces, or the script's arguments after --."),
    ] = None,
    steps: Annotated[int, Option(min=1, metavar="N", help="For a script: steps to measure.")] = 3,
    warmup: Annotated[
        int, Option(min=0, metavar="N", help="For a script: steps to skip first.")
    ] = 5,
    against: Annotated[
        Path | None,
        Option(
            metavar="TRACE", help="An earlier trace, to show what moved onto Tensor Cores since."
        ),
    ] = None,
    triton_cache: Annotated[
        Path | None,
        Option(
            metavar="DIR",
            help="Triton's or inductor's cache, or the log of tritonparse or TORCH_TRACE, "
            "to read the code of kernels.",
        ),
    ] = None,
    verbose: Annotated[
        bool, Option("-v", "--verbose", help="Also show tables of kernels, steps and gaps.")
    ] = False,
    as_json: options.JsonOption = False,
    strict: options.StrictOption = False,
) -> None:
    """Say whether matrix work ran on Tensor Cores. For a script after --, or a trace."""
    from mpdiag.profiler import part
    from mpdiag.reports import terminal

    script = context.meta["script"]
    given = len(arguments or []) + (trace is not None)
    code = 0
    if script is None and trace is not None and (arguments or trace.is_dir()):
        _ranks(trace, arguments or [], against, as_json=as_json)
        return
    _refuse_mixtures(script, trace, given, triton_cache)
    if script is not None or trace is None:
        from mpdiag.runs.provenance import announced_ranks

        launched = part("profiled_script").profile_script(script or [], steps=steps, warmup=warmup)
        result, code = launched.result, launched.exit_code
        if announced_ranks()[0] > 0:  # the first rank reports for all
            raise typer.Exit(code)
    else:
        with terminal.waiting(f"reading {trace}"):
            result = part("trace_analysis").profile_trace(trace, triton_code=triton_cache)
    change = None
    if against is not None:
        with terminal.waiting(f"reading {against}"):
            change = part("trace_analysis").compare_traces(against, result)
    show = part("reports.profile").show_profile
    document = show(result, against, change, as_json=as_json, verbose=verbose)
    if code:
        raise typer.Exit(code)
    options.exit_on_findings(strict, (finding["severity"] for finding in document["findings"]))


def _refuse_mixtures(
    script: list[str] | None, trace: Path | None, given: int, triton_cache: Path | None
) -> None:
    """Refuse words that are neither one trace nor one script; ``given`` counts them.

    Raises:
        UsageError: With the reason.
    """
    if script is not None and given:
        message = "give a trace or a script after --, not both; an earlier trace with --against"
        raise UsageError(message)
    if script is None and trace is None:
        raise UsageError("give a trace, or a script after --: mpdiag profile -- script.py ARGS")
    if script is not None and triton_cache is not None:
        raise UsageError("--triton-cache belongs to a trace: give one instead of a script")


def _ranks(trace: Path, more: list[str], against: Path | None, *, as_json: bool) -> None:
    """Compare one step of several ranks."""
    from mpdiag.profiler import part
    from mpdiag.reports import terminal

    if against is not None:
        raise UsageError("several traces are ranks of one run: give one trace only with --against")
    paths = [trace, *map(Path, more)] if more else part("trace_analysis").traces_in(trace)
    with terminal.waiting(f"reading {len(paths)} traces"):
        found = part("trace_analysis").profile_ranks(paths)
    if as_json:
        terminal.show_json(found.to_json())
    else:
        terminal.show(part("reports.profile").rank_text(found))
