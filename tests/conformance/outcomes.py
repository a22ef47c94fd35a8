"""What a behaviour is, and what came of it when a subject was asked for it."""

import traceback
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache, wraps
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from conformance.models import Weighted, values
from conformance.subjects.protocol import Subject, Training
from torch import nn

from mpdiag.hardware.tables import read_table

Check = Callable[[Subject], None]
Kind = Literal["holds", "fails", "not applicable"]
PEERS = ("torch.amp", "Accelerate", "Lightning")


class NotApplicable(Exception):
    """A subject has nothing that the behaviour is about; the text says what is missing."""


@dataclass(frozen=True)
class Outcome:
    """What came of a behaviour.

    Attributes:
        kind: Whether it holds.
        note: What failed, or why it does not apply.
    """

    kind: Kind
    note: str = ""


@dataclass(frozen=True, eq=False)
class Behaviour:
    """One thing that a mixed-precision trainer should do.

    Attributes:
        name: One line.
        source: The project and the test file that describe it; the code here is our own.
        check: Asserts it of a subject; raises ``NotApplicable`` where it cannot be asked.
        instead: What a peer does where the behaviour does not hold for it, by the peer's name.
        on_purpose: Why it does not hold for ours, by level or label; it must fail there.
    """

    name: str
    source: str
    check: Check
    instead: Mapping[str, str] = field(default_factory=dict)
    on_purpose: Mapping[str, str] = field(default_factory=dict)

    def purpose(self, subject: Subject) -> str:
        """Why it does not hold for one of ours; empty if it should."""
        return self.on_purpose.get(subject.label) or self.on_purpose.get(subject.level, "")


def table(name: str) -> list[dict[str, str]]:
    """The rows of a table beside the behaviours."""
    return read_table(Path(__file__).with_name("behaviours") / f"{name}.tsv")


SOURCES = {row["check"]: row for row in table("sources")}
"""By the name of a check: where the behaviour is described, and where and why it does not hold."""


@dataclass(frozen=True)
class Chapter:
    """Behaviours of one kind, in the order of their definition.

    Attributes:
        title: What the table calls it.
        about_loops: Whether it matters how the trainer is driven.
    """

    title: str
    about_loops: bool = False
    behaviours: list[Behaviour] = field(default_factory=list)

    def add(
        self,
        name: str,
        source: str,
        check: Check,
        *,
        instead: Mapping[str, str] | str | None = None,
        on_purpose: Mapping[str, str] | None = None,
    ) -> None:
        """Add a behaviour; where all peers differ alike, ``instead`` says it once."""
        differ = dict.fromkeys(PEERS, instead) if isinstance(instead, str) else dict(instead or {})
        self.behaviours.append(Behaviour(name, source, check, differ, dict(on_purpose or {})))

    def behaviour(self, check: Check) -> Check:
        """Add a function as a behaviour; the first line of its docstring is the name.

        Its source, and what peers do instead, are in ``sources.tsv``.
        """
        row = SOURCES[check.__name__]
        name = (check.__doc__ or "").splitlines()[0].rstrip(".")
        differ = {peer: row[peer] for peer in PEERS if row[peer]}
        on_purpose = dict.fromkeys(
            filter(None, row["differ on purpose"].split(", ")), row["because"]
        )
        self.add(name, row["source"], check, instead=differ, on_purpose=on_purpose)
        return check

    def trained(
        self,
        weights: list[float] | None = None,
        *,
        model: Callable[[], nn.Module | list[nn.Module]] = Weighted,
        **options: Any,
    ) -> Callable[[Callable[[Training], None]], Check]:
        """Add a function of a training; the first model has these weights at the end."""

        def add(run: Callable[[Training], None]) -> Check:
            @wraps(run)
            def check(subject: Subject) -> None:
                with subject.training(model(), **options) as training:
                    run(training)
                    assert weights is None or values(training.weights()) == weights

            return self.behaviour(check)

        return add


@cache
def outcome_of(behaviour: Behaviour, subject: Subject) -> Outcome:
    """Ask a subject for a behaviour, once in a process."""
    torch.manual_seed(0)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error" if subject.ours else "ignore")
            behaviour.check(subject)
    except NotApplicable as reason:
        return Outcome("not applicable", str(reason))
    except (Exception, pytest.fail.Exception) as error:  # noqa: BLE001 - what came of it
        text = str(error).strip().splitlines()
        place = traceback.extract_tb(error.__traceback__)[-1]
        said = f"{type(error).__name__}: {text[0] if text else ''}"
        return Outcome("fails", f"{said} ({place.name}, line {place.lineno}: {place.line})")
    finally:
        torch.clear_autocast_cache()
    return Outcome("holds")
