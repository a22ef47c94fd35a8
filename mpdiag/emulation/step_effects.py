"""What rounding each operation of each module does to a step's gradients: the facts of a recording.

One site is one operation of one module, as a plan names it. ``step_tape.py`` notes the step and runs it
again.

Most operations of most trainings are harmless, so many are rounded at once: all of a step, and, where
that changes the gradients by a tenth and more, one half of them, then the other. Errors add up,
so what is below a tenth together is taken to be so alone: each of such a group gets the group's
figures. (Errors that cancel within a group would cancel under autocast, too.) Without harm the step runs
three times, whatever the number of its operations. In FP8, in which layers are only stored, a group is
also looked at more closely where it moves the loss by a tenth: which layers bear FP8 is a question of
the loss.

Runs are counted in the step's own work and not in seconds, so that a slow minute of the machine changes
no recording.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from mpdiag.emulation.rounding import DTYPES
from mpdiag.emulation.step_tape import BREAKS, FP8, Call, Effect, StepReplay, StepTape
from mpdiag.numerics.autocast_lists import COMPOSITES, LISTS, MOVES, policy_name
from mpdiag.tracing.dispatch import tensors_of

Site = tuple[str | None, str]
"""A module's name, None outside of all, and an operation's."""

ALIKE = 0.1
"""Change of the gradients up to which a group is not looked at one by one; ``HARMLESS`` of the rules."""
FP8_ALIKE = 0.3
"""The same for FP8, which rounds sixteen times as coarsely as BF16; ``GRADIENT`` of the rules."""
FP8_QUIET = 0.1
"""Change of the loss, beside the step's, up to which a group in FP8 is not looked at one by one."""
FP8_RUNS = 4
"""What the runs in FP8 may cost, in runs of the whole step, of those that the others leave."""
RUNS = 12
"""What all runs may cost, in runs of the whole step."""
SMALL = 1 << 28
"""The same for small steps, in elements read and written: some tenths of a second."""
LARGEST_WITH_TWINS, LONGEST_WITH_TWINS = 1 << 26, 20_000
"""Elements of all values of a step with twins, 256 MiB in FP32, and its operations, at most."""


