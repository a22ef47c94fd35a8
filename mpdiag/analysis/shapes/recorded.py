"""A recorded model with its sizes in unknowns: from its operations, or from its modules alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mpdiag.analysis.shapes.model_sizes import ModelSize, model_sizes, settings_of
from mpdiag.analysis.shapes.other_rules import OTHER_RULES
from mpdiag.analysis.shapes.product_rules import PRODUCT_RULES
from mpdiag.analysis.shapes.rules import KEYS, LOOKED_UP, SOFTMAX, Rules, SizedProduct
from mpdiag.analysis.shapes.solution import SizedModel
from mpdiag.analysis.shapes.tensors import COMPUTED, DATA, Tensors
from mpdiag.tensorcores.sizes.expressions import Size, number
from mpdiag.tensorcores.sizes.unknowns import Unknowns

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from mpdiag.analysis.shapes.model_work import ModuleWork
    from mpdiag.runs.operations import Operation

_FEATURES = frozenset(
    """
    in_features out_features in_channels out_channels embedding_dim embed_dim input_size
    hidden_size proj_size
    """.split()
)


def from_operations(
    rows: Sequence[Mapping[str, Any]], operations: Iterable[Operation]
) -> SizedModel | None:
    """The sizes as the operations of one step show them.

    None where no step's views were recorded: earlier versions kept no strides.
    """
    forward = _one_step(operations)
    if not forward or not any("views" in op.scalars for op in forward):
        return None
    unknowns = Unknowns()
    known = model_sizes(rows, unknowns)
    rules = Rules(Tensors(unknowns, known.parameters), PRODUCT_RULES | OTHER_RULES)
    for op in forward:
        rules.follow(op)
    rules.tensors.join_slices()
    sizes = [*known.sizes, *_plain_norms(rows, rules, {s.module for s in known.sizes})]
    _one_number(rules.products, unknowns)
    sizes += _sequences(rules.products, unknowns)
    for a, b in unknowns.refused:  # something of the model was misunderstood there
        unknowns.fix(a)
        unknowns.fix(b)
    return SizedModel(unknowns, tuple(sizes), tuple(rules.products), proved=True)


def _plain_norms(
    rows: Sequence[Mapping[str, Any]], rules: Rules, known: set[str]
) -> Iterable[ModelSize]:
    """The sizes of normalisations without parameters, which only their inputs show."""
    value = rules.tensors.unknowns.value
    for row in rows:
        name, settings = str(row.get("name")), settings_of(row)
        size = rules.normed.get(name)
        if row.get("what") != "module" or size is None or name in known:
            continue
        if "num_features" in settings:
            width = int(settings["num_features"])
            count = value(size) // max(1, width)  # instance norm has a channel for each image's
            if count * width == value(size):
                yield ModelSize(name, "num_features", rules.tensors.split(size, [count, width])[-1])
        elif "normalized_shape" in settings:
            yield ModelSize(name, "normalized_shape", size)
        elif "num_groups" in settings:
            yield ModelSize(name, "num_channels", size)


def _one_number(products: Iterable[SizedProduct], unknowns: Unknowns) -> None:
    """A layer from a width that the script split to one as wide: the script has one number for both.

    The shapes do not prove it, and heads could be padded alone. But scripts mostly compute the head
    from the width of the model, and those would break.
    """
    for product in products:
        if product.kind != "linear" or not product.weight:
            continue
        (_, entering), (_, leaving) = product.aligned
        computed = COMPUTED in unknowns.notes_of(entering) | unknowns.notes_of(leaving)
        if computed and unknowns.value(entering) == unknowns.value(leaving):
            unknowns.equate(entering, leaving)


def _sequences(products: Iterable[SizedProduct], unknowns: Unknowns) -> list[ModelSize]:
    """The lengths of sequences that attention multiplies by, where the data gives them."""
    found: dict[Size, ModelSize] = {}
    for product in products:
        for _, size in product.aligned:
            resolved = unknowns.resolve(size)
            notes = unknowns.notes_of(resolved)
            computed = COMPUTED in notes  # as windows are, whose number the script computes
            if resolved.unknown is not None and {DATA, SOFTMAX} <= notes and not computed:
                unknowns.note(resolved, KEYS)
                found.setdefault(resolved, ModelSize(product.module, "sequence", resolved))
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


def from_modules(works: Sequence[ModuleWork], vocabulary: set[str]) -> SizedModel:
    """The sizes as settings of modules show them: those of the same number are the same.

    That is no proof. It keeps sizes that must be equal equal, and groups and heads whole.

    Args:
        works: The matrix work of each module.
        vocabulary: Embeddings whose vocabulary is the width of an output layer, too.
    """
    unknowns = Unknowns()
    classes: dict[int, Size] = {}
    sizes: list[ModelSize] = []
    products: list[SizedProduct] = []

    def named(work: ModuleWork, dimension: str, value: int) -> Size:
        if dimension == "sequence":
            return unknowns.new(value, DATA, KEYS)
        if dimension == "num_embeddings" and work.module not in vocabulary:
            return unknowns.new(value, LOOKED_UP)
        if value not in classes:
            classes[value] = unknowns.new(value)
        if dimension == "num_embeddings":
            unknowns.note(classes[value], LOOKED_UP)
        return classes[value]

    for work in works:
        mine = {n: named(work, n, v) for n, v in work.sizes if n != "embed_dim / num_heads"}
        words = _divide(work, mine, unknowns)
        sizes += [ModelSize(work.module, n, s, words if n in _FEATURES else "")
                  for n, s in mine.items()]  # fmt: skip
        products += _products(work, mine, unknowns)
    return SizedModel(unknowns, tuple(sizes), tuple(products), proved=False)


def _groups(work: ModuleWork) -> int:
    return max((w.groups for _, w in work.works), default=1)


def _divide(work: ModuleWork, mine: Mapping[str, Size], unknowns: Unknowns) -> str:
    """Say what groups and heads ask of a module's sizes; what they are made of in words."""
    plain = dict(work.sizes)
    if work.kind == "attention":
        heads = plain["embed_dim"] // max(1, plain["embed_dim / num_heads"])
        head = unknowns.new(plain["embed_dim / num_heads"])
        unknowns.equate(mine["embed_dim"], number(heads) * head)
        return f"{heads} heads of {{}}"
    groups = _groups(work)
    if work.kind != "convolution" or groups == 1 or work.depthwise:
        return ""
    for name in ("in_channels", "out_channels"):
        part = unknowns.new(plain[name] // groups)
        unknowns.equate(mine[name], number(groups) * part)
    return f"{groups} groups of {{}}"


def _products(work: ModuleWork, mine: Mapping[str, Size], unknowns: Unknowns) -> list[SizedProduct]:
    plain = dict(work.sizes)
    if work.depthwise or not work.works:
        return []
    if work.kind != "attention":
        order = {
            "linear": ("in_features", "out_features"),
            "convolution": ("in_channels", "out_channels"),
            "rnn": ("input_size", "hidden_size"),
        }[work.kind]
        pair = [mine[n] for n in order]
        groups = _groups(work)
        parts = [_part(unknowns, s, plain[n], groups) for s, n in zip(pair, order, strict=True)]
        return [_product(work, float(work.flops), pair, parts)]
    embed = mine["embed_dim"]
    heads = plain["embed_dim"] // plain["embed_dim / num_heads"]
    head = _part(unknowns, embed, plain["embed_dim"], heads)
    scores = sum(w.flops for _, w in work.works if w.kind == "attention")
    keys = mine["sequence"]
    return [
        _product(work, float(work.flops - scores), [embed, embed], [embed, embed]),
        _product(work, float(scores), [head, keys], [head, keys]),
    ]


def _part(unknowns: Unknowns, size: Size, value: int, parts: int) -> Size:
    if parts == 1:
        return size
    part = unknowns.new(value // parts)
    unknowns.equate(size, number(parts) * part)
    return part


def _product(
    work: ModuleWork, flops: float, grows: list[Size], aligned: list[Size]
) -> SizedProduct:
    names = zip("KN", aligned, strict=True)
    return SizedProduct(work.module, work.kind, flops, tuple(grows), tuple(names), weight=True)
