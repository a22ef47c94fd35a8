"""What values show and dtypes do not: frozen weights that move, equal ones that part, narrow values.

A few elements of each tensor are kept and compared: what changes a tensor as a whole, as decay, a copy
or a cast does, changes them.

An average of the weights (EMA, a target network) belongs to the script: no optimizer steps it, and no
recorded module need hold it. So all living tensors are looked through once, for those in half precision
that are nearly a parameter. Torch counts the writes to each tensor. An element that a write leaves as it
was, though the parameter's is another, has lost its update.
"""

import gc
import re
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import nn
from torch.optim import SGD, Adam, Optimizer

from mpdiag.numerics.formats import STORED_IN
from mpdiag.recording.cadence import DENSE_STEPS
from mpdiag.recording.counting.tensors import some_of
from mpdiag.recording.gradient_sums import GradientSums
from mpdiag.recording.state_shadow import LEAST, hold_bf16_numbers
from mpdiag.recording.step_clock import Step, StepListener
from mpdiag.recording.step_tap import StepTap
from mpdiag.runs.precision import Observed
from mpdiag.tracing.names import NamedParameter, Subjects
from mpdiag.tracing.precision import HALF

MOST_STATES = 32
"""Of an optimizer, that are compared before and after a recorded step."""
_IN_TURN, _IN_TURN_AT_FIRST = 8, 64
"""FP32 states that are looked at in a recorded step; of the dense beginning."""
_NUMBER = re.compile(r"\d+")
STEPS = 3
"""Steps after which values are looked at; later in recorded steps alone."""

MOST = 64
"""Parameters, and averages of them, that are followed."""
NEAR = 0.5
"""Distance from a parameter, over its norm, within which a tensor may be an average of it."""


