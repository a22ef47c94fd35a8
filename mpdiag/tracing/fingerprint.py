"""The fingerprint of a model: the names and shapes of its parameters, and how two models differ.

A plan carries the fingerprint of the model that was recorded, so that a plan of another model is not
taken for one that holds. Names are freed of what wrappers put into them (DDP, FSDP, ``torch.compile``,
activation checkpoints), on both sides alike. No torch here: callers hand in the names
and shapes of their parameters.

Two models are compared layer by layer, a layer being the parameters of one module. Layers are the same
if they have the same name and their parameters have the same numbers of dimensions; where a size
differs, the layer was resized. One model may lie inside the other (``encoder.0`` and ``0``): the
prefix under which most layers meet is found, and named. Below a prefix numbered names meet by chance,
so there most of the layers that meet must have the same shapes.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from mpdiag.display.wording import some_of

Shape = tuple[int, ...]
"""Sizes of a parameter."""

_WRAPPERS = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
_FLAT, _SHARDED = "_flat_param", "_fsdp_wrapped_module"
_DDP = "module"
DEEPEST = 2
"""Parts of a prefix under which a model is looked for inside another."""


@dataclass(frozen=True)
class ModelFingerprint:
    """What identifies a model.

    Attributes:
        parameters: The shape of each parameter by its name; None where it is not known, because a
            rank held a piece of it.
        complete: Whether these are all of its parameters: a recording with ``include`` or
            ``exclude`` knows those it was asked for.
    """

    parameters: Mapping[str, Shape | None]
    complete: bool = True

    @property
    def layers(self) -> tuple[str, ...]:
        """The modules that hold parameters, in their order."""
        return tuple(_layers(self))

    def to_json(self) -> dict[str, Any]:
        """``{"parameters": {"conv.weight": "8x3x3x3"}, "complete": true}``."""
        shapes = {
            name: None if shape is None else "x".join(map(str, shape)) or "scalar"
            for name, shape in self.parameters.items()
        }
        return {"parameters": shapes, "complete": self.complete}

    @classmethod
    def from_json(cls, document: Any) -> "ModelFingerprint":
        """The inverse of ``to_json``.

        Raises:
            ValueError: If it is something else.
        """
        if not isinstance(document, dict) or set(document) - {"parameters", "complete"}:
            raise ValueError("it is not an object of parameters")
        parameters, complete = document.get("parameters"), document.get("complete", True)
        if not isinstance(parameters, dict) or not isinstance(complete, bool):
            raise ValueError("its parameters are not an object of names and shapes")
        return cls({str(n): _shape_of(text) for n, text in parameters.items()}, complete)


def fingerprint(
    parameters: Iterable[tuple[str, Sequence[int] | None]], *, complete: bool = True
) -> ModelFingerprint | None:
    """The fingerprint of some parameters; None if wrappers leave no name of them.

    Args:
        parameters: Names, as PyTorch gives them, and shapes; None where a shape is not known.
        complete: Whether these are all of the model's.
    """
    listed = list(parameters)
    if not listed or any(name.rpartition(".")[2].startswith(_FLAT) for name, _ in listed):
        return None
    sharded = any(_SHARDED in name.split(".") for name, _ in listed)
    names = without_wrappers([name for name, _ in listed])
    shapes = [None if shape is None or sharded else tuple(shape) for _, shape in listed]
    return ModelFingerprint(dict(zip(names, shapes, strict=True)), complete)


def without_wrappers(names: Sequence[str]) -> list[str]:
    """Names of parameters or modules without what wrappers have put into them."""
    paths = [tuple(p for p in name.split(".") if p and p not in _WRAPPERS) for name in names]
    return [".".join(path) for path in _without_ddp(paths)]


def _without_ddp(paths: Sequence[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Paths without each ``module`` that is all there is in its parent, as DDP makes one."""
    children: dict[tuple[str, ...], set[str]] = {}
    for path in paths:
        for depth in range(len(path)):
            children.setdefault(path[:depth], set()).add(path[depth])
    alone = {parent for parent, inside in children.items() if inside == {_DDP}}
    return [
        tuple(part for i, part in enumerate(path) if path[:i] not in alone or i == len(path) - 1)
        for path in paths
    ]


def _shape_of(text: Any) -> Shape | None:
    if text is None or text == "scalar":
        return None if text is None else ()
    sizes = str(text).split("x")
    if not isinstance(text, str) or not all(s.isascii() and s.isdigit() for s in sizes):
        raise ValueError(f"{text!r} is not a shape")
    return tuple(map(int, sizes))


def other_model(
    difference: "ModelDifference", plan: ModelFingerprint, model: ModelFingerprint, whose: str
) -> str:
    """The sentence for a plan of another model.

    Args:
        difference: Between the plan's model and the other, ``disjoint``.
        plan: The plan's model.
        model: The other.
        whose: Whose model that is: ``run``, ``script``.
    """
    alike = len(difference.same) - len(difference.changed)
    common = "no layer" if not alike else f"{alike} of {difference.layers} layers"
    return (
        f"the plan is for another model: {common} of the plan's ({some_of(plan.layers)}) "
        f"{'is' if alike < 2 else 'are'} the same in the {whose}'s ({some_of(model.layers)}); use "
        f"this model's plan, or write one: mpdiag analyze RUN -o plan.json"
    )


