"""The conditions of a training: what a plan says of its recording, and what has changed since.

A plan answers for the training that was recorded. Where a later training differs, each change names the
answers that it touches. The model is compared by its ``fingerprint``.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

FIRST_RATE = "first_lr"
"""In ``meta.json``, an optimizer's learning rate in its first step. A schedule changes ``lr`` later."""
_SETTINGS = ("weight_decay", "eps", "amsgrad", "nesterov", "decoupled_weight_decay")
"""Settings that decide the size of updates, and that no scheduler of torch changes."""
_UPDATES = "the loss scale and the need for master weights"


@dataclass(frozen=True)
class OptimizerSettings:
    """An optimizer's first parameter group in its first step.

    Attributes:
        type: Its class.
        learning_rate: None where it was not recorded, or is a tensor.
        settings: Those that decide the size of updates.
    """

    type: str = ""
    learning_rate: float | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, described: Mapping[str, Any], rate: Any) -> "OptimizerSettings":
        """From an optimizer's plain settings, as ``meta.json`` has them, and its first rate."""
        return cls(
            str(described.get("type")),
            float(rate) if isinstance(rate, (int, float)) else None,
            {name: described[name] for name in _SETTINGS if name in described},
        )


@dataclass(frozen=True)
class TrainingConditions:
    """How a training was set up.

    Attributes:
        optimizers: In the order of the recording.
        first_input: Sizes of the first tensor that the model was given; empty where not known.
        torch: Its version, without the build (``2.13.0``); "" where not known.
    """

    optimizers: tuple[OptimizerSettings, ...] = ()
    first_input: tuple[int, ...] = ()
    torch: str = ""

    @classmethod
    def from_run(
        cls, meta: Mapping[str, Any], modules: Sequence[Mapping[str, Any]]
    ) -> "TrainingConditions":
        """From the ``meta.json`` of a run and its table of modules."""
        shapes = next((m["input_shapes"] for m in modules if not m["name"]), None)
        inputs = json.loads(shapes) if shapes else []
        return cls(
            tuple(OptimizerSettings.of(o, o.get(FIRST_RATE)) for o in meta.get("optimizers") or []),
            tuple(inputs[0]) if inputs else (),
            release(str((meta.get("versions") or {}).get("torch") or "")),
        )


def release(version: str) -> str:
    """A version without its build: ``2.13.0`` of ``2.13.0+cpu``."""
    return version.partition("+")[0]


@dataclass(frozen=True)
class Change:
    """One condition that is not as it was recorded.

    Attributes:
        what: The condition.
        before, now: In the recording, and in the later training.
        touches: The answers that depend on it.
    """

    what: str
    before: str
    now: str
    touches: str

    def __str__(self) -> str:
        return f"{self.what} is {self.now}, but was {self.before} in the plan's recording"


def changes(recorded: TrainingConditions, now: TrainingConditions) -> tuple[Change, ...]:
    """What has changed since a recording; what either side does not know is left out."""
    found = [c for o in now.optimizers for c in _of_optimizer(recorded.optimizers, o)]
    a, b = recorded.first_input, now.first_input
    if a and b and a != b:
        touches = "the loss scale, the memory per level and the sizes to pad"
        found.append(Change("the model's input", _sizes(a), _sizes(b), touches))
    if recorded.torch and now.torch and recorded.torch != now.torch:
        touches = "the operations that stay in FP32"
        found.append(Change("torch", recorded.torch, now.torch, touches))
    return tuple(dict.fromkeys(found))


def _of_optimizer(
    recorded: Sequence[OptimizerSettings], now: OptimizerSettings
) -> Iterator[Change]:
    """Compare with the recorded optimizers of the same class: several may take turns."""
    alike = [o for o in recorded if o.type == now.type]
    if recorded and not alike:
        types = " and ".join(dict.fromkeys(o.type for o in recorded))
        yield Change("the optimizer", types, now.type, _UPDATES)
    rates = [o.learning_rate for o in alike if o.learning_rate is not None]
    if len(rates) == len(alike) and now.learning_rate is not None:
        yield from _other("the learning rate", rates, now.learning_rate, _UPDATES)
    for name, value in now.settings.items():
        before = [o.settings[name] for o in alike if name in o.settings]
        yield from _other(name, before, value, "the need for master weights")


def _other(what: str, before: Sequence[Any], now: Any, touches: str) -> Iterator[Change]:
    if before and now not in before:
        words = " and ".join(dict.fromkeys(map(_word, before)))
        yield Change(what, words, _word(now), touches)


def _word(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _sizes(shape: Sequence[int]) -> str:
    return "×".join(map(str, shape))
