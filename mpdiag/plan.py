"""The plan: every decision about a mixed-precision training, with its reason and its numbers.

A plan is what the analysis concludes and the trainer obeys. It is a frozen tree of plain values
that a person can read as JSON, and that goes through JSON and back without losing a field.

Reading is done here, by the annotations of the dataclasses, and by no library: training loads a plan,
and a machine that trains may have none beyond what the core needs.
"""

import dataclasses
import hashlib
import json
import os
import sys
import types
import typing
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from mpdiag.errors import DamagedPlan, NewerSchema, PlanNotFound, UsageError
from mpdiag.files.documents import read_document
from mpdiag.files.recognition import named_instead
from mpdiag.numerics.block_recipes import BLOCK_RECIPES, OPERANDS, WIDE, BlockRecipe, OperandFormat
from mpdiag.numerics.formats import FP16, FP32, TRAINABLE
from mpdiag.numerics.loss_scalers import SCALERS, ConstantScale, Scaler
from mpdiag.tracing.conditions import TrainingConditions
from mpdiag.tracing.fingerprint import ModelFingerprint

SCHEMA_VERSION = 1
FILE = "plan.json"
"""The plan in a run folder."""

Evidence = Mapping[str, Any]
"""Numbers a decision rests on: plain JSON values by name."""

LossScaleNeed = Literal["needed", "advisable", "not needed", "unknown"]
NO_SCALE = "none"
"""The method that scales nothing and checks nothing; all others are names in ``SCALERS``."""


@dataclass(frozen=True)
class LossScalePlan:
    """How the loss is scaled.

    Attributes:
        need: How sure it is that a scale is needed; ``unknown`` where the recording cannot say.
        method: The scaler's name in ``SCALERS``; ``none`` is scale 1 without any check.
        recommended: The scale, a power of two.
        lower: Smallest power of two from which what is lost no longer matters.
        upper: Largest admissible power of two, None where nothing limits it.
        init_scale: The scale to begin with.
        growth_factor, backoff_factor, growth_interval, hysteresis, min_scale, max_scale: As in
            ``torch.amp.GradScaler`` and ``mpdiag.numerics.loss_scalers``.
        settings: Other settings of the scaler, where they differ from its defaults; JSON has no
            such key where there are none.
    """

    need: LossScaleNeed = "not needed"
    method: str = NO_SCALE
    recommended: float = 1.0
    lower: float = 1.0
    upper: float | None = None
    init_scale: float = 1.0
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    hysteresis: int = 1
    min_scale: float = 1.0
    max_scale: float = 2.0**24
    settings: Mapping[str, Any] = field(default_factory=dict)
    reason: str = ""
    evidence: Evidence = field(default_factory=dict)

    @property
    def needed(self) -> bool:
        """Whether training is expected to suffer without a scale."""
        return self.need == "needed"

    @property
    def adaptive(self) -> bool:
        """Whether the scale changes during training."""
        return self.scaler_class().adaptive

    def scaler_class(self) -> type[Scaler]:
        """The class of the scaler; where there is no scale, that of a constant one.

        Raises:
            UsageError: If there is no such scaler, or it has no such settings.
        """
        if self.method not in (NO_SCALE, *SCALERS):
            raise UsageError(
                f"the plan's loss_scale.method is {self.method!r}, and this version knows "
                f"{', '.join((NO_SCALE, *SCALERS))}: choose one of these, or upgrade mpdiag"
            )
        kind = SCALERS.get(self.method, ConstantScale)
        unknown = sorted(set(self.settings) - set(kind.setting_names()))
        if unknown:
            raise UsageError(
                f"the plan's loss_scale.settings has {unknown[0]!r}, and a scale by "
                f"{self.method!r} has no such setting: remove it, or upgrade mpdiag"
            )
        return kind

    def scaler(self) -> Scaler:
        """The scaler as training begins.

        Raises:
            UsageError: If there is no such scaler or setting, or a setting makes no sense.
        """
        kind = self.scaler_class()
        if self.method == NO_SCALE:
            return ConstantScale(1.0)
        own = {name: getattr(self, name) for name in _SETTINGS}
        return kind.from_plan({**own, **self.settings})

    def with_scaler(self, scaler: Scaler) -> "LossScalePlan":
        """The same plan for another scaler, whose state is left out."""
        planned, defaults = scaler.to_plan(), type(scaler).defaults()
        own = {name: planned.pop(name) for name in ("method", *_SETTINGS) if name in planned}
        own = {"init_scale": scaler.scale, **own}
        other = {k: v for k, v in planned.items() if k not in defaults or defaults[k] != v}
        return dataclasses.replace(self, **own, settings=other)


