"""One run on one screen.

How its trainings ended, what FP16 makes of its worst layer's gradients before and after the loss scale,
its loss beside those of its trainings, what to run next, and what was not recorded.
"""

import math
import shlex
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from mpdiag.analysis.analyzer import Analysis
from mpdiag.analysis.comparison.comparison_findings import Tone, tone_of
from mpdiag.analysis.findings import Finding
from mpdiag.display.wording import counted, layer_name, percent, scale_text, sentence, spoken_layer
from mpdiag.numerics.block_recipes import BLOCK_RECIPES, format_label
from mpdiag.numerics.formats import FP16, FP32
from mpdiag.plan import FILE as PLAN
from mpdiag.plan import LossScalePlan, PrecisionPlan
from mpdiag.reports import next_commands
from mpdiag.reports.contents import compared_with
from mpdiag.reports.picture import Picture
from mpdiag.reports.plotting import MARK
from mpdiag.reports.text.analysis import after_analysis, can_be_settled, settling_command
from mpdiag.reports.views.gradients.frame import one_layer, scale_frame, summary
from mpdiag.reports.views.gradients.pictures import Gradients, share_axis
from mpdiag.reports.views.gradients.scales import room_words
from mpdiag.reports.views.training import Trainings, final_losses
from mpdiag.runs.coverage import coverage_of
from mpdiag.runs.run import Run
from mpdiag.runs.training_log import FINAL_LOSS, FINAL_WORDS, TrainingLog

HEIGHT = 228
"""Pixels of a small figure."""
WORST_HEIGHT = 330
"""Pixels of a figure of the worst layer."""
ABOVE, BELOW = 12 + 3 * MARK, 92
"""Pixels above a figure's plot, for a line of words and two of marks, and below, for its legend."""
CURVES = 170
"""Pixels of a small figure of curves."""
FINDINGS = 3
"""Findings that are shown; the verdict's page has all."""
COMMANDS = 2
WINDOW = 15
"""Steps of the running median of a loss."""


@dataclass(frozen=True)
class Tile:
    """How one training ended: its metric beside what it was trained in; no markup.

    Attributes:
        run: Its name.
        label: The metric, and how it was trained.
        value: The metric's value, with a mark that says whether it is as FP32's.
        note: What ``mpdiag compare`` says of it, or that it is the reference.
        tone: The colour of the note.
        meaning: What the metric is, where its name does not say it.
    """

    run: str
    label: str
    value: str
    note: str
    tone: Literal["green", "red", "gray"] = "gray"
    meaning: str = ""


_ENDED: Mapping[Tone, tuple[str, Literal["green", "red", "gray"]]] = {
    "good": ("✓", "green"),
    "bad": ("✗", "red"),
    "open": ("", "gray"),
}


def tiles(
    logs: Mapping[str, TrainingLog], trained: Mapping[str, str], answers: Mapping[str, str]
) -> tuple[Tile, ...]:
    """How a recording and the trainings that belong with it ended, in its last metric or its loss.

    Args:
        logs: By name, the recording first.
        trained: Of each training how it was trained, as ``how_trained`` says it.
        answers: What a comparison with the recording says of each; may lack some.

    Returns:
        A tile each; none where no training has the same metric.
    """
    recording = next(iter(logs.values()), None)
    if recording is None:
        return ()
    metric = recording.metrics[-1].metric if recording.metrics else FINAL_LOSS
    meaning = "" if recording.metrics else FINAL_WORDS
    found = []
    for name, log in logs.items():
        end = log.outcome(metric)
        if end is None:
            continue
        how, answer = trained.get(name, FP32.label), answers.get(name, "")
        mark, tone = _ENDED[tone_of(answer)]
        note = answer or ("not compared" if name in trained else "reference")
        label, value = f"{metric} in {how}", f"{end:.3g} {mark}".strip()
        found.append(Tile(name, label, value, note, tone, meaning))
    return tuple(found) if len(found) > 1 else ()


def how_trained(fmt: str, log: TrainingLog, *, by_the_plan: bool) -> str:
    """How a training was trained, in a phrase.

    Args:
        fmt: The label of its format.
        log: Its log.
        by_the_plan: Whether it follows the recording's present plan.
    """
    if by_the_plan:
        return f"{fmt} by the plan"
    scales = {step.scale for step in log.steps}
    if scales == {1.0}:
        return f"{fmt} without a scale" if fmt == FP16.label else fmt
    return f"{fmt} at a scale of {scale_text(scales.pop())}" if len(scales) == 1 else fmt


# -- before and after the scale --------------------------------------------------------------------


