"""What every format would lose, overall and per layer; and the dtype to sum gradients over ranks in."""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpdiag.analysis.layers import Layers, share
from mpdiag.analysis.operations.layer_effects import Effects, LayerEvidence
from mpdiag.analysis.operations.rounding_error import rounding_error
from mpdiag.files.documents import finite
from mpdiag.numerics.formats import FP16, FP32, TARGETS, FloatFormat
from mpdiag.numerics.rounded import lost_before, overflow_before
from mpdiag.plan import LayerFormat, ReductionPlan
from mpdiag.runs.schema import KINDS

CANDIDATES = tuple(sorted(TARGETS, key=lambda fmt: fmt.bits))
"""From narrow to wide."""
TOLERATED = 0.01
"""Share of Σ|x| that may be lost to zero for a format to be called fit."""
SPARE = 1
"""Bits that the largest recorded value leaves free: steps that were not recorded may go further."""
TOGETHER = 0.1
"""Rounding error that all layers' formats of a kind may add up to (root of the sum of squares)."""
_NOT_MEASURED = "its effect on a late step was not measured"
_NAMES = (*(fmt.name for fmt in CANDIDATES), FP32.name)


def summarise_formats(
    layers: Layers, gradient_exponent: int, rounded_to: FloatFormat | None = None
) -> dict[str, dict[str, Any]]:
    """The ``formats`` of ``mpdiag analyze --json``: shares lost and rounding, by format and kind.

    ``rounding`` is of the layer that rounding moves most: ‖rounded − x‖ / ‖x‖, an estimate; None where
    a layer overflows.

    Args:
        layers: Merged histograms.
        gradient_exponent: log2 of the loss scale, applied to gradients in formats that need one;
            formats whose tensors have a scale of their own (FP8) get one for each layer.
        rounded_to: The format that the values were rounded to before they were counted, if any: then
            ``underflow_bounds`` and ``overflow_bounds`` hold what the unrounded ones would lose.
    """
    summary: dict[str, dict[str, Any]] = {}
    for fmt in CANDIDATES:
        kinds: dict[str, dict[str, Any]] = {}
        for kind in KINDS:
            part = layers.of_kind(kind)
            if len(part) == 0:
                continue
            lost, over, below = _losses(part, fmt, gradient_exponent)
            h = part.histograms
            kinds[kind] = {
                "underflow": float(share(lost.sum(), h.nonzero.sum())),
                "overflow": float(share(over.sum(), h.finite.sum())),
                "below_normal": float(share(below.sum(), h.nonzero.sum())),
                "rounding": finite(_rounding(part, fmt, gradient_exponent)),
            }
            if rounded_to is not None:
                kinds[kind] |= _bounds(part, fmt, gradient_exponent, rounded_to)
        worst = max((k["underflow"] + k["overflow"] for k in kinds.values()), default=0.0)
        summary[fmt.name] = {"worst_share_lost": worst, "kinds": kinds}
    return summary


def advise_layers(
    layers: Layers, gradient_exponent: int, evidence: LayerEvidence | None = None
) -> tuple[LayerFormat, ...]:
    """Formats for each layer's activations and activation gradients, for when all are applied at once.

    Each is the narrowest that keeps 99 % of Σ|x|, holds twice the largest value, and does no harm to a
    recorded step run again with it. Where formats would together round by more than ``TOGETHER``, or do
    harm together, the coarsest or most harmful ones give way to wider formats. FP8 is advised where its
    effect was measured, and nowhere else.

    Args:
        layers: Merged histograms.
        gradient_exponent: log2 of the loss scale.
        evidence: What rounding layers did to recorded steps.
    """
    known = evidence or LayerEvidence()
    sides = [
        _Side(kind, part, *_fits(part, gradient_exponent, known), _rounding_errors(part))
        for kind in ("activation", "activation_grad")
        if len(part := layers.of_kind(kind)) > 0
    ]
    effects = _Effects(known)
    for side in sides:
        held = side.fits & effects.allowed(side.part.names)
        side.chosen = _narrowest_together(held, side.errors, effects.losses(side.part.names))
        side.held = held
    _widen_together(sides, effects)
    return tuple(advice for side in sides for advice in side.advice(effects))


