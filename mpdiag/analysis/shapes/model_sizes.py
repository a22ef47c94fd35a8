"""The sizes that a user gives to a model's modules and parameters, in classes.

A module's settings say what its parameters' shapes do not: groups, heads, gates.
"""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from mpdiag.analysis.shapes.sizes import Size, number

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from mpdiag.analysis.shapes.sizes import Sizes
    from mpdiag.analysis.shapes.tensors import Dims

_GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}


@dataclass(frozen=True)
class Dimension:
    """A size that a user gives to a module or a parameter.

    Attributes:
        module: Name of the module.
        name: As the module calls it: ``out_features``; ``weight[1]`` for a parameter's own.
        size: In classes.
        count: Of how many equal parts it is made.
        parts: What the parts are: ``heads``, ``groups``; "" where it is one thing.
    """

    module: str
    name: str
    size: Size
    count: int = 1
    parts: str = ""


@dataclass
class ModelSizes:
    """The sizes of all modules, with the parameters they come from.

    Attributes:
        sizes: The classes.
        parameters: The sizes of each parameter, by all of its names.
        dimensions: Those that a user can change.
    """

    sizes: Sizes
    parameters: dict[str, Dims] = field(default_factory=dict)
    dimensions: list[Dimension] = field(default_factory=list)

    @cached_property
    def by_owner(self) -> Mapping[str, Mapping[str, Dims]]:
        """The sizes of the parameters of each module, by their names in it."""
        found: dict[str, dict[str, Dims]] = defaultdict(dict)
        for name, dims in self.parameters.items():
            owner, _, leaf = name.rpartition(".")
            found[owner][leaf] = dims
        return found


def model_sizes(rows: Sequence[Mapping[str, Any]], sizes: Sizes) -> ModelSizes:
    """The sizes of a model, from the run's table of modules and parameters."""
    model = ModelSizes(sizes)
    for row in rows:
        if row.get("what") == "parameter" and row.get("shape") is not None:
            dims = [sizes.new(int(n)) for n in row["shape"]]
            for name in (str(row["name"]), *map(str, row.get("aliases") or ())):
                model.parameters[name] = dims
    covered: set[str] = set()  # modules whose settings say the sizes of their parameters
    for row in rows:
        if row.get("what") != "module":
            continue
        name, settings = str(row.get("name")), settings_of(row)
        if covered & set(_outer(name)):  # an attention's projection
            continue
        found = [Dimension(name, *of_one) for of_one in _dimensions(model, row, name, settings)]
        if found:
            covered.add(name)
            model.dimensions += found
    for row in rows:
        name = str(row.get("name"))
        owner, _, leaf = name.rpartition(".")
        outside = not covered & {owner, *_outer(name)}
        if row.get("what") == "parameter" and name in model.parameters and outside:
            model.dimensions += [
                Dimension(owner, f"{leaf}[{i}]", size)
                for i, size in enumerate(model.parameters[name])
                if size.classes
            ]
    return model


def _outer(name: str) -> list[str]:
    """The modules that a module or parameter is in, but for the root."""
    return [name[:i] for i, letter in enumerate(name) if letter == "."]


_Named = tuple[str, Size] | tuple[str, Size, int, str]


def _dimensions(
    model: ModelSizes, row: Mapping[str, Any], module: str, settings: Mapping[str, Any]
) -> Iterable[_Named]:
    kind = str(row.get("type"))
    if {"embed_dim", "num_heads"} <= settings.keys():
        return _attention(model, module, settings)
    if {"input_size", "hidden_size"} <= settings.keys():
        return _recurrent(model, module, kind, settings)
    weight = model.by_owner[module].get("weight")
    if weight is None:
        return ()
    if {"in_channels", "out_channels"} <= settings.keys() and len(weight) > 2:
        return _convolution(model, kind, settings, weight)
    if "num_groups" in settings:
        groups = int(settings["num_groups"])
        model.sizes.part(weight[0], groups)
        return (("num_channels", weight[0], groups, "groups"),)
    names: tuple[str, ...] = next((n for key, n in _OF_WEIGHT.items() if key in settings), ())
    if "normalized_shape" in settings:
        names = ("normalized_shape",) * len(weight)
    elif "Bilinear" in kind:
        names = ("out_features", "in1_features", "in2_features")
    return tuple(zip(names, weight, strict=True)) if len(names) == len(weight) else ()


