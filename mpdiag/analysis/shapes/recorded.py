"""A recorded model with its sizes in classes: from its operations, or from its modules alone."""

import json
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from mpdiag.analysis.shapes.rules import Product, Step
from mpdiag.analysis.shapes.sizes import COMPUTED, DATA, KEYS, SOFTMAX, Size, Sizes, number
from mpdiag.analysis.shapes.tensors import Dims, Tensors
from mpdiag.runs.operations import Operation


@dataclass(frozen=True)
class SizedModel:
    """A model with its sizes in classes.

    Attributes:
        sizes: Their present values and notes.
        dimensions: Those that a user can change.
        products: The matrix products of a training step.
        proved: Whether equal sizes were followed through the recorded operations; else sizes of
            the same number are taken to be the same.
    """

    sizes: Sizes
    dimensions: "tuple[Dimension, ...]"
    products: tuple[Product, ...]
    proved: bool


def from_operations(
    rows: Sequence[Mapping[str, Any]], operations: Iterable[Operation]
) -> SizedModel | None:
    """The sizes as the operations of one step show them.

    None where no step's views were recorded: earlier versions kept no strides.
    """
    forward = _one_step(operations)
    if not any("views" in op.scalars for op in forward):
        return None
    model = model_sizes(rows, Sizes())
    step = Step(Tensors(model.sizes, model.parameters))
    for op in forward:
        step.follow(op)
    step.tensors.join_slices()
    known = {d.module for d in model.dimensions}
    model.dimensions += [
        Dimension(str(row["name"]), "normalized_shape", step.normed[str(row["name"])])
        for row in rows
        if row.get("name") in step.normed.keys() - known and "normalized_shape" in settings_of(row)
    ]
    _one_number(step.products, model.sizes)
    dimensions = (*model.dimensions, *_sequences(step.products, model.sizes))
    return SizedModel(model.sizes, dimensions, tuple(step.products), proved=True)


def _one_number(products: Iterable[Product], sizes: Sizes) -> None:
    """A layer from a width that the script split to one as wide: the script has one number for both.

    The shapes do not prove it, and heads could be padded alone. But scripts mostly compute the head
    from the width of the model, and those would break.
    """
    for product in products:
        if product.kind != "linear" or not product.weight:
            continue
        entering, leaving = product.aligned
        computed = COMPUTED in sizes.notes_of(entering) | sizes.notes_of(leaving)
        if computed and sizes.value(entering) == sizes.value(leaving):
            sizes.equate(entering, leaving)


def _sequences(products: Iterable[Product], sizes: Sizes) -> "list[Dimension]":
    """The lengths of sequences that attention multiplies by, where the data gives them."""
    found: dict[Size, Dimension] = {}
    for product in products:
        for size in map(sizes.resolve, product.aligned):
            notes = sizes.notes_of(size)
            computed = COMPUTED in notes  # as windows are, whose number the script computes
            if size.single is not None and {DATA, SOFTMAX} <= notes and not computed:
                sizes.note(size, KEYS)
                found.setdefault(size, Dimension(product.module, "sequence", size))
    return list(found.values())


def _one_step(operations: Iterable[Operation]) -> list[Operation]:
    """The forward operations of the first recorded step that has any, of one rank."""
    found: list[Operation] = []
    for op in operations:
        if found and (op.rank, op.step) != (found[0].rank, found[0].step):
            break
        if op.phase == "forward":
            found.append(op)
    return found


@dataclass(frozen=True)
class ModuleWork:
    """The matrix work of a module in one training step, by the shapes it was first called with.

    Attributes:
        module: Its name.
        type: Its class.
        kind: ``linear``, ``convolution``, ``rnn`` or ``attention``.
        flops: Of its products with weights: forward, input gradient, weight gradient.
        scores: FLOP of an attention's products of queries, keys and values.
        batch: Size of the batch dimension and rows per entry; (0, 0) if unknown.
        keys: Length of the sequence that an attention looks at.
        channels_last: Whether a convolution's weight lies so in memory; None if the recording does not
            say, or its sizes make no difference.
    """

    module: str
    type: str
    kind: str
    flops: float
    scores: float = 0.0
    batch: tuple[int, int] = (0, 0)
    keys: int = 0
    channels_last: bool | None = None


def module_work(rows: Sequence[Mapping[str, Any]]) -> tuple[ModuleWork, ...]:
    """The matrix work of every module that has any and was called."""
    weights = _matrix_elements(rows)
    found = (_one_work(row, weights) for row in rows if row.get("what") == "module")
    return tuple(work for work in found if work is not None)


def input_sizes(rows: Sequence[Mapping[str, Any]]) -> frozenset[int]:
    """The sizes of the model's own inputs; none where they were not recorded."""
    roots = (r for r in rows if r.get("what") == "module" and r.get("name") == "")
    return frozenset(n for r in roots for shape in _shapes(r.get("input_shapes")) for n in shape)


def largest_output(rows: Sequence[Mapping[str, Any]]) -> int:
    """Values of the largest tensor that a module returned to the script, not to another module."""
    called = [
        (str(row["name"]).split(".") if row["name"] else [], shapes)
        for row in rows
        if row.get("what") == "module" and (shapes := _shapes(row.get("output_shapes")))
    ]
    most, outer = 0, [""]
    for path, shapes in sorted(called):  # a module comes right before those inside it
        if path[: len(outer)] != outer:
            outer, most = path, max(most, *map(math.prod, shapes))
    return most