@dataclass
class _Side:
    """The layers of one kind.

    Attributes:
        kind: Activations, or gradients.
        part: The layers (n,).
        fits: bool (formats, n): whether each of ``_NAMES`` holds each by its range.
        shares: (formats, n): what it loses of Σ|x|.
        errors: (formats, n): its rounding error, as ``_rounding_errors`` says.
        held: bool (formats, n): fits, and does no harm alone.
        chosen: The place of each layer's format in ``_NAMES``, (n,).
    """

    kind: str
    part: Layers
    fits: NDArray[np.bool_]
    shares: NDArray[np.float64]
    errors: NDArray[np.float64]
    held: NDArray[np.bool_] = field(init=False)
    chosen: NDArray[np.int64] = field(init=False)

    def wider(self, i: int) -> int | None:
        """The next wider format of a layer; None where there is none."""
        errors = self.errors[:, i]
        finer = np.flatnonzero(self.held[:, i] & (errors < errors[self.chosen[i]]))
        return int(finer[0]) if finer.size else None

    def advice(self, effects: "_Effects") -> Iterator[LayerFormat]:
        """What is advised, with reasons."""
        rows = np.arange(len(self.part))
        own = self.errors[self.chosen, rows]
        together = float(np.sqrt((own**2).sum()))
        for i, row in enumerate(self.chosen):
            name = str(self.part.names[i])
            narrowest = int(np.argmax(self.fits[:, i]))
            numbers: dict[str, Any] = {
                "sum_lost": float(self.shares[row, i]),
                "absmax": float(self.part.histograms.absmax[i]),
                "rounding": float(own[i]),
                "rounding_together": together,
            }
            yield LayerFormat(
                name=name,
                kind=self.kind,
                format=_NAMES[row],
                reason=effects.reason(name, int(row), narrowest, together),
                evidence=numbers | effects.figures(name, int(row)),
            )


class _Effects:
    """What rounding layers to each of ``_NAMES`` did to a recorded step."""

    def __init__(self, evidence: LayerEvidence) -> None:
        self._evidence = evidence
        self._known: dict[tuple[str, int], Effects | None] = {}

    def of(self, name: str, row: int) -> Effects | None:
        """The effects of one layer in one format; None where they were not measured."""
        key = name, row
        if key not in self._known:
            wide = row == len(CANDIDATES)
            self._known[key] = None if wide else self._evidence.of(name, CANDIDATES[row])
        return self._known[key]

    def allowed(self, names: Sequence[str] | NDArray[np.object_]) -> NDArray[np.bool_]:
        """Whether each format does no harm to each layer alone, as far as was measured."""
        found = np.ones((len(_NAMES), len(names)), bool)
        for i, name in enumerate(names):
            kept = bool(self._evidence.keeper(name))
            for row, fmt in enumerate(CANDIDATES):
                effects = self.of(name, row)
                unknown = effects is None and fmt.needs_tensor_scale
                harms = effects is not None and self._evidence.harmful([(fmt, effects)])
                found[row, i] = not (kept or unknown or harms)
        return found

    def losses(self, names: Sequence[str] | NDArray[np.object_]) -> NDArray[np.float64]:
        """What each format changes of the loss, (formats, n); 0 where it is not known."""
        return np.array(
            [[sum(e.loss for e in self.of(n, r) or ()) for n in names] for r in range(len(_NAMES))]
        )

    def harmful(self, chosen: Iterable[tuple[str, int]]) -> bool:
        """Whether formats do harm together."""
        known = [(row, self.of(name, row)) for name, row in chosen]
        return self._evidence.harmful([(CANDIDATES[r], e) for r, e in known if e is not None])

    def figures(self, name: str, row: int) -> dict[str, Any]:
        """The measured effect of one layer's format, as evidence."""
        effects = self.of(name, row)
        if not effects:
            return {}
        return {
            "gradient_error": math.hypot(*(e.gradients for e in effects)),
            "loss_change": sum(e.loss for e in effects),
            "step": self._evidence.step(),
        }

    def reason(self, name: str, row: int, narrowest: int, together: float) -> str:
        """Why a layer is given a format.

        Args:
            name: The layer's.
            row: Its format's place in ``_NAMES``.
            narrowest: That of the narrowest one by range alone.
            together: Rounding error of all layers' formats.
        """
        label = (*CANDIDATES, FP32)[narrowest].label
        if keeper := self._evidence.keeper(name):
            return keeper
        text = (
            "keeps 99 % of Σ|x|, holds twice the largest value, and keeps the rounding error of all "
            f"layers' formats together at {together:.2g} of the values or less"
        )
        step, measured = self._evidence.step(), self.of(name, row) is not None
        if measured:
            text += f"; step {step}, run again, tolerates it together with the other formats"
        else:
            text += f"; {_NOT_MEASURED}"
        if row == narrowest:
            return f"the narrowest format that {text}"
        if self.of(name, narrowest) is None:
            return f"{label} holds the range, but {_NOT_MEASURED}; this {text}"
        return f"{label} holds the range, but is too coarse with the other formats; this {text}"


