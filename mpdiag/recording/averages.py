"""Averages of the weights in half precision: tensors that something writes to, and that do not follow.

An average of the weights (EMA, a target network) belongs to the script: no optimizer steps it, and no
recorded module need hold it. So all living tensors are looked through once, for those in half precision
that are nearly a parameter. Torch counts the writes to each tensor. An element that a write leaves as it
was, though the parameter's is another, has lost its update.
"""

from __future__ import annotations

import gc
import weakref
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from mpdiag.recording.counting.tensors import some_of
from mpdiag.tracing.names import NamedParameter
from mpdiag.tracing.precision import HALF

MOST = 64
"""Parameters, and averages of them, that are followed."""
NEAR = 0.5
"""Distance from a parameter, over its norm, within which a tensor may be an average of it."""


@dataclass(eq=False)
class Average:
    """A tensor in half precision that may be an average of a parameter.

    Attributes:
        name, parameter: The parameter.
        tensor: The tensor.
        wide: FP32 tensors of its shape: it may be a copy of one, which loses nothing.
        step, version: Of the last look: the step, and torch's count of writes.
        values, goal: Elements at the last look, (k,), and the parameter's in the tensor's dtype.
        away, still: Elements × writes: those that were not the parameter's, and those of them that
            stayed.
    """

    name: str
    parameter: weakref.ref[torch.Tensor]
    tensor: weakref.ref[torch.Tensor]
    wide: Sequence[weakref.ref[torch.Tensor]]
    step: int
    version: int
    values: torch.Tensor
    goal: torch.Tensor
    away: int = 0
    still: int = 0

    def look(self, step: int) -> None:
        """Compare the tensor with what it was a step ago, if it was written to since."""
        tensor, parameter = self.tensor(), self.parameter()
        if tensor is not None and tensor._version == self.version:
            self.step = step
            return
        now = None if tensor is None else some_of(tensor)
        goal = None if parameter is None else some_of(parameter)
        if tensor is None or now is None or goal is None or now.shape != self.values.shape:
            return
        before, earlier, goal = self.values, self.goal, goal.to(now.dtype)
        written = step == self.step + 1
        self.step, self.version, self.values, self.goal = step, tensor._version, now, goal
        others = (some_of(t) for t in (one() for one in self.wide) if t is not None)
        copied = (goal, earlier, *(t.to(now.dtype) for t in others if t is not None))
        if written and not any(torch.equal(now, one) for one in copied):
            away = before != goal
            self.away += int(away.sum())
            self.still += int((away & (now == before)).sum())


def averages(parameters: Iterable[NamedParameter], step: int) -> Iterator[Average]:
    """Tensors in half precision that are nearly a trained parameter, and not its memory.

    Args:
        parameters: Those recorded.
        step: That has ended.
    """
    trained = [n for n in parameters if n.parameter.requires_grad]
    taken = {id(t) for n in trained for t in (n.parameter, n.parameter.grad)}
    shapes = {n.parameter.shape for n in trained[:MOST]}
    alike: dict[torch.Size, list[torch.Tensor]] = defaultdict(list)
    for one in gc.get_objects():
        if type(one) not in (torch.Tensor, nn.Parameter) or id(one) in taken:
            continue
        plain = one.layout == torch.strided and not (one.is_nested or one.is_inference())
        if plain and one.shape in shapes:
            alike[one.shape].append(one)
    for named in trained[:MOST]:
        parameter: torch.Tensor = named.parameter
        own = some_of(parameter)
        if own is None or bool((own == own[0]).all()):
            continue  # constants are near each other by chance
        near = [
            t for t in alike[parameter.shape] if t.device == parameter.device and _is_near(t, own)
        ]
        wide = [weakref.ref(t) for t in near if t.dtype == torch.float32]
        for one in (t for t in near if t.dtype in HALF and t.data_ptr() != parameter.data_ptr()):
            values = some_of(one)
            if values is not None and id(one) not in taken:
                taken.add(id(one))
                of, tensor, goal = weakref.ref(parameter), weakref.ref(one), own.to(one.dtype)
                yield Average(named.name, of, tensor, wide, step, one._version, values, goal)


def _is_near(tensor: torch.Tensor, own: torch.Tensor) -> bool:
    values = some_of(tensor)
    if values is None or values.shape != own.shape:
        return False
    return bool((values.float() - own.float()).norm() <= NEAR * own.float().norm())
