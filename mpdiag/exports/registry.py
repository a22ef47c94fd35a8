"""Every framework a plan can be written for: a file in ``templates/`` each, read by one function.

A file has a head, which says what the framework can hold (``Support``), and three sections::

    === settings    the plan's decisions under the framework's own names: a name and its JSON a line
    === notes       what else a user must know
    === text        the text itself; where the language is JSON, the settings are

What a framework cannot hold of the plan becomes a note, so that nothing is dropped silently. If the
language has comments, the text contains the notes, too.

The sections are a Jinja template of facts of the plan, see ``_facts``; comments in the files name their
sources. Those of the frameworks whose development has ended: NVIDIA, *Training with Mixed Precision User
Guide* (sections on MXNet, Theano, the Cognitive Toolkit, NVCaffe and Caffe2); OpenSeq2Seq, *Mixed
Precision Training*; Chainer's documentation of ``mixed16`` and of its optimizers; cutorch's of
``torch.CudaHalfTensor``; NVCaffe's ``caffe.proto`` for ``global_grad_scale`` and the types of a layer.
"""

import json
import math
import pprint
import re
import textwrap
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

from mpdiag.display.rendering import environment
from mpdiag.display.wording import did_you_mean, enumerated, some_of
from mpdiag.errors import UsageError
from mpdiag.exports.block_layers import exactly, exclude, include, layers_of
from mpdiag.numerics.formats import FP16, format_named
from mpdiag.numerics.loss_scalers import Backoff, ConstantScale
from mpdiag.plan import NO_SCALE, BlockPlan, Fp32Choice, LossScalePlan, PrecisionPlan

BLOCK_ENGINES = ("torchtitan", "torchao", "transformer_engine", "modelopt")
"""Those that hold block recipes and nothing else."""
_NAMES = (
    *("torch", "lightning", "huggingface", "accelerate", "deepspeed", "megatron"),
    *("keras", "tensorflow"),
    *("fsdp2", *BLOCK_ENGINES),
    # Their development has ended.
    *("openseq2seq", "mxnet", "chainer", "theano", "cntk", "torch7", "caffe2", "nvcaffe"),
)
_FOLDER = Path(__file__).parent / "templates"

NEVER = 2**31 - 1
"""A growth interval that no training reaches; GradScaler's counter is an int32."""
ALMOST_ONE = 1 - 2**-53
"""A backoff factor below 1, as GradScaler demands, that leaves an FP32 scale unchanged."""


TextLanguage = Literal["python", "json", "shell", "prototxt", "lua"]
_COMMENT = {"python": "# ", "shell": "# ", "prototxt": "# ", "lua": "-- "}

SCHEMA_VERSION = 1


@dataclass(frozen=True)
class Export:
    """A plan in a framework's own terms.

    Attributes:
        framework: The name given to ``--to``.
        language: The language of the text.
        text: The file's content, with the notes if the language has comments.
        settings: The same decisions as plain values, under the framework's own names.
        notes: What the framework cannot express, a sentence each.
    """

    framework: str
    language: TextLanguage
    text: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """The document of ``mpdiag export --json``."""
        return {
            "schema_version": SCHEMA_VERSION,
            "framework": self.framework,
            "language": self.language,
            "settings": dict(self.settings),
            "notes": list(self.notes),
            "text": self.text,
        }


def export_plan(plan: PrecisionPlan, framework: str) -> Export:
    """Write a plan as a framework's settings.

    Args:
        plan: The plan.
        framework: One of ``EXPORTERS``, in any case.

    Raises:
        UsageError: If there is no such framework, or it has no such format; the message names
            those there are.
    """
    exporter = EXPORTERS.get(framework.lower())
    if exporter is None:
        hint = did_you_mean(framework, EXPORTERS)
        message = f"cannot export to {framework!r}{hint}: choose one of {', '.join(EXPORTERS)}"
        raise UsageError(message)
    return exporter(plan)


