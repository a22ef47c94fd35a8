"""The gradients of an unmodified script: they carry the loss scale nowhere but inside a backward pass.

Each gradient loses the scale where the pass adds it to ``.grad``, so that a script may look at
``.grad`` at any time, in its hooks, too. Where gradients are reduced over ranks on their way (DDP,
FSDP), they keep it until the pass is over, for the reduction may be in half precision. What was not
finite is remembered: a script that clips by value would hide it.
"""

import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mpdiag.tracing.precision import HALF
from mpdiag.training.judgement import divided, multiply, norms, unscale, values_of
from mpdiag.training.scaling import parameters_of
from mpdiag.training.weights.held import HeldTensor, hold_wide


class ScriptGradients:
    """Takes the loss scale off the gradients of some models, and knows which were not finite.

    Attributes:
        unscaled_at_leaves: Whether a gradient loses the scale where it is added to ``.grad``.
    """

    def __init__(self, models: Sequence[nn.Module]) -> None:
        self.unscaled_at_leaves = not any(_is_reduced(model) for model in models)
        self._passes: list[object] = []  # backward passes under way, the innermost last
        self._seen: list[Tensor] = []  # whether what hooks have replaced was finite
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
        if tensor.dtype in HALF:
            hold_wide(tensor)
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

    @property
    def within_pass(self) -> bool:
        """Whether a backward pass is under way; a hook of the script may begin another."""
        return bool(self._passes)

    @contextmanager
    def passing(self) -> Iterator[object]:
        """A backward pass, of which it is known what its hooks have seen."""
        this, seen = object(), self._seen
        self._passes.append(this)
        self._seen = []
        try:
            yield this
        finally:
            self._passes.pop()
            self._seen = seen + self._seen

    @contextmanager
    def unscaling(self, receiving: Sequence[Tensor], scale: float, *, keep: bool) -> Iterator[None]:
        """A backward pass at the loss scale, before and after which no ``.grad`` carries it.

        Args:
            receiving: What may receive a gradient.
            scale: The loss scale of the pass.
            keep: Whether the graph of these gradients lives on, so that nothing in it may change.
        """
        at_once = self.unscaled_at_leaves
        leaves = [t for t in receiving if at_once and t.is_leaf and t.requires_grad]
        others = [t for t in receiving if not (at_once and t.is_leaf and t.requires_grad)]
        with torch.no_grad():
            waiting = [t.grad for t in others if not isinstance(t, HeldTensor)]
            multiply([g for g in waiting if g is not None], scale)
        with self.passing() as this:

            def unscaled(gradient: Tensor | None) -> Tensor | None:
                # In a hook, the script may run a pass of its own, with hooks of its own on leaves.
                if gradient is None or self._passes[-1] is not this:
                    return None
                return divided(gradient, scale)

            handles = [t.register_hook(unscaled) for t in leaves] if scale != 1.0 else []
            try:
                yield
            finally:  # a pass that fails on its way has left scaled gradients, too
                for handle in handles:
                    handle.remove()
                self._unscale(others, scale, keep=keep)
                self._judge(receiving)

    def _unscale(self, leaves: Sequence[Tensor], scale: float, *, keep: bool) -> None:
        for leaf in leaves:
            if isinstance(leaf, HeldTensor):
                leaf.gather_wide(scale)
        leaves = [leaf for leaf in leaves if not isinstance(leaf, HeldTensor)]
        if keep:
            for leaf in leaves:
                leaf.grad = None if leaf.grad is None else divided(leaf.grad, scale)
            return
        with torch.no_grad():
            unscale([leaf.grad for leaf in leaves if leaf.grad is not None], scale)

    def _judge(self, receiving: Sequence[Tensor]) -> None:
        """Remember which gradients are not finite, or were before a hook replaced them."""
        reached = [leaf for leaf in receiving if leaf.grad is not None]
        found = [leaf.grad for leaf in reached if leaf.grad is not None]
        seen, self._seen = self._seen, []
        if not found:
            return
        with torch.no_grad():
            parts = norms([values_of(g) for g in found], 2.0)
            device = parts[0].device
            sums = torch.stack([n.float().to(device) for n in parts])
            finite = torch.isfinite(sums)
            if seen:
                finite = finite & torch.stack([s.to(device) for s in seen]).all()
        self.note_reached(id(leaf) for leaf in reached)
        for leaf, good in zip(reached, finite.tolist(), strict=True):
            if not good:
                self._nonfinite[id(leaf)] = leaf

    def note_seen(self, gradient: Tensor) -> None:
        """Look at a gradient that a hook of the script may replace; no one waits for the answer."""
        with torch.no_grad():
            self._seen.append(torch.isfinite(values_of(gradient)).all())

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


def _is_reduced(model: Any) -> bool:
    """Whether the gradients of a model are reduced over ranks in its backward pass."""
    kinds = ("DistributedDataParallel", "FullyShardedDataParallel")
    wrapped = any(base.__name__ in kinds for m in model.modules() for base in type(m).__mro__)
    return wrapped or any(type(p).__name__ == "DTensor" for p in model.parameters())
