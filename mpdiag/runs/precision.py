"""What precision each parameter of a training has: ``precision.json`` in a run folder.

::

    {"schema_version": 1, "step": 2, "parameters": [
       {"name": "head.weight", "numel": 640, "trainable": true, "optimizer": "AdamW",
        "stored": "bfloat16", "forward": "bfloat16", "input_grad": "bfloat16", "weight_grad": "bfloat16",
        "grad": "bfloat16", "accumulated": "bfloat16", "reduced": null,
        "states": {"exp_avg": "bfloat16", "exp_avg_sq": "bfloat16"}, "master": null,
        "set_by": "before recording", "unknown": {"reduced": "one process: nothing is reduced"}}],
     "changes": [{"step": 7, "name": "head.weight", "field": "stored", "was": "float32",
        "is": "bfloat16"}],
     "settings": [{"optimizer": "AdamW", "groups": [{"lr": 0.001, …}]}], "accumulating": false}

Dtypes have torch's names without ``torch.``. What is not known is null, and ``unknown`` says why; a null
without a reason says that there is none (``master``: no master copy, ``optimizer``: none holds it).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from mpdiag.errors import DamagedRun, NewerSchema
from mpdiag.files.documents import read_document
from mpdiag.files.paths import AnyPath

PRECISION = "precision.json"
SCHEMA_VERSION = 1
HALF = frozenset({"float16", "bfloat16"})
BYTES = frozenset({"uint8", "int8", "float8_e4m3fn", "float8_e5m2"})
"""What quantized weights and states are stored in; a byte may hold two values."""
LABELS = {"float32": "FP32", "bfloat16": "BF16", "float16": "FP16", "float64": "FP64"}
LABELS |= {"float8_e4m3fn": "FP8 E4M3", "float8_e5m2": "FP8 E5M2"}
"""Dtypes as people write them."""
_LORA = re.compile(r"(?i)(^|\.)lora_\w")
POLICIES = ("MixedPrecisionPolicy", "MixedPrecision", "mixed precision")
"""How ``set_by`` ends where a wrapper's policy chose; casts and checkpoints end in a line's number."""


@dataclass(frozen=True)
class ParameterPrecision:
    """The dtypes around one parameter; see above.

    Attributes:
        name: As the recording names it.
        numel: Elements over all ranks.
        trainable: Whether it requires a gradient.
        optimizer: Type of the optimizer that holds it or its master; None where none does. Of
            several they are joined by " and "; ``states`` are the last one's.
        stored: Of the parameter itself.
        forward: In which it is multiplied in the forward pass.
        input_grad, weight_grad: In which the products of the backward pass are computed.
        grad: Of its gradient as it arrives from the backward pass.
        accumulated: Of the gradient that the optimizer reads, a sum over micro-batches.
        reduced: In which gradients are added over ranks.
        states: Of each tensor that the optimizer keeps for it, by name.
        master: Of the copy that the optimizer steps in its place; None where there is none.
        set_by: What chose the precision it computes in.
        quantized: What the bytes of a quantized weight hold: ``4-bit NF4``; None for other weights.
        unknown: Why a field is None although there is something to know.
    """

    name: str
    numel: int
    trainable: bool
    optimizer: str | None
    stored: str
    forward: str | None = None
    input_grad: str | None = None
    weight_grad: str | None = None
    grad: str | None = None
    accumulated: str | None = None
    reduced: str | None = None
    states: Mapping[str, str] = field(default_factory=dict)
    master: str | None = None
    set_by: str | None = None
    quantized: str | None = None
    unknown: Mapping[str, str] = field(default_factory=dict)

    @property
    def holders(self) -> tuple[str, ...]:
        """The types in ``optimizer``."""
        return tuple(self.optimizer.split(" and ")) if self.optimizer else ()

    def to_json(self) -> dict[str, Any]:
        """An entry of ``parameters``."""
        return {**vars(self), "states": dict(self.states), "unknown": dict(self.unknown)}

    @classmethod
    def from_json(cls, entry: Mapping[str, Any]) -> ParameterPrecision:
        """The inverse of ``to_json``; unknown fields are ignored.

        Raises:
            ValueError: If a field holds what is never written there.
        """
        known = {f.name: entry[f.name] for f in fields(cls) if f.name in entry}
        whole = cls(**known)
        for name, value in vars(whole).items():
            if name in ("states", "unknown"):
                good = isinstance(value, dict) and all(isinstance(v, str) for v in value.values())
            elif name == "numel":
                good = type(value) is int and value >= 0
            elif name == "trainable":
                good = type(value) is bool
            else:
                good = isinstance(value, str) or (value is None and name not in ("name", "stored"))
            if not good:
                raise ValueError(f"its field {name!r} holds a value that mpdiag never writes there")
        return whole


@dataclass(frozen=True)
class Shadow:
    """A state in half precision beside the same in FP32, in elements that were followed.

    Attributes:
        optimizer: The optimizer's type.
        state: The state's name.
        parameters, elements: Of how many.
        steps: Over how many steps.
        low, median, high: The state over FP32's: 10th, 50th and 90th percentile of the elements.
    """

    optimizer: str
    state: str
    parameters: int
    elements: int
    steps: int
    low: float
    median: float
    high: float


@dataclass(frozen=True)
class Observed:
    """What values showed.

    Attributes:
        kind: ``frozen-moved``: a parameter without a gradient changed; ``parted``: two that were equal
            are not any more; ``narrow-values``: an FP32 state holds BF16 numbers alone;
            ``optimizer-products``: products in an optimizer's step; ``factor-without-effect``: a factor
            below 1 that changed no element of a parameter; ``policy-not-applied``: FSDP's policies
            that were made, and that no wrapper had at the first reading; ``gradient-sum``: a sum of
            gradients in half precision beside FP32's; ``still-state``: elements of a state in half
            precision that a step did not change; ``moving-rate``: the learning rate above which a
            share of half-precision weights moves; ``average-still``: elements of a half-precision
            average that do not move; ``no-orthogonalization``: an update that is a multiple of the
            gradient, of an optimizer named for orthogonal ones.
        names: Of the parameters; before them the state or the optimizer. Of products their dtype, of
            ``still-state`` the state, of ``moving-rate`` the share of weights, of ``average-still``
            after the parameter the average's dtype.
        first, last: Steps after which it was seen.
        size: Of the change over the values' norm; of ``parted`` the norm of the difference; the number
            of products; the factor; of ``gradient-sum`` the relative error; of ``still-state`` and
            ``average-still`` the share; the learning rate.
        count: Of ``gradient-sum`` how many gradients it took.
    """

    kind: str
    names: tuple[str, ...]
    first: int
    last: int
    size: float
    count: int = 0


@dataclass(frozen=True)
class PrecisionFacts:
    """What was read of a training's objects, at a step.

    Attributes:
        step: The last one at which it was read.
        parameters: One entry each.
        changes: What differed from an earlier reading: dicts of step, name, field, was and is.
        settings: Type and plain settings of each optimizer's groups.
        accumulating: Whether a step has several backward passes.
        shadows: States beside the same in FP32.
        observed: What values showed.
    """

    step: int
    parameters: tuple[ParameterPrecision, ...]
    changes: tuple[Mapping[str, Any], ...] = ()
    settings: tuple[Mapping[str, Any], ...] = ()
    accumulating: bool = False
    shadows: tuple[Shadow, ...] = ()
    observed: tuple[Observed, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """The document."""
        return {
            "schema_version": SCHEMA_VERSION,
            "step": self.step,
            "parameters": [p.to_json() for p in self.parameters],
            "changes": [dict(change) for change in self.changes],
            "settings": [dict(setting) for setting in self.settings],
            "accumulating": self.accumulating,
            "shadows": [asdict(shadow) for shadow in self.shadows],
            "observed": [asdict(one) for one in self.observed],
        }

    def after(self, later: Iterable[ParameterPrecision], step: int) -> PrecisionFacts:
        """These facts with a later reading: its values, and what changed."""
        before = {p.name: p for p in self.parameters}
        read = tuple(later)
        changes = [
            {"step": step, "name": p.name, "field": name, "was": _plain(was), "is": _plain(now)}
            for p in read
            if p.name in before
            for name, was, now in _differences(before[p.name], p)
        ]
        return replace(self, step=step, parameters=read, changes=(*self.changes, *changes))


def _differences(
    one: ParameterPrecision, other: ParameterPrecision
) -> Iterable[tuple[str, Any, Any]]:
    """Fields that were known and have another value now; an optimizer's first states are no change."""
    for name in ("stored", "grad", "accumulated", "states", "master", "optimizer", "trainable"):
        was, now = getattr(one, name), getattr(other, name)
        known = bool(was) or name == "trainable"
        if was != now and known and name not in other.unknown:
            yield name, was, now


