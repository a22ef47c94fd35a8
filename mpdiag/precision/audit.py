"""``mpdiag.audit``: which dtype everything in a training has, who set it, and what that does.

::

    print(mpdiag.audit("runs/mine"))         # a recording, whose operations show the products' dtypes
    print(mpdiag.audit(model, optimizer))    # objects as they are: nothing runs
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from mpdiag.analysis.findings import Finding, by_severity
from mpdiag.errors import UsageError
from mpdiag.precision.consequences import consequences
from mpdiag.precision.products import NO_PRODUCTS, Computed, Products, computed_in
from mpdiag.runs.answers import Answer, answers, no_answers
from mpdiag.runs.operations import Operation
from mpdiag.runs.precision import ParameterPrecision, PrecisionFacts, summary
from mpdiag.runs.run import Run, open_run

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

SCHEMA_VERSION = 1
COLUMNS = ("stored", "forward", "weight_grad", "accumulated", "reduced", "states", "master")
"""What the table shows of a group of parameters."""
_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")
"""An index in a name: ``layers.3.weight`` is ``layers.*.weight``."""
_NO_OPERATIONS = "no operation was recorded"


@dataclass(frozen=True)
class Group:
    """Parameters whose dtypes are all the same.

    Attributes:
        parameters: Them, in the order of the model.
    """

    parameters: tuple[ParameterPrecision, ...]

    @property
    def numel(self) -> int:
        """Elements of all."""
        return sum(p.numel for p in self.parameters)

    @property
    def words(self) -> str:
        """The group in words: its name or its names' pattern, else the first and how many more."""
        names = [p.name for p in self.parameters]
        patterns = {_NUMBER.sub("*", name) for name in names}
        if len(names) == 1:
            return names[0]
        if len(patterns) == 1:
            return f"{patterns.pop()} ({len(names):,})"
        return f"{names[0]} and {len(names) - 1:,} more"


@dataclass(frozen=True)
class Audit:
    """The precision of a training.

    Attributes:
        facts: What was read.
        parameters: One entry each, with the dtypes of its products.
        answers: Which questions this recording answers.
        findings: What the precision does, the gravest first.
        autocast: Dtypes in which the training's own autocast was on.
    """

    facts: PrecisionFacts
    parameters: tuple[ParameterPrecision, ...]
    answers: tuple[Answer, ...]
    findings: tuple[Finding, ...]
    autocast: tuple[str, ...] = ()

    @property
    def groups(self) -> tuple[Group, ...]:
        """Parameters with the same dtypes together, the largest group first."""
        alike: dict[Any, list[ParameterPrecision]] = {}
        for p in self.parameters:
            states = tuple(sorted(p.states.items()))
            key = (
                *(getattr(p, c) for c in COLUMNS if c != "states"),
                states,
                p.quantized,
                p.trainable,
                p.optimizer,
            )
            alike.setdefault(key, []).append(p)
        groups = (Group(tuple(parameters)) for parameters in alike.values())
        return tuple(sorted(groups, key=lambda g: -g.numel))

    @property
    def line(self) -> str:
        """The precision in one line: ``BF16 weights and AdamW states, no FP32 masters``."""
        return summary(self.parameters, self.autocast)

    @property
    def table(self) -> list[dict[str, Any]]:
        """A row for each group, for people: name, elements and ``COLUMNS``."""
        rows = []
        for group in self.groups:
            first = group.parameters[0]
            row = {name: getattr(first, name) for name in COLUMNS}
            states = dict.fromkeys(first.states.values())
            rows.append(
                {
                    "parameters": group.words,
                    "numel": group.numel,
                    **row,
                    "stored": first.quantized or first.stored,
                    "states": ", ".join(states),
                }
            )
        return rows

    def to_json(self) -> dict[str, Any]:
        """The document of ``mpdiag audit --json``."""
        return {
            "schema_version": SCHEMA_VERSION,
            "summary": self.line,
            "parameters": [p.to_json() for p in self.parameters],
            "changes": [dict(change) for change in self.facts.changes],
            "answers": [vars(answer) for answer in self.answers],
            "findings": [finding.to_json() for finding in self.findings],
        }

    def __str__(self) -> str:
        lines = [self.line, *(f"{f.severity}: {f.message}" for f in self.findings)]
        return "\n".join(lines)


def audit(
    model: nn.Module | Run | str | os.PathLike[str],
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
) -> Audit:
    """Say which dtype every parameter, gradient and optimizer state has, and what that does.

    Args:
        model: A recorded run or its folder; or a model, which is looked at as it is.
        optimizer: The optimizer of the model, or several; of a run none.

    Raises:
        UsageError: If an optimizer is given beside a run.
        InputError: If the run cannot be read.
    """
    if isinstance(model, (str, os.PathLike, Run)):
        if optimizer is not None:
            raise UsageError("a run has its optimizers in it: give audit() the run alone")
        run = model if isinstance(model, Run) else open_run(model)
        found = audit_of_run(run)
        if found is None:
            raise UsageError(
                f"{run.folder} says nothing of precision: it was recorded by an earlier mpdiag, or "
                "ended in its first step; record it again"
            )
        return found
    from mpdiag.recording.contract import facts_of

    return _audited(facts_of(model, optimizer), NO_PRODUCTS, (), None)


def audit_of_run(run: Run) -> Audit | None:
    """The audit of a recording; None of one by an earlier version, or one that has no step.

    Raises:
        InputError: If the run cannot be read.
    """
    facts = run.precision
    if facts is None:
        return None
    precision = run.meta.get("precision")
    autocast = precision.get("autocast", ()) if isinstance(precision, dict) else ()
    operations = run.operations()
    return _audited(facts, computed_in(operations), tuple(autocast), run, operations)


def _audited(
    facts: PrecisionFacts,
    products: Products,
    autocast: tuple[str, ...],
    run: Run | None,
    operations: Sequence[Operation] = (),
) -> Audit:
    parameters = tuple(_with_products(p, products.of(p.name), autocast) for p in facts.parameters)
    findings = by_severity(consequences(facts, parameters, autocast, run, operations))
    answered = no_answers("no step was run")
    if run is not None:
        answered = answers(run.half_precision, run.meta)
    return Audit(facts, parameters, answered, findings, autocast)


def _with_products(
    parameter: ParameterPrecision, computed: Computed | None, autocast: tuple[str, ...]
) -> ParameterPrecision:
    """A parameter with the dtypes of its products, or why they are not known."""
    unknown = dict(parameter.unknown)
    found = computed or Computed()
    products = {
        "forward": found.forward or parameter.forward,
        "input_grad": found.input_grad,
        "weight_grad": found.weight_grad if parameter.trainable else None,
    }
    for name, value in products.items():
        if value is None and (name != "weight_grad" or parameter.trainable):
            unknown[name] = _NO_OPERATIONS if computed is None else "no product of it was recorded"
    set_by = parameter.set_by
    asked = parameter.forward or parameter.stored  # a policy's, or its own
    cast = found.forward is not None and found.forward != asked
    if cast and found.forward in autocast and (parameter.forward or set_by in (None, "default")):
        set_by = "autocast"
    return replace(
        parameter,
        forward=products["forward"],
        input_grad=products["input_grad"],
        weight_grad=products["weight_grad"],
        set_by=set_by,
        unknown=unknown,
    )
