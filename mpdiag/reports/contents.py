"""What a run folder holds beside its recording, read once and handed to the views.

Views draw what they are given: this is where the reports read files.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from mpdiag.analysis.analyzer import Analysis, in_recipes
from mpdiag.analysis.blocks.choice import BlockAnalysis
from mpdiag.errors import RunNotFound
from mpdiag.files.paths import AnyPath
from mpdiag.precision.audit import Audit, audit_of_run
from mpdiag.runs import results
from mpdiag.runs.operations import Operation
from mpdiag.runs.training_log import FILE, TrainingLog, read_log


@dataclass(frozen=True, eq=False)
class RunContents:
    """A run's analysis and what else its folder holds; None where it holds no such thing.

    Attributes:
        analysis: Of its recording.
        modules: The model's modules, in its order.
        operations: The recorded operations.
        sensitivities: What was measured of its operations.
        search: What a search for the smallest FP32 set left.
        log: Its training log, if that has a step.
        profile: Its ``profile.json``.
        audit: Of the training's precision.
    """

    analysis: Analysis
    modules: Sequence[Mapping[str, Any]]
    operations: Sequence[Operation]
    sensitivities: results.Sensitivities | None = None
    search: results.StoredSearch | None = None
    log: TrainingLog | None = None
    profile: Mapping[str, Any] | None = None
    audit: Audit | None = None

    @cached_property
    def blocks(self) -> Mapping[str, BlockAnalysis]:
        """What its recorded operands say of each block recipe; empty without any."""
        return in_recipes(self.analysis)

    @property
    def folder(self) -> AnyPath:
        """The run folder."""
        return self.analysis.run.folder


def read_contents(analysis: Analysis) -> RunContents:
    """Read what a run's folder holds beside the recording that was analyzed.

    Raises:
        InputError: If a file is damaged or of a newer schema.
    """
    folder = analysis.run.folder
    log = read_log(folder) if (folder / FILE).is_file() else None
    try:
        profile = results.read_profile(folder)
    except RunNotFound:
        profile = None
    return RunContents(
        analysis,
        analysis.run.modules(),
        analysis.run.operations(),
        results.read_sensitivities(folder),
        results.read_search(folder),
        log if log is not None and log.steps else None,
        profile,
        audit_of_run(analysis.run),
    )


def compared_with(recording: AnyPath) -> str:
    """The name of the training that a recording was last compared with; "" for none."""
    found = results.read_comparison(recording)
    return "" if found is None else found.against