_Layers = dict[str, dict[str, "Shape | None"]]


@dataclass(frozen=True)
class ModelDifference:
    """How two models differ, layer by layer.

    Attributes:
        same: Layers that both have, under the first one's names; ``changed`` are among them.
        changed: Those of which a size differs, or of which one has a parameter more.
        only_first, only_second: Layers that the other lacks; empty where the other is not complete.
        first_prefix, second_prefix: Under which names one lies inside the other; "" for none.
        layers: How many layers the smaller of both has; 0 where two parts of models do not meet, of
            which nothing can be said.
        alike: How many layers are the same, where a changed one counts for the share of all layers
            that both have: in an edited model that is nearly 1.
    """

    same: tuple[str, ...]
    changed: tuple[str, ...]
    only_first: tuple[str, ...]
    only_second: tuple[str, ...]
    first_prefix: str
    second_prefix: str
    layers: int
    alike: float

    @property
    def disjoint(self) -> bool:
        """Whether less than half of the smaller model's layers are the other's too."""
        return 2 * self.alike < self.layers

    @property
    def changes(self) -> str:
        """The layers that differ, the second model as an edit of the first; "" where none does."""
        parts = (("changed", self.changed), ("new", self.only_second), ("gone", self.only_first))
        return "; ".join(f"{what}: {some_of(names)}" for what, names in parts if names)


def compare_models(first: ModelFingerprint, second: ModelFingerprint) -> ModelDifference:
    """Compare two models by their parameters' names and shapes."""
    a, b = _layers(first), _layers(second)
    whole = _difference(first, second, "", "", a, b)
    pairs = [*((p, "") for p in _prefixes(a)), *(("", q) for q in _prefixes(b))]
    tried = [_difference(first, second, p, q, _inside(a, p), _inside(b, q)) for p, q in pairs]
    below = [d for d in tried if 2 * len(d.changed) < len(d.same)]
    best = max([whole, *below], key=lambda d: d.alike)  # the first of equals
    if not (first.complete or second.complete or best.same):
        return best
    return replace(best, layers=min(len(a), len(b)))


def share_a_layer(first: ModelFingerprint, second: ModelFingerprint) -> bool:
    """Whether a layer of one has the parameters and shapes of one of the other's, by any name."""
    both = [_layers(first).values(), _layers(second).values()]
    return any(a.keys() == b.keys() and not _changed(a, b) for a in both[0] for b in both[1])


def _difference(
    first: ModelFingerprint, second: ModelFingerprint, p: str, q: str, a: _Layers, b: _Layers
) -> ModelDifference:
    """The difference of two models' layers below two prefixes, of which one is empty."""
    same = [name for name in a if name in b and _alike(a[name], b[name])]
    changed = [name for name in same if _changed(a[name], b[name])]
    known = set(same)
    shared = len(same) / max(1, len(a) + len(b) - len(same))
    return ModelDifference(
        tuple(joined(p, name) for name in same),
        tuple(joined(p, name) for name in changed),
        tuple(joined(p, n) for n in a if n not in known) if second.complete else (),
        tuple(joined(q, n) for n in b if n not in known) if first.complete else (),
        p,
        q,
        layers=0,
        alike=len(same) - len(changed) * (1 - shared),
    )


def _layers(model: ModelFingerprint) -> _Layers:
    """Parameters by the module that holds them."""
    found: _Layers = {}
    for name, shape in model.parameters.items():
        layer, _, own = name.rpartition(".")
        found.setdefault(layer, {})[own] = shape
    return found


def _alike(a: Mapping[str, Shape | None], b: Mapping[str, Shape | None]) -> bool:
    """Whether two layers of one name hold the same kinds of parameters; a bias may come or go."""
    shared = [(a[name], b[name]) for name in a if name in b]
    return bool(shared) and all(x is None or y is None or len(x) == len(y) for x, y in shared)


def _changed(a: Mapping[str, Shape | None], b: Mapping[str, Shape | None]) -> bool:
    if set(a) != set(b):
        return True
    return any(a[n] != b[n] and a[n] is not None and b[n] is not None for n in a)


def _inside(layers: _Layers, prefix: str) -> _Layers:
    """The layers below a prefix, without it."""
    if not prefix:
        return layers
    cut = len(prefix) + 1
    return {n[cut:]: own for n, own in layers.items() if n == prefix or n.startswith(f"{prefix}.")}


def _prefixes(layers: _Layers) -> list[str]:
    """What a model inside this one could lie under, the shortest first."""
    found = {
        ".".join(name.split(".")[:depth])
        for name in layers
        for depth in range(1, DEEPEST + 1)
        if name.count(".") >= depth - 1 and name
    }
    return sorted(found, key=lambda name: (name.count("."), name))


def joined(prefix: str, name: str) -> str:
    """A name below a prefix, either of which may be empty."""
    return f"{prefix}.{name}" if prefix and name else prefix or name
