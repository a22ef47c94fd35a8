"""Which sizes of a recorded model to pad for Tensor Cores, and what that costs and gains.

No GPU is needed: the recording knows the shapes. The sizes a user can change are features,
channels, hidden sizes, vocabulary, heads, sequence and batch. Sources: NVIDIA, *Training with Mixed
Precision User Guide*, section 2.2 (shape constraints); *Convolutional Layers User's Guide* (first
layers with few channels); *Recurrent Layers User's Guide*.
"""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mpdiag.analysis.findings import Finding, info, warning
from mpdiag.analysis.shapes.recorded import (
    Dimension,
    ModuleWork,
    from_modules,
    from_operations,
    input_sizes,
    module_work,
)
from mpdiag.analysis.shapes.sizes import (
    BATCH_NORM,
    CLASSES,
    COMPUTED,
    DATA,
    FEW_CHANNELS,
    KEYS,
    MADE,
    NORM,
    REDUCED,
    SOFTMAX,
    TRANSPOSED,
)
from mpdiag.analysis.shapes.solution import Solved, Wanted, solve_sizes
from mpdiag.display.wording import counted, percent
from mpdiag.hardware.alignment import (
    BYTES,
    alignment,
    generation,
    multiple_for,
    padded,
    values_in_step,
)
from mpdiag.plan import ShapeAdvice
from mpdiag.runs.run import Run

_EIGHT_BIT = "int8"
_MOST_NAMED = 50  # sizes that one entry names, or a plan would grow as the square of its layers
_WORTH = 0.05  # share of a model's matrix work from which there is a finding


def advise_shapes(run: Run, wanted: Wanted) -> tuple[tuple[ShapeAdvice, ...], tuple[Finding, ...]]:
    """The dimensions to pad, one set that fits together, and findings about a model's shapes.

    Those with the most matrix work come first. A set that touches little of it is not worth a
    change of the model: then none is named, in no report and no export.
    """
    rows = run.modules()
    works = module_work(rows)
    solved = solve_run(run, wanted)
    batch = tuple(_batch(works, wanted, input_sizes(rows)))
    share = max(_touched(solved)[1], *(float(b.evidence["share_of_flops"]) for b in batch), 0.0)
    advice = (*_advice(solved), *batch) if share >= _WORTH else ()
    return advice, tuple(_findings(solved, works))


def _touched(solved: Solved) -> tuple[set[str], float]:
    """The modules with a size that changes, and their share of the matrix work."""
    changed = {
        d.module for d in solved.model.dimensions if solved.new(d.size) != solved.old(d.size)
    }
    touched = changed - {""}
    return touched, sum(solved.shares.get(name, 0.0) for name in touched)


def solve_run(run: Run, wanted: Wanted) -> Solved:
    """A recorded model's sizes, solved together."""
    rows = run.modules()
    model = from_operations(rows, run.operations()) or from_modules(rows, module_work(rows))
    return solve_sizes(model, wanted)


def _findings(solved: Solved, works: Sequence[ModuleWork]) -> Iterator[Finding]:
    total = sum(w.flops + w.scores for w in works) or 1
    # Layout matters from two dimensions on, and not for depthwise ones, which memory limits.
    images = [w for w in works if w.kind == "convolution" and w.type.startswith(("Conv2", "Conv3"))]
    if any(w.channels_last for w in images):  # of the others, a part may lie so as well
        images = [w for w in images if w.channels_last is False]
    share = sum(w.flops for w in images) / total
    if images and share >= _WORTH:
        yield info(
            code="channels-last",
            message=f"{percent(share)} of the matrix FLOPs are convolutions, which Tensor Cores compute "
            "in channels_last; the library converts other layouts back and forth",
            evidence={"share_of_flops": share, "modules": [w.module for w in images]},
            fix="use model.to(memory_format=torch.channels_last), and convert the images, too",
        )
    changed = [d for d in solved.model.dimensions if solved.new(d.size) != solved.old(d.size)]
    touched, share = _touched(solved)
    if touched and share >= _WORTH:
        fits = all(_proved(solved, d) for d in changed)
        yield info(
            code="shapes-to-pad",
            message=f"{counted(len(touched), 'layer')} ({percent(share)} of the matrix FLOPs) "
            f"{'has' if len(touched) == 1 else 'have'} misaligned sizes, so Tensor Cores load "
            f"{'it' if len(touched) == 1 else 'them'} slowly",
            evidence={
                "share_of_flops": share,
                "modules": sorted(touched),
                "added_flops": solved.cost,
                "expected_time": solved.expected_time,
            },
            fix="pad them as listed in plan.shapes; "
            + (
                "the recorded operations fit together with the new sizes"
                if fits
                else "check that the new sizes fit together"
            ),
        )
    yield from _left_alone(solved)
    yield from _undivided_heads(solved)