_OF_WEIGHT = {
    "in_features": ("out_features", "in_features"),
    "num_embeddings": ("num_embeddings", "embedding_dim"),
    "num_features": ("num_features",),
}


def _convolution(
    model: ModelSizes, kind: str, settings: Mapping[str, Any], weight: Dims
) -> Iterable[_Named]:
    groups, transposed = int(settings.get("groups") or 1), "Transpose" in kind
    if groups > 1 and model.sizes.value(weight[1]) == 1:  # depthwise
        entering, factor = weight[0], model.sizes.value(weight[0]) // groups
        if factor > 1 and not transposed:
            entering = model.sizes.new(groups)
            model.sizes.equate(weight[0], number(factor) * entering)
        return (("in_channels", entering), ("out_channels", weight[0]), ("groups", entering))
    if groups > 1:
        model.sizes.part(weight[0], groups)
    inner = number(groups) * weight[1]
    entering, leaving = (weight[0], inner) if transposed else (inner, weight[0])
    parts = "groups" if groups > 1 else ""
    return (("in_channels", entering, groups, parts), ("out_channels", leaving, groups, parts))


def _attention(model: ModelSizes, module: str, settings: Mapping[str, Any]) -> Iterable[_Named]:
    width, heads = int(settings["embed_dim"]), int(settings["num_heads"])
    own = dict(model.by_owner[module])
    for leaf, dims in model.by_owner[f"{module}.out_proj" if module else "out_proj"].items():
        own[f"out_proj.{leaf}"] = dims
    if "out_proj.weight" not in own or not heads or width % heads:
        return ()
    embed = own["out_proj.weight"][1]
    model.sizes.part(embed, heads)
    multiples = (
        ("out_proj.weight", 1), ("in_proj_weight", 3), ("in_proj_bias", 3), ("out_proj.bias", 1),
        ("q_proj_weight", 1), ("k_proj_weight", 1), ("v_proj_weight", 1),
    )  # fmt: skip
    for name, count in multiples:
        if name in own:
            model.sizes.equate(own[name][0], number(count) * embed)
    entering = [
        own[n][-1] for n in ("in_proj_weight", "q_proj_weight", "bias_k", "bias_v") if n in own
    ]
    for size in entering:
        model.sizes.equate(size, embed)
    keys = [(f"{letter}dim", own[n][1]) for letter in "kv" if (n := f"{letter}_proj_weight") in own]
    return (*keys, ("embed_dim", embed, heads, "heads"))


def _recurrent(
    model: ModelSizes, module: str, kind: str, settings: Mapping[str, Any]
) -> Iterable[_Named]:
    own, sizes = model.by_owner[module], model.sizes
    gates = next((n for word, n in _GATES.items() if kind.startswith(word)), 1)
    first = own.get("weight_ih_l0", own.get("weight_ih"))
    recurring = own.get("weight_hh_l0", own.get("weight_hh"))
    if first is None or recurring is None:
        return ()
    hidden, leaving = sizes.new(int(settings["hidden_size"])), recurring[1]
    directions = 2 if settings.get("bidirectional") else 1
    projected = bool(settings.get("proj_size"))
    if not projected:
        sizes.equate(leaving, hidden)
    for name, dims in own.items():
        if name.startswith("weight_hr"):
            sizes.equate(dims[0], leaving)
            sizes.equate(dims[1], hidden)
            continue
        sizes.equate(dims[0], number(gates) * hidden)
        if name.startswith("weight_hh"):
            sizes.equate(dims[1], leaving)
        elif name.startswith("weight_ih"):
            below = number(directions) * leaving
            sizes.equate(dims[1], first[1] if "_l0" in name or name == "weight_ih" else below)
    widths = [("input_size", first[1]), ("hidden_size", hidden)]
    return (*widths, ("proj_size", leaving)) if projected else tuple(widths)


def settings_of(row: Mapping[str, Any]) -> dict[str, Any]:
    """A module's settings; none where they cannot be read."""
    try:
        read = json.loads(row.get("settings") or "{}")
    except (TypeError, ValueError):
        return {}
    return read if isinstance(read, dict) else {}
