"""Copies of weights that are not copies any more: over ranks, and averages in half precision."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

from mpdiag.analysis.findings import Finding, warning
from mpdiag.display.wording import percent, spoken_parameters
from mpdiag.runs.operations import Operation, TensorRecord
from mpdiag.runs.precision import LABELS, Observed, ParameterPrecision

CHANNELWISE = frozenset(
    "mul add sub div native_layer_norm _fused_rms_norm native_group_norm".split()
)
"""Operations that have a parameter for each channel of what they read."""
LEAST = 64
"""Elements from which two ranks' values are the same if their counts and extremes are."""


def copies_over_ranks(
    operations: Sequence[Operation], parameters: Iterable[ParameterPrecision]
) -> Iterator[Finding]:
    """Parameters that differ over ranks although each rank applies them to the same values, by channel.

    A rank of tensor parallelism has its own part of a matrix, and its own channels after the product;
    what every rank applies to the same channels of the same values is a copy.

    Args:
        operations: Of all ranks.
        parameters: Those that a DDP or an FSDP holds are copies, or parts, by its care.
    """
    loose = {p.name for p in parameters if p.unknown.get("reduced", "").startswith("no DDP")}
    steps: dict[int, dict[int, list[Operation]]] = defaultdict(lambda: defaultdict(list))
    for operation in operations:
        if operation.phase == "forward":
            steps[operation.step][operation.rank].append(operation)
    last = max((step for step, ranks in steps.items() if len(ranks) > 1), default=None)
    apart: dict[str, list[float]] = {}
    for same in zip(*steps[last].values(), strict=False) if last is not None else ():
        if same[0].op in CHANNELWISE and len({(o.op, o.module, o.where) for o in same}) == 1:
            apart |= _apart(same, loose)
    if apart:
        name = max(apart, key=lambda n: max(apart[n]) - min(apart[n]))
        yield warning(
            code="precision-copies-differ",
            message=f"ranks apply different values of {spoken_parameters(list(apart))} to the same "
            f"input; the largest value of {name} is {min(apart[name]):.4g} on one rank "
            f"and {max(apart[name]):.4g} on another in step {last}",
            evidence={"parameters": list(apart)[:20], "largest": apart[name], "step": last},
            fix="broadcast them once, and add their gradients over ranks in each step",
        )


def _apart(same: Sequence[Operation], loose: set[str]) -> dict[str, list[float]]:
    """Each rank's largest value of each parameter that differs over ranks."""
    columns = list(zip(*(o.inputs for o in same), strict=False))
    read = [c for c in columns if not c[0].parameter and c[0].numel >= LEAST]
    if not read or not all(map(_are_equal, read)):
        return {}
    return {
        column[0].parameter: [t.absmax for t in column]
        for column in columns
        if column[0].parameter in loose and not _are_equal(column)
        if any(c[0].shape[-len(column[0].shape) :] == column[0].shape for c in read)
    }


def _are_equal(tensors: Sequence[TensorRecord]) -> bool:
    """Whether the ranks' tensors have the same values, by their counts and extremes."""
    seen = {(t.shape, t.first_exponent, t.counts, t.zeros, t.absmax, t.absmin) for t in tensors}
    return len(seen) == 1 and all(t.counted for t in tensors)


def still_averages(observed: Iterable[Observed]) -> Iterator[Finding]:
    """Averages of the weights that half precision keeps from following."""
    those = [one for one in observed if one.kind == "average-still"]
    for dtype in sorted({one.names[1] for one in those}):
        some = [one for one in those if one.names[1] == dtype]
        largest = max(some, key=lambda one: one.size)
        yield warning(
            code="precision-average-still",
            message=f"the script moves {LABELS[dtype]} copies of "
            f"{spoken_parameters([one.names[0] for one in some])} towards them; "
            f"{percent(largest.size)} of the values that differ from {largest.names[0]} do not move",
            evidence={"parameters": [one.names[0] for one in some][:20], "size": largest.size},
            fix="keep averages of the weights in FP32",
        )
