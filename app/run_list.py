"""The list of runs as a table: what each is, how it ended, what is known of it without an analysis."""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

import pandas as pd
from glance import Glance

from mpdiag.analysis.comparison.comparison_findings import Tone, tone_of
from mpdiag.display.wording import percent, scale_text
from mpdiag.numerics.block_recipes import BLOCK_RECIPES, format_label
from mpdiag.runs.run import Listing

Kind = Literal["recording", "training", "profile", "unreadable"]
KINDS: Mapping[Kind, str] = {
    "recording": "Recordings",
    "training": "Trainings by a plan",
    "profile": "Profiles",
    "unreadable": "Unreadable",
}
"""What a run folder may hold, and what several of them are called."""
COLUMNS = (
    *("run", "verdict", "losses", "final_loss", "metric", "skipped", "format", "created", "size"),
    *("steps", "recorded", "model", "device", "state", "kind"),
)
"""In the order in which they are shown; the last one is what a filter asks for."""
MARK = "mark"
"""The column that sets off what is listed below its recording."""
BELOW = "↳"
"""Stands beside a training that is listed below its recording."""


@dataclass(frozen=True)
class Badge:
    """A verdict in two or three words; the tone repeats them as a colour.

    Attributes:
        words: The words.
        tone: ``good``, ``careful``, ``bad``, ``busy`` or ``plain``.
    """

    words: str
    tone: Literal["good", "careful", "bad", "busy", "plain"] = "plain"


TONES = {
    "good": "#00745a",
    "careful": "#9c5c00",
    "bad": "#b14300",
    "busy": "#1c689f",
    "plain": "#646e7d",
}
"""The colour of each tone of a badge: those of the figures, dark enough for white words on them."""
_NEEDS = {
    "needed": ("needs scale {}", "careful"),
    "advisable": ("scale {} advised", "good"),
    "not needed": ("needs no scale", "good"),
    "unknown": ("not known", "plain"),
}
_TRAINED = re.compile(rf"-({'|'.join(('fp16', 'bf16', *BLOCK_RECIPES))})(-.*)?$")
"""How the name of a training by a plan ends, as ``mpdiag train`` and ``mpdiag demo`` choose it."""
_COMPARED: Mapping[Tone, Any] = {"good": "good", "bad": "bad", "open": "plain"}
_OF_SEEDS = {
    "equivalent": "equivalent to FP32",
    "different": "different from FP32",
    "inconclusive": "undecided",
}


def kind_of(listing: Listing) -> Kind:
    """What a run folder holds, by its ``meta.json``."""
    if listing.run is None:
        return "unreadable"
    if listing.run.meta.get("training"):
        return "training"
    return "profile" if listing.run.meta.get("profile_only") else "recording"


def format_of(meta: Mapping[str, Any]) -> str:
    """The format and the level of a training by a plan; empty for any other run."""
    training = meta.get("training")
    if not isinstance(training, dict):
        return ""
    label = format_label(str(training.get("dtype") or ""))
    backend = "emulated" if training.get("backend") == "emulated" else ""
    return ", ".join(filter(None, (label, str(training.get("level") or ""), backend)))


@dataclass(frozen=True)
class Listed:
    """A run of the list.

    Attributes:
        listing: The run.
        name: What it is called.
        glance: What the files in its folder say.
        state: In words.
        live: Whether it is being written now.
    """

    listing: Listing
    name: str
    glance: Glance = field(default_factory=Glance)
    state: str = ""
    live: bool = False

    def badge(self, compared: str | None = None) -> Badge:
        """What is known of it; of a training ``compared`` is what ``mpdiag compare`` said."""
        kind, plan = kind_of(self.listing), self.glance.plan
        if kind == "unreadable":
            return Badge("cannot be read", "bad")
        if self.live:
            return Badge("in progress", "busy")
        if kind == "profile":
            known = self.glance.tensor_cores
            return Badge("profile" if known is None else f"{percent(known, 0)} Tensor Cores")
        if kind == "training":
            return _training_badge(self.glance, compared)
        if plan is None:
            return Badge("not analyzed")
        if plan.verdict.level == "cannot":
            return Badge("cannot train so", "bad")
        if plan.target in BLOCK_RECIPES:
            return Badge(f"plan for {format_label(plan.target)}", "good")
        words, tone = _NEEDS.get(plan.need, _NEEDS["unknown"])
        shown = ", shown" if plan.verdict.level == "shown" else ""
        return Badge(words.format(scale_text(plan.scale)) + shown, tone)  # type: ignore[arg-type]


def _training_badge(glance: Glance, compared: str | None) -> Badge:
    if glance.stopped:
        return Badge("stopped", "bad")
    if glance.last_loss is not None and not math.isfinite(glance.last_loss):
        return Badge("loss not finite", "bad")
    words = _OF_SEEDS.get(compared or "", compared or "not compared")
    return Badge(words, _COMPARED[tone_of(compared or "")])


