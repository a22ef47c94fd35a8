"""Scores a flagger of operations against the results of training.

::

    def flags(model, batch):                 # an FP32 model in training, and its next batch
        return {("criterion", "exp")}        # (module, operation); "" for a whole module

    print(score(flags, load_truth("studies/results/gallery-truth.json")))

A flagger sees the model at several moments of its FP32 training, as a recording would; its flags are
united. It may call ``model(*batch)``, which returns the loss; it must remove its hooks itself.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from mpdiag.errors import DamagedRun
from studies.exhibits import load
from studies.exhibits.exhibit import Batch, Exhibit

if TYPE_CHECKING:
    import os

FlaggedOperation = tuple[str, str]
Flagger = Callable[[nn.Module, Batch], Collection[FlaggedOperation]]
MOMENTS = (0.0, 0.1, 0.5, 1.0)
"""The moments at which a flagger is called, as shares of the training."""


@dataclass(frozen=True)
class Judged:
    """The flags of one exhibit, judged.

    Attributes:
        name: Name of the exhibit.
        needs: Whether training showed that it needs FP32 somewhere.
        flags: The flagged operations.
        covers: Whether the flagged operations include a set that training found sufficient.
        spare: Flags that belong to no sufficient set.
    """

    name: str
    needs: bool
    flags: frozenset[FlaggedOperation]
    covers: bool
    spare: int


@dataclass(frozen=True)
class Score:
    """A flagger's score over all exhibits."""

    judged: tuple[Judged, ...]

    @property
    def precision(self) -> float:
        """Of the exhibits flagged anywhere, the share that needs FP32; 1 if none was flagged."""
        flagged = [j for j in self.judged if j.flags]
        return _share([j.needs for j in flagged])

    @property
    def recall(self) -> float:
        """Of the exhibits that need FP32, the share flagged anywhere."""
        return _share([bool(j.flags) for j in self.judged if j.needs])

    @property
    def covered(self) -> float:
        """Of the exhibits that need FP32, the share whose flags would suffice."""
        return _share([j.covers for j in self.judged if j.needs])

    @property
    def mistakes(self) -> tuple[str, ...]:
        """Exhibits flagged without need, or missed."""
        return tuple(j.name for j in self.judged if bool(j.flags) != j.needs)

    def to_json(self) -> dict[str, Any]:
        """The score as plain values."""
        return {
            "exhibits": len(self.judged),
            "precision": self.precision,
            "recall": self.recall,
            "covered": self.covered,
            "mistakes": list(self.mistakes),
            "flags": sum(len(j.flags) for j in self.judged),
            "spare_flags": sum(j.spare for j in self.judged),
        }


def _share(answers: list[bool]) -> float:
    return sum(answers) / len(answers) if answers else 1.0


def load_truth(path: str | os.PathLike[str]) -> Mapping[str, Mapping[str, Any]]:
    """The results of training, by exhibit, as ``studies/gallery_truth.py`` wrote it.

    Raises:
        DamagedRun: If it is missing or unreadable.
    """
    try:
        document = json.loads(Path(path).read_text(encoding="utf-8"))
        exhibits: dict[str, Mapping[str, Any]] = document["exhibits"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        message = f"{path} holds no gallery truth ({error}): run studies/gallery_truth.py"
        raise DamagedRun(message) from error
    return exhibits


def flag(exhibit: Exhibit, flagger: Flagger, *, seed: int = 0) -> frozenset[FlaggedOperation]:
    """All flags of a flagger over an exhibit's FP32 training."""
    torch.manual_seed(seed)
    model = exhibit.model()
    optimizer = exhibit.optimizer(model)
    batches = exhibit.batches(seed)
    looks = {round(share * (len(batches) - 1)) for share in MOMENTS}
    flags: set[FlaggedOperation] = set()
    for step, batch in enumerate(batches):
        if step in looks:
            flags.update(flagger(model, batch))
        optimizer.zero_grad()
        model(*batch).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimizer.step()
    return frozenset(flags)


def judge(
    name: str,
    flags: Collection[FlaggedOperation],
    truth: Mapping[str, Any],
    *,
    beyond_lists: bool = False,
) -> Judged:
    """Compare the flags of one exhibit with its truth."""
    sets = [[(m, op) for m, op in kept] for kept in truth.get("fixes", [])]
    modules = [(m, "") for m in truth.get("fixing_modules", [])]
    needs = bool(truth["needs_fp32_beyond_lists" if beyond_lists else "needs_fp32"])
    covers = any(
        all(_covered(one, flags) for one in kept) for kept in [*sets, *([m] for m in modules)]
    )
    useful = {one for kept in sets for one in kept} | set(modules)
    spare = sum(1 for f in flags if f not in useful)
    return Judged(name, needs, frozenset(flags), covers, spare)


def _covered(one: FlaggedOperation, flags: Collection[FlaggedOperation]) -> bool:
    """Whether a flag covers an operation: by itself, or by a module around it."""
    module, op = one
    return any(
        (m == module or m == "" or module.startswith(f"{m}.")) and o in (op, "") for m, o in flags
    )


def score(
    flagger: Flagger,
    truth: Mapping[str, Mapping[str, Any]],
    names: Iterable[str] | None = None,
    *,
    beyond_lists: bool = False,
) -> Score:
    """Score a flagger.

    Args:
        flagger: Given a model in FP32 training and its next batch, returns what should stay in FP32.
        truth: From ``load_truth``.
        names: The exhibits; default: all in the truth.
        beyond_lists: Score what is needed in addition to the operation policy's lists; otherwise
            what is needed if everything else is narrow.
    """
    chosen = list(truth) if names is None else list(names)
    return Score(
        tuple(judge(n, flag(load(n), flagger), truth[n], beyond_lists=beyond_lists) for n in chosen)
    )