class ValueWatch(StepListener):
    """Looks at elements of parameters and states.

    Args:
        subjects: What is recorded.
        optimizers: All that step; they may become more.
        others: Know what else was observed.
        failed: Told what failed; after that nothing more is looked at.
    """

    def __init__(
        self,
        subjects: Subjects,
        optimizers: Sequence[Optimizer],
        others: Sequence[StepTap | GradientSums],
        failed: Callable[[str, Exception], None],
    ) -> None:
        self._subjects = subjects
        self._optimizers = optimizers
        self._failed = failed
        self._looks = True
        self._begun = False
        self._frozen: dict[str, torch.Tensor] = {}
        self._pairs: list[tuple[str, str]] = []
        self._averages: list[Average] | None = None
        self._found: dict[tuple[str, ...], Observed] = {}
        self._unread: list[tuple[int, list[tuple[str, ...]], torch.Tensor]] = []
        self._others = others
        self._before: dict[tuple[str, str, int], torch.Tensor] = {}
        self._rates_due = 0
        self._turn = 0

    def step_began(self, step: Step) -> None:
        """Keep what frozen and equal parameters are before the first step, and states before others."""
        if self._looks and not self._begun:
            self._begun = True
            self._safely(self._begin)
        self._before = {}
        if self._looks and step.recorded:
            self._safely(lambda: self._before.update(self._half_states()))

    def step_ended(self, step: Step) -> None:
        """Compare."""
        if self._looks and (step.number < STEPS or step.recorded):
            self._safely(lambda: self._look(step.number))

    def found(self) -> tuple[Observed, ...]:
        """All that was observed, once each; waits for the device."""
        self._safely(self._read)
        return (*self._found.values(), *(one for other in self._others for one in other.found()))

    def _read(self) -> None:
        unread, self._unread = self._unread, []
        for step, keys, sizes in unread:
            for (kind, *names), size in zip(keys, sizes.tolist(), strict=True):
                if size:
                    self._note(kind, tuple(names), step, float(size))

    def _safely(self, look: Callable[[], None]) -> None:
        try:
            with torch.no_grad():
                look()
        except Exception as error:  # noqa: BLE001 - whatever it is, training goes on
            self._looks = False
            self._failed("looking at values", error)

    def _begin(self) -> None:
        alike: dict[tuple[object, ...], list[str]] = defaultdict(list)
        inside = {id(p) for root in self._subjects.roots for p in root.parameters()}
        for key, named in self._subjects.parameters.items():
            values = some_of(named.parameter)
            if values is None or key not in inside:
                continue  # an optimizer's copies are equal to what they are copies of
            if not named.parameter.requires_grad:
                self._frozen[named.name] = values
            elif bool((values != values[0]).any()):  # constants are equal by chance
                alike[(named.parameter.shape, *values.double().tolist())].append(named.name)
        for names in alike.values():
            one, *others = names
            # Repeated layers may begin alike, as with A_log = log(1, 2, …).
            first = _NUMBER.sub("", one)
            self._pairs += [(one, other) for other in others if _NUMBER.sub("", other) != first]

    def _look(self, step: int) -> None:
        sizes: dict[tuple[str, ...], torch.Tensor] = {}  # 0 where there is nothing to note
        now = {n.name: n.parameter for n in self._subjects.parameters.values()}
        for name, before in list(self._frozen.items()):
            parameter = now.get(name)
            values = None if parameter is None or parameter.requires_grad else some_of(parameter)
            if values is None or values.shape != before.shape:
                del self._frozen[name]  # it trains now, or was replaced
            else:
                sizes["frozen-moved", name] = _away(values, before) / (
                    before.double().norm().clamp_min(1e-45)
                )
        for one, other in self._pairs:
            a, b = (some_of(now[n]) if n in now else None for n in (one, other))
            if a is not None and b is not None and a.shape == b.shape:
                sizes["parted", one, other] = _away(a, b)
        if self._averages is None:
            inside = {id(p) for root in self._subjects.roots for p in root.parameters()}
            named = [n for key, n in self._subjects.parameters.items() if key in inside]
            self._averages = list(islice(averages(named, step), MOST))
        for average in self._averages:
            average.look(step)
            if average.still:
                names = (average.name, str(average.values.dtype).removeprefix("torch."))
                self._note("average-still", names, step, average.still / average.away)
        self._read_later(step, sizes)
        for keys, narrow in self._narrow(step):
            self._unread.append((step, keys, narrow))
        self._compare_states(step)

    def _read_later(self, step: int, sizes: Mapping[tuple[str, ...], torch.Tensor]) -> None:
        """Keep sizes on their devices: to read one is to wait for all that was launched before."""
        places: dict[torch.device, list[tuple[str, ...]]] = defaultdict(list)
        for key, size in sizes.items():
            places[size.device].append(key)
        for keys in places.values():
            self._unread.append((step, keys, torch.stack([sizes[key] for key in keys])))

    def _half_states(self) -> Iterator[tuple[tuple[str, str, int], torch.Tensor]]:
        """Elements of the first states in half precision, by optimizer, name and parameter."""
        for optimizer in self._optimizers:
            states = (
                ((type(optimizer).__name__, str(name), id(parameter)), values)
                for parameter, state in optimizer.state.items()
                for name, value in state.items()
                if isinstance(value, torch.Tensor) and value.dtype in HALF
                if (values := some_of(value)) is not None
            )
            yield from islice(states, MOST_STATES)

    def _compare_states(self, step: int) -> None:
        """Count the elements that the step did not change, of states of which it changed any."""
        counts: dict[tuple[str, str], list[int]] = defaultdict(lambda: [0, 0])
        for key, now in self._half_states() if self._before else ():
            before = self._before.get(key)
            if before is not None and now.shape == before.shape and not torch.equal(now, before):
                live = before != 0
                counts[key[:2]][0] += int(((now == before) & live).sum())
                counts[key[:2]][1] += int(live.sum())
        for names, (still, among) in counts.items():
            self._note("still-state", names, step, still / max(1, among))
        if step >= self._rates_due:  # at steps that double
            self._rates_due = 2 * step
            for optimizer in self._optimizers:
                for share, rate in moving_rates(optimizer):
                    self._note("moving-rate", (type(optimizer).__name__, share), step, rate)

    def _narrow(self, step: int) -> Iterator[tuple[list[tuple[str, ...]], torch.Tensor]]:
        """Which FP32 states hold BF16 numbers alone: their low 16 bits are 0.

        Some take turns: all of a hundred parameters would take as long as counting them.
        """
        known = {id(n.parameter): n.name for n in self._subjects.parameters.values()}
        states = [
            (("narrow-values", f"{type(optimizer).__name__}.{kind}", known[id(parameter)]), value)
            for optimizer in self._optimizers
            for parameter, state in optimizer.state.items()
            if id(parameter) in known
            for kind, value in state.items()
            if isinstance(value, torch.Tensor) and value.dtype == torch.float32
            if value.numel() >= LEAST
        ]
        many = _IN_TURN if step >= DENSE_STEPS else _IN_TURN_AT_FIRST
        if len(states) > many:
            self._turn = (self._turn + many) % len(states)
            states = (2 * states)[self._turn : self._turn + many]
        alike: dict[tuple[object, ...], list[tuple[tuple[str, ...], torch.Tensor]]]
        alike = defaultdict(list)
        for key, state in states:
            values = some_of(state)
            if values is not None:
                alike[values.device, values.shape].append((key, values))
        for some in alike.values():
            keys, rows = zip(*some, strict=True)
            yield list(keys), hold_bf16_numbers(torch.stack(rows))

    def _note(self, kind: str, names: tuple[str, ...], step: int, size: float) -> None:
        key = (kind, *names)
        first = self._found[key].first if key in self._found else step
        self._found[key] = Observed(kind, names, first, step, size)