def _write(framework: str, plan: PrecisionPlan) -> Export:
    """The plan as the settings of a framework, by the file of that name."""
    template = (_FOLDER / f"{framework}.j2").read_text(encoding="utf-8")
    start = template.index("=== settings")
    head = dict(re.findall(r"^(\w+): (.*)$", template[:start], re.MULTILINE))
    support = Support(
        head["name"],
        formats=tuple(head["formats"].split()),
        methods=tuple(head.get("methods", "").split()),
        blocks=tuple(head.get("blocks", "").split()),
        settings=tuple(head.get("settings", "").split()),
        levels=tuple(head["levels"].split()),
        fp32_modules="fp32_modules" in head,
        reduction="reduction" in head,
    )
    jinja = environment().overlay(autoescape=False)
    jinja.filters = {**jinja.filters, **_FILTERS}
    filled = jinja.from_string(template[start:]).render(_facts(plan, support))
    lines, own, body = re.split(r"^=== (?:notes|text)\n", filled, maxsplit=2, flags=re.MULTILINE)
    values = [line.partition(": ") for line in _joined(lines)[1:]]
    settings = {name: json.loads(value) for name, _, value in values}
    notes = *(note.removeprefix("- ") for note in _joined(own) if note), *shortfalls(plan, support)
    language: Any = head["language"]
    if language == "json":
        text = json.dumps(settings, indent=2) + "\n"
    else:
        text = f"{_heading(plan, support, notes, language)}\n{body.strip()}\n"
    return Export(framework, language, text, settings, notes)


def _joined(section: str) -> list[str]:
    """The lines of a section; what is indented goes on with the line above it."""
    return section.replace("\n  ", " ").splitlines()


def _arguments(settings: Mapping[str, Any]) -> str:
    """Settings as keyword arguments."""
    return ", ".join(f"{name}={value!r}" for name, value in settings.items())


@dataclass(frozen=True)
class _Scaling:
    """The plan's loss scale, as frameworks know it.

    Attributes:
        kind: ``none``, ``constant`` or ``dynamic``.
        scale: The constant scale, or the one to begin with.
    """

    kind: Literal["none", "constant", "dynamic"]
    scale: float


def _scaling_of(plan: PrecisionPlan) -> _Scaling:
    """How a framework with constant and backoff scales would scale by this plan.

    Where it has no such scaler it backs off from the plan's first scale; the notes say so.
    """
    scale = plan.loss_scale
    if plan.level in ("O0", "O3") or scale.method == NO_SCALE:
        return _Scaling("none", 1.0)
    return _Scaling("dynamic" if scale.adaptive else "constant", scale.init_scale)


def _format_of(plan: PrecisionPlan, support: "Support") -> str:
    """The format that the framework would compute in: ``fp16``, ``bf16``, an FP8 format or ``fp32``.

    For a plan in FP8, a framework without FP8 uses FP16, the format in which FP8 training keeps what
    is outside its matrix products; the plan's loss scale is FP16's.

    Raises:
        UsageError: If the framework has no such format, so that another plan is needed.
    """
    _require_blocks(plan, support)
    if plan.level == "O0":
        return "fp32"
    if plan.target in support.formats:
        return plan.target
    if format_named(plan.target).needs_tensor_scale and FP16.name in support.formats:
        return FP16.name
    raise UsageError(
        f"{support.name} cannot train in {format_named(plan.target).label}: analyze with --target "
        f"{support.formats[0] if support.formats else 'fp16'}, and export that plan"
    )


def _require_blocks(plan: PrecisionPlan, support: "Support") -> None:
    """Refuse a block recipe that the framework lacks, and a plan without one if it needs one.

    Raises:
        UsageError: With another framework or target.
    """
    if plan.blocks is None:
        if not support.methods:  # nothing but block recipes
            raise UsageError(
                f"{support.name} takes plans for block formats: analyze with --target "
                f"{support.blocks[0]}, and export that plan"
            )
        return
    recipe = plan.blocks.recipe
    if recipe.target not in support.blocks:
        raise UsageError(
            f"{support.name} cannot train in {recipe.label}: export to "
            f"{enumerated(recipe.engines, 'or')}, or analyze with --target "
            f"{support.blocks[0] if support.blocks else plan.target}, and export that plan"
        )
    if not layers_of(plan.blocks).quantised and support.name != "FSDP2":
        raise UsageError(
            f"the plan keeps every linear layer in BF16, so {support.name} has nothing to convert"
        )