def _plain(value: Any) -> Any:
    return dict(value) if isinstance(value, Mapping) else value


def read_precision(folder: AnyPath) -> PrecisionFacts | None:
    """What a run folder holds; None where the recording is of an earlier version, or too short.

    Raises:
        DamagedRun: If it cannot be read.
        NewerSchema: If a newer version wrote it.
    """
    path = folder / PRECISION
    try:
        document = read_document(path)
        version = document["schema_version"]
        if isinstance(version, int) and version > SCHEMA_VERSION:
            message = f"{path} was written by a newer mpdiag (schema {version}): upgrade to read it"
            raise NewerSchema(message)
        return PrecisionFacts(
            int(document["step"]),
            tuple(map(ParameterPrecision.from_json, document["parameters"])),
            tuple(map(dict, document["changes"])),
            tuple(map(dict, document["settings"])),
            document.get("accumulating") is True,
            tuple(Shadow(**shadow) for shadow in document.get("shadows", ())),
            tuple(
                Observed(**{**one, "names": tuple(one["names"])})
                for one in document.get("observed", ())
            ),
        )
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise DamagedRun(f"{path} is damaged ({error}): record again, or remove it") from None


def summary(parameters: Sequence[ParameterPrecision], autocast: Sequence[str] = ()) -> str:
    """The precision of a training in one line.

    Args:
        parameters: Of all models.
        autocast: Dtypes in which autocast was on.
    """
    trained = [p for p in parameters if p.trainable] or list(parameters)
    stored = _labels(p.quantized or p.stored for p in trained)
    masters = {p.master for p in trained}
    states = _labels(d for p in trained for d in p.states.values())
    optimizers = sorted({name for p in trained for name in p.holders})
    adapters = [p for p in trained if _LORA.search(p.name)]
    kind = "LoRA " if len(adapters) == len(trained) else "LoRA and other " if adapters else ""
    words = f"{stored} {kind}weights"
    if states and states == stored:
        words += f" and {'/'.join(optimizers)} states"
    elif states:
        words += f", {states} {'/'.join(optimizers)} states"
    half = any(p.stored in HALF and not p.quantized for p in trained)
    if half:
        words += ", no FP32 masters" if masters == {None} else ""
        words += ", FP32 masters" if masters == {"float32"} else ""
        words += ", FP32 masters of some" if len(masters) > 1 else ""
    ruled = [p for p in trained if p.set_by and p.set_by.endswith(POLICIES)]
    computed = _labels(p.forward for p in ruled if p.forward)
    if ruled:
        words += f"; {', '.join(sorted({str(p.set_by) for p in ruled}))} computes in {computed}"
    if autocast and _labels(autocast) != computed:
        words += f"; autocast computes in {_labels(autocast)}"
    frozen = [p for p in parameters if not p.trainable and p not in trained]
    if frozen and (adapters or any(p.quantized for p in frozen)):
        words += f"; frozen weights in {_labels(p.quantized or p.stored for p in frozen)}"
    return words


def _labels(dtypes: Iterable[str]) -> str:
    found = dict.fromkeys(LABELS.get(d, d) for d in dtypes)
    return "/".join(found)
