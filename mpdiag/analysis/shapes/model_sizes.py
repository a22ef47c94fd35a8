"""The sizes that a user gives to a model's modules and parameters, in unknowns.

A module's settings say what its parameters' shapes do not: groups, heads, gates.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from mpdiag.tensorcores.sizes.expressions import Size, number

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from mpdiag.tensorcores.sizes.unknowns import Unknowns

Dims = list[Size]

GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}


@dataclass(frozen=True)
class ModelSize:
    """A size that a user gives to a module or a parameter.

    Attributes:
        module: Name of the module.
        dimension: As the module calls it: ``out_features``; ``weight[1]`` for a parameter's own.
        size: In unknowns.
        parts: What it is made of, in words: ``7 heads of 9``; "" where it is one thing.
    """

    module: str
    dimension: str
    size: Size
    parts: str = ""


@dataclass
class ModelSizes:
    """All of them, with the parameters they come from.

    Attributes:
        parameters: The sizes of each parameter, by all of its names.
        sizes: Those that a user can change.
        heads: Number of heads by attention module, where the module states it.
        groups: Number of groups by convolution or group norm.
    """

    parameters: dict[str, Dims] = field(default_factory=dict)
    sizes: list[ModelSize] = field(default_factory=list)
    heads: dict[str, int] = field(default_factory=dict)
    groups: dict[str, int] = field(default_factory=dict)


def model_sizes(rows: Sequence[Mapping[str, Any]], unknowns: Unknowns) -> ModelSizes:
    """The sizes of a model, from the run's table of modules and parameters."""
    found = ModelSizes()
    for row in rows:
        if row.get("what") != "parameter" or row.get("shape") is None:
            continue
        dims = [unknowns.new(int(n)) for n in row["shape"]]
        for name in (str(row["name"]), *map(str, row.get("aliases") or ())):
            found.parameters[name] = dims
    named: set[str] = set()
    hidden: set[str] = set()  # inside an attention module, whose settings they follow
    for row in rows:
        if row.get("what") == "module":
            _take_in(row, found, unknowns, named, hidden)
    for row in rows:
        if row.get("what") != "parameter" or row.get("shape") is None:
            continue
        name = str(row["name"])
        owner, _, leaf = name.rpartition(".")
        if owner in named or any(name.startswith(f"{h}.") for h in hidden):
            continue
        found.sizes += [
            ModelSize(owner, f"{leaf}[{i}]", dim)
            for i, dim in enumerate(found.parameters[name])
            if dim.unknowns
        ]
    return found


def _take_in(
    row: Mapping[str, Any],
    found: ModelSizes,
    unknowns: Unknowns,
    named: set[str],
    hidden: set[str],
) -> None:
    name, kind, settings = str(row.get("name")), str(row.get("type")), settings_of(row)
    if any(name.startswith(f"{h}.") for h in hidden):
        return
    named.add(name)
    weight = found.parameters.get(f"{name}.weight" if name else "weight")
    sizes: Iterable[tuple[str, Size, str]] = ()
    if {"embed_dim", "num_heads"} <= settings.keys():
        hidden.add(name)
        sizes = _attention(name, settings, found, unknowns)
    elif {"input_size", "hidden_size"} <= settings.keys():
        sizes = _recurrent(name, kind, settings, found, unknowns)
    elif weight is None:
        named.discard(name)
    elif {"in_channels", "out_channels"} <= settings.keys() and len(weight) > 2:
        sizes = _convolution(name, kind, settings, weight, found, unknowns)
    elif "num_groups" in settings:
        groups = found.groups[name] = int(settings["num_groups"])
        part = unknowns.new(unknowns.value(weight[0]) // groups)
        unknowns.equate(weight[0], number(groups) * part)
        sizes = (("num_channels", weight[0], f"{groups} groups of {{}}"),)
    else:
        sizes = _of_weight(kind, settings, weight)
        if not sizes:
            named.discard(name)
    found.sizes += [ModelSize(name, n, size, parts) for n, size, parts in sizes]


_OF_WEIGHT: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("in_features", ("out_features", "in_features")),
    ("num_embeddings", ("num_embeddings", "embedding_dim")),
    ("num_features", ("num_features",)),
)
_BILINEAR = ("out_features", "in1_features", "in2_features")


def _of_weight(
    kind: str, settings: Mapping[str, Any], weight: Dims
) -> tuple[tuple[str, Size, str], ...]:
    """The sizes of a module whose weight has them as they are; () for any other."""
    names: tuple[str, ...] = next((n for setting, n in _OF_WEIGHT if setting in settings), ())
    if "normalized_shape" in settings:
        names = ("normalized_shape",) * len(weight)
    elif "Bilinear" in kind:
        names = _BILINEAR
    if len(names) != len(weight):
        return ()
    return tuple((n, d, "") for n, d in zip(names, weight, strict=True))


