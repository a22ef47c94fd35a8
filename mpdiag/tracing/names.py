"""Names of what can be recorded: the modules and parameters of the models."""

import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from mpdiag.errors import UsageError
from mpdiag.tracing.compiled_products import ForwardFlops
from mpdiag.tracing.fingerprint import joined
from mpdiag.tracing.sharding import shards_of

Models = nn.Module | Sequence[nn.Module] | Mapping[str, nn.Module]


class Stages(tuple[nn.Module, ...]):
    """Parts of one model, which keep the names that they have in it."""

    __slots__ = ()


HIDDEN = "no call was seen: it was not called, or inside a branch, loop or vmap of a compiled graph"
"""Why a module has no records where compiled graphs showed others."""
_SETTINGS = tuple(
    """
    in_channels out_channels kernel_size stride padding dilation groups in_features out_features
    num_embeddings embedding_dim embed_dim num_heads input_size hidden_size proj_size num_layers
    bidirectional batch_first eps num_features normalized_shape num_groups
    """.split()
)
"""Attributes a shape rule or a numerical rule may need, kept where a module has them."""


@dataclass(eq=False)
class NamedModule:
    """A module to record, and what was seen of it.

    Attributes:
        name: Its first name, as ``named_modules`` gives it; ``""`` is the root.
        module: The module.
        aliases: Its other names, where it is used in several places.
        root: Whether it is one of the models themselves.
        reason: Why it cannot be recorded; None where it can.
        captured: Whether a call of it was captured in a CUDA graph.
        compiled: Whether it stands in a compiled module.
        inside: Whether a call of it inside a compiled region was seen.
        due, came: Gradients of outputs inside compiled regions that were to come, and that came.
        seen: Kinds recorded so far.
        differentiated: Whether an output of a recorded call required a gradient.
        input_shapes, output_shapes: Of its first recorded call, None before.
        script_name: What the script calls it, where it was found in one.
    """

    name: str
    module: nn.Module
    aliases: tuple[str, ...]
    root: bool
    reason: str | None = None
    seen: set[str] = field(default_factory=set)
    differentiated: bool = False
    captured: bool = False
    compiled: bool = False
    inside: bool = False
    due: int = 0
    came: int = 0
    input_shapes: list[list[int]] | None = None
    output_shapes: list[list[int]] | None = None
    script_name: str | None = None

    @property
    def may_hide(self) -> bool:
        """Whether it can be called, as containers cannot, and no call was seen."""
        kind = type(self.module)
        able = kind.forward is not nn.Module.forward and kind is not NonDynamicallyQuantizableLinear
        return able and self.output_shapes is None and not self.seen

    def row(self, *, hidden: bool = False, graphs: bool = False) -> dict[str, Any]:
        """Its row in the table of modules.

        Args:
            hidden: Whether compiled regions showed no module at all.
            graphs: Whether they showed some.
        """
        settings = {
            name: _plain(getattr(self.module, name))
            for name in _SETTINGS
            if _has(self.module, name)
        }
        own = dict(self.module.named_parameters(recurse=False))  # a ScriptModule's too
        settings["channels_last"] = _channels_last(own.get("weight"))
        called = self.output_shapes is not None
        unseen = "returned no tensor" if called else "never called in a recorded step"
        if graphs and self.may_hide:
            unseen = HIDDEN
        if self.compiled and hidden:
            unseen = "compiled: no record came from inside the compiled region"
        if self.captured:
            unseen = "captured in a CUDA graph: hooks do not run in its replays"
        reason = self.reason or ("" if self.seen and not self.captured else unseen)
        return {
            "name": self.name,
            "what": "module",
            "type": type_name(self.module),
            "aliases": list(self.aliases),
            "numel": sum(p.numel() for p in self.module.parameters(recurse=False)),
            "recorded": bool(self.seen),
            "reason": reason,
            "script_name": self.script_name,
            "input_shapes": _json(self.input_shapes),
            "output_shapes": _json(self.output_shapes),
            "settings": json.dumps({k: v for k, v in settings.items() if v is not None}),
        }

    def has_gradient(self) -> bool:
        """Whether there is a gradient of its output, seen or not."""
        return self.differentiated or "activation_grad" in self.seen

    def why_without_gradient(self) -> str:
        """Why no gradient of its output was recorded, though its output was."""
        if not self.has_gradient():
            return "its output needs no gradient: nothing before it is trained"
        return "its output got no gradient in a recorded step"