def _widen_together(sides: Sequence[_Side], effects: _Effects) -> None:
    """Widen the formats whose measured effects are the largest, until together they do no harm."""
    while effects.harmful(
        (str(s.part.names[i]), int(r)) for s in sides for i, r in enumerate(s.chosen)
    ):
        open_ = [
            (sum(e.loss for e in known), side, i, wider)
            for side in sides
            for i, row in enumerate(side.chosen)
            if (known := effects.of(str(side.part.names[i]), int(row)))
            and (wider := side.wider(i)) is not None
        ]
        if not open_:
            return
        _, side, i, wider = max(open_, key=lambda one: one[0])
        side.chosen[i] = wider


def _fits(
    part: Layers, gradient_exponent: int, evidence: LayerEvidence
) -> tuple[NDArray[np.bool_], NDArray[np.float64]]:
    """Whether each of ``_NAMES`` holds each layer by its range, and the share of Σ|x| it loses.

    Of gradients it must hold the loss's own, too, where other backward passes hide them.
    """
    h = part.histograms
    whole = h.abs_sum().value
    fits = np.zeros((len(_NAMES), len(part)), bool)
    shares = np.zeros((len(_NAMES), len(part)))
    fits[-1] = True
    for row, fmt in enumerate(CANDIDATES):
        exponents = _exponents(part, fmt, gradient_exponent)
        spare = 0 if fmt.needs_tensor_scale else SPARE  # a scale of its own has it already
        for k in np.unique(exponents):
            at = np.flatnonzero(exponents == k)
            few = h[at]
            shares[row, at] = share(few.abs_sum(fmt.zero_exponent - int(k)).value, whole[at])
            fits[row, at] = (shares[row, at] <= TOLERATED) & (
                few.overflow(fmt, int(k) + spare).upper == 0
            )
        if not fmt.needs_tensor_scale:  # a scale of its own has each tensor of each pass
            fits[row] &= ~_loses_the_loss(part, fmt, exponents, evidence)
    return fits, shares


def _loses_the_loss(
    part: Layers, fmt: FloatFormat, exponents: Any, evidence: LayerEvidence
) -> NDArray[np.bool_]:
    """Whether a format loses the loss's own gradients at each layer, (n,)."""
    found = np.zeros(len(part), bool)
    for i in np.flatnonzero(part.kinds == "activation_grad"):
        least = fmt.zero_exponent - int(exponents[i])
        found[i] = any(
            float(share(h.abs_sum(least).value, h.abs_sum().value)) > TOLERATED
            for h in evidence.of_the_loss(str(part.names[i]))
        )
    return found


def _rounding_errors(part: Layers) -> NDArray[np.float64]:
    """The largest rounding error of each of ``_NAMES`` in each layer, beside what tells values apart.

    That is the value itself, or less where no value is near 0: temperatures of 288 ± 5 differ by 10.
    """
    h = part.histograms
    least = np.where((h.zeros > 0) | ~np.isfinite(h.absmin), 0.0, h.absmin)
    apart = np.maximum(h.absmax - least, 2.0**-10 * h.absmax)
    offset = np.where(h.absmax > 0, h.absmax / np.where(apart > 0, apart, 1.0), 1.0)
    bits = np.array([fmt.mantissa_bits for fmt in (*CANDIDATES, FP32)])
    errors: NDArray[np.float64] = np.exp2(-bits[:, None] - 1.0) * offset
    return errors


def _narrowest_together(
    fits: NDArray[np.bool_], errors: NDArray[np.float64], losses: NDArray[np.float64]
) -> NDArray[np.int64]:
    """The place in ``_NAMES`` of each layer's format.

    The coarsest give way first; of those alike, the ones that change the loss most.
    """
    chosen: NDArray[np.int64] = np.argmax(fits, axis=0)
    rows = np.arange(fits.shape[1])
    while float(np.sqrt((errors[chosen, rows] ** 2).sum())) > TOGETHER:
        coarsest = int(np.lexsort((losses[chosen, rows], errors[chosen, rows]))[-1])
        finer = np.flatnonzero(
            fits[:, coarsest] & (errors[:, coarsest] < errors[chosen[coarsest], coarsest])
        )
        if finer.size == 0:
            break
        chosen[coarsest] = finer[0]
    return chosen