def _undivided_heads(solved: Solved) -> Iterator[Finding]:
    """Attention whose heads tensor parallelism cannot share out: a shard takes whole heads."""
    shards = solved.wanted.shards
    heads: dict[str, set[int]] = {}
    for d in solved.model.dimensions:
        if d.parts == "heads":
            heads.setdefault(d.module, set()).add(d.count)
    for product in solved.model.products:
        if product.heads:
            heads.setdefault(product.module, set()).update(product.heads)
    odd = {
        module: sorted(n for n in counts if n % shards)
        for module, counts in heads.items()
        if any(n % shards for n in counts)
    }
    if not odd:
        return
    most = math.gcd(*(n for counts in heads.values() for n in counts))
    fewer = f", or a number of parts that divides {most}" if most > 1 else ""
    numbers = " and ".join(map(str, sorted({n for counts in odd.values() for n in counts})))
    yield warning(
        code="heads-not-divisible",
        message=f"{counted(len(odd), 'attention layer')} cannot be split into {shards} "
        f"tensor-parallel parts: each takes whole heads, and there are {numbers}",
        evidence={"shards": shards, "heads": odd},
        fix=f"use a number of heads that is a multiple of {shards}{fewer}",
    )


def _left_alone(solved: Solved) -> Iterator[Finding]:
    """The sizes that no padding is advised for, if much of the work has them."""
    # A size that changes is in ``shapes-to-pad``, though it may become no whole multiple.
    left = [(m, size) for m, size in solved.misaligned if solved.new(size) == solved.old(size)]
    share = sum(solved.shares.get(name, 0.0) for name in {name for name, _ in left})
    if not left or share < _WORTH:
        return
    multiple = solved.wanted.multiple
    sizes = [
        {
            "module": module,
            "size": (now := solved.old(size)),
            "padded": padded(now, multiple),
            "growth": padded(now, multiple) / now - 1,
            "reason": "padding would add as many FLOPs as it should save, or nearly as many"
            if size.classes
            else "the script fixes it elsewhere",
        }
        for module, size in left
    ]
    yield info(
        code="shapes-left-alone",
        message=f"{counted(len(sizes), 'size')} that {'is not a' if len(sizes) == 1 else 'are not'} "
        f"{'multiple' if len(sizes) == 1 else 'multiples'} of {multiple} should not be padded: that "
        "would not save time, or the script fixes the size elsewhere",
        evidence={"share_of_flops": share, "sizes": sizes},
        fix=_other_heads(solved),
    )