def worst_layer(gradients: Gradients, plan: LossScalePlan) -> tuple[Picture, ...]:
    """The gradients of the layer that loses most without a scale, before and after the scale.

    Args:
        gradients: In the steps that decide.
        plan: The recommended scale; if it is 1 there is one picture, not two.
    """
    if not len(gradients.layers):
        return ()
    worst = summary(scale_frame(gradients.layers, gradients.fmt, 0)).worst_layer
    own = replace(gradients, layers=one_layer(gradients.layers, worst))
    made = tuple(
        _small_histogram(own, worst, key, exponent, plan)
        for key, exponent in _exponents(plan.recommended).items()
    )
    share_axis(made, title=None)
    return made


def _small_histogram(
    own: Gradients, name: str, key: str, exponent: int, plan: LossScalePlan
) -> Picture:
    line = own.rounding_words(exponent)
    picture = own.histogram(exponent, layer=name, log=False, words=line)
    margin = {"l": 46, "r": 24, "t": ABOVE, "b": BELOW, "autoexpand": False}
    picture.figure.update_layout(height=WORST_HEIGHT, margin=margin).update_yaxes(title=None)
    row = scale_frame(own.layers, own.fmt, exponent).iloc[0]
    words = sentence(
        f"{own.when}, {percent(row['lost_share'])} of its values become 0; they make up "
        f"{percent(row['sum_share'])} of its gradient"
    )
    if exponent:
        words = " ".join(filter(None, (words, room_words(plan, own.fmt))))
    return replace(
        picture,
        key=f"{key}-the-worst",
        title=f"{layer_name(name)} {_at(exponent)}",
        caption=words,
    )


def _at(exponent: int) -> str:
    """A loss scale of 2^exponent as a heading ends with it."""
    return f"at scale {scale_text(2.0**exponent)}" if exponent else "without a loss scale"


def _exponents(scale: float) -> dict[str, int]:
    """log2 of no scale and of the recommended one, each with its name; of one alone where it is 1."""
    exponent = round(math.log2(scale))
    return {"before": 0} if exponent == 0 else {"before": 0, "after": exponent}


def losses(
    folder: str,
    logs: Mapping[str, TrainingLog],
    height: int = CURVES,
    places: Mapping[str, int] = MappingProxyType({}),
) -> Picture:
    """The loss of a run beside those of the trainings that belong with it.

    Args:
        folder: The folder that holds the runs.
        logs: By name, the recording first.
        height: In pixels.
        places: Each run's place, which its colour goes by.
    """
    known = [s.loss for log in logs.values() for s in log.steps if s.loss is not None]
    finite = [loss for loss in known if math.isfinite(loss)]
    wide = bool(finite) and min(finite) > 0 and max(finite) > 10 * min(finite)
    picture = Trainings(folder, logs, places).losses(log=wide, window=WINDOW)
    _small(picture, height)
    return replace(picture, caption=" ".join(outcome_words(logs)))


def outcome_words(logs: Mapping[str, TrainingLog]) -> Iterator[str]:
    """How the trainings ended, in sentences: final losses, metrics, skipped steps."""
    found = final_losses(logs)
    if found:
        yield found
    metrics = dict.fromkeys(m.metric for log in logs.values() for m in log.metrics)
    for name in metrics:
        values = {run: log.outcome(name) for run, log in logs.items()}
        told = [f"{run} {value:.4g}" for run, value in values.items() if value is not None]
        yield f"{name}: {', '.join(told)}."
    skipped = {run: len(log.skipped) for run, log in logs.items() if log.skipped}
    if skipped:
        yield f"Skipped steps: {', '.join(f'{run} {n:,}' for run, n in skipped.items())}."


# -- what to run next ------------------------------------------------------------------------------

_REASONS = {
    "train": "Train by the plan",
    "compare": "Compare the training with FP32",
    "search": "Settle it: search the smallest FP32 set",
    "export": "Export the plan",
    "why": "See why, layer by layer",
    "report": "Write the report",
    "analyze": "Write the plan",
    "record": "Record it in FP32",
}


@dataclass(frozen=True)
class Step:
    """A command to run next, and what it is for."""

    reason: str
    command: str


def next_steps(analysis: Analysis, stored: PrecisionPlan | None) -> tuple[Step, ...]:
    """The commands to run after a look at a recording.

    Args:
        analysis: Of it, for FP16.
        stored: The plan that lies in its folder; it may be for another format.
    """
    run = analysis.run.folder
    found: list[next_commands.Words] = []
    if analysis.concluded and stored is None:
        found.append(next_commands.analyze_it(run, None))
    plan = None if stored is None else Path(str(run)) / PLAN
    words = after_analysis(analysis, run, plan)
    if words[1:2] != ("dashboard",):  # which shows this page
        found.append(words)
    if analysis.concluded and can_be_settled(analysis) and not compared_with(run):
        found.append(settling_command(analysis))
    if stored is not None:
        blocks = BLOCK_RECIPES.get(stored.aim)
        found.append(("mpdiag", "export", plan, "--to", blocks.engines[0] if blocks else "torch"))
    return steps_of(found)