@dataclass(eq=False)
class NamedParameter:
    """A parameter to record; fields as for ``NamedModule``."""

    name: str
    parameter: nn.Parameter
    aliases: tuple[str, ...] = ()
    reason: str | None = None
    seen: set[str] = field(default_factory=set)
    script_name: str | None = None

    def row(self) -> dict[str, Any]:
        """Its row in the table of modules."""
        p = self.parameter
        if self.reason is not None:
            reason = self.reason
        elif not p.requires_grad:
            reason = "frozen: it has neither gradient nor update"
        else:
            reason = "" if "weight_grad" in self.seen else "it got no gradient in a recorded step"
        return {
            "name": self.name,
            "what": "parameter",
            "type": type(p).__name__,
            "aliases": list(self.aliases),
            "shape": list(p.shape),
            "numel": p.numel(),
            "dtype": str(p.dtype).removeprefix("torch."),
            "recorded": bool(self.seen),
            "reason": reason,
            "script_name": self.script_name,
        }


@dataclass(eq=False)
class Subjects:
    """The modules and parameters that a recording is about.

    Attributes:
        roots: The models.
        modules: By ``id`` of the module; ids are stable, as the modules are kept alive here.
        parameters: By ``id`` of the parameter.
        chosen: Whether a name passes ``include`` and ``exclude``.
        names: First name of every module, parameter and buffer by ``id``, chosen or not.
    """

    roots: tuple[nn.Module, ...]
    modules: dict[int, NamedModule]
    parameters: dict[int, NamedParameter]
    chosen: "NameFilter"
    names: dict[int, str] = field(default_factory=dict)

    def adopt(self, prefix: str, model: nn.Module, wrapper: nn.Module | None = None) -> None:
        """Take in a model and all in it.

        Args:
            prefix: What its names begin with; ``""`` for names as PyTorch gives them.
            model: The model.
            wrapper: What stands around it (DDP, ``torch.compile``) and gives no names.
        """
        self.roots = (*self.roots, model)
        self._take_in(prefix, model, wrapper, aliases=True)

    def nothing_chosen(self) -> str:
        """Why there is nothing to record, and names that a pattern could match, as a sentence."""
        named = [name for name in self.names.values() if name][:3]
        asked = {"include": self.chosen.include, "exclude": self.chosen.exclude}
        patterns = " and ".join(f"{k}={v!r}" for k, v in asked.items() if v is not None)
        like = f": match names like {', '.join(named)}" if named else ""
        return f"{patterns or 'the model'} leaves no module or parameter to record{like}"

    def grow(self) -> None:
        """Take in what was added to the models since: adapters, parametrisations, new heads.

        What is known keeps the names that it has, even where it has moved.
        """
        for root in self.roots:
            self._take_in(self.names.get(id(root), ""), root, None, aliases=False)

    def _take_in(
        self, prefix: str, model: nn.Module, wrapper: nn.Module | None, *, aliases: bool
    ) -> None:
        for walk in (model.named_modules, model.named_parameters, model.named_buffers):
            self.names.update(
                {id(x): joined(prefix, n) for n, x in walk() if id(x) not in self.names}
            )
        covered = _compiled_inside(model if wrapper is None else wrapper)
        for name, module in model.named_modules(remove_duplicate=False):
            full = joined(prefix, name)
            if self._is_new(self.modules.get(id(module)), full, aliases=aliases):
                self.modules[id(module)] = NamedModule(
                    full, module, (), root=module is model, compiled=id(module) in covered
                )
        shards = shards_of(model)
        for name, held in model.named_parameters(remove_duplicate=False):
            full, parameter = joined(prefix, name), shards.get(id(held), held)
            self.names.setdefault(id(parameter), full)
            if self._is_new(self.parameters.get(id(parameter)), full, aliases=aliases):
                self.parameters[id(parameter)] = NamedParameter(full, parameter)

    def _is_new(
        self, known: NamedModule | NamedParameter | None, name: str, *, aliases: bool
    ) -> bool:
        """Whether a name is chosen and of something not known; else it may be another name of it."""
        chosen = self.chosen(name)
        if known is not None and chosen and aliases:
            known.aliases += (name,)
        return known is None and chosen

    def name_models(self, names: Mapping[int, str]) -> None:
        """Note what a script calls its models, for the table: names by ``id`` of the model."""
        for root in self.roots:
            if id(root) not in names:
                continue
            script_name = names[id(root)]
            for name, module in root.named_modules():
                if id(module) in self.modules:
                    self.modules[id(module)].script_name = joined(script_name, name)
            for name, parameter in root.named_parameters():
                if id(parameter) in self.parameters:
                    self.parameters[id(parameter)].script_name = joined(script_name, name)

    def rows(self) -> Iterator[dict[str, Any]]:
        """The table of modules and parameters."""
        modules = self.modules.values()
        graphs = any(m.inside for m in modules)
        hidden = not graphs and not any(m.compiled and m.seen for m in modules)
        for module in modules:
            yield module.row(hidden=hidden, graphs=graphs)
        for parameter in self.parameters.values():
            yield parameter.row()

    def coverage(self, rows: Sequence[Mapping[str, Any]], graphs: ForwardFlops) -> dict[str, Any]:
        """What of the table's rows was recorded and what was not, with the reason of each."""
        modules = [r for r in rows if r["what"] == "module"]
        parameters = [r for r in rows if r["what"] == "parameter"]
        not_recorded = [
            {"name": r["name"], "what": r["what"], "reason": r["reason"]}
            for r in rows
            if r["reason"]
        ]
        not_recorded += [
            {"name": m.name, "what": "activation_grad", "reason": m.why_without_gradient()}
            for m in self.modules.values()
            if m.seen and "activation_grad" not in m.seen
        ]
        return {
            "modules": len(modules),
            "modules_recorded": sum(r["recorded"] for r in modules),
            "parameters": len(parameters),
            "parameters_recorded": sum(r["recorded"] for r in parameters),
            "seen": self._seen(),
            "compiled": self._inside(graphs),
            "not_recorded": not_recorded,
        }

    def _inside(self, graphs: ForwardFlops) -> dict[str, int]:
        """Modules seen in compiled regions, and how many of their gradients were due and came.

        Also whether inductor compiled anything here, and elements of parameters in modules that graphs
        may hide; none where they show no module, as ``not_recorded`` then names all. FLOPs are of the
        graphs' forward passes; ``flops`` is 0 where they are not known.
        """
        seen = [m for m in self.modules.values() if m.inside]
        hidden = [m.module for m in self.modules.values() if seen and m.may_hide]
        counters = sys.modules["torch._dynamo.utils"].counters if seen else {}
        return {
            "modules": len(seen),
            "parameters_hidden": sum(
                p.numel() for m in hidden for p in m.parameters(recurse=False)
            ),
            "flops_hidden": graphs.hidden,
            "flops": 0 if graphs.unknown else graphs.all,
            "inductor": int(bool(counters.get("inductor"))),
            "gradients_due": sum(m.due for m in seen),
            "gradients": sum(m.came for m in seen),
        }

    def _seen(self) -> dict[str, int]:
        """How much there is and how much was counted; ``runs.coverage.Coverage`` says what of.

        What ``include`` and ``exclude`` leave out is there, and was not counted.
        """
        named = list(self.parameters.values())
        # By name, too: FSDP puts gathered parameters in the place of those that were named.
        taken = {name for n in named for name in (n.name, *n.aliases)}
        held = {
            id(p): p
            for root in self.roots
            for name, p in root.named_parameters()
            if joined(self.names.get(id(root), ""), name) not in taken
        }
        held.update((key, n.parameter) for key, n in self.parameters.items())
        every_module = {id(m) for root in self.roots for m in root.modules()}
        modules = list(self.modules.values())
        return {
            "parameters": sum(p.numel() for p in held.values()),
            "parameters_seen": sum(n.parameter.numel() for n in named if n.seen),
            "gradients": sum(p.numel() for p in held.values() if p.requires_grad),
            "gradients_seen": sum(
                n.parameter.numel()
                for n in named
                if "weight_grad" in n.seen and n.parameter.requires_grad
            ),
            "modules": len(every_module | set(self.modules)),
            "modules_seen": sum(bool(m.seen) for m in modules),
            "activation_gradients": sum(bool(m.seen) and m.has_gradient() for m in modules),
            "activation_gradients_seen": sum("activation_grad" in m.seen for m in modules),
        }

    def add_stray(self, parameter: nn.Parameter, name: str) -> NamedParameter | None:
        """Take in a parameter that an optimizer holds but no model does."""
        if not self.chosen(name):
            return None
        named = NamedParameter(name, parameter)
        self.parameters[id(parameter)] = named
        return named