def _other_heads(solved: Solved) -> str:
    """Another number of heads where attention keeps an odd head size; "" where there is none."""
    multiple = solved.wanted.multiple
    of_modules = [
        (d.module, f"{d.name} {{}} alone", d.count, solved.new(d.size) // d.count)
        for d in solved.model.dimensions
        if d.parts == "heads"
    ]
    of_products = [
        (p.module, "{} in all", p.heads[0], p.aligned[0].value(solved.values))
        for p in solved.products
        if p.heads
    ]
    for module, words, count, old in (*of_modules, *of_products):
        if old % multiple == 0:
            continue
        # Heads of less than half the size would double their number.
        heads = (multiple * n for n in range(1, 1 + 2 * old // multiple + 1))
        wide, head = min(
            (padded(count * old, h), abs(h - old), h)[::2] for h in heads if 2 * h > old
        )
        return (
            f"{module or 'the model'}: use {wide // head} heads of {head} ({words.format(wide)}) "
            f"instead of {count} heads of {old}"
        )
    return ""


def recorded_generation(meta: Mapping[str, Any]) -> str | None:
    """The generation of the GPU a run was recorded on; None for a CPU or an unknown one."""
    device = meta.get("device") or {}
    text = str(device.get("compute_capability") or "")
    major, _, minor = text.partition(".")
    if not (major.isdecimal() and minor.isdecimal()):
        return None
    return generation((int(major), int(minor)), str(device.get("name") or ""))


def _advice(solved: Solved) -> Iterator[ShapeAdvice]:
    """What changes, those with the most matrix work first."""
    changed = [d for d in solved.model.dimensions if solved.new(d.size) != solved.old(d.size)]
    changed.sort(key=lambda d: -solved.shares.get(d.module, 0.0))
    depending: dict[int, list[Dimension]] = {}
    for d in changed:
        for c in solved.model.sizes.resolve(d.size).classes:
            depending.setdefault(c, []).append(d)
    depthwise = {d.module for d in changed if d.name == "groups"}
    for d in changed:
        yield _one(solved, d, depending, depthwise=d.module in depthwise)


def _one(
    solved: Solved, d: Dimension, depending: Mapping[int, Sequence[Dimension]], *, depthwise: bool
) -> ShapeAdvice:
    wanted, share = solved.wanted, solved.shares.get(d.module, 0.0)
    old, new = solved.old(d.size), solved.new(d.size)
    growth = new / old - 1
    known = wanted.target in BYTES
    before, after = (values_in_step(n, wanted.target if known else "fp8") for n in (old, new))
    best = alignment(wanted.target, wanted.generation).best if known else wanted.multiple
    parts = f"{d.count} {d.parts} of {old // d.count} → {new // d.count}" if d.parts else ""
    care = _care(solved, d)
    others = dict.fromkeys(
        f"{other.module}.{other.name}" if other.module else other.name
        for c in sorted(solved.model.sizes.resolve(d.size).classes)
        for other in _others(depending[c], d)
    )
    evidence = {
        "format": wanted.target,
        "generation": wanted.generation,
        "multiple": wanted.multiple,
        "shards": wanted.shards,
        "share_of_flops": share,
        "cost_flops": share * growth,
        "values_at_once_before": before,
        "values_at_once_after": after,
        "padded_int8": padded(old, alignment(_EIGHT_BIT, wanted.generation).good),
        "padded_best": padded(old, best),
        # In formats of eight bits and fewer each part and shard is a multiple of the block.
        **{
            f"padded_{name}": d.count
            * padded(old // d.count, multiple_for(name, None) * wanted.shards)
            for name in ("fp8_e4m3", "mxfp8", "nvfp4", "fp8_128x128")
        },
        "parts": parts,
        "together_with": list(others),
        "proved": _proved(solved, d),
        "care": care,
        "model_cost_flops": solved.cost,
        "model_expected_time": solved.expected_time,
    }
    price = f"padding adds {percent(growth)}"
    why = _why(d.name, old, new, wanted)
    if depthwise:
        why = "its neighbours need this size; a depthwise convolution does not run on Tensor Cores"
    elif (old // d.count) % (wanted.multiple * wanted.shards) == 0:
        why = "its neighbours need this size"
    elif after > before:
        price += f" and allows loads of {after} values instead of {before}"
    clauses = [why, parts, price, *care]
    return ShapeAdvice(d.module, d.name, old, new, "; ".join(c for c in clauses if c), evidence)


def _others(tied: Sequence[Dimension], d: Dimension) -> Sequence[Dimension]:
    """The sizes that change with one; of very many only the first, which names them all."""
    if len(tied) > _MOST_NAMED and d is not tied[0]:
        return tied[:1]
    return [other for other in tied if other is not d]


def _proved(solved: Solved, d: Dimension) -> bool:
    """Whether the recorded operations show all that depends on a size."""
    return solved.model.proved and COMPUTED not in solved.model.sizes.notes_of(d.size)


_CARE = (
    (
        TRANSPOSED,
        "slice off the added channels if a transposed convolution makes the model's output",
    ),
    (NORM, "a layer or group norm counts the added values: train with them, or mask them"),
    (BATCH_NORM, "batch norm treats each channel separately: mask nothing there"),
    (REDUCED, "a sum or mean over it counts the added values: slice them off before it"),
    (MADE, "the script creates tensors of this size: change it there, too"),
)


def _care(solved: Solved, d: Dimension) -> list[str]:
    """What must be masked, sliced or checked where a size is padded, in clauses."""
    notes, found = solved.model.sizes.notes_of(d.size), []
    if {KEYS, DATA} <= notes:
        found.append("mask the added positions in attention and leave them out of the loss")
    elif {CLASSES, SOFTMAX} & notes and d.name != "num_embeddings":
        found.append("mask the added classes with −inf before softmax and loss, or slice them off")
    if DATA in notes and KEYS not in notes:
        found.append("the data has this size: pad it with zeros")
    found += [words for note, words in _CARE if note in notes]
    if not solved.model.proved:
        found.append("not proved: mpdiag assumes that equal numbers are the same size")
    elif COMPUTED in notes:
        found.append(
            "not proved: the script splits this size (view, reshape, chunk); check that it computes the "
            "parts from it"
        )
    return found


def _why(dimension: str, old: int, new: int, wanted: Wanted) -> str:
    multiple, gpu, target = wanted.multiple, wanted.generation, wanted.target
    if dimension == "num_embeddings":
        return "the vocabulary is also the width of the output layer: pad both, and mask the added words"
    if dimension == "in_channels" and new % multiple and old < FEW_CHANNELS == new:
        return "in channels_last, the first layer reads 4-channel images faster than 3-channel ones"
    if wanted.shards > 1:
        return f"each of {wanted.shards} shards needs a multiple of {multiple} in {target.upper()}"
    if target not in BYTES:
        return f"{target.upper()} has one scale per block of {multiple} values"
    if gpu in {"hopper", "blackwell"}:
        return (
            f"for sizes that are not multiples of {multiple}, libraries use kernels older than "
            f"{gpu.title()}'s"
        )
    if gpu in {"volta", "turing"}:
        return (
            f"cuBLAS before 11 needs multiples of {multiple} for Tensor Cores; newer versions are "
            "slower without them"
        )
    return f"Tensor Cores load {multiple} {target.upper()} values at once"


def _batch(
    works: Sequence[ModuleWork], wanted: Wanted, given: frozenset[int]
) -> tuple[ShapeAdvice, ...]:
    """Advice on the batch size, if the rows of matrix products are not a multiple.

    Args:
        works: The matrix work of the modules.
        wanted: What the sizes are solved for.
        given: The sizes of the model's inputs; a batch is one of them, the number of rows that one
            expert got by chance is not. Empty where they are not known.
    """
    multiple = wanted.multiple
    odd = [w for w in works if w.batch[0] > 1 and (w.batch[0] * w.batch[1]) % multiple]
    odd = [w for w in odd if not given or w.batch[0] in given]
    if not odd:
        return ()
    size = Counter(w.batch[0] for w in odd).most_common(1)[0][0]
    rows = [w.batch[1] for w in odd if w.batch[0] == size]
    new = next(
        b for b in range(size, size + multiple + 1) if all(b * r % multiple == 0 for r in rows)
    )
    total = sum(w.flops + w.scores for w in works) or 1
    evidence = {
        "format": wanted.target,
        "generation": wanted.generation,
        "multiple": multiple,
        "share_of_flops": sum(w.flops + w.scores for w in odd) / total,
        "modules": [w.module for w in odd],
    }
    reason = (
        f"multiples of {multiple} rows fill Tensor Core tiles, also in weight gradients (set "
        "drop_last=True if the last batch is smaller)"
    )
    return (ShapeAdvice("", "batch", size, new, reason, evidence),)
