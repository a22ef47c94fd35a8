"""What rounding each operation of each module does to a step's gradients: the facts of a recording.

One site is one operation of one module, as a plan names it. ``step_tape.py`` runs the step again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from mpdiag.emulation.step_tape import BREAKS, StepTape
from mpdiag.numerics.autocast_lists import COMPOSITES, LISTS, policy_name
from mpdiag.tracing.dispatch import tensors_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from mpdiag.emulation.step_tape import Call

Site = tuple[str | None, str]
"""A module's name, None outside of all, and an operation's."""

# What moves values, or counts and compares them: it rounds nothing anew.
_MOVES = frozenset(
    """
    _to_copy clone copy copy_ cat stack constant_pad_nd index index_select gather repeat expand_copy
    embedding select_backward slice_backward zeros_like ones_like full_like fill fill_ zero zero_ relu
    relu_ masked_fill masked_fill_ where max_pool2d_with_indices threshold neg neg_ abs abs_ maximum
    minimum sort topk amax amin max min triu tril flip roll unfold_backward
    """.split()
)


class StepEffects:
    """Tapes one step and says what roundings do to it; after any failure it says nothing.

    Args:
        parameters: Names of parameters and buffers by ``id``.
    """

    def __init__(self, parameters: Mapping[int, str]) -> None:
        self._parameters = parameters
        self._tape: StepTape | None = None
        self._sites: dict[int, Site] = {}

    def begin(self, *, wanted: bool) -> None:
        """A new step."""
        self.drop()
        self._tape = StepTape() if wanted else None

    def drop(self) -> None:
        """Let go of the step."""
        if self._tape is not None:
            self._tape.clear()
        self._tape, self._sites = None, {}

    def read(self, arguments: Any) -> None:
        """An operation, or a view, is about to read these."""
        if self._tape is None:
            return
        for tensor in tensors_of(arguments):
            if id(tensor) in self._parameters and tensor.requires_grad:
                self._tape.parameter(tensor)

    def foreign(self, arguments: Any) -> None:
        """An operation that is not torch's own reads these: what it does with them is not known."""
        if self._tape is not None and tensors_of(arguments):
            self.drop()

    def before(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call | None:
        """An operation that is no view is about to run."""
        if self._tape is None:
            return None
        try:
            return self._tape.before(func, args, kwargs)
        except Exception:  # noqa: BLE001 - an effect that is not known is left out
            self.drop()
        return None

    def after(
        self,
        call: Call | None,
        fields: Mapping[str, Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        result: Any,
    ) -> None:
        """It has run.

        Args:
            call: As ``before`` gave it.
            fields: The operation's record: ``index``, ``op``, ``module``, ``function``, ``node``,
                ``forward`` and ``flops``.
            args: Its positional arguments.
            kwargs: Its other ones.
            result: What it gave.
        """
        if self._tape is None or call is None:
            return
        try:
            backward = bool(fields["node"])
            site = self._site(fields, backward=backward, result=result, args=(args, kwargs))
            self._tape.after(
                call, args, kwargs, result, site=site, backward=backward, flops=fields["flops"]
            )
        except Exception:  # noqa: BLE001
            self.drop()

    def _site(
        self, fields: Mapping[str, Any], *, backward: bool, result: Any, args: Any
    ) -> Site | None:
        if backward:
            return self._sites.get(fields["forward"])
        op, function = fields["op"], fields["function"]
        name = function if function in COMPOSITES else policy_name(op)
        computes = op not in _MOVES and (name in COMPOSITES or LISTS.get(name) != "fp32")
        if not computes or not (_has_floats(result) and _has_floats(args)):
            return None
        site = fields["module"], name
        self._sites[fields["index"]] = site
        return site

    def note_gradients(self) -> None:
        """An optimizer is about to step."""
        if self._tape is not None:
            try:
                self._tape.note_gradients()
            except Exception:  # noqa: BLE001
                self.drop()

    def facts(self) -> dict[int, dict[str, float]]:
        """By the number of each operation: ``gradient_error_FORMAT`` and ``loss_change_FORMAT``.

        ``gradient_error`` is ‖Δg‖ / ‖g‖ of all parameters' gradients, ``loss_change`` |ΔL|, where all
        calls of this operation in its module, and their backward passes, are rounded. Where one is no
        longer finite, it is ``step_breaks_FORMAT`` instead.
        """
        if self._tape is None:
            return {}
        try:
            sites = dict.fromkeys(self._sites.values())
            order = sorted(sites, key=lambda s: LISTS.get(s[1]) != "low" and s[1] not in COMPOSITES)
            effects = self._tape.effects(order)
        except Exception:  # noqa: BLE001
            return {}
        finally:
            tape_sites = self._sites
            self.drop()
        found: dict[int, dict[str, float]] = {}
        for index, site in tape_sites.items():
            for (of, name), effect in effects.items():
                if of == site:
                    facts = found.setdefault(index, {})
                    if effect == BREAKS:
                        facts[f"step_breaks_{name}"] = 1.0
                        continue
                    facts[f"gradient_error_{name}"] = effect.gradient_error
                    facts[f"loss_change_{name}"] = effect.loss_change
        return found


def _has_floats(values: Any) -> bool:
    return any(t.dtype is torch.float32 for t in tensors_of(values))
