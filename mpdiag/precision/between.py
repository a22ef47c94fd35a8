"""What a script does to gradients between the backward pass and the optimizer's step.

Read from the recorded operations: gradients that are clipped while they still carry the loss scale, and
sums over ranks in half precision that no DDP or FSDP makes.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

from mpdiag.analysis.findings import Finding, warning
from mpdiag.display.wording import counted, percent
from mpdiag.numerics.sums import sum_bound
from mpdiag.runs.operations import NONE, Operation, TensorRecord
from mpdiag.runs.precision import HALF, LABELS

_UNSCALES = "_amp_foreach_non_finite_check_and_unscale_"
_NORMS = frozenset(("_foreach_norm", "linalg_vector_norm", "norm"))
_MULTIPLIES = frozenset(("mul_", "_foreach_mul_"))
_CLAMPS = frozenset(("clamp_", "clamp_max_", "_foreach_clamp_max_", "_foreach_minimum_"))


def between(operations: Iterable[Operation]) -> Iterator[Finding]:
    """What to know of it.

    Args:
        operations: Of one or more recorded steps.
    """
    steps: dict[tuple[int, int], list[Operation]] = defaultdict(list)
    for operation in operations:
        steps[operation.rank, operation.step].append(operation)
    found: dict[tuple[str, str], Finding] = {}
    for step in steps.values():
        for finding in (*_clipped_scaled(step), *_added_over_ranks(step)):
            found.setdefault((finding.code, finding.evidence["where"]), finding)
    yield from found.values()


def _clipped_scaled(step: Sequence[Operation]) -> Iterator[Finding]:
    """The operation that clips gradients before the scaler divides them by the scale.

    A factor that is no norm's is the loop's own (a mean over micro-batches), and does no harm.
    """
    by_index = {operation.index: operation for operation in step}
    for unscales in (o for o in step if o.op == _UNSCALES):
        inverse = unscales.input("inv_scale")
        scale = 1.0 / inverse.absmax if inverse is not None and inverse.absmax else 1.0
        for index in {t.producer for t in unscales.inputs if t.argument == "self"}:
            clips = by_index.get(index)
            if clips is None or clips.phase != "update" or scale == 1.0:
                continue
            cut = _norm_cut(clips, by_index)
            limit = clips.scalars.get("max", clips.scalars.get("scalar"))
            if cut is not None:
                norm, left = (size / scale for size in cut)
                told = f"unscaled, their norm falls from {norm:.2g} to {left:.2g}"
            elif clips.op in _CLAMPS and isinstance(limit, (int, float)):
                norm, left = None, limit / scale
                told = f"the limit of {limit:g} is {left:.2g} when they are unscaled"
            else:
                continue
            yield warning(
                code="precision-clipped-scaled",
                message=f"{clips.where or 'the script'} clips gradients that still carry the loss "
                f"scale of {scale:,g}; {told} (step {clips.step})",
                evidence={"where": clips.where, "scale": scale, "norm": norm, "left": left},
                fix="call scaler.unscale_(optimizer) before clipping",
            )


def _norm_cut(clips: Operation, by_index: dict[int, Operation]) -> tuple[float, float] | None:
    """The norm that gradients are multiplied by a function of, and what that makes of it."""
    factor = next((t for t in clips.inputs if t.argument == "other" and t.numel == 1), None)
    if clips.op not in _MULTIPLIES or factor is None or not 0.0 < factor.absmax < 1.0:
        return None
    norms = [o for o in _origins(factor, by_index) if o.op in _NORMS]
    total = max(norms, key=lambda o: o.index).outputs if norms else ()
    norm = total[0].absmax if len(total) == 1 else 0.0
    return (norm, norm * factor.absmax) if norm else None


def _origins(tensor: TensorRecord, by_index: dict[int, Operation]) -> Iterator[Operation]:
    """The operations after the backward pass that a tensor was computed by."""
    waiting, seen = [tensor.producer], {NONE}
    while waiting:
        index = waiting.pop()
        operation = by_index.get(index)
        if index not in seen and operation is not None and operation.phase == "update":
            seen.add(index)
            yield operation
            waiting += [t.producer for t in operation.inputs]


def _added_over_ranks(step: Sequence[Operation]) -> Iterator[Finding]:
    by_index = {operation.index: operation for operation in step}
    for adds in step:
        added = next((t for t in adds.inputs if t.dtype in HALF), None)
        ranks = int(adds.facts.get("ranks", 0))
        if adds.phase != "update" or added is None or ranks < 2:
            continue
        norm = any(o.op in _NORMS for o in _origins(added, by_index))
        what = "a gradient norm" if norm else f"{counted(added.numel, 'element')}"
        label, bound = LABELS[added.dtype], sum_bound(added.dtype, ranks)
        told = (
            f"; rounding moves the sum by up to {percent(bound)} of its terms" if bound < 1 else ""
        )
        yield Finding(
            severity="warning" if norm else "info",
            code="precision-narrow-collective",
            message=f"{adds.where or 'the script'} adds {what} over {ranks} ranks in {label}{told}",
            evidence={"where": adds.where, "dtype": added.dtype, "ranks": ranks, "bound": bound},
            fix="convert to FP32 before the sum: all_reduce(x.float())",
        )
