"""Reads the precision of a training from its objects: parameters, gradients, optimizers, wrappers.

Nothing is computed but comparisons for equality, of parameters that no optimizer holds with FP32
tensors of the same shape that one does: one that rounds to the parameter is its master copy.
"""

import math
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from types import MappingProxyType
from typing import Any, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer

from mpdiag.errors import UsageError
from mpdiag.recording.counting.tensors import has_memory, own_part, readable, stored_as
from mpdiag.recording.state_shadow import StateShadow
from mpdiag.recording.step_clock import Step, StepListener
from mpdiag.recording.value_watch import ValueWatch
from mpdiag.runs import provenance
from mpdiag.runs.precision import Observed, ParameterPrecision, PrecisionFacts, summary
from mpdiag.tracing.dtype_setters import DtypeSetters
from mpdiag.tracing.names import Models, Subjects, subjects
from mpdiag.tracing.precision import HALF, PrecisionWatch
from mpdiag.tracing.sharding import Reduction, reductions, unapplied

FIRST_STEPS = 3
"""Steps after which the precision is read; later only in recorded steps, at numbers that double."""
MOST_BETWEEN = 100
"""Steps after which it is read again at the latest: reading takes as long as counting tensors."""
_HEAD = 64
_Found = TypeVar("_Found")
Pairs = Mapping[int, tuple[torch.Tensor, Optimizer]]
_BITS_OF = re.compile(r"(?i)(?:nf|fp|int|float(?=8tensor))([48])(?!\d)|([48])bit")
"""In the name of a class of quantized weights: Params4bit, Int8Params, Float8Tensor."""
_COUNTERS = ("step", "steps")
"""States that count, and hold no statistic."""


def short(dtype: torch.dtype | None) -> str | None:
    """A dtype's name without ``torch.``."""
    return None if dtype is None else str(dtype).removeprefix("torch.")


def read_parameters(
    names: Mapping[str, nn.Parameter],
    optimizers: Sequence[Optimizer],
    around: Iterable[nn.Module],
    *,
    world: int,
    setter: Callable[[nn.Parameter], str | None] = lambda _: None,
    masters: Pairs = MappingProxyType({}),
) -> tuple[ParameterPrecision, ...]:
    """The precision of each parameter, as far as the objects of a training tell.

    Args:
        names: Parameters by name.
        optimizers: All that step.
        around: The models, and what is wrapped around them.
        world: Processes that train together.
        setter: Says who gave a parameter its dtype, if that was seen.
        masters: Copies that held the parameters' values before the step.
    """
    wrapped = reductions(around)
    holders: dict[int, list[Optimizer]] = defaultdict(list)
    for optimizer in optimizers:
        for key in {id(p) for g in optimizer.param_groups for p in g["params"]}:
            holders[key].append(optimizer)
    copies = masters or _pairs(names.values(), optimizers)
    found = []
    for name, parameter in names.items():
        held, master = holders.get(id(parameter), []), None
        state: Mapping[str, Any] = {}
        if held:
            state = held[-1].state.get(parameter, {})
            if parameter.dtype in HALF:
                master = next(
                    (t for t in _tensors(state).values() if _is_master(t, parameter)), None
                )
        elif id(parameter) in copies:
            master, holder = copies[id(parameter)]
            held, state = [holder], holder.state.get(master, {})
        found.append(
            _of(name, parameter, held, state, master, wrapped.get(id(parameter)), world, setter)
        )
    return tuple(found)


def _pairs(weights: Collection[nn.Parameter], optimizers: Sequence[Optimizer]) -> Pairs:
    """The FP32 copies that optimizers step in place of parameters, by the parameter's ``id``."""
    stepped = {id(p): (p, o) for o in optimizers for g in o.param_groups for p in g["params"]}
    own = set(map(id, weights))
    loose = [pair for key, pair in stepped.items() if key not in own]
    found: dict[int, tuple[torch.Tensor, Optimizer]] = {}
    for parameter in (p for p in weights if loose and id(p) not in stepped):
        alike = (i for i, (t, _) in enumerate(loose) if t.numel() == parameter.numel())
        place = next((i for i in alike if _is_master(loose[i][0], parameter)), None)
        if place is not None:  # of parameters with equal values each has its own
            found[id(parameter)] = loose.pop(place)
    return found


