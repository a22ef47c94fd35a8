"""How much of a training a recording saw: shares of parameters, gradients and modules, and steps.

A statement about a training rests on the tensors that were counted. These figures say how many of
all there are: counted in elements for parameters and their gradients, in modules for the gradients
of activations.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from mpdiag.runs.run import Run

FROZEN = "frozen: it has neither gradient nor update"
"""Why a parameter that needs no gradient has none."""
UNTRAINED = "its output needs no gradient: nothing before it is trained"
"""Why a module whose output needs no gradient has none."""
_SEARCHES = 2
"""Evaluations in a step beyond which an optimizer searches; sharpness-aware ones make two."""


@dataclass(frozen=True)
class Coverage:
    """What of a model was seen in recorded steps.

    Attributes:
        parameters: Elements of all parameters.
        parameters_seen: Of these, elements of parameters whose values were counted.
        gradients: Elements of the parameters that are trained, each of which has a gradient.
        gradients_seen: Of these, elements of parameters whose gradient was counted.
        modules: Modules of the models.
        modules_seen: Of these, those with a counted activation or gradient.
        activation_gradients: Modules with a counted activation that has a gradient: something before
            it is trained.
        activation_gradients_seen: Of these, those whose output's gradient was counted, too.
    """

    parameters: int
    parameters_seen: int
    gradients: int
    gradients_seen: int
    modules: int
    modules_seen: int
    activation_gradients: int
    activation_gradients_seen: int

    @property
    def gradients_unseen(self) -> float:
        """Share of the trained elements whose gradient was never counted, 0 to 1."""
        return _unseen(self.gradients_seen, self.gradients)

    @property
    def activation_gradients_unseen(self) -> float:
        """Share of the modules with an activation whose output's gradient was never counted."""
        return _unseen(self.activation_gradients_seen, self.activation_gradients)


def coverage_of(run: Run) -> Coverage | None:
    """What a recording saw; None if it does not say.

    Recordings say it in ``meta.json``. Of an earlier one it is worked out from its table of modules,
    which lacks what ``include`` and ``exclude`` left out.
    """
    stated = (run.meta.get("coverage") or {}).get("seen")
    names = tuple(Coverage.__annotations__)
    if stated is not None and all(type(stated.get(name)) is int for name in names):
        return Coverage(**{name: stated[name] for name in names})
    return _from_table(run.modules(), (run.meta.get("coverage") or {}).get("not_recorded") or [])


def _from_table(
    rows: Iterable[Mapping[str, Any]], not_recorded: Iterable[Mapping[str, Any]]
) -> Coverage | None:
    rows = list(rows)
    if not rows:
        return None
    parameters = [r for r in rows if r["what"] == "parameter"]
    modules = [r for r in rows if r["what"] == "module"]
    trained = [r for r in parameters if r["reason"] != FROZEN]
    seen = [r for r in modules if r["recorded"]]
    items = [i for i in not_recorded if i.get("what") == "activation_grad"]
    without = {i.get("name") for i in items}
    untrained = {i.get("name") for i in items if i.get("reason") == UNTRAINED}
    return Coverage(
        parameters=_elements(parameters),
        parameters_seen=_elements(r for r in parameters if r["recorded"]),
        gradients=_elements(trained),
        gradients_seen=_elements(r for r in trained if not r["reason"]),
        modules=len(modules),
        modules_seen=len(seen),
        activation_gradients=sum(r["name"] not in untrained for r in seen),
        activation_gradients_seen=sum(r["name"] not in without for r in seen),
    )


def _elements(rows: Iterable[Mapping[str, Any]]) -> int:
    return sum(int(r["numel"] or 0) for r in rows)


def _unseen(seen: int, of: int) -> float:
    return 1.0 - seen / of if of else 0.0


@dataclass(frozen=True)
class Stepped:
    """An optimizer that has stepped.

    Attributes:
        kind: Its type.
        taken: Its steps.
        recorded: Those of them that were recorded; None where the run does not say.
        evaluations: How often it evaluated a closure; 0 where the run does not say.
    """

    kind: str
    taken: int
    recorded: int | None
    evaluations: int

    @property
    def unseen(self) -> bool:
        """Whether none of its steps was recorded."""
        return self.recorded == 0

    @property
    def searches(self) -> bool:
        """Whether it goes by differences between evaluations of its loss, as L-BFGS does."""
        return self.evaluations > _SEARCHES * self.taken


def stepped_in(run: Run) -> tuple[Stepped, ...]:
    """The optimizers of a run that have stepped, as ``meta.json`` lists them."""
    return tuple(
        Stepped(
            kind=str(o.get("type") or "an optimizer"),
            taken=int(o["steps_taken"]),
            recorded=None if o.get("steps_recorded") is None else int(o["steps_recorded"]),
            evaluations=int(o.get("evaluations") or 0),
        )
        for o in run.meta.get("optimizers") or []
        if o.get("steps_taken")
    )
