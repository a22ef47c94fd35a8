"""Which sizes of a recorded model to pad for Tensor Cores, and what that costs and gains.

No GPU is needed: the recording knows the shapes. The sizes a user can change are features,
channels, hidden sizes, vocabulary, heads, sequence and batch. Sources: NVIDIA, *Training with Mixed
Precision User Guide*, section 2.2 (shape constraints); *Convolutional Layers User's Guide* (first
layers with few channels); *Recurrent Layers User's Guide*.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from mpdiag.analysis.findings import Finding
from mpdiag.display.wording import counted
from mpdiag.hardware.alignment import alignment, generation, padded, values_in_step
from mpdiag.plan import ShapeAdvice
from mpdiag.tensorcores.work.model import ModuleWork, model_work

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from mpdiag.runs.run import Run

_FEW_CHANNELS = 4  # cuDNN has special kernels for images: up to four channels are padded to four
_EIGHT_BIT = "int8"
_WORTH = 0.05  # share of a model's matrix work from which there is a finding


def advise_shapes(run: Run, target: str) -> tuple[ShapeAdvice, ...]:
    """The dimensions to pad, those with the most matrix work first.

    Args:
        run: The recording.
        target: The format to train in.
    """
    rows = run.modules()
    return advise(model_work(rows), target, recorded_generation(run.meta), rows)


def shape_findings(run: Run, target: str) -> list[Finding]:
    """Findings about a model's shapes, in addition to the advice in the plan."""
    works = model_work(run.modules())
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
                message=f"{_percent(share)} of the matrix work is convolutions; Tensor Cores compute "
                "them in channels_last, and any other layout is converted back and forth",
                evidence={"share_of_flops": share, "modules": [w.module for w in images]},
                fix="use model.to(memory_format=torch.channels_last), and the same for the images",
            )
        )
    odd = advise(works, target, recorded_generation(run.meta), run.modules())
    touched = {a.module for a in odd if a.module}
    share = sum(w.flops for w in works if w.module in touched) / whole
    if touched and share >= _WORTH:
        found.append(
            Finding(
                severity="info",
                code="shapes-to-pad",
                message=f"{counted(len(touched), 'layer')} ({_percent(share)} of the matrix work) "
                f"{'has' if len(touched) == 1 else 'have'} sizes that Tensor Cores cannot read at "
                "full width",
                evidence={"share_of_flops": share, "modules": sorted(touched)},
                fix="pad them as plan.shapes says",
            )
        )
    return found


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
    """The dimensions to pad, from the matrix work of a model.

    Args:
        works: The matrix work of each module.
        target: mpdiag's name of a format with Tensor Core rules: ``fp16``, ``bf16``, ``fp8_e4m3`` …
        gpu: A generation; None for the rule that holds for all.
        rows: The table of modules, which shows shared weights.
    """
    whole = sum(w.flops for w in works) or 1
    vocabulary = _vocabulary(works, rows)
    found = []
    for work in works:
        for dimension, size in () if work.depthwise else work.sizes:
            multiple = _multiple(work, dimension, size, target, gpu)
            if size > 1 and size % multiple and _matters(work, dimension, vocabulary):
                share = work.flops / whole
                found.append(_padding(work, dimension, size, multiple, target, gpu, share))
    found.sort(key=lambda a: -float(a.evidence["share_of_flops"]))
    return (*found, *_batch(works, target, gpu, whole))


def _multiple(work: ModuleWork, dimension: str, size: int, target: str, gpu: str | None) -> int:
    if work.kind == "convolution" and dimension == "in_channels" and size <= _FEW_CHANNELS:
        return _FEW_CHANNELS
    return alignment(target, gpu).good


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


def _matters(work: ModuleWork, dimension: str, vocabulary: set[str]) -> bool:
    """Whether a dimension needs padding: an embedding that is only looked up does not."""
    return dimension != "num_embeddings" or work.module in vocabulary


def _padding(
    work: ModuleWork,
    dimension: str,
    size: int,
    multiple: int,
    target: str,
    gpu: str | None,
    share: float,
) -> ShapeAdvice:
    new = padded(size, multiple)
    growth = new / size - 1
    before, after = values_in_step(size, target), values_in_step(new, target)
    evidence = {
        "format": target,
        "generation": gpu,
        "multiple": multiple,
        "share_of_flops": share,
        "cost_flops": share * growth,
        "values_at_once_before": before,
        "values_at_once_after": after,
        "padded_int8": padded(size, alignment(_EIGHT_BIT, gpu).good),
        "padded_best": padded(size, alignment(target, gpu).best),
    }
    reason = f"{_why(work, dimension, multiple, target, gpu)}; {_price(growth, before, after)}"
    return ShapeAdvice(work.module, dimension, size, new, reason, evidence)


def _why(work: ModuleWork, dimension: str, multiple: int, target: str, gpu: str | None) -> str:
    if dimension == "num_embeddings":
        return "the vocabulary is also the width of the output layer: pad both, and mask the added words"
    if dimension == "embed_dim / num_heads":
        return (
            f"fused attention needs head sizes that are multiples of {multiple} in {target.upper()}"
        )
    if multiple == _FEW_CHANNELS and work.kind == "convolution":
        return "in channels_last, first layers read images of 4 channels faster than of 3"
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
    words = f"padding adds {growth:.2%} and allows loads of {after} values instead of {before}"
    return words.replace("%", " %")


def _percent(fraction: float) -> str:
    return f"{fraction:.2%}".replace("%", " %")


def _batch(
    works: Sequence[ModuleWork], target: str, gpu: str | None, whole: int
) -> tuple[ShapeAdvice, ...]:
    """Advice on the batch size, if the rows of matrix products are not a multiple."""
    multiple = alignment(target, gpu).good
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