def _of(
    name: str,
    parameter: nn.Parameter,
    holders: Sequence[Optimizer],
    state: Mapping[str, Any],
    master: torch.Tensor | None,
    reduction: Reduction | None,
    world: int,
    setter: Callable[[nn.Parameter], str | None],
) -> ParameterPrecision:
    unknown: dict[str, str] = {}
    compute = None if reduction is None else reduction.compute
    stored = stored_as(parameter)
    arrives = compute or getattr(parameter, "grad_dtype", None) or parameter.dtype
    summed = _accumulated(parameter)
    elsewhere = "" if parameter.numel() else "this rank holds no element of it"
    if parameter.requires_grad and summed is None:
        unknown["accumulated"] = elsewhere or "no gradient was seen"
    reduced = None
    if parameter.requires_grad:
        if world == 1:
            unknown["reduced"] = "one process: nothing is reduced"
        elif reduction is None:
            unknown["reduced"] = (
                "tensor parallelism: each rank keeps the gradient of its part"
                if any(one.is_shard() for one in getattr(parameter, "placements", ()))
                else "no DDP or FSDP holds it: the script reduces it, or nothing does"
            )
        elif reduction.unknown:
            unknown["reduced"] = reduction.unknown
        else:
            reduced = reduction.dtype or arrives
    held = {key: t for key, t in _tensors(state).items() if t is not master}
    states = {key: str(short(stored_as(t))) for key, t in held.items()}
    kept = bool(holders) and any(map(_tensors, holders[-1].state.values()))
    if holders and not states and not state and (kept or not holders[-1].state):
        unknown["states"] = elsewhere or "the optimizer has not stepped it"
    set_by = (reduction.policy if reduction is not None else "") or setter(parameter)
    if not set_by:
        set_by = "before recording" if stored != torch.get_default_dtype() else "default"
    quantized, numel = _quantized(parameter)
    if reduction is not None:
        numel = reduction.numel or numel
    return ParameterPrecision(
        name=name,
        numel=numel,
        trainable=parameter.requires_grad,
        optimizer=" and ".join(type(o).__name__ for o in holders) or None,
        stored=str(short(stored)),
        forward=short(compute),
        grad=short(arrives) if parameter.requires_grad else None,
        accumulated=short(summed),
        reduced=short(reduced),
        states=states,
        master=None if master is None else short(master.dtype),
        set_by=set_by,
        quantized=quantized,
        unknown=unknown,
    )


def _quantized(parameter: nn.Parameter) -> tuple[str | None, int]:
    """What the bytes of a quantized weight hold, by its class (bitsandbytes, torchao), and its elements.

    A class that quantizes may still hold the floating-point weight, until it comes to the device.
    """
    kind = type(parameter)
    bits = _BITS_OF.search(kind.__name__)
    packed = (
        not parameter.is_floating_point() or getattr(parameter, "quant_state", None) is not None
    )
    if bits is None or not (packed or nn.Parameter not in kind.__mro__):
        return None, parameter.numel()
    width = int(bits[1] or bits[2])
    form = str(getattr(parameter, "quant_type", "")).upper()
    stored = parameter.numel() * parameter.element_size() * 8
    return f"{width}-bit {form}".rstrip(), stored // width if packed else parameter.numel()


def _accumulated(parameter: nn.Parameter) -> torch.dtype | None:
    """Of the gradient that is summed: Megatron's ``main_grad``, or torch's ``grad``."""
    for held in (getattr(parameter, "main_grad", None), parameter.grad):
        if isinstance(held, torch.Tensor):
            return held.dtype
    return None