def _block_facts(blocks: BlockPlan, parameters: Collection[str]) -> dict[str, Any]:
    """What the templates may use of a block recipe; the names of its layers are ``BlockLayers``'."""
    layers = layers_of(blocks)
    wide = (*layers.kept, *layers.wide_wgrad)
    experts = [layer for layer in blocks.layers if layer.kind == "grouped"]
    return {
        **vars(layers),
        "target": blocks.target,
        "label": blocks.recipe.label,
        "quantised": layers.quantised,
        "biased": [name for name in layers.whole if f"{name}.bias" in parameters],
        "all_experts": bool(experts) and all(len(layer.quantised) == 3 for layer in experts),
        "include": include(layers.whole, wide),
        "exclude": exclude(wide, layers.whole),
        "te_config": {
            section: {
                "enabled": True,
                "layers": {"layer_name_regex_pattern": exactly(names)},
                "transformer_engine": {feature: {"enabled": True, **products}},
            }
            for section, names, feature, products in (
                ("bf16", layers.kept, "DisableQuantizationLayer", {}),
                ("wgrad", layers.wide_wgrad, "DisableQuantizationGEMM", {"gemms": ["wgrad"]}),
            )
            if names
        },
    }


def _heading(
    plan: PrecisionPlan, support: "Support", notes: tuple[str, ...], language: TextLanguage
) -> str:
    """What an export is, and its notes, as comments of its language."""
    mark = _COMMENT[language]
    origin = f" of run {plan.run!r}" if plan.run else ""
    paragraphs = [f"{support.name}, by the plan{origin}.", plan.verdict.text]
    if notes:
        paragraphs += ["", "Notes:"]
    lines = [line for p in paragraphs for line in _wrapped(p, mark, "")]
    lines += [line for note in notes for line in _wrapped(note, mark, "- ")]
    return "".join(f"{line}\n" for line in lines)


def _one_line(text: str) -> str:
    """Text for a comment, without line breaks that would end it or control characters."""
    words = " ".join(text.split())
    return "".join(c if c.isprintable() else "\ufffd" for c in words)


def _wrapped(text: str, mark: str, bullet: str) -> list[str]:
    """A paragraph as comment lines."""
    plain = _one_line(text)
    if not plain:
        return [mark.rstrip()] if text == "" and not bullet else []
    wrapped = textwrap.wrap(
        plain,
        100 - len(mark),
        initial_indent=bullet,
        subsequent_indent=" " * len(bullet),
        break_long_words=False,
        break_on_hyphens=False,
    )
    return [mark + line for line in wrapped]


listed = partial(some_of, shown=12)
"""Names in a row, the first ones."""
_FILTERS: dict[str, Callable[..., Any]] = {
    "tojson": json.dumps,  # in the order of the keys, which Jinja's own sorts
    "literal": repr,
    "one_line": _one_line,
    "arguments": _arguments,
    "python": partial(pprint.pformat, width=96, sort_dicts=False),
    "listed": listed,
}