def _matrix_elements(rows: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """Elements of the weights of each module, without its vectors."""
    found: dict[str, int] = {}
    for row in rows:
        if row.get("what") == "parameter" and len(row.get("shape") or ()) > 1:
            for name in (str(row["name"]), *map(str, row.get("aliases") or ())):
                owner = name.rpartition(".")[0]
                found[owner] = found.get(owner, 0) + math.prod(map(int, row["shape"]))
    return found


def _one_work(row: Mapping[str, Any], weights: Mapping[str, int]) -> ModuleWork | None:
    name, kind, settings = str(row.get("name")), str(row.get("type")), settings_of(row)
    inputs, outputs = _shapes(row.get("input_shapes")), _shapes(row.get("output_shapes"))
    x, y = inputs[0] if inputs else (), outputs[0] if outputs else ()
    elements = 6.0 * weights.get(name, 0)
    if {"in_features", "out_features"} <= settings.keys():
        if not x or x[-1] != settings["in_features"]:
            return None
        rows = math.prod(x[:-1])
        batch = (x[0], rows // x[0]) if len(x) > 1 and x[0] else (0, 0)
        return ModuleWork(name, kind, "linear", elements * rows, batch=batch)
    if {"in_channels", "out_channels", "kernel_size"} <= settings.keys():
        rank = len(settings["kernel_size"])
        if not rank + 1 <= len(x) == len(y) <= rank + 2:
            return None
        images = x[0] if len(x) == rank + 2 else 1
        pixels = math.prod((x if "Transpose" in kind else y)[-rank:])
        flops, last = elements * images * pixels, settings.get("channels_last")
        return ModuleWork(name, kind, "convolution", flops, channels_last=last)
    if {"input_size", "hidden_size"} <= settings.keys():
        if not x or x[-1] != settings["input_size"]:
            return None
        known = len(x) == (2 if "Cell" in kind else 3)
        at = 0 if settings.get("batch_first") or "Cell" in kind else 1
        batch = (x[at], 1) if known else (0, 0)
        return ModuleWork(name, kind, "rnn", elements * math.prod(x[:-1]), batch=batch)
    if {"embed_dim", "num_heads"} <= settings.keys():
        return _attention_work(name, kind, settings, inputs)
    return None


def _attention_work(
    name: str, kind: str, settings: Mapping[str, Any], inputs: Sequence[tuple[int, ...]]
) -> ModuleWork | None:
    width = int(settings["embed_dim"])
    query = inputs[0] if inputs else ()
    key = inputs[1] if len(inputs) > 1 else query
    if len(query) not in (2, 3) or query[-1] != width or len(key) != len(query):
        return None
    if not settings["num_heads"]:
        return None
    at = 1 if settings.get("batch_first") else 0
    batch = query[1 - at] if len(query) == 3 else 1
    queries, keys = (query[at], key[at]) if len(query) == 3 else (query[0], key[0])
    projections = 12.0 * batch * (queries + keys) * width * width
    scores = 14.0 * batch * queries * keys * width  # two products forward, five backward
    return ModuleWork(name, kind, "attention", projections, scores, (batch, queries), keys)


def _shapes(text: Any) -> list[tuple[int, ...]]:
    """Recorded shapes; () for one where a size has no number."""
    try:
        read = json.loads(text) if isinstance(text, str) else None
    except ValueError:
        read = None
    return [
        tuple(shape)
        if isinstance(shape, list) and all(type(n) is int and n >= 0 for n in shape)
        else ()
        for shape in (read if isinstance(read, list) else [])
    ]


_PAIRS = {
    "linear": ("in_features", "out_features"),
    "convolution": ("in_channels", "out_channels"),
    "rnn": ("input_size", "hidden_size"),
    "attention": ("embed_dim", "embed_dim"),
}


def from_modules(rows: Sequence[Mapping[str, Any]], works: Sequence[ModuleWork]) -> SizedModel:
    """The sizes as settings of modules show them: those of the same number are the same.

    That is no proof. It keeps sizes that must be equal equal, and groups and heads whole.

    Args:
        rows: The run's table of modules and parameters.
        works: The matrix work of its modules.
    """
    model = model_sizes(rows, Sizes())
    sizes = model.sizes
    dimensions = [d for d in model.dimensions if not d.name.endswith("]")]
    outputs = {sizes.value(d.size) for d in dimensions if d.name == "out_features"}
    of_number: dict[int, Size] = {}
    for d in dimensions:
        value = sizes.value(d.size)
        if d.name != "num_embeddings" or value in outputs:
            sizes.equate(of_number.setdefault(value, d.size), d.size)
    by_module: dict[str, dict[str, Dimension]] = {}
    for d in dimensions:
        by_module.setdefault(d.module, {})[d.name] = d
    products = []
    for work in works:
        named = by_module.get(work.module, {})
        pair = [named[n] for n in _PAIRS[work.kind] if n in named]
        grows = tuple(d.size for d in pair)
        parts = tuple(sizes.part(d.size, d.count) for d in pair)
        if "groups" in named:  # a depthwise convolution, which no padding helps
            parts = ()
        if work.kind == "attention" and parts:
            keys = sizes.new(work.keys, DATA, KEYS)
            dimensions.append(Dimension(work.module, "sequence", keys))
            scores = (parts[0], keys)
            products.append(Product(work.module, work.kind, work.scores, scores, scores))
            parts = grows
        products.append(Product(work.module, work.kind, work.flops, grows, parts))
    return SizedModel(sizes, tuple(dimensions), tuple(products), proved=False)


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
    """The sizes of a model, from the run's table of modules and parameters.

    A module's settings say what its parameters' shapes do not: groups, heads, gates.
    """
    model = ModelSizes(sizes)
    for row in rows:
        if row.get("what") == "parameter" and row.get("shape") is not None:
            dims = [sizes.new(int(n)) for n in row["shape"]]
            for name in (str(row["name"]), *map(str, row.get("aliases") or ())):
                model.parameters[name] = dims
    covered: set[str] = set()  # modules with settings that say the sizes of their parameters
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
