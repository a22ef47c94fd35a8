"""Which sizes of a recorded model to pad for Tensor Cores, and what that costs and gains.

No GPU is needed: the recording knows the shapes. The sizes a user can change are features,
channels, hidden sizes, vocabulary, heads, sequence and batch. Sources: NVIDIA, *Training with Mixed
Precision User Guide*, section 2.2 (shape constraints); *Convolutional Layers User's Guide* (first
layers with few channels); *Recurrent Layers User's Guide*.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import TYPE_CHECKING, Any

from mpdiag.analysis.findings import Finding
from mpdiag.analysis.shapes.model_work import ModuleWork, model_work
from mpdiag.analysis.shapes.recorded import from_modules, from_operations
from mpdiag.analysis.shapes.rules import (
    BATCH_NORM,
    CLASSES,
    KEYS,
    NORM,
    REDUCED,
    SOFTMAX,
    TRANSPOSED,
)
from mpdiag.analysis.shapes.solution import Solved, Wanted, misaligned, solve_sizes
from mpdiag.analysis.shapes.tensors import COMPUTED, DATA, MADE
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

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from mpdiag.analysis.shapes.model_sizes import ModelSize
    from mpdiag.runs.run import Run

_FEW_CHANNELS = 4  # cuDNN has special kernels for images: up to four channels are padded to four
_EIGHT_BIT = "int8"
_WORTH = 0.05  # share of a model's matrix work from which there is a finding


def judge_shapes(
    run: Run, target: str, shards: int = 1
) -> tuple[tuple[ShapeAdvice, ...], list[Finding]]:
    """What ``advise_shapes`` and ``shape_findings`` say, with the sizes solved once."""
    works = model_work(run.modules())
    solved = solve_run(run, Wanted(target, recorded_generation(run.meta), shards))
    return _advice(solved, works), _findings(solved, works)


def advise_shapes(
    run: Run, target: str, *, shards: int = 1, worthwhile: bool = True
) -> tuple[ShapeAdvice, ...]:
    """The dimensions to pad: one set that fits together, those with the most matrix work first.

    Args:
        run: The recording.
        target: The format to train in: one with Tensor Core rules, or a block format.
        shards: Into how many parts tensor parallelism cuts weights.
        worthwhile: Only what is expected to gain more than it costs; else every size that can be
            a multiple becomes one.
    """
    wanted = Wanted(target, recorded_generation(run.meta), shards, worthwhile)
    return _advice(solve_run(run, wanted), model_work(run.modules()))


def shape_findings(run: Run, target: str, *, shards: int = 1) -> list[Finding]:
    """Findings about a model's shapes, in addition to the advice in the plan.

    Args:
        run: The recording.
        target: The format to train in.
        shards: Into how many parts tensor parallelism cuts weights.
    """
    return judge_shapes(run, target, shards)[1]


def _findings(solved: Solved, works: Sequence[ModuleWork]) -> list[Finding]:
    whole = sum(w.flops for w in works) or 1
    found = []
    # Layout matters from two dimensions on, and not for depthwise ones, which memory limits.
    images = [w for w in works if w.kind == "convolution" and w.type.startswith(("Conv2", "Conv3"))]
    share = sum(w.flops for w in images) / whole
    if images and share >= _WORTH:
        found.append(
            Finding(
                severity="info",
                code="channels-last",
                message=f"{percent(share)} of the matrix work is convolutions; Tensor Cores compute "
                "them in channels_last, and any other layout is converted back and forth",
                evidence={"share_of_flops": share, "modules": [w.module for w in images]},
                fix="use model.to(memory_format=torch.channels_last), and the same for the images",
            )
        )
    shares = solved.shares() | {w.module: w.flops / whole for w in works if w.works}
    padded_sizes = [s for s in solved.model.sizes if solved.new(s.size) != solved.old(s.size)]
    touched = {s.module for s in padded_sizes if s.module}
    share = sum(shares.get(name, 0.0) for name in touched)
    if touched and share >= _WORTH:
        found.append(
            Finding(
                severity="info",
                code="shapes-to-pad",
                message=f"{counted(len(touched), 'layer')} ({percent(share)} of the matrix work) "
                f"{'has' if len(touched) == 1 else 'have'} sizes that Tensor Cores cannot read at "
                "full width",
                evidence={
                    "share_of_flops": share,
                    "modules": sorted(touched),
                    "added_flops": solved.cost,
                    "expected_time": solved.expected_time,
                },
                fix="pad them as plan.shapes says, all of them"
                + (
                    ": the recorded operations fit together with these sizes"
                    if all(_proved(solved, size) for size in padded_sizes)
                    else "; that the new sizes fit together is not proved"
                ),
            )
        )
    return [*found, *_left_alone(solved, shares), *_undivided_heads(solved)]


def _undivided_heads(solved: Solved) -> list[Finding]:
    """Attention whose heads tensor parallelism cannot share out: a shard takes whole heads."""
    shards = solved.wanted.shards
    heads: dict[str, set[int]] = {}
    for size in solved.model.sizes:
        if "heads" in size.parts:
            heads.setdefault(size.module, set()).add(int(size.parts.split()[0]))
    for product in solved.model.products:
        if product.heads:
            heads.setdefault(product.module, set()).update(product.heads)
    odd = {name: sorted(n for n in found if n % shards) for name, found in heads.items()}
    odd = {name: found for name, found in odd.items() if found}
    if not odd:
        return []
    most = math.gcd(*(n for found in heads.values() for n in found))
    fewer = f", or parts that divide {most}" if most > 1 else ""
    return [
        Finding(
            severity="warning",
            code="heads-not-divisible",
            message=f"{counted(len(odd), 'attention layer')} cannot be split into {shards} "
            f"tensor-parallel parts: {_numbers_of(odd)} heads, and each part takes whole heads",
            evidence={"shards": shards, "heads": odd},
            fix=f"use a number of heads that is a multiple of {shards}{fewer}",
        )
    ]


def _numbers_of(odd: Mapping[str, Sequence[int]]) -> str:
    return " and ".join(map(str, sorted({n for found in odd.values() for n in found})))


def _left_alone(solved: Solved, shares: Mapping[str, float]) -> list[Finding]:
    """The sizes that no padding is advised for, if much of the work has them."""
    left = misaligned(solved)
    share = sum(shares.get(name, 0.0) for name in {name for name, _ in left})
    if not left or share < _WORTH:
        return []
    multiple = solved.wanted.multiple
    sizes = [
        {
            "module": name,
            "size": (now := solved.new(size)),
            "padded": padded(now, multiple),
            "growth": padded(now, multiple) / now - 1,
            "reason": solved.why_left(size),
        }
        for name, size in left
    ]
    return [
        Finding(
            severity="info",
            code="shapes-left-alone",
            message=f"{counted(len(sizes), 'size')} that {'is no' if len(sizes) == 1 else 'are no'} "
            f"{'multiple' if len(sizes) == 1 else 'multiples'} of {multiple} should stay: to pad "
            "costs more work than it is expected to save, or other sizes do not allow it",
            evidence={"share_of_flops": share, "sizes": sizes},
            fix=_other_heads(solved),
        )
    ]


def _other_heads(solved: Solved) -> str:
    """Another number of heads where attention keeps an odd head size; "" where there is none."""
    multiple = solved.wanted.multiple
    for size in solved.model.sizes:
        width = solved.new(size.size)
        count = int(size.parts.split()[0]) if "heads" in size.parts else 0
        if not count or width // count % multiple == 0:
            continue
        old = width // count
        heads = (multiple * n for n in range(1, 1 + 2 * old // multiple + 1))
        wide, head = min((padded(width, h), abs(h - old), h)[::2] for h in heads)
        return (
            f"{size.module or 'the model'}: {wide // head} heads of {head} need {size.dimension} "
            f"{wide} alone, in place of {count} heads of {old}"
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


def advise(
    works: Sequence[ModuleWork],
    target: str,
    gpu: str | None,
    rows: Sequence[Mapping[str, Any]] = (),
) -> tuple[ShapeAdvice, ...]:
    """The dimensions to pad, from the matrix work of a model's modules alone.

    Args:
        works: The matrix work of each module.
        target: mpdiag's name of a format with Tensor Core rules: ``fp16``, ``bf16``, ``fp8_e4m3`` …
        gpu: A generation; None for the rule that holds for all.
        rows: The table of modules, which shows shared weights.
    """
    model = from_modules(works, _vocabulary(works, rows))
    return _advice(solve_sizes(model, Wanted(target, gpu)), works)


def solve_run(run: Run, wanted: Wanted) -> Solved:
    """A recorded model's sizes, solved together.

    Args:
        run: The recording.
        wanted: The format, the GPU and the shards to solve them for.
    """
    rows = run.modules()
    model = from_operations(rows, run.operations())
    if model is None:
        works = model_work(rows)
        model = from_modules(works, _vocabulary(works, rows))
    return solve_sizes(model, wanted)


def _advice(solved: Solved, works: Sequence[ModuleWork]) -> tuple[ShapeAdvice, ...]:
    """What changes, those with the most matrix work first, and the batch."""
    whole = sum(w.flops for w in works) or 1
    shares = solved.shares() | {w.module: w.flops / whole for w in works if w.works}
    found = [
        _one(solved, size, shares.get(size.module, 0.0))
        for size in solved.model.sizes
        if solved.new(size.size) != solved.old(size.size)
    ]
    found.sort(key=lambda a: -float(a.evidence["share_of_flops"]))
    wanted = solved.wanted
    return (*found, *_batch(works, wanted.target, wanted.generation, whole))


def _one(solved: Solved, size: ModelSize, share: float) -> ShapeAdvice:
    wanted, unknowns = solved.wanted, solved.model.unknowns
    old, new = solved.old(size.size), solved.new(size.size)
    growth = new / old - 1
    before, after = _at_once(old, wanted.target), _at_once(new, wanted.target)
    parts = _parts(size, old, new)
    notes = unknowns.notes_of(size.size)
    proved = _proved(solved, size)
    together = _together(solved, size)
    care = _care(size, notes, followed=solved.model.proved)
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
        "padded_best": padded(old, _best(wanted)),
        **_by_format(size, old, wanted.shards),
        "parts": parts,
        "together_with": together,
        "proved": proved,
        "care": care,
        "model_cost_flops": solved.cost,
        "model_expected_time": solved.expected_time,
    }
    reason = _why(size.dimension, old, new, wanted)
    clauses = [reason, parts, _price(growth, before, after), *care]
    return ShapeAdvice(
        size.module, size.dimension, old, new, "; ".join(c for c in clauses if c), evidence
    )


def _proved(solved: Solved, size: ModelSize) -> bool:
    """Whether the recorded operations show all that depends on a size."""
    return solved.model.proved and COMPUTED not in solved.model.unknowns.notes_of(size.size)


def _at_once(value: int, target: str) -> int:
    return values_in_step(value, target if target in BYTES else "fp8")


def _best(wanted: Wanted) -> int:
    if wanted.target not in BYTES:
        return wanted.multiple
    return alignment(wanted.target, wanted.generation).best


def _by_format(size: ModelSize, old: int, shards: int) -> dict[str, int]:
    """The size in formats of eight bits and fewer, each part and shard a multiple of the block."""
    parts = int(size.parts.split()[0]) if size.parts else 1
    formats = ("fp8_e4m3", "mxfp8", "nvfp4", "fp8_128x128")
    return {
        f"padded_{name}": parts * padded(old // parts, multiple_for(name, None) * shards)
        for name in formats
    }


def _parts(size: ModelSize, old: int, new: int) -> str:
    """What a size is made of before and after: ``3 groups of 12 → 16``."""
    if not size.parts:
        return ""
    count = int(size.parts.split()[0])
    return size.parts.format(f"{old // count} → {new // count}")


def _together(solved: Solved, size: ModelSize) -> list[str]:
    """The other sizes that depend on the same unknowns, and so must change with it."""
    mine = solved.model.unknowns.resolve(size.size).unknowns
    return [
        f"{other.module}.{other.dimension}" if other.module else other.dimension
        for other in solved.model.sizes
        if other is not size and mine & solved.model.unknowns.resolve(other.size).unknowns
    ]


_CARE = (
    (TRANSPOSED, "slice off added channels where a transposed convolution makes the result"),
    (NORM, "a layer or group norm counts the added values: train with them, or mask them"),
    (BATCH_NORM, "batch norm treats added channels by themselves: nothing to mask there"),
    (REDUCED, "a sum or mean over it counts the added values: slice them off before it"),
    (MADE, "the script makes tensors of this size"),
)


def _care(size: ModelSize, notes: frozenset[str], *, followed: bool) -> list[str]:
    """What must be masked, sliced or checked where a size is padded, in clauses."""
    found = []
    if {KEYS, DATA} <= notes:
        found.append("mask the added positions in attention and leave them out of the loss")
    elif {CLASSES, SOFTMAX} & notes and size.dimension != "num_embeddings":
        found.append("mask the added classes with −inf before softmax and loss, or slice them off")
    if DATA in notes and KEYS not in notes:
        found.append("the data has this size: fill it up with zeros")
    found += [words for note, words in _CARE if note in notes]
    if not followed:
        found.append("not proved: sizes of the same number are taken to be the same")
    elif COMPUTED in notes:
        found.append(
            "not proved: the script splits this size (view, reshape, chunk), and must compute the "
            "parts from it"
        )
    return found


def _vocabulary(works: Sequence[ModuleWork], rows: Sequence[Mapping[str, Any]]) -> set[str]:
    """Embeddings whose vocabulary is also the width of an output layer."""
    outputs = {
        size for w in works if w.kind == "linear" for n, size in w.sizes if n == "out_features"
    }
    shared = {
        name.rpartition(".")[0]
        for row in rows
        if row.get("what") == "parameter" and row.get("aliases")
        for name in (str(row.get("name")), *map(str, row["aliases"]))
    }
    return {
        w.module
        for w in works
        if w.kind == "embedding"
        and (w.module in shared or dict(w.sizes)["num_embeddings"] in outputs)
    }


def _why(dimension: str, old: int, new: int, wanted: Wanted) -> str:
    multiple, gpu, target = wanted.multiple, wanted.generation, wanted.target
    if dimension == "num_embeddings":
        return "the vocabulary is also the width of the output layer: pad both, and mask the added words"
    if new % multiple and old < _FEW_CHANNELS and new == _FEW_CHANNELS:
        return "in channels_last, first layers read images of 4 channels faster than of 3"
    if wanted.shards > 1:
        return f"each of {wanted.shards} shards should have a multiple of {multiple} in {target.upper()}"
    if target not in BYTES:
        return f"{target.upper()} scales blocks of {multiple} values together"
    if gpu in {"hopper", "blackwell"}:
        return (
            f"sizes that are not multiples of {multiple} fall back to kernels older than "
            f"{gpu.title()}'s"
        )
    if gpu in {"volta", "turing"}:
        return (
            f"cuBLAS before 11 needs multiples of {multiple} for Tensor Cores; newer versions are "
            "slower without them"
        )
    return f"Tensor Cores read {multiple} values of {target.upper()} at once"


def _price(growth: float, before: int, after: int) -> str:
    return f"padding adds {percent(growth)} and allows loads of {after} values instead of {before}"


def _batch(
    works: Sequence[ModuleWork], target: str, gpu: str | None, whole: int
) -> tuple[ShapeAdvice, ...]:
    """Advice on the batch size, if the rows of matrix products are not a multiple."""
    multiple = multiple_for(target, gpu)
    odd = [w for w in works if w.batch[0] > 1 and (w.batch[0] * w.batch[1]) % multiple]
    if not odd:
        return ()
    size = Counter(w.batch[0] for w in odd).most_common(1)[0][0]
    rows = [w.batch[1] for w in odd if w.batch[0] == size]
    new = next(
        b for b in range(size, size + multiple + 1) if all(b * r % multiple == 0 for r in rows)
    )
    share = sum(w.flops for w in odd) / whole
    evidence = {
        "format": target,
        "generation": gpu,
        "multiple": multiple,
        "share_of_flops": share,
        "modules": [w.module for w in odd],
    }
    reason = (
        f"rows of matrix products in multiples of {multiple} fill Tensor Core tiles; weight gradients "
        "sum over them (use drop_last=True if the last batch is smaller)"
    )
    return (ShapeAdvice("", "batch", size, new, reason, evidence),)