def _facts(plan: PrecisionPlan, support: "Support") -> dict[str, Any]:
    """What the templates may use of a plan.

    ``format`` is what the framework computes in, ``half`` whether that is FP16; ``kind`` is that of the
    scale (``none``, ``constant``, ``dynamic``), ``first`` its first value, ``start`` the same as a
    person writes it, ``power`` the nearest power of two, and ``scale`` the constant one of a framework
    that has no other.
    """
    chosen, scaling, scale = _format_of(plan, support), _scaling_of(plan), plan.loss_scale
    dtype = {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32"}.get(chosen, "bfloat16")
    return {
        "format": chosen,
        "half": chosen == "fp16",
        "level": plan.level,
        "masters": plan.master_weights.needed,
        "kind": scaling.kind,
        "first": float(scaling.scale),
        "start": f"{scaling.scale:g}",
        "power": round(math.log2(scaling.scale)),
        # For a framework that has only constant scales; 1 means none.
        "scale": plan.loss_scale.recommended if scaling.kind == "dynamic" else scaling.scale,
        "loss_scale": scale,
        "interval": scale.growth_interval,
        "reduction": plan.reduction,
        "blocks": plan.blocks
        and _block_facts(plan.blocks, plan.model.parameters if plan.model else ()),
        "fp32_modules": modules_in_fp32(plan) if chosen != "fp32" else [],
        "autocast": {"dtype": dtype, "enabled": chosen != "fp32"},
        "grad_scaler": _grad_scaler(scaling, scale),
    }


def _grad_scaler(scaling: _Scaling, scale: LossScalePlan) -> dict[str, Any]:
    """The arguments of ``torch.amp.GradScaler`` except the device.

    A constant scale is checked as well: it never grows, and backing off leaves it unchanged.
    """
    if scaling.kind == "none":
        return {"enabled": False}
    constant = scaling.kind == "constant"
    return {
        "init_scale": float(scaling.scale),
        "growth_factor": scale.growth_factor,
        "backoff_factor": ALMOST_ONE if constant else scale.backoff_factor,
        "growth_interval": NEVER if constant else scale.growth_interval,
    }


EXPORTERS: Mapping[str, Callable[[PrecisionPlan], Export]] = {
    name: partial(_write, name) for name in _NAMES
}


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
        fp32_modules: Whether the text itself keeps the plan's modules in FP32.
        levels: The opt levels it has: O0, the nearest to O1, and others.
        reduction: Whether the text sets the format in which gradients are reduced.
        blocks: The block recipes that it holds, the plain choice first.
    """

    name: str
    formats: tuple[str, ...] = ("fp16", "bf16")
    methods: tuple[str, ...] = ("constant", "backoff")
    settings: tuple[str, ...] = ()
    fp32_modules: bool = False
    levels: tuple[str, ...] = ("O0", "O1")
    reduction: bool = False
    blocks: tuple[str, ...] = ()


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


def _of_format(plan: PrecisionPlan, support: Support) -> Iterator[str]:
    if plan.level != "O0" and plan.target not in support.formats:
        label = format_named(plan.target).label
        yield (
            f"the plan is for {label}, which this file does not set. It sets FP16 with the plan's "
            "loss scale, the format outside FP8's matrix products."
        )


def _of_level(plan: PrecisionPlan, support: Support) -> Iterator[str]:
    if plan.level not in support.levels:
        yield (
            f"the plan's opt level is {plan.level}; the closest that {support.name} has is "
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
    lacks = f"the plan's loss scaler is {label}; {support.name} has none like it, so the scale"
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
    for name, fixed in (("growth_factor", 2.0), ("backoff_factor", 0.5), ("hysteresis", 1)):
        wanted = getattr(scale, name)
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
        yield f"the plan keeps in FP32: {listed(names)}. This file does not set that: do it by hand."
    if names and support.fp32_modules:
        parts = [c for c in plan.fp32_operations if c.op[:1].islower() and not _seen_to(c)]
        for choice in parts:
            yield (
                f"the plan keeps {choice.op} of {choice.module or 'the model itself'} in FP32; "
                "here the whole module stays in FP32."
            )
    automatic = [c.module for c in plan.fp32_operations if _seen_to(c)]
    if automatic and not support.fp32_modules:
        yield (
            f"the plan keeps normalisations, softmax and losses in FP32 (modules: {listed(automatic)}); "
            f"check that {support.name} does."
        )


def _of_the_rest(plan: PrecisionPlan, support: Support) -> Iterator[str]:
    if plan.blocks is not None:
        yield from _of_blocks(plan.blocks, support)
    reduction = plan.reduction
    if reduction is not None and not support.reduction:
        how = " after division by the number of ranks" if reduction.pre_divide else ""
        yield f"the plan reduces gradients over ranks in {reduction.dtype.upper()}{how}; not set here."
    if plan.blocks is not None:
        return  # the other sizes and formats are FP16's
    for shape in plan.shapes:
        what = f"{shape.dimension} of {listed([shape.module])}"
        care = "".join(f"; {clause}" for clause in shape.evidence.get("care") or ())
        yield f"pad {what} from {shape.size} to {shape.padded} in the model{care}."
    narrow = sorted(
        {layer.format for layer in plan.layer_formats if layer.format.startswith("fp8")}
    )
    if narrow:
        count = sum(layer.format in narrow for layer in plan.layer_formats)
        yield f"tensors that would fit FP8 by the plan's layer_formats: {count}; advice, not set here."


def _of_blocks(blocks: BlockPlan, support: Support) -> Iterator[str]:
    if others := layers_of(blocks).others:
        yield (
            f"the plan quantises some products of {listed(list(others))}; {support.name} cannot split "
            "them so, and they stay in BF16."
        )
    if blocks.ragged:
        yield (
            f"kernels need tokens in multiples of {blocks.recipe.multiple}, for experts those of each: "
            f"pad the tokens of {listed(blocks.ragged)}."
        )