def _convolution(
    name: str,
    kind: str,
    settings: Mapping[str, Any],
    weight: Dims,
    found: ModelSizes,
    unknowns: Unknowns,
) -> Iterable[tuple[str, Size, str]]:
    groups, transposed = int(settings.get("groups") or 1), "Transpose" in kind
    narrow = number(groups) * weight[1]
    if groups > 1 and unknowns.value(weight[1]) == 1:  # depthwise
        entering, leaving = weight[0], weight[0]
        factor = unknowns.value(weight[0]) // groups
        if factor > 1 and not transposed:
            entering = unknowns.new(groups)
            unknowns.equate(weight[0], number(factor) * entering)
        if transposed:
            leaving = weight[0]
        return (
            ("in_channels", entering, ""),
            ("out_channels", leaving, ""),
            ("groups", entering, ""),
        )
    if groups > 1:
        found.groups[name] = groups
        part = unknowns.new(unknowns.value(weight[0]) // groups)
        unknowns.equate(weight[0], number(groups) * part)
    words = f"{groups} groups of {{}}" if groups > 1 else ""
    entering, leaving = (weight[0], narrow) if transposed else (narrow, weight[0])
    return (("in_channels", entering, words), ("out_channels", leaving, words))


def _attention(
    name: str, settings: Mapping[str, Any], found: ModelSizes, unknowns: Unknowns
) -> Iterable[tuple[str, Size, str]]:
    width, heads = int(settings["embed_dim"]), int(settings["num_heads"])
    prefix = f"{name}." if name else ""
    out = found.parameters.get(f"{prefix}out_proj.weight")
    if out is None or not heads or width % heads:
        return
    head = unknowns.new(width // heads)
    embed = out[1]
    unknowns.equate(embed, number(heads) * head)
    unknowns.equate(out[0], embed)
    found.heads[name] = heads
    packed = found.parameters.get(f"{prefix}in_proj_weight")
    if packed is not None:
        unknowns.equate(packed[0], number(3) * embed)
        unknowns.equate(packed[1], embed)
    for letter, setting in (("q", ""), ("k", "kdim"), ("v", "vdim")):
        own = found.parameters.get(f"{prefix}{letter}_proj_weight")
        if own is None:
            continue
        unknowns.equate(own[0], embed)
        if setting:
            yield (setting, own[1], "")
        else:
            unknowns.equate(own[1], embed)
    for leaf, count in (("in_proj_bias", 3), ("out_proj.bias", 1), ("bias_k", 1), ("bias_v", 1)):
        bias = found.parameters.get(f"{prefix}{leaf}")
        if bias is not None:
            unknowns.equate(bias[-1], number(count) * embed)
    yield ("embed_dim", embed, f"{heads} heads of {{}}")


def _recurrent(
    name: str,
    kind: str,
    settings: Mapping[str, Any],
    found: ModelSizes,
    unknowns: Unknowns,
) -> Iterable[tuple[str, Size, str]]:
    prefix = f"{name}." if name else ""
    gates = next((n for word, n in GATES.items() if kind.startswith(word)), 1)
    mine = {n.removeprefix(prefix): d for n, d in found.parameters.items() if n.startswith(prefix)}
    first = mine.get("weight_ih_l0", mine.get("weight_ih"))
    recurring = mine.get("weight_hh_l0", mine.get("weight_hh"))
    if first is None or recurring is None:
        return
    hidden = unknowns.new(int(settings["hidden_size"]))
    leaving = recurring[1]
    directions = 2 if settings.get("bidirectional") else 1
    projected = int(settings.get("proj_size") or 0)
    if not projected:
        unknowns.equate(leaving, hidden)
    for leaf, dims in mine.items():
        if leaf.startswith("weight_hr"):
            unknowns.equate(dims[0], leaving)
            unknowns.equate(dims[1], hidden)
            continue
        unknowns.equate(dims[0], number(gates) * hidden)
        if leaf.startswith("weight_hh"):
            unknowns.equate(dims[1], leaving)
        elif leaf.startswith("weight_ih") and "_l0" not in leaf and leaf != "weight_ih":
            unknowns.equate(dims[1], number(directions) * leaving)
        elif leaf.startswith("weight_ih"):
            unknowns.equate(dims[1], first[1])
    yield ("input_size", first[1], "")
    yield ("hidden_size", hidden, "")
    if projected:
        yield ("proj_size", leaving, "")


def settings_of(row: Mapping[str, Any]) -> dict[str, Any]:
    """A module's settings; none where they cannot be read."""
    try:
        read = json.loads(row.get("settings") or "{}")
    except (TypeError, ValueError):
        return {}
    return read if isinstance(read, dict) else {}