def _away(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """The norm of a difference, float64 on its device; 0 where nothing differs."""
    away: torch.Tensor = (one.double() - other.double()).norm()
    return away


@dataclass(eq=False)
class Average:
    """A tensor in half precision that may be an average of a parameter.

    Attributes:
        name, parameter: The parameter.
        tensor: The tensor.
        wide: FP32 tensors of its shape: it may be a copy of one, which loses nothing.
        step, version: Of the last look: the step, and torch's count of writes.
        values, goal: Elements at the last look, (k,), and the parameter's in the tensor's dtype.
        away, still: Elements × writes: those that were not the parameter's, and those of them that
            stayed.
    """

    name: str
    parameter: weakref.ref[torch.Tensor]
    tensor: weakref.ref[torch.Tensor]
    wide: Sequence[weakref.ref[torch.Tensor]]
    step: int
    version: int
    values: torch.Tensor
    goal: torch.Tensor
    away: int = 0
    still: int = 0

    def look(self, step: int) -> None:
        """Compare the tensor with what it was a step ago, if it was written to since."""
        tensor, parameter = self.tensor(), self.parameter()
        if tensor is not None and tensor._version == self.version:
            self.step = step
            return
        now = None if tensor is None else some_of(tensor)
        goal = None if parameter is None else some_of(parameter)
        if tensor is None or now is None or goal is None or now.shape != self.values.shape:
            return
        before, earlier, goal = self.values, self.goal, goal.to(now.dtype)
        written = step == self.step + 1
        self.step, self.version, self.values, self.goal = step, tensor._version, now, goal
        others = (some_of(t) for t in (one() for one in self.wide) if t is not None)
        copied = (goal, earlier, *(t.to(now.dtype) for t in others if t is not None))
        if written and not any(torch.equal(now, one) for one in copied):
            away = before != goal
            self.away += int(away.sum())
            self.still += int((away & (now == before)).sum())


def averages(parameters: Iterable[NamedParameter], step: int) -> Iterator[Average]:
    """Tensors in half precision that are nearly a trained parameter, and not its memory."""
    trained = [n for n in parameters if n.parameter.requires_grad]
    taken = {id(t) for n in trained for t in (n.parameter, n.parameter.grad)}
    shapes = {n.parameter.shape for n in trained[:MOST]}
    alike: dict[torch.Size, list[torch.Tensor]] = defaultdict(list)
    for one in gc.get_objects():
        if type(one) not in (torch.Tensor, nn.Parameter) or id(one) in taken:
            continue
        plain = one.layout == torch.strided and not (one.is_nested or one.is_inference())
        if plain and one.shape in shapes:
            alike[one.shape].append(one)
    for named in trained[:MOST]:
        parameter: torch.Tensor = named.parameter
        own = some_of(parameter)
        if own is None or bool((own == own[0]).all()):
            continue  # constants are near each other by chance
        near = [
            t for t in alike[parameter.shape] if t.device == parameter.device and _is_near(t, own)
        ]
        wide = [weakref.ref(t) for t in near if t.dtype == torch.float32]
        for one in (t for t in near if t.dtype in HALF and t.data_ptr() != parameter.data_ptr()):
            values = some_of(one)
            if values is not None and id(one) not in taken:
                taken.add(id(one))
                of, tensor, goal = weakref.ref(parameter), weakref.ref(one), own.to(one.dtype)
                yield Average(named.name, of, tensor, wide, step, one._version, values, goal)


def _is_near(tensor: torch.Tensor, own: torch.Tensor) -> bool:
    values = some_of(tensor)
    if values is None or values.shape != own.shape:
        return False
    return bool((values.float() - own.float()).norm() <= NEAR * own.float().norm())


RATED_PARAMETERS = 64
"""At most, at equal distances: one takes 0.2 ms."""
SHARES = (0.5, 0.99)
"""Of the elements that are looked at."""


def moving_rates(optimizer: Optimizer) -> Iterator[tuple[str, float]]:
    """Shares of an optimizer's half-precision weights, and the learning rate above which each moves.

    A step of ``lr·d`` moves a weight if it is larger than half the distance to the weight's next value.
    ``d`` is read from the optimizer's states after a step (``torch/optim/adam.py``, ``sgd.py``). What
    the optimizer itself rounds on the way is left out: it shifts a rate by 1 %.

    Args:
        optimizer: After a step. Of others than Adam, AdamW and SGD of torch nothing is known.
    """
    if not type(optimizer).step.__module__.startswith("torch.optim."):
        return
    found = []
    held = [(g, p) for g in optimizer.param_groups for p in g["params"] if p.dtype in HALF]
    for group, parameter in held[:: -(-len(held) // RATED_PARAMETERS) or 1]:
        weight = some_of(parameter)
        update = None if weight is None else _update(optimizer, group, parameter, weight)
        if weight is not None and update is not None:
            half = half_distances(weight, update, str(parameter.dtype).removeprefix("torch."))
            found.append((half / update.abs())[update != 0].double())
    rates = torch.cat(found) if found else torch.zeros(0)
    for share in SHARES if rates.numel() else ():
        yield f"{share:g}", float(rates.quantile(share))


def half_distances(weight: torch.Tensor, update: torch.Tensor, dtype: str) -> torch.Tensor:
    """Half the distance from each weight to its next value towards ``weight - update``, FP32.

    Args:
        weight: Weights.
        update: What is subtracted, of the same shape.
        dtype: ``bfloat16`` or ``float16``.
    """
    mantissa, exponent = weight.float().abs().frexp()
    # Below a power of two values lie half as far apart.
    inward = (mantissa == 0.5) & (weight.sign() == update.sign())
    fmt = STORED_IN[dtype]
    least = fmt.min_subnormal_exponent
    place = (exponent - 1 - fmt.mantissa_bits - inward.int()).clamp_min(least)
    place = torch.where(weight == 0, least, place) - 1
    return torch.ldexp(torch.ones_like(mantissa), place)


def _update(
    optimizer: Optimizer, group: Mapping[str, Any], parameter: torch.Tensor, weight: torch.Tensor
) -> torch.Tensor | None:
    """What the last step subtracted at a learning rate of 1, FP32 (k,); None where it is not known."""
    state = optimizer.state.get(parameter, {})
    some = {k: some_of(v) for k, v in state.items() if isinstance(v, torch.Tensor) and v.dim()}
    have: dict[str, torch.Tensor] = {k: v.float() for k, v in some.items() if v is not None}
    found: torch.Tensor | None = None
    if isinstance(optimizer, Adam) and "exp_avg" in have:
        one, two = (1.0 - float(beta) ** float(state["step"]) for beta in group["betas"])
        square = have.get("max_exp_avg_sq", have["exp_avg_sq"])
        found = have["exp_avg"] / one / ((square / two).sqrt() + group["eps"])
    gradient = None if parameter.grad is None else some_of(parameter.grad)
    if isinstance(optimizer, SGD) and gradient is not None:
        found = gradient.float() + group["weight_decay"] * weight.float()
        if "momentum_buffer" in have:
            buffer = have["momentum_buffer"]
            found = found + group["momentum"] * buffer if group["nesterov"] else buffer
    return found
