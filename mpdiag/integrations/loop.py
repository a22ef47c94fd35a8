"""A loop of one's own, recorded as it goes: the audit's line, findings as they appear, live series.

::

    with record_loop(model_parts, optimizers, "runs/mine"):
        for batch in loader:
            ...

The loop may compile its blocks, shard its model with FSDP2, or train the stages of a pipeline. All that
is said and sent comes from what was counted anyway, between two steps.
"""

import os
import re
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from mpdiag.integrations.series import (
    Destination,
    Pieces,
    active,
    destination,
    figures,
    state_figures,
)
from mpdiag.precision.consequences import consequences
from mpdiag.recording.contract import FIRST_STEPS
from mpdiag.recording.recorder import Optimizers, Recorder, record
from mpdiag.recording.run_folder import Progress
from mpdiag.runs import provenance
from mpdiag.runs.precision import PrecisionFacts, summary
from mpdiag.runs.records import Records
from mpdiag.tracing.names import Models, Stages

SHARE = 0.01
"""Of the time that looking at the rows may take."""
_FIGURES = re.compile(r"[\d.,]+|steps?\b")


def record_loop(
    models: Models,
    optimizers: Optimizers,
    run: str | os.PathLike[str],
    *,
    report_to: Any = None,
    **options: Any,
) -> Recorder:
    """Record a loop; use it as a context manager around the loop.

    After the first step the first rank prints the training's precision in one line, and later each
    finding once. Each process sends its series to what it reports to itself.

    Args:
        models: The model, or the stages of a pipeline that this rank trains, as a list. Stages keep the
            names that their layers have in the whole model.
        optimizers: An optimizer, a list of them, or what holds them as ``optimizers``.
        run: The run folder, a path or a URL.
        report_to: Where series go: a path that ends in ``.jsonl``, a ``SummaryWriter``, a run of W&B,
            or a list of these; ``[]`` for nowhere. Default: W&B's active run, MLflow's active run and
            each open ``SummaryWriter`` of this process, as they are after the first step. In W&B they
            join the next row that the loop logs.
        options: As for ``mpdiag.record``: ``every``, ``include``, ``exclude``, ``fp32`` …

    Raises:
        UsageError: If an argument has the wrong type or value.
        RunExists: If the folder holds a run and ``overwrite`` is not set.
    """
    several = isinstance(report_to, (list, tuple))
    targets = report_to if several else [] if report_to is None else [report_to]
    chosen = [destination(target) for target in targets]
    recorder = record(_stages(models), optimizers, run, **options)
    opened = active if report_to is None else lambda: chosen
    recorder.show_to(Reporter(opened, _say))
    return recorder


def _stages(models: Models) -> Models:
    """Several modules as the stages of one, if no name stands in two of them."""
    if not isinstance(models, (list, tuple)) or not all(isinstance(m, nn.Module) for m in models):
        return models
    names = [name for model in models for name, _ in model.named_parameters()]
    return Stages(models) if len(models) > 1 and len(names) == len(set(names)) else models


class Reporter:
    """Says and sends how a recording goes on; handed to a recorder as its audience.

    Args:
        destinations: Gives what takes the series, when there is something to send.
        say: Prints a line.
        clock: Seconds.
    """

    def __init__(
        self,
        destinations: Callable[[], Sequence[Destination]],
        say: Callable[[str], None],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._open = destinations
        self._destinations: list[Destination] | None = None
        self._say = say
        self._clock = clock
        self._look_at = 0.0
        self._said: set[str] = set()

    def due(self) -> bool:
        """Whether it is time to look again."""
        return self._clock() >= self._look_at

    def show(self, progress: Progress) -> None:
        """Say what is new, and send the figures of the steps that came."""
        begin = self._clock()
        rows = [Records.from_table(table) for table in progress.tables]
        records = Records.concatenate(rows) if rows else None
        if progress.facts is not None:
            self._tell(progress.facts, progress.autocast, records)
        if records is not None:
            self._send(records, progress.facts)
        self._look_at = self._clock() + (self._clock() - begin) / SHARE

    def _tell(
        self, facts: PrecisionFacts, autocast: Sequence[str], records: Records | None
    ) -> None:
        if not self._said:
            self._say(summary(facts.parameters, autocast))
            self._said.add("")
        if facts.step + 1 < FIRST_STEPS:
            return  # a step or two show too little of what it does
        world = provenance.ranks()[1]
        run = None if records is None else Pieces(records, {"world_size": world})
        for finding in consequences(facts, facts.parameters, autocast, run):
            sentence = _FIGURES.sub("", finding.message)  # once, whatever its figures become
            if finding.severity != "info" and sentence not in self._said:
                self._said.add(sentence)
                self._say(f"{finding.severity}: {finding.message} → {finding.fix}")

    def _send(self, records: Records, facts: PrecisionFacts | None) -> None:
        if self._destinations is None:
            self._destinations = list(self._open())
        if not self._destinations:
            return
        steps = list(figures(records))
        if steps and facts is not None:
            steps[-1][1].update(state_figures(facts))
        self._destinations = [board for board in self._destinations if self._takes(board, steps)]

    def _takes(self, board: Destination, steps: Sequence[tuple[int, dict[str, float]]]) -> bool:
        """Send the figures of some steps; whether that worked."""
        try:
            for step, row in steps:
                board.send(step, row)
        except Exception as error:  # noqa: BLE001 - whatever it is, the training goes on
            words = f"{type(error).__name__}: {error}"
            self._say(f"{board.name} takes no more series ({words}); recording goes on")
            return False
        return True


def _say(line: str) -> None:
    if provenance.ranks()[0] == 0:
        print(f"mpdiag: {line}", file=sys.stderr, flush=True)
