"""The gradients of an unmodified script: unscaled right after each backward pass.

A script may clip or print its gradients at any time, so they never carry the loss scale outside a
backward pass. What was not finite is remembered: a script that clips by value would hide it.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

import torch

from mpdiag.training.gradients.judgement import norms, unscale, values_of
from mpdiag.training.gradients.scaling import parameters_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from torch import Tensor, nn
    from torch.optim import Optimizer


class ScriptGradients:
    """Which gradients of some models are under the loss scale, and which were not finite."""

    def __init__(self, models: Sequence[nn.Module]) -> None:
        self._parameters: dict[int, Tensor] = {id(p): p for m in models for p in m.parameters()}
        self._retained: list[weakref.ref[Tensor]] = []
        self._nonfinite: dict[int, Tensor] = {}  # parameters whose gradient was not finite, by id
        self._reached: set[int] = set()  # parameters whose gradients came through here

    def adopt(self, tensors: Iterable[Tensor]) -> None:
        """Count these among the parameters."""
        self._parameters.update({id(t): t for t in tensors})

    def owns(self, leaves: Iterable[int]) -> bool:
        """Whether any of some tensors, given by ``id``, is a parameter of the models."""
        return any(key in self._parameters for key in leaves)

    def retain(self, tensor: Tensor) -> None:
        """A tensor inside the graph keeps its gradient, which must be unscaled, too."""
        self._retained = [r for r in self._retained if r() is not None]
        self._retained.append(weakref.ref(tensor))

    def receiving(
        self, reached: tuple[Mapping[int, Tensor], bool], inputs: Sequence[Tensor] | None
    ) -> list[Tensor]:
        """What may receive a gradient in a backward pass.

        Args:
            reached: The leaves that the pass reaches, by id, and whether it reaches others that
                cannot be seen.
            inputs: If given, only these receive gradients.
        """
        leaves, opaque = reached
        receiving = dict(leaves)
        if inputs is not None:
            receiving = {id(t): t for t in inputs}
        elif opaque:
            receiving |= {k: p for k, p in self._parameters.items() if p.requires_grad}
        kept = [t for r in self._retained if (t := r()) is not None]
        return list((receiving | {id(t): t for t in kept}).values())

    def unscale(self, leaves: Sequence[Tensor], scale: float, *, keep: bool) -> None:
        """Unscale gradients after a backward pass, and remember what is not finite.

        Args:
            leaves: What may have received a gradient.
            scale: The loss scale of the pass.
            keep: Whether the graph of these gradients lives on, so that nothing in it may change.
        """
        reached = [leaf for leaf in leaves if leaf.grad is not None]
        if keep:
            for leaf in reached:
                leaf.grad = None if leaf.grad is None else leaf.grad / scale
        found = [leaf.grad for leaf in reached if leaf.grad is not None]
        if not found:
            return
        with torch.no_grad():
            if not keep:
                unscale(found, scale)
            parts = norms([values_of(g) for g in found], 2.0)
            sums = torch.stack([n.float().to(parts[0].device) for n in parts])
        self.note_reached(id(leaf) for leaf in reached)
        for leaf, finite in zip(reached, torch.isfinite(sums).tolist(), strict=True):
            if not finite:
                self._nonfinite[id(leaf)] = leaf

    def note_reached(self, leaves: Iterable[int]) -> None:
        """Gradients of these, given by ``id``, were computed under the loss scale."""
        self._reached.update(leaves)

    def came_through(self, optimizer: Optimizer) -> bool:
        """Whether an optimizer's gradients, if it has any, were computed under the loss scale."""
        held = [p for p in parameters_of(optimizer) if p.grad is not None]
        return not held or any(id(p) in self._reached for p in held)

    def were_cleared(self) -> bool:
        """Whether the script has thrown away all gradients that were not finite, without a step."""
        if not self._nonfinite:
            return False
        for key, leaf in list(self._nonfinite.items()):
            if leaf.grad is None or not bool(values_of(leaf.grad).any()):
                del self._nonfinite[key]
        return not self._nonfinite

    def were_nonfinite(self, optimizer: Optimizer) -> bool:
        """Whether an optimizer's gradients were not finite at some time since its last step."""
        return any(id(p) in self._nonfinite for p in parameters_of(optimizer))

    def forget(self, optimizer: Optimizer) -> None:
        """The optimizer has stepped, or its step was skipped."""
        for parameter in parameters_of(optimizer):
            self._nonfinite.pop(id(parameter), None)
