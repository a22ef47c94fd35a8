"""What a framework cannot hold of a plan, said in sentences."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from mpdiag.numerics.formats import format_named
from mpdiag.numerics.loss_scalers import Backoff, ConstantScale
from mpdiag.plan import NO_SCALE, Fp32Choice, LossScalePlan, PrecisionPlan

MANY = 12
"""So many names are written out in a note."""

# What autocast does by itself, by the type of a module: these need no setting in its family.
_BY_AUTOCAST = (
    "Softmax LogSoftmax Softmax2d Softmin Softplus LayerNorm GroupNorm RMSNorm BatchNorm "
    "SyncBatchNorm InstanceNorm"
).split()


@dataclass(frozen=True)
class Support:
    """What a framework can hold.

    Attributes:
        name: As its makers write it.
        formats: The formats it trains in, the plain choice first.
        methods: The scalers it has, by their names in ``SCALERS``.
        settings: Of a backoff scale: ``growth_factor``, ``backoff_factor``, ``growth_interval``,
            ``hysteresis``, ``min_scale``, ``max_scale``.
        growth_factor, backoff_factor, hysteresis: What it does where it has no such setting.
        fp32_modules: Whether the text itself keeps the plan's modules in FP32.
        levels: The opt levels it has: O0, the nearest to O1, and others.
        reduction: Whether the text sets the format in which gradients are reduced.
    """

    name: str
    formats: tuple[str, ...] = ("fp16", "bf16")
    methods: tuple[str, ...] = ("constant", "backoff")
    settings: tuple[str, ...] = ()
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    hysteresis: int = 1
    fp32_modules: bool = False
    levels: tuple[str, ...] = ("O0", "O1")
    reduction: bool = False


def shortfalls(plan: PrecisionPlan, support: Support) -> tuple[str, ...]:
    """A sentence for each part of the plan that the framework cannot hold."""
    return (
        *_of_format(plan, support),
        *_of_level(plan, support),
        *_of_scale(plan, support),
        *_of_modules(plan, support),
        *_of_the_rest(plan, support),
    )


def modules_in_fp32(plan: PrecisionPlan) -> list[str]:
    """Names of modules that need FP32 beyond what autocast's lists see to, in the plan's order."""
    chosen = [c.module for c in plan.fp32_modules]
    chosen += [c.module for c in plan.fp32_operations if not _seen_to(c)]
    return list(dict.fromkeys(chosen))


def _seen_to(choice: Fp32Choice) -> bool:
    """Whether autocast keeps this operation in FP32 (or its statistics) without being told."""
    op = choice.op
    return op.startswith(tuple(_BY_AUTOCAST)) or op.endswith("Loss")


def listed(names: list[str]) -> str:
    """Names in a row, the first ones; the model itself is called so."""
    shown = [name or "the model itself" for name in names[:MANY]]
    rest = len(names) - len(shown)
    return ", ".join(shown) + (f" and {rest} more" if rest else "")


def _of_format(plan: PrecisionPlan, support: Support) -> Iterator[str]:
    if plan.level != "O0" and plan.target not in support.formats:
        label = format_named(plan.target).label
        yield (
            f"the plan is for {label}, which is not set here: what follows is FP16 with the "
            "plan's loss scale, as outside FP8's matrix products."
        )


def _of_level(plan: PrecisionPlan, support: Support) -> Iterator[str]:
    if plan.level not in support.levels:
        yield (
            f"the plan's opt level is {plan.level}; what follows is as near as {support.name} comes, "
            f"{support.levels[1]}."
        )
    if plan.level == "O2" and not plan.keep_batch_norm_fp32 and "O2" in support.levels:
        yield "the plan casts batch normalisation, too; this is not set here."


def _of_scale(plan: PrecisionPlan, support: Support) -> Iterator[str]:
    scale = plan.loss_scale
    if plan.level in ("O0", "O3") or scale.method == NO_SCALE:
        return
    if scale.method not in support.methods:
        yield _of_another_scaler(scale, support)
    for name, value in scale.settings.items():
        if name not in support.settings:
            yield f"{name} is {value} in the plan; it cannot be set here."
    if scale.adaptive and Backoff.name in support.methods:
        yield from _of_settings(scale, support)
    elif "checks" not in support.settings:
        yield (
            "the plan checks every step and skips those that overflow; a constant scale is not "
            "checked here."
        )


def _of_another_scaler(scale: LossScalePlan, support: Support) -> str:
    """What becomes of the scale where the framework lacks the plan's scaler."""
    label = scale.scaler_class().label
    lacks = f"the plan scales by {label}; {support.name} has no such scaler, so the scale"
    if not scale.adaptive and ConstantScale.name not in support.methods:
        return (
            f"the plan's scale is constant, {scale.init_scale:g}; {support.name} never lets it grow "
            "here, but halves it after an overflow."
        )
    if scale.adaptive and Backoff.name in support.methods:
        return f"{lacks} begins at {scale.init_scale:g} and backs off."
    kept = scale.recommended if scale.adaptive else scale.init_scale
    return f"{lacks} stays at {'the recommended ' if scale.adaptive else ''}{kept:g}."


def _of_settings(scale: LossScalePlan, support: Support) -> Iterator[str]:
    """Fields of a backoff scale that are fixed, or that are not there."""
    for name in ("growth_factor", "backoff_factor", "hysteresis"):
        wanted, fixed = getattr(scale, name), getattr(support, name)
        if name not in support.settings and wanted != fixed:
            yield f"{name} is {wanted:g} in the plan and {fixed:g} here: it cannot be set."
    if "growth_interval" not in support.settings:
        yield f"growth_interval is {scale.growth_interval} in the plan; it cannot be set here."
    for name, edge in (("min_scale", "lower"), ("max_scale", "upper")):
        if name not in support.settings:
            yield f"the scale has no {edge} bound here; the plan's {name} is {getattr(scale, name):g}."


def _of_modules(plan: PrecisionPlan, support: Support) -> Iterator[str]:
    if plan.level == "O0":
        return
    names = modules_in_fp32(plan)
    if names and not support.fp32_modules:
        yield f"the plan keeps in FP32: {listed(names)}. Nothing here sets this; see to it by hand."
    if names and support.fp32_modules:
        parts = [c for c in plan.fp32_operations if c.op[:1].islower() and not _seen_to(c)]
        for choice in parts:
            yield (
                f"the plan keeps {choice.op} of {choice.module or 'the model itself'} in FP32; "
                "here the whole module is."
            )
    automatic = [c.module for c in plan.fp32_operations if _seen_to(c)]
    if automatic and not support.fp32_modules:
        yield (
            f"the plan keeps normalisations, softmax and losses in FP32: {listed(automatic)}; "
            f"check that {support.name} does."
        )


def _of_the_rest(plan: PrecisionPlan, support: Support) -> Iterator[str]:
    reduction = plan.reduction
    if reduction is not None and not support.reduction:
        how = " after division by the number of ranks" if reduction.pre_divide else ""
        yield f"the plan reduces gradients over ranks in {reduction.dtype.upper()}{how}; not set here."
    for shape in plan.shapes:
        what = f"{shape.dimension} of {shape.module}"
        yield f"pad {what} from {shape.size} to {shape.padded} in the model."
    narrow = sorted(
        {layer.format for layer in plan.layer_formats if layer.format.startswith("fp8")}
    )
    if narrow:
        count = sum(layer.format in narrow for layer in plan.layer_formats)
        yield f"tensors that would fit FP8 by the plan's layer_formats: {count}; advice, not set here."