_SETTINGS = (
    *("init_scale", "growth_factor", "backoff_factor", "growth_interval", "hysteresis"),
    *("min_scale", "max_scale"),
)
"""Settings of scalers that are fields of ``LossScalePlan``."""


@dataclass(frozen=True)
class MasterWeightsPlan:
    """Whether the optimizer keeps an FP32 copy of the weights."""

    needed: bool = True
    swallowed_fraction: float = 0.0
    worst_parameter: str | None = None
    reason: str = ""
    evidence: Evidence = field(default_factory=dict)


@dataclass(frozen=True)
class Fp32Choice:
    """An operation of a module, or a whole module (``op`` empty), that stays in FP32."""

    op: str
    module: str
    reason: str = ""
    evidence: Evidence = field(default_factory=dict)


@dataclass(frozen=True)
class ReductionPlan:
    """How gradients are reduced over ranks."""

    dtype: str = FP32.name
    pre_divide: bool = False
    reason: str = ""
    evidence: Evidence = field(default_factory=dict)


@dataclass(frozen=True)
class LevelAdvice:
    """What one opt level would cost and win.

    Attributes:
        level: O0 to O3.
        memory_bytes: Predicted peak of weights, gradients, optimizer state, activations and the loss.
        batch_factor: How many times the recorded batch would fit into what O0 takes.
        possible: Whether the recording speaks for it.
    """

    level: str
    memory_bytes: int
    batch_factor: float
    possible: bool = True
    reason: str = ""


@dataclass(frozen=True)
class ShapeAdvice:
    """A dimension to pad so that Tensor Cores run well."""

    module: str
    dimension: str
    size: int
    padded: int
    reason: str = ""
    evidence: Evidence = field(default_factory=dict)


@dataclass(frozen=True)
class LayerFormat:
    """The narrowest format that holds one layer's tensors of one kind."""

    name: str
    kind: str
    format: str
    reason: str = ""
    evidence: Evidence = field(default_factory=dict)


@dataclass(frozen=True)
class BlockLayer:
    """A layer's matrix products in a block recipe.

    Attributes:
        module: The layer.
        parameter: Name of the weight, as the model has it; "" if it is not known.
        kind: ``linear``, ``grouped`` (a part for each expert), and others that no engine quantises.
        fprop, dgrad, wgrad: What each product computes in: the recipe's target, or ``bf16``.
        reason: Why.
    """

    module: str
    parameter: str
    kind: str
    fprop: str
    dgrad: str
    wgrad: str
    reason: str = ""
    evidence: Evidence = field(default_factory=dict)

    @property
    def quantised(self) -> tuple[str, ...]:
        """The products that the recipe quantises."""
        return tuple(name for name in OPERANDS if getattr(self, name) != WIDE)

    @property
    def name(self) -> str:
        """The weight's name; a layer with one ``weight`` goes by its module's."""
        name = f"{self.module}.{self.parameter}"
        return (name if self.kind == "grouped" else name.removesuffix(".weight")).strip(".")


@dataclass(frozen=True)
class BlockPlan:
    """Which matrix products compute in a block format.

    Attributes:
        target: A name of ``numerics.block_recipes.BLOCK_RECIPES``.
        formats: Every operand's format in words, by product and operand.
        layers: All layers with matrix products, in the model's order.
        reason: How the layers that stay in BF16 were chosen.
    """

    target: str
    formats: Mapping[str, Any]
    layers: tuple[BlockLayer, ...]
    reason: str = ""
    evidence: Evidence = field(default_factory=dict)

    @property
    def recipe(self) -> BlockRecipe:
        """The recipe of that name.

        Raises:
            UsageError: If this version does not know it.
        """
        if self.target not in BLOCK_RECIPES:
            known = ", ".join(BLOCK_RECIPES)
            raise UsageError(
                f"the plan's blocks.target is {self.target!r}, and this version knows {known}: "
                "choose one of these, or upgrade mpdiag"
            )
        return BLOCK_RECIPES[self.target]

    def refuse_unknown(self) -> None:
        """Refuse what a plan edited by hand may hold, and would train as something else.

        Raises:
            UsageError: If this version does not know the recipe, or a layer names another format.
        """
        known = (self.recipe.target, WIDE)
        for layer in self.layers:
            for gemm in OPERANDS:
                if getattr(layer, gemm) not in known:
                    raise UsageError(
                        f"the plan's blocks.layers has {getattr(layer, gemm)!r} as {gemm} of layer "
                        f"{layer.name!r}: write {known[0]!r} or {WIDE!r}"
                    )

    def operands(self) -> dict[str, tuple[OperandFormat, OperandFormat]]:
        """How both operands of each product are rounded, in the order of ``OPERANDS``.

        Raises:
            UsageError: If ``formats`` lacks an operand, or says what no version knows.
        """
        found = {}
        for gemm, names in OPERANDS.items():
            try:
                first, second = (OperandFormat.read(self.formats[gemm][name]) for name in names)
                if first.rotated != second.rotated:
                    raise ValueError("one of its operands is rotated")
            except (AttributeError, KeyError, TypeError, ValueError) as error:
                raise UsageError(
                    f"the plan's blocks.formats has no {gemm} that can be read ({error}): write the "
                    "plan again"
                ) from error
            found[gemm] = first, second
        return found

    @property
    def ragged(self) -> list[str]:
        """Quantised layers with a number of tokens that is not a multiple of the recipe's."""
        return [c.name for c in self.layers if c.quantised and "tokens_padded" in c.evidence]


