"""What of a training a recording holds: its steps, its parameters, its gradients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from mpdiag.analysis.scaling.windows import unseen_windows
from mpdiag.display.wording import counted, percent

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy as np
    from numpy.typing import NDArray

    from mpdiag.analysis.layers import Layers
    from mpdiag.runs.run import Run


@dataclass(frozen=True)
class Coverage:
    """What was recorded, beside what there was.

    Attributes:
        recorded, seen: Steps; ``seen`` is 0 where the run does not say.
        first, last: The first and the last recorded step; -1 without any.
        parameters, parameters_seen: Trainable values, and those whose gradient was recorded.
        layers, layers_seen: Modules without children, and those whose output's gradient was
            recorded.
        unseen_parts: Late parts of the training of which no step was recorded.
        reasons: Why parameters and layers were not seen, with how many, the most frequent first.
    """

    recorded: int
    seen: int
    first: int
    last: int
    parameters: int
    parameters_seen: int
    layers: int
    layers_seen: int
    reasons: tuple[tuple[str, int], ...]
    unseen_parts: tuple[str, ...] = ()

    @property
    def parameter_share(self) -> float:
        """Share of the trainable values whose gradient was recorded; 1 where none are known."""
        return self.parameters_seen / self.parameters if self.parameters else 1.0

    @property
    def layer_share(self) -> float:
        """Share of the layers whose output's gradient was recorded; 1 where none are known."""
        return self.layers_seen / self.layers if self.layers else 1.0

    @property
    def whole(self) -> bool:
        """Whether every parameter and layer was seen."""
        return self.parameters_seen >= self.parameters and self.layers_seen >= self.layers

    def steps(self) -> str:
        """The recorded steps: ``39 of 400 steps``."""
        if self.seen > self.recorded:
            return f"{self.recorded:,} of {self.seen:,} steps"
        return counted(self.recorded, "step")

    def unseen(self) -> str:
        """What no gradient was recorded of, with the reasons, in a clause; empty if nothing."""
        if self.whole:
            return ""
        parts = []
        if self.parameters_seen < self.parameters:
            parts.append(f"{percent(1 - self.parameter_share)} of the parameters")
        if self.layers_seen < self.layers:
            missing = self.layers - self.layers_seen
            parts.append(f"the output gradients of {missing:,} of {self.layers:,} layers")
        why = "; ".join(f"{reason} ({number:,})" for reason, number in self.reasons[:2])
        return " and ".join(parts) + (f": {why}" if why else "")


def coverage_of(run: Run, layers: Layers, steps: NDArray[np.int64]) -> Coverage:
    """Count what a run holds.

    Args:
        run: The run.
        layers: Its merged rows.
        steps: int64 (n,), the recorded steps with gradients, in order.
    """
    gradients = set(layers.of_kind("weight_grad").names.tolist())
    outputs = set(layers.of_kind("activation_grad").names.tolist())
    rows = list(run.modules())
    frozen = {str(r["name"]) for r in rows if str(r["reason"] or "").startswith("frozen")}
    sizes = {
        str(r["name"]): int(r["numel"] or 0)
        for r in rows
        if r["what"] == "parameter" and str(r["name"]) not in frozen
    }
    left_out = _left_out(run, sum(int(r["numel"] or 0) for r in rows if r["what"] == "parameter"))
    names = {str(r["name"]) for r in rows if r["what"] == "module"}
    leaves = names - {name.rpartition(".")[0] for name in names if name}
    unseen = {n for n in sizes if n not in gradients} | (leaves - outputs)
    return Coverage(
        recorded=int(run.meta.get("steps_recorded") or steps.size),
        seen=int(run.meta.get("steps_seen") or 0),
        first=int(steps[0]) if steps.size else -1,
        last=int(steps[-1]) if steps.size else -1,
        parameters=sum(sizes.values()) + left_out,
        parameters_seen=sum(size for name, size in sizes.items() if name in gradients),
        layers=len(leaves),
        layers_seen=len(leaves & outputs),
        reasons=tuple(_reasons(run, unseen, left_out)),
        unseen_parts=unseen_windows(steps, int(run.meta.get("steps_seen") or 0)),
    )


def _left_out(run: Run, known: int) -> int:
    """Values of parameters that ``include`` or ``exclude`` left out of the recording."""
    filters = run.meta.get("cadence") or {}
    if not (filters.get("include") or filters.get("exclude")):
        return 0
    return max(0, int((run.meta.get("model") or {}).get("parameters") or 0) - known)


def _reasons(run: Run, unseen: set[str], left_out: int) -> Iterator[tuple[str, int]]:
    """Why some names were not recorded, the most frequent reason first."""
    if left_out:
        yield "left out by --include or --exclude", 1
    found: dict[str, int] = {}
    for item in (run.meta.get("coverage") or {}).get("not_recorded") or []:
        if str(item.get("name")) in unseen and item.get("reason"):
            reason = str(item["reason"])
            found[reason] = found.get(reason, 0) + 1
    yield from sorted(found.items(), key=lambda pair: -pair[1])