class StepEffects:
    """Tapes one step and says what roundings do to it; after any failure it says nothing.

    Args:
        parameters: Names of parameters and buffers by ``id``.
    """

    def __init__(self, parameters: Mapping[int, str]) -> None:
        self._parameters = parameters
        self._tape: StepTape | None = None
        self._sites: dict[int, Site] = {}
        self._wanted = False

    def begin(self, *, wanted: bool, twins: bool = False) -> None:
        """A new step.

        Args:
            wanted: Whether to tape it, and to say what roundings do to it.
            twins: Whether to tape it for its twins, too: a larger step than for that alone.
        """
        self.drop()
        self._wanted = wanted
        if twins:
            self._tape = StepTape(LARGEST_WITH_TWINS, LONGEST_WITH_TWINS)
        elif wanted:
            self._tape = StepTape()

    @property
    def tape(self) -> StepTape | None:
        """The step so far; None where it is not taped, or cannot be."""
        return self._tape

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
                ``forward``, ``flops`` and ``reduction``.
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
                call,
                args,
                kwargs,
                result,
                site=site,
                backward=backward,
                flops=fields["flops"],
                reduction=fields["reduction"],
            )
        except Exception:  # noqa: BLE001
            self.drop()

    def _site(
        self, fields: Mapping[str, Any], *, backward: bool, result: Any, args: Any
    ) -> Site | None:
        if backward or not self._wanted:
            return self._sites.get(fields["forward"])
        op, function = fields["op"], fields["function"]
        name = function if function in COMPOSITES else policy_name(op)
        computes = op not in MOVES and (name in COMPOSITES or LISTS.get(name) != "fp32")
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
        calls of this operation in its module, and their backward passes, are rounded; or those of a
        group of operations, where its ``gradient_error`` is below ``ALIKE``. Where one is no longer
        finite, it is ``step_breaks_FORMAT`` instead. FORMAT is ``fp16``, ``bf16`` or, for operations
        of modules, ``fp8_e4m3``.
        """
        if self._tape is None or not self._wanted:
            return {}
        try:
            effects = _effects(self._tape, self._sites)
        except Exception:  # noqa: BLE001
            return {}
        finally:
            tape_sites = self._sites
            self.drop()
        found: dict[int, dict[str, float]] = {}
        for index, site in tape_sites.items():
            for name in effects:
                effect = effects[name].get(site)
                if effect is None:
                    continue
                facts = found.setdefault(index, {})
                if effect == BREAKS:
                    facts[f"step_breaks_{name}"] = 1.0
                    continue
                facts[f"gradient_error_{name}"] = effect.gradient_error
                facts[f"loss_change_{name}"] = effect.loss_change
        return found


def _effects(tape: StepTape, sites: Mapping[int, Site]) -> dict[str, dict[Site, Effect]]:
    """What rounding does, by the format's name and the site; nothing where the tape is not faithful."""
    found: dict[str, dict[Site, Effect]] = {name: {} for name in DTYPES}
    with StepReplay.alone():
        replay = StepReplay(tape)
        if not replay.is_faithful():
            return found
        whole = replay.spent
        left = max(RUNS * whole, SMALL)
        order = sorted(dict.fromkeys(sites.values()), key=_is_no_product)  # else as they run
        products = sum(not _is_no_product(site) for site in order)
        for number, name in enumerate(DTYPES):
            before = replay.spent
            # What one format leaves, the next may use.
            until = before + left // (len(DTYPES) - number)
            found[name] = by_groups(
                order,
                partial(replay.effect, name=name),
                partial(_is_below, replay, until),
                products,
            )
            left -= replay.spent - before
        until = replay.spent + min(left, max(FP8_RUNS * whole, SMALL * FP8_RUNS // RUNS))
        found[FP8] = by_groups(
            [site for site in order if site[0] is not None],
            partial(replay.effect, name=FP8),
            partial(_is_below, replay, until),
            alike=FP8_ALIKE,
            quiet=FP8_QUIET * replay.loss(),
        )
    return found


def _is_no_product(site: Site) -> bool:
    return LISTS.get(site[1]) != "low" and site[1] not in COMPOSITES


def _is_below(replay: StepReplay, until: int) -> bool:
    return replay.spent < until


def by_groups(
    sites: Sequence[Site],
    effect: Callable[[Sequence[Site]], Effect | None],
    goes_on: Callable[[], bool],
    first: int = 0,
    alike: float = ALIKE,
    quiet: float = math.inf,
) -> dict[Site, Effect]:
    """The effect of each site, or of a group of sites that together change hardly anything.

    Args:
        sites: Those that matter most first.
        effect: That of rounding some at once; None where the step cannot run so.
        goes_on: Whether to look further. Groups that change most come first.
        first: How many sites, with all groups that have any of them, go before the others.
        alike: Change of the gradients up to which a group is not looked at one by one.
        quiet: The same of the loss.
    """
    found: dict[Site, Effect] = {}
    harmful: list[_Harmful] = []
    before = frozenset(sites[:first])

    def is_harmless(group: Sequence[Site]) -> bool:
        together = effect(group)
        error, moved = (math.inf, math.inf) if together is None else together
        passes = error < alike and moved <= quiet
        if together is not None and (len(group) == 1 or passes):
            found.update(dict.fromkeys(group, together))
        elif len(group) > 1:
            harmful.append(_Harmful(group[0] in before, error, group, together))
        return passes

    if sites:
        is_harmless(sites)
    while harmful and goes_on():
        worst = harmful.pop(max(range(len(harmful)), key=lambda i: harmful[i][:2]))
        middle = len(worst.group) // 2
        one, other = worst.group[:middle], worst.group[middle:]
        if is_harmless(one) and len(other) > 1:  # it must be these
            harmful.append(_Harmful(other[0] in before, worst.error, other, worst.together))
        else:
            is_harmless(other)
    for left in harmful:  # what only moves the loss keeps its bound
        if left.together is not None and left.error < alike:
            found.update(dict.fromkeys(left.group, left.together))
    return found


class _Harmful(NamedTuple):
    """A group that is to be looked at more closely.

    Attributes:
        before: Whether it goes before others.
        error: Change of the gradients, its own or that of the group that it comes from.
        group: The sites.
        together: Their effect, or that of the group that they come from, where it was measured.
    """

    before: bool
    error: float
    group: Sequence[Site]
    together: Effect | None


def _has_floats(values: Any) -> bool:
    return any(t.dtype is torch.float32 for t in tensors_of(values))