def _exponents(part: Layers, fmt: FloatFormat, gradient_exponent: int) -> Any:
    """log2 of the scale each layer is given in a format."""
    if fmt.needs_tensor_scale:
        # Its own scale: the largest power of two that keeps the maximum inside, with bits to spare.
        largest = np.maximum(part.histograms.absmax, 2.0**-120)
        return np.floor(math.log2(fmt.max) - np.log2(largest)).astype(int) - SPARE
    if fmt.needs_loss_scale:
        gradient = np.isin(part.kinds, ("activation_grad", "weight_grad"))
        return np.where(gradient, gradient_exponent, 0)
    return np.zeros(len(part), int)


def _losses(part: Layers, fmt: FloatFormat, gradient_exponent: int) -> tuple[Any, Any, Any]:
    exponents = _exponents(part, fmt, gradient_exponent)
    lost, over, below = (np.zeros(len(part)) for _ in range(3))
    for k in np.unique(exponents):
        rows = np.flatnonzero(exponents == k)
        h = part.histograms[rows]
        lost[rows] = h.lost_to_zero(fmt, int(k)).value
        over[rows] = h.overflow(fmt, int(k)).value
        below[rows] = h.below_normal(fmt, int(k)).value
    return lost, over, below


def _bounds(
    part: Layers, fmt: FloatFormat, gradient_exponent: int, rounded_to: FloatFormat
) -> dict[str, list[float]]:
    """Between what the shares lie that are lost of values before they were rounded."""
    h, half_step = part.histograms, 2.0 ** (-rounded_to.mantissa_bits - 1)
    scales = np.stack(
        [
            _exponents(replace(part, histograms=replace(h, absmax=top)), fmt, gradient_exponent)
            for top in (h.absmax * (1 + half_step), h.absmax * (1 - half_step))
        ]
    )
    lost, over = np.zeros((2, 2))
    for low, high in np.unique(scales, axis=1).T.tolist():
        rows = h[np.flatnonzero((scales == [[low], [high]]).all(axis=0))]
        for sums, found in (
            (lost, lost_before(rows, fmt, low, high)),
            (over, overflow_before(rows, fmt, low, high)),
        ):
            sums += [found.lower.sum(), found.upper.sum()]
    return {
        "underflow_bounds": share(lost, h.nonzero.sum()).tolist(),
        "overflow_bounds": share(over, h.finite.sum()).tolist(),
    }


def _rounding(part: Layers, fmt: FloatFormat, gradient_exponent: int) -> float:
    """How far the format's rounding moves a layer at most; infinite where one overflows."""
    exponents = _exponents(part, fmt, gradient_exponent)
    return max(
        float(rounding_error(part.histograms[exponents == k], fmt, int(k)).max())
        for k in np.unique(exponents)
    )


HEADROOM = 4.0
HARMLESS = 0.001
"""Share of Σ|g| that may be lost to zero by dividing before the sum."""


def choose_reduction(layers: Layers, scale: float, world_size: int) -> ReductionPlan | None:
    """Choose the reduction for data-parallel training; None for one rank.

    A sum over ranks reaches at most world size × the largest gradient × the loss scale. If that
    fits into FP16 with headroom, FP16 halves the traffic. If not, dividing first may make it fit, unless
    that flushes small gradients to zero. Otherwise the reduction stays in FP32.
    """
    h = layers.of_kind("weight_grad").histograms
    if world_size < 2 or len(h.absmax) == 0:
        return None
    top = float(h.absmax.max()) * scale * HEADROOM
    exponent = int(np.floor(np.log2(scale))) - int(np.ceil(np.log2(world_size)))
    lost = float(
        share(h.abs_sum(FP16.zero_exponent - exponent).value.sum(), h.abs_sum().value.sum())
    )
    evidence = {
        "absmax": float(h.absmax.max()),
        "scale": scale,
        "world_size": world_size,
        "sum_lost_divided_first": lost,
    }
    if top * world_size < FP16.max:
        reason = f"{world_size} ranks' largest gradients sum to less than FP16's {FP16.max:.5g}"
        return ReductionPlan(FP16.name, pre_divide=False, reason=reason, evidence=evidence)
    if top < FP16.max and lost <= HARMLESS:
        reason = f"the sum over {world_size} ranks could overflow FP16; divide before you add"
        return ReductionPlan(FP16.name, pre_divide=True, reason=reason, evidence=evidence)
    reason = f"the sum over {world_size} ranks, or even its parts, may not fit FP16"
    return ReductionPlan(FP32.name, pre_divide=False, reason=reason, evidence=evidence)