def _tensors(state: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    return {
        str(key): value
        for key, value in state.items()
        if isinstance(value, torch.Tensor) and key not in _COUNTERS
    }


def _is_master(candidate: torch.Tensor, parameter: nn.Parameter) -> bool:
    """Whether an FP32 tensor rounds to a parameter, in every element."""
    if parameter.dtype not in (*HALF, torch.float32) or candidate.dtype != torch.float32:
        return False
    theirs, ours = readable(candidate), readable(parameter)
    if theirs is None or ours is None:
        return False
    if theirs.shape != ours.shape or theirs.device != ours.device or ours.numel() == 0:
        return False
    # Most candidates differ in their first elements; only those that do not are compared whole.
    head = (theirs.reshape(-1)[:_HEAD].to(ours.dtype), ours.reshape(-1)[:_HEAD])
    return torch.equal(*head) and torch.equal(theirs.to(ours.dtype), ours)


def facts_of(
    model: Models, optimizer: Optimizer | Sequence[Optimizer] | None = None
) -> PrecisionFacts:
    """The precision of a model and its optimizers as they are; nothing runs.

    Raises:
        UsageError: If the model is no module, or the optimizer no optimizer.
    """
    about = subjects(model, None, None)
    optimizers = optimizers_of(optimizer)
    names = {n.name: n.parameter for n in about.parameters.values()}
    world = provenance.ranks()[1]
    read = read_parameters(names, optimizers, about.roots, world=world)
    return PrecisionFacts(0, read, (), tuple(map(_settings, optimizers)))


def optimizers_of(optimizer: Optimizer | Sequence[Optimizer] | None) -> list[Optimizer]:
    """The optimizers that a caller named, without wrappers; each once.

    Raises:
        UsageError: If one is none.
    """
    if optimizer is None:
        return []
    found = [optimizer] if isinstance(optimizer, Optimizer) else optimizer
    if isinstance(held := getattr(optimizer, "optimizers", None), (list, tuple)):
        found = held  # torchtitan's container of those that step
    sequence: object = found  # callers without a type checker pass anything
    if not isinstance(sequence, Sequence) or not all(isinstance(o, Optimizer) for o in sequence):
        raise UsageError(
            "the second argument must be a torch.optim.Optimizer, a list of them or None, "
            f"not {type(optimizer).__name__}"
        )
    return list({id(o): o for o in map(_unwrapped, found)}.values())


def _unwrapped(optimizer: Optimizer) -> Optimizer:
    """The optimizer that steps, inside a wrapper that only looks like one (Accelerate's is)."""
    while not hasattr(optimizer, "_optimizer_step_pre_hooks"):
        inner = getattr(optimizer, "optimizer", None)
        if not isinstance(inner, Optimizer):
            break
        optimizer = inner
    return optimizer


class ContractWatch(StepListener):
    """Reads the precision after the first steps, and again in recorded ones.

    Args:
        subjects: What is recorded.
        optimizers: The optimizers, which may become more.
        wrappers: Modules around the models, as far as they were seen.
        world: Processes that train together.
        shadow: Follows states that are stored in half precision.
        values: Knows what values showed.
        precision: Knows whether autocast is on, and whom to tell what was read.
        failed: Told what failed; after that nothing more is read.
        setters: Note who gives parameters their dtype; detached when recording stops.
    """

    def __init__(
        self,
        subjects: Subjects,
        optimizers: Sequence[Optimizer],
        wrappers: Callable[[], Iterable[nn.Module]],
        world: int,
        shadow: StateShadow,
        values: ValueWatch,
        precision: PrecisionWatch,
        failed: Callable[[str, Exception], None],
        setters: DtypeSetters,
    ) -> None:
        self._shadow = shadow
        self._values = values
        self._precision = precision
        self._facts: PrecisionFacts | None = None
        self._next = 0
        self._subjects = subjects
        self._optimizers = optimizers
        self._wrappers = wrappers
        self._world = world
        self._failed = failed
        self._setters = setters
        self._gradients: dict[str, str] = {}
        self._masters: dict[int, tuple[torch.Tensor, Optimizer]] = {}
        self._reads = self._due = True
        self._unapplied: tuple[Observed, ...] = ()

    @property
    def facts(self) -> PrecisionFacts | None:
        """What was read; None before the first step has ended. Waits for the device."""
        if self._facts is None:
            return None
        observed = _finite((*self._unapplied, *self._values.found()))
        found = replace(self._facts, observed=observed)
        try:
            settings = tuple(_settings(o) for o in self._optimizers)
            return replace(found, settings=settings, shadows=_finite(self._shadow.found()))
        except Exception as error:  # noqa: BLE001 - whatever it is, training goes on
            self._failed("reading the states of optimizers", error)
            return found

    def stopped(self) -> None:
        """Let torch's functions be as they were."""
        self._setters.detach()

    def step_began(self, step: Step) -> None:
        """Note whether the step is read, and whether the one before had several backward passes."""
        due = step.number < FIRST_STEPS or (step.recorded and step.number >= self._next)
        self._due = self._reads and due
        self._masters.clear()
        if step.accumulating and self._facts is not None and not self._facts.accumulating:
            self._facts = replace(self._facts, accumulating=True)

    def optimizer_begins(self) -> None:
        """Pair copies with their parameters; a loop may copy the new weights after the step ended."""
        with suppress(Exception):  # reading them after the step says what fails
            if self._due:
                weights = [p for root in self._subjects.roots for p in root.parameters()]
                self._masters.update(_pairs(weights, self._optimizers))

    def optimizer_stepped(self, optimizer: Any) -> None:
        """Note the dtypes of gradients while they are there."""
        del optimizer
        if not self._due:
            return
        for named in self._subjects.parameters.values():
            dtype = _accumulated(named.parameter)
            if dtype is not None:
                self._gradients[named.name] = str(short(dtype))

    def step_ended(self, step: Step) -> None:
        """Read the rest, when all optimizers of the step have stepped."""
        if self._due:
            try:
                self._read(step.number)
            except Exception as error:  # noqa: BLE001 - whatever it is, training goes on
                self._reads = self._due = False
                self._failed("reading the precision of parameters", error)
        self._gradients.clear()

    def _read(self, step: int) -> None:
        self._next = step + min(max(step, 1), MOST_BETWEEN)
        known = self._subjects.parameters  # with copies of an optimizer, without what came later
        names = {
            known[id(p)].name if id(p) in known else name: p
            for root in self._subjects.roots
            for name, p in root.named_parameters()
        }
        told, copies = self._setters.of, self._masters
        around = [*self._subjects.roots, *self._wrappers()]
        read = [
            self._with_gradient(p)
            for p in read_parameters(
                names, self._optimizers, around, world=self._world, setter=told, masters=copies
            )
        ]
        if self._facts is None and not self._precision.off:  # --fp32 takes policies away itself
            made = unapplied(reductions(around).values(), self._setters.policies)
            seen = Observed("policy-not-applied", tuple(made), step, step, 0.0)
            self._unapplied = (seen,) if made else ()
        if self._facts is None:
            self._facts = PrecisionFacts(step, tuple(read), (), (), False, (), ())
            if self._precision.tell is not None:
                self._precision.tell(summary(read, sorted(self._precision.autocast)))
        else:
            self._facts = self._facts.after(read, step)

    def _with_gradient(self, parameter: ParameterPrecision) -> ParameterPrecision:
        seen = self._gradients.get(parameter.name)
        if seen is None:
            return parameter
        unknown = {k: v for k, v in parameter.unknown.items() if k != "accumulated"}
        return replace(parameter, accumulated=seen, unknown=unknown)


def _settings(optimizer: Optimizer) -> dict[str, Any]:
    """An optimizer's type, and the plain settings of its groups that differ from each other."""
    groups = [
        {k: v for k, v in group.items() if _is_plain(v)} | {"parameters": len(group["params"])}
        for group in optimizer.param_groups
    ]
    held = (p for group in optimizer.param_groups for p in group["params"])
    freed = sum(not has_memory(own_part(p)) for p in held)
    found = {
        "optimizer": type(optimizer).__name__,
        "step": str(getattr(type(optimizer).step, "__module__", "")),
        "groups": groups,
    }
    counters = {
        key: [str(short(value.dtype)), float(value)]
        for state in optimizer.state.values()
        for key, value in state.items()
        if key in _COUNTERS and isinstance(value, torch.Tensor)
        if value.dtype in HALF and value.numel() == 1 and math.isfinite(value)
    }
    more = {"freed": freed, "counters": counters}
    return found | {name: value for name, value in more.items() if value}


def _is_plain(value: Any) -> bool:
    """Whether a document can hold a setting: JSON has no infinity and no NaN."""
    if isinstance(value, (tuple, list)):
        return all(isinstance(v, (int, float)) and _is_plain(v) for v in value)
    if isinstance(value, float):
        return math.isfinite(value)
    return value is None or isinstance(value, (bool, int, str))


def _finite(found: Sequence[_Found]) -> tuple[_Found, ...]:
    """What holds numbers: weights that are not finite show nothing else."""
    numbers = [[v for v in vars(one).values() if isinstance(v, float)] for one in found]
    return tuple(o for o, own in zip(found, numbers, strict=True) if all(map(math.isfinite, own)))