@dataclass(frozen=True)
class NameFilter:
    """Passes names that match ``include`` (if given) and do not match ``exclude`` (if given).

    Both are regular expressions, searched anywhere in the name.
    """

    include: str | None
    exclude: str | None

    def __post_init__(self) -> None:
        """Refuse a pattern that is no regular expression."""
        for option in ("include", "exclude"):
            pattern = getattr(self, option)
            try:
                re.compile(pattern or "")
            except (re.error, TypeError) as error:
                message = f"{option}={pattern!r} is no regular expression: {error}"
                raise UsageError(message) from error

    def __call__(self, name: str) -> bool:
        """Whether a name passes the filter."""
        if self.include is not None and not re.search(self.include, name):
            return False
        return self.exclude is None or not re.search(self.exclude, name)


def subjects(models: Models, include: str | None, exclude: str | None) -> Subjects:
    """Find every module and parameter, once each, with all its names.

    Args:
        models: One model (names as PyTorch gives them), several (``0.conv``, ``1.conv`` …) or a
            mapping (``generator.conv`` …).
        include: See ``NameFilter``.
        exclude: See ``NameFilter``.

    Raises:
        UsageError: If ``models`` is anything else, or a filter is no regular expression.
    """
    found = Subjects((), {}, {}, NameFilter(include, exclude))
    for prefix, model in _named_models(models):
        found.adopt(prefix, model)
    return found


