"""Forward passes that are looked at module by module, and put side by side."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from mpdiag.errors import UsageError

Forward = Callable[[nn.Module, Any], Any]
Given = nn.Module | tuple[nn.Module, Forward]


class Side:
    """A model, and how it is called.

    Args:
        given: A model, or a pair of a model and a function of model and batch.

    Raises:
        UsageError: If it is anything else.
    """

    def __init__(self, given: Given) -> None:
        pair: tuple[Any, ...] = given if isinstance(given, tuple) else (given, _call)
        if len(pair) != 2 or not isinstance(pair[0], nn.Module) or not callable(pair[1]):
            raise UsageError("give mismatch() two models, or pairs of a model and a function")
        self.model, self.forward = pair

    def logits(self, batch: Any) -> Tensor:
        """What the model makes of a batch, ``(…, vocabulary)``.

        Raises:
            UsageError: If that is no logits, or the call fails.
        """
        try:
            found = self.forward(self.model, batch)
        except Exception as error:
            message = f"{type(error).__name__}: {error}".partition("\n")[0]
            raise UsageError(f"a forward pass failed ({message})") from error
        found = found["logits"] if isinstance(found, Mapping) and "logits" in found else found
        found = getattr(found, "logits", found)
        found = found[0] if isinstance(found, (tuple, list)) and found else found
        if isinstance(found, Tensor) and found.is_floating_point() and found.dim() > 1:
            return found
        raise UsageError("a model returns no logits: give a pair (model, function) that does")

    @contextmanager
    def evaluated(self) -> Iterator[None]:
        """The model is in evaluation mode."""
        training = [m for m in self.model.modules() if m.training]
        self.model.eval()
        try:
            yield
        finally:
            for m in training:
                m.training = True

    def layers_in_fp32(self) -> dict[str, nn.Module]:
        """The modules that own parameters; in FP32, copies where they are not."""
        return {
            name: m
            if all(p.dtype == torch.float32 for p in m.parameters())
            else copy.deepcopy(m).float()
            for name, m in self.model.named_modules()
            if list(m.parameters(recurse=False))
        }


def _call(model: nn.Module, batch: Any) -> Any:
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(*batch) if isinstance(batch, tuple) else model(batch)


@dataclass(eq=False)
class Call:
    """A call of a module.

    Attributes:
        inputs, outputs: Its floating-point tensors.
        wide: What the layer gives in FP32 for the same inputs; empty if it was not asked.
        inside: The calls of modules in it.
    """

    inputs: list[Tensor] = field(default_factory=list)
    outputs: list[Tensor] = field(default_factory=list)
    wide: list[Tensor] = field(default_factory=list)
    inside: list[Call] = field(default_factory=list)


class FollowedPass:
    """A forward pass, and each call of a module in it.

    Args:
        side: The model.
        batch: Its input.
        layers: Modules that run in FP32, too, by name.
        keep: Those of them whose FP32 output takes the place of the model's own.
        head: The module that makes the logits: its FP32 output is not rounded. None: not known yet.
        graph: Whether gradients of the logits will be wanted.

    Attributes:
        logits: The result.
        calls: By the module's name, in the order of their first calls.
    """

    def __init__(
        self,
        side: Side,
        batch: Any,
        layers: Mapping[str, nn.Module],
        *,
        keep: Collection[str] = (),
        head: str | None = None,
        graph: bool = False,
    ) -> None:
        self.calls: dict[str, list[Call]] = {}
        self._layers, self._keep, self._graph = layers, keep, graph
        self._stack: list[Call] = []
        self._head, self._beside = head, False
        with ExitStack() as hooks, torch.set_grad_enabled(graph):
            for name, m in side.model.named_modules():
                before = partial(self._before, name)
                after = partial(self._after, name)
                hooks.callback(m.register_forward_pre_hook(before, with_kwargs=True).remove)
                hooks.callback(m.register_forward_hook(after, with_kwargs=True).remove)
            self.logits = side.logits(batch)

    def _before(self, name: str, _module: nn.Module, args: Any, kwargs: Any) -> Any:
        if self._beside:  # inside a layer that runs in FP32 beside the model
            return None
        call = Call()
        if self._stack:
            self._stack[-1].inside.append(call)
        self._stack.append(call)
        self.calls.setdefault(name, []).append(call)
        if self._graph:  # a tensor of this call alone: its gradient does not come from elsewhere
            args, kwargs = _changed((args, kwargs), lambda t: t.view_as(t))
        call.inputs = floats((args, kwargs))
        return args, kwargs

    def _after(self, name: str, _module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        if self._beside:
            return None
        call = self._stack.pop()
        if self._graph:
            output = _changed(
                output, lambda t: t if t.requires_grad else t.detach().requires_grad_().clone()
            )
        call.outputs = floats(output)
        if name not in self._layers or (self._keep and name not in self._keep):
            return output
        args, kwargs = _changed((args, kwargs), Tensor.float)
        self._beside = True
        with torch.no_grad(), torch.autocast(_device(args, kwargs), enabled=False):
            wide = self._layers[name].forward(*args, **kwargs)
        self._beside = False
        call.wide = floats(wide)
        if not self._keep:
            return output
        like = iter(call.outputs)
        return wide if name == self._head else _changed(wide, lambda t: t.to(next(like).dtype))

    @property
    def head(self) -> str:
        """The innermost module whose output is the logits, empty if there is none."""
        made = self.logits.untyped_storage().data_ptr()
        last = {n: c.outputs for n, calls in self.calls.items() for c in calls[-1:]}
        return next(
            (
                n
                for n in reversed(last)
                if any(t.untyped_storage().data_ptr() == made for t in last[n])
            ),
            "",
        )


def floats(nest: Any) -> list[Tensor]:
    """The floating-point tensors of a nest, in order."""
    return [t for t in tree_leaves(nest) if isinstance(t, Tensor) and t.is_floating_point()]


def _device(*nests: Any) -> str:
    return next((t.device.type for t in tree_leaves(nests) if isinstance(t, Tensor)), "cpu")


def _changed(nest: Any, change: Callable[[Tensor], Tensor]) -> Any:
    return tree_map(
        lambda t: change(t) if isinstance(t, Tensor) and t.is_floating_point() else t, nest
    )


def in_shapes_of(
    ours: Sequence[list[Tensor]], theirs: Sequence[list[Tensor]]
) -> list[list[Tensor] | None]:
    """One module's tensors in one pass, call by call in the shapes of another pass.

    Many calls are put together where the other pass has one: the tokens of a KV cache, or rows of the
    batch. Of padded positions, the last are the tokens.

    Returns:
        For each of our calls their tensors, None where these do not fit.
    """
    if len(theirs) > len(ours) == 1 and {len(ts) for ts in theirs} == {len(ours[0])}:
        columns = zip(*theirs, strict=True)
        theirs = [[_joined(ts, t.shape) for ts, t in zip(columns, ours[0], strict=True)]]
    if len(theirs) != len(ours):
        return [None] * len(ours)
    cut = [
        [_cut(t, o.shape) for t, o in zip(ts, os, strict=False)]
        for ts, os in zip(theirs, ours, strict=True)
    ]
    return [
        ts if [t.shape for t in ts] == [o.shape for o in os] else None
        for ts, os in zip(cut, ours, strict=True)
    ]


def _joined(parts: Sequence[Tensor], shape: torch.Size) -> Tensor:
    for dim in range(min(2, len(shape)))[::-1]:
        rest = {(*t.shape[:dim], *t.shape[dim + 1 :]) for t in parts}
        if rest == {(*shape[:dim], *shape[dim + 1 :])}:
            return torch.cat(list(parts), dim)
    return parts[0]


def _cut(tensor: Tensor, shape: torch.Size) -> Tensor:
    padding = tensor.shape[1] - shape[1] if tensor.dim() == len(shape) > 1 else 0
    return tensor.narrow(1, padding, shape[1]) if padding > 0 else tensor