def badges(
    runs: Sequence[Listed], answers: Mapping[str, str] = MappingProxyType({})
) -> list[Badge]:
    """The badge of each run; what a recording keeps of a comparison is told of the other run.

    Args:
        runs: The runs.
        answers: What a comparison with its recording says of a training, by name, where none is kept.
    """
    compared = dict(answers)
    for run in runs:
        if run.glance.compared is not None:
            before, slash, _ = run.name.rpartition("/")  # sample runs are listed as sample/NAME
            against, verdict = run.glance.compared
            compared[before + slash + against] = verdict
    return [run.badge(compared.get(run.name)) for run in runs]


def runs_frame(runs: Sequence[Listed], shown: Sequence[Badge] | None = None) -> pd.DataFrame:
    """A row for each run; what its files do not say, or say otherwise, is empty.

    Args:
        runs: The runs.
        shown: Their badges; None for those of what their files say.
    """
    told = badges(runs) if shown is None else shown
    rows = [
        {"run": run.name, "state": run.state, "verdict": badge.words} | _row(run)
        for run, badge in zip(runs, told, strict=True)
    ]
    frame = pd.DataFrame(rows, columns=list(COLUMNS))
    frame["created"] = pd.to_datetime(frame["created"], errors="coerce", utc=True)
    for name in ("steps", "recorded", "skipped"):
        frame[name] = pd.to_numeric(frame[name], errors="coerce").astype("Int64")
    frame["final_loss"] = pd.to_numeric(frame["final_loss"], errors="coerce").astype(float)
    return frame


def family(name: str, known: Iterable[str]) -> list[str]:
    """The trainings that belong with one: their names begin with the name of the same recording.

    ``mpdiag demo`` names them ``ssd``, ``ssd-fp16-no-scale``, ``ssd-fp16-plan``.
    """
    return sorted((n for n in known if root_of(n) == root_of(name)), key=len)


def root_of(name: str) -> str:
    """The recording that a training belongs with, by its name; of a recording its own."""
    return _TRAINED.sub("", name) or name


def model_of(listing: Listing) -> str:
    """The type of a run's model, as far as its meta.json says."""
    return "" if listing.run is None else _inside(listing.run.meta, "model", "type")


def places(listings: Iterable[Listing]) -> dict[str, int]:
    """The place of each run among those of its model, by its folder's name.

    A run's colour goes by it, so that it is the same in every figure: a recording comes first, its
    trainings follow, then the next recording of the same model.
    """
    models: dict[str, list[str]] = {}
    for item in listings:
        models.setdefault(model_of(item), []).append(item.folder.resolve().name)
    order = [sorted(names, key=lambda n: (root_of(n), len(n), n)) for names in models.values()]
    return {name: i for names in order for i, name in enumerate(names)}


def grouped(names: Sequence[str]) -> list[int]:
    """Positions of runs in an order in which trainings follow their recording.

    Args:
        names: The runs in their order, which the groups keep among themselves.
    """
    place = {name: i for i, name in enumerate(names)}
    order: list[int] = []
    for name in names:
        if place[name] in order:
            continue
        order += [place[n] for n in family(name, names) if place[n] not in order]
    return order


def marks(names: Sequence[str]) -> list[str]:
    """Of ``grouped`` runs: ``BELOW`` for those below their recording, else nothing."""
    known = set(names)
    return [BELOW if root_of(n) != n and root_of(n) in known else "" for n in names]


def matches(row: Mapping[str, Any], text: str) -> bool:
    """Whether a row of ``runs_frame`` has all words of a text, in any of its texts."""
    own = ("run", "verdict", "metric", "kind", "format", "model", "device", "state")
    words = " ".join(str(row[name]) for name in own).lower()
    return all(word in words for word in text.lower().split())


def _row(run: Listed) -> dict[str, Any]:
    listing, glance = run.listing, run.glance
    known: dict[str, Any] = {
        "kind": kind_of(listing),
        "losses": list(glance.losses),
        "final_loss": glance.final_loss,
        "metric": metric_text(glance),
        "skipped": glance.skipped,
        "size": glance.size,
    }
    if listing.run is None:
        return known | dict.fromkeys(("format", "model", "device", "created"), "")
    meta = listing.run.meta
    seen = meta.get("steps_seen")
    return known | {
        "format": format_of(meta),
        "model": model_of(listing),
        "steps": glance.steps if seen is None else seen,
        "recorded": meta.get("steps_recorded"),
        "device": _inside(meta, "device", "type"),
        "created": str(meta.get("created") or ""),
    }


def metric_text(glance: Glance) -> str:
    """The last metric that was logged: its value, then its name; empty without one."""
    if not glance.metrics:
        return ""
    last = glance.metrics[-1]
    return f"{last.value:.4g} {last.metric}"


def _inside(meta: Any, name: str, field: str) -> str:
    part = meta.get(name)
    return str(part.get(field) or "") if isinstance(part, dict) else ""