def _named_models(models: Models) -> list[tuple[str, nn.Module]]:
    given: object = models  # callers without a type checker pass anything
    if isinstance(models, nn.Module):
        return [("", models)]
    named: list[tuple[str, nn.Module]]
    if isinstance(given, Mapping):
        named = [(str(name), model) for name, model in given.items()]
    elif isinstance(given, Stages):
        named = [("", model) for model in given]
    elif isinstance(given, Sequence):
        named = [(str(i), model) for i, model in enumerate(given)]
        if len(named) == 1:
            named = [("", named[0][1])]
    else:
        named = []
    if not named or not all(isinstance(model, nn.Module) for _, model in named):
        raise UsageError(
            f"give a torch.nn.Module, or a list or mapping of them, not {type(models).__name__}"
        )
    return named


def _compiled_inside(model: nn.Module) -> set[int]:
    """Modules that stand in a compiled one, by ``id``."""
    return {
        id(child)
        for module in model.modules()
        if hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None
        for child in module.modules()
        if child is not module
    }


def type_name(module: nn.Module) -> str:
    """The class a module was written as: ``fully_shard`` puts one of its own in front."""
    kind = type(module)
    if len(kind.__mro__) > 2 and kind.__mro__[1].__name__ == "FSDPModule":
        kind = kind.__mro__[2]
    return kind.__name__


def _has(module: nn.Module, name: str) -> bool:
    """``hasattr``, without the error that torch makes for each name a module lacks."""
    if type(module).__getattr__ is not nn.Module.__getattr__:
        return hasattr(module, name)
    return name in module.__dict__ or hasattr(type(module), name)


def _plain(value: Any) -> Any:
    if isinstance(value, (int, float, str, bool)):
        return value
    if isinstance(value, (tuple, list)) and all(isinstance(v, (int, float)) for v in value):
        return list(value)
    return None


def _channels_last(weight: torch.Tensor | None) -> bool | None:
    """Whether the weight of a convolution lies so in memory; None where both formats are the same."""
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    if weight is None or weight.dim() not in formats:
        return None
    last: bool = weight.is_contiguous(memory_format=formats[weight.dim()])
    return None if last == weight.is_contiguous() else last


def _json(shapes: list[list[int]] | None) -> str | None:
    return None if shapes is None else json.dumps(shapes)


def shapes_of(tensors: Iterator[torch.Tensor]) -> list[list[int]]:
    """Sizes of some tensors, as plain lists; -1 where a nested or symbolic one has no number."""
    return [
        [t.size(0)] + [-1] * (t.dim() - 1)
        if t.is_nested
        else [n if type(n) is int else -1 for n in t.shape]
        for t in tensors
    ]