def training_steps(run: Path, recording: Path | None) -> tuple[Step, ...]:
    """The commands to run after a look at a training by a plan."""
    words = next_commands.look_beside(run) if recording is None else next_commands.go_on(recording)
    return steps_of([words] if recording is None or words[1:2] != ("dashboard",) else [])


def steps_of(commands: Iterable[next_commands.Words]) -> tuple[Step, ...]:
    """The first of some commands, each once; what cannot be run has no words."""
    texts = {command_text(words): words for words in commands if words}
    return tuple(Step(_reason(words), text) for text, words in texts.items())[:COMMANDS]


def _reason(words: next_commands.Words) -> str:
    if "--probe" in words:
        return "Settle it: train its first steps by the plan"
    if "--target" in words and words[1] == "analyze":
        return f"Plan for {format_label(str(words[words.index('--target') + 1]))} instead"
    return _REASONS.get(str(words[1]), "Next")


def command_text(words: next_commands.Words) -> str:
    """A command as a shell takes it; paths below the present folder are written from there."""
    return shlex.join(_short(str(word)) for word in words)


def _short(word: str) -> str:
    path = Path(word)
    here = Path.cwd()
    return str(path.relative_to(here)) if path.is_absolute() and here in path.parents else word


def coverage_words(analysis: Analysis) -> tuple[str, ...]:
    """What the recording saw of the training, and what was not looked at, in sentences."""
    meta = analysis.run.meta
    words = [f"{_of(meta.get('steps_recorded'), meta.get('steps_seen'), 'step')} recorded"]
    seen = coverage_of(analysis.run)
    if seen is not None:
        words.append(f"{_of(seen.modules_seen, seen.modules, 'module')} seen")
        words.append(f"{_of(seen.parameters_seen, seen.parameters, 'parameter')} seen")
    told = [sentence(", ".join(words))]
    missing = _missing(analysis.run)
    if missing:
        told.append(f"Not recorded: {missing}.")
    if analysis.verdict.not_examined:
        told.append(f"Not checked: {'; '.join(analysis.verdict.not_examined)}.")
    return tuple(told)


def _of(part: object, whole: object, what: str) -> str:
    if not isinstance(part, int) or not isinstance(whole, int):
        return f"an unknown number of {what}s"
    if part == whole:
        return f"all {counted(whole, what)}" if whole != 1 else f"the one {what}"
    return f"{part:,} of {counted(whole, what)}"


def _missing(run: Run, most: int = 3) -> str:
    """The first of what was not recorded, by name, with the reason."""
    items = (run.meta.get("coverage") or {}).get("not_recorded") or []
    reasons: dict[str, list[str]] = {}
    for item in items:
        reasons.setdefault(str(item.get("reason") or ""), []).append(spoken_layer(item.get("name")))
    told = []
    for reason, names in reasons.items():
        few = list(dict.fromkeys(names))
        more = f" and {len(few) - most:,} more" if len(few) > most else ""
        told.append(f"{', '.join(few[:most])}{more}" + (f" ({reason})" if reason else ""))
    return "; ".join(told)


def training_words(meta: Mapping[str, Any], log: TrainingLog | None, label: str) -> str:
    """How a training by a plan went, in a sentence.

    Args:
        meta: Its ``meta.json``.
        log: Its log, if it has one.
        label: Format and level, in words.
    """
    state = str(meta.get("state") or "unknown")
    what = "Trained" if state == "complete" else f"A training ({state})"
    if log is None or not log.steps:
        return f"{what} in {label}; no step was logged."
    skipped = len(log.skipped)
    told = f"{counted(len(log.steps), 'step')}, {f'{skipped:,}' if skipped else 'none'} skipped"
    last = next((s.loss for s in reversed(log.steps) if s.loss is not None), None)
    if last is not None and not math.isfinite(last):
        told += "; its last loss is not finite"
    return f"{what} in {label}: {told}."


def scale_picture(
    folder: str, name: str, log: TrainingLog, places: Mapping[str, int] = MappingProxyType({})
) -> Picture:
    """The loss scale of a training, as high as the losses beside it; arguments as ``losses``."""
    picture = Trainings(folder, {name: log}, places).scales()
    _small(picture, HEIGHT)
    return picture


def _small(picture: Picture, height: int) -> None:
    """Curves in little room: no title of the axis of steps, the legend below."""
    margin = {"l": 4, "r": 4, "t": 10, "b": 48}
    picture.figure.update_layout(height=height, margin=margin)
    picture.figure.update_xaxes(title=None)


def profile_findings(profile: Mapping[str, Any]) -> tuple[Finding, ...]:
    """The findings of a stored profile, as those of a recording are."""
    return tuple(map(Finding.from_json, profile.get("findings", [])))


def profile_steps(trace: Path) -> tuple[Step, ...]:
    """The commands to run after a look at a profile."""
    return steps_of([next_commands.after_profile(str(trace), None)])