VerdictLevel = Literal["shown", "expected", "cannot"]


@dataclass(frozen=True)
class Verdict:
    """What is known of a training in the plan's format, and what is not.

    Attributes:
        level: ``shown``: a training by this plan was compared with FP32, and the result is in the
            run; ``expected``: it follows from the recording, within ``evidence``; ``cannot``: the
            training fails in the format, or the recording does not allow an answer.
        text: The verdict in one or two sentences.
        evidence: What it rests on, in clauses.
        not_examined: What was not looked at, in clauses.
    """

    level: VerdictLevel = "expected"
    text: str = ""
    evidence: tuple[str, ...] = ()
    not_examined: tuple[str, ...] = ()

    def __str__(self) -> str:
        return self.text

    @classmethod
    def of_sentence(cls, text: str) -> "Verdict":
        """The verdict of a plan that an earlier version wrote: one sentence, without its evidence."""
        refused = ("This cannot", "This training already", "No gradients were recorded")
        return cls("cannot" if text.startswith(refused) else "expected", text)


@dataclass(frozen=True)
class PrecisionPlan:
    """Every decision about a mixed-precision training.

    Attributes:
        run: The recording that the plan was made from.
        verdict: Whether training by the plan works, with the evidence.
        target: The format to train in: ``fp16``, ``bf16``, ``fp8_e4m3`` or ``fp8_e5m2``.
        level: Opt level O0 to O3 (GTC 2019, *Automatic Mixed Precision for PyTorch*).
        keep_batch_norm_fp32: Whether batch normalisation stays in FP32.
        loss_scale: The loss scale and its scaler.
        master_weights: Whether the optimizer keeps an FP32 copy of the weights.
        fp32_operations: Operations that stay in FP32 in addition to the operation policy.
        fp32_modules: Modules that stay in FP32.
        reduction: How gradients are reduced over ranks; None for one rank.
        levels: What each level would cost, in the order to try them.
        shapes: Dimensions to pad for Tensor Cores.
        layer_formats: The narrowest format of each layer's tensors.
        blocks: Which matrix products compute in a block format; None where all are in ``target``.
        model: The recorded model; None in plans of versions that did not write it.
        conditions: Optimizers, learning rates, input and torch of the recording; None in these plans.
        schema_version: Version of the plan's format.
    """

    run: str = ""
    verdict: Verdict = field(default_factory=Verdict)
    target: str = FP16.name
    level: Literal["O0", "O1", "O2", "O3"] = "O1"
    keep_batch_norm_fp32: bool = True
    loss_scale: LossScalePlan = field(default_factory=LossScalePlan)
    master_weights: MasterWeightsPlan = field(default_factory=MasterWeightsPlan)
    fp32_operations: tuple[Fp32Choice, ...] = ()
    fp32_modules: tuple[Fp32Choice, ...] = ()
    reduction: ReductionPlan | None = None
    levels: tuple[LevelAdvice, ...] = ()
    shapes: tuple[ShapeAdvice, ...] = ()
    layer_formats: tuple[LayerFormat, ...] = ()
    blocks: BlockPlan | None = None
    model: ModelFingerprint | None = None
    conditions: TrainingConditions | None = None
    schema_version: int = SCHEMA_VERSION

    def __repr__(self) -> str:
        scale = self.loss_scale
        amount = "" if scale.method == NO_SCALE else f" {scale.init_scale:g}"
        fp32 = len({c.module for c in (*self.fp32_modules, *self.fp32_operations)})
        return (
            f"<PrecisionPlan {self.aim} {self.level}, loss scale {scale.method}{amount}, "
            f"{fp32} modules in FP32>"
        )

    def _repr_html_(self) -> str:
        """The plan in a notebook."""
        from mpdiag.display import notebook

        return notebook.card(
            self.verdict.text or "A plan for mixed precision",
            *self.notebook_parts(),
            notebook.next_step(self.next_call("plan")),
            mood="warning" if self.loss_scale.needed else "good",
        )

    def notebook_parts(self, said: Collection[str] = ()) -> tuple[str, ...]:
        """HTML for a notebook, below the verdict; reasons in ``said`` are left out."""
        from mpdiag.display import notebook

        return notebook.plan_parts(self, scaled=self.loss_scale.method != NO_SCALE, said=said)

    @property
    def aim(self) -> str:
        """What ``--target`` was for this plan: the block recipe, where there is one, or the format."""
        return self.target if self.blocks is None else self.blocks.target

    def next_call(self, name: str) -> str:
        """The line of code that trains by this plan; "" for a format that mpdiag cannot train in.

        Args:
            name: The plan's name in that line.
        """
        trainable = self.target in {fmt.name for fmt in TRAINABLE}
        return f"mpdiag.MixedPrecision(model, optimizer, {name})" if trainable else ""

    def decisions(self) -> dict[str, Any]:
        """The settings that change a training, as plain values: no reasons, evidence or advice."""
        scale = _encode(self.loss_scale)
        reduction = self.reduction
        return {
            "target": self.target,
            "level": self.level,
            "keep_batch_norm_fp32": self.keep_batch_norm_fp32,
            "loss_scale": {name: scale[name] for name in ("method", *_SETTINGS, "settings")},
            "master_weights": self.master_weights.needed,
            "fp32_operations": sorted([c.module, c.op] for c in self.fp32_operations),
            "fp32_modules": sorted([c.module, c.op] for c in self.fp32_modules),
            "reduction": None if reduction is None else [reduction.dtype, reduction.pre_divide],
        } | ({} if self.blocks is None else {"blocks": self._block_decisions(self.blocks)})

    @staticmethod
    def _block_decisions(blocks: BlockPlan) -> list[Any]:
        layers = sorted([c.module, c.parameter, c.fprop, c.dgrad, c.wgrad] for c in blocks.layers)
        own = [] if blocks.formats == blocks.recipe.formats() else [blocks.formats]
        return [blocks.target, layers, *own]

    def digest(self) -> str:
        """A hash of ``decisions()`` in 16 hexadecimal digits."""
        text = json.dumps(self.decisions(), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def to_json(self) -> dict[str, Any]:
        """Plain values, ready for ``json.dumps(…, allow_nan=False)``."""
        document: dict[str, Any] = _encode(dataclasses.replace(self, model=None))
        document["model"] = None if self.model is None else self.model.to_json()
        if not self.loss_scale.settings:  # so that versions which know no such key read the plan
            del document["loss_scale"]["settings"]
        if self.blocks is None:
            del document["blocks"]
        return document

    @classmethod
    def from_json(cls, document: Any) -> "PrecisionPlan":
        """The inverse of ``to_json``.

        Raises:
            NewerSchema: If a newer version wrote it.
            DamagedPlan: If a field is unknown or of the wrong type.
        """
        version = document.get("schema_version") if isinstance(document, dict) else None
        if type(version) is not int or version < 1:
            raise DamagedPlan(
                "this is not a plan: it has no schema_version; write one with mpdiag analyze -o"
            )
        if version > SCHEMA_VERSION:
            raise NewerSchema(
                f"the plan was written by a newer mpdiag (schema {version}, this one reads up to "
                f"{SCHEMA_VERSION}): upgrade mpdiag to read it"
            )
        if isinstance(document.get("verdict"), str):  # as plans were written at first
            sentence = Verdict.of_sentence(document["verdict"])
            document = {**document, "verdict": _encode(sentence)}
        model = document.get("model")
        plan: PrecisionPlan = _decode(cls, {**document, "model": None}, "plan")
        try:
            plan.loss_scale.scaler_class()
            if plan.blocks is not None:
                plan.blocks.refuse_unknown()
        except UsageError as error:
            raise DamagedPlan(str(error)) from error
        try:
            known = None if model is None else ModelFingerprint.from_json(model)
        except ValueError as error:
            raise DamagedPlan(f"plan.model is damaged ({error}): write the plan again") from error
        return dataclasses.replace(plan, model=known)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan as JSON."""
        text = json.dumps(self.to_json(), indent=2, allow_nan=False, ensure_ascii=False)
        Path(path).write_text(text + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "PrecisionPlan":
        """Read a plan.

        Args:
            path: The plan's file, or the run folder that holds it.

        Raises:
            PlanNotFound: If the file is missing.
            DamagedPlan: If it cannot be read.
            NewerSchema: If a newer version wrote it.
            UsageError: If ``path`` is not a path, for example an ``Analysis``: pass its ``plan``.
        """
        given: object = path  # callers without a type checker pass anything
        if not isinstance(given, (str, os.PathLike)):
            inside = isinstance(getattr(given, "plan", None), cls)
            raise UsageError(
                f"a plan is a PrecisionPlan or the path of one, not {type(given).__name__}"
                + (": pass its .plan" if inside else "")
            )
        path = Path(path)
        write = "write one with mpdiag analyze RUN -o plan.json"
        if (path / FILE).is_file():
            path /= FILE
        try:
            document = read_document(path)
        except FileNotFoundError:
            raise PlanNotFound(f"there is no plan at {path}: {write}") from None
        except IsADirectoryError:
            message = f"{path} is a folder without a plan.json: {write}, and give that file"
            if (path / "meta.json").is_file():
                message = (
                    f"the run {path} holds no plan: write one with mpdiag analyze {path} "
                    f"-o {path / FILE}"
                )
            raise PlanNotFound(message) from None
        except (OSError, ValueError, RecursionError) as error:
            raise DamagedPlan(
                named_instead(path, "plan") or f"{path} is {_why_unreadable(error)}: {write}"
            ) from error
        other = named_instead(path, "plan")
        if other is not None:
            raise DamagedPlan(other)
        return cls.from_json(document)


def _why_unreadable(error: Exception) -> str:
    """What keeps a file from being a plan: it is damaged, or something else altogether."""
    if isinstance(error, json.JSONDecodeError) and not error.doc.lstrip().startswith("{"):
        return "not a plan (it is not JSON)"
    return f"no readable plan ({str(error).splitlines()[0]})"


def _encode(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: _encode(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(k): _encode(v) for k, v in value.items()}
    if isinstance(value, (tuple, list)):
        return [_encode(v) for v in value]
    return value


def _decode(kind: Any, value: Any, where: str) -> Any:  # noqa: C901 - a case for each type
    """A JSON value as the annotated type, or a sentence that says where it is not."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        return _decode_object(kind, value, where)
    if origin is tuple:
        if isinstance(value, list):
            return tuple(_decode(arguments[0], v, f"{where}[{i}]") for i, v in enumerate(value))
    elif origin in (typing.Union, types.UnionType):
        if value is None:
            return None
        return _decode(next(a for a in arguments if a is not type(None)), value, where)
    elif origin is Literal:
        if value in arguments:
            return value
    elif kind is float:
        if type(value) in (int, float) and abs(value) <= sys.float_info.max:  # not NaN
            return float(value)
    elif kind in (int, str, bool):
        if type(value) is kind:
            return value
    elif isinstance(value, dict) and _is_plain(value):  # evidence
        return value
    raise DamagedPlan(f"{where} is {value!r}, which is not allowed there: write the plan again")


def _is_plain(value: dict[str, Any]) -> bool:
    """Whether it can be written again: JSON knows no infinity, though its readers make one of 1e999."""
    try:
        json.dumps(value, allow_nan=False)
    except ValueError:
        return False
    return True


def _decode_object(kind: type[Any], value: Any, where: str) -> Any:
    if not isinstance(value, dict):
        message = f"{where} should be an object, not {type(value).__name__}: write the plan again"
        raise DamagedPlan(message)
    hints = typing.get_type_hints(kind)
    unknown = set(value) - {f.name for f in dataclasses.fields(kind)}
    if unknown:
        message = f"{where} has an unknown field {min(unknown)!r}: remove it, or upgrade mpdiag"
        raise DamagedPlan(message)
    try:
        return kind(**{k: _decode(hints[k], v, f"{where}.{k}") for k, v in value.items()})
    except TypeError as error:
        raise DamagedPlan(f"{where} is incomplete ({error}): write the plan again") from error
