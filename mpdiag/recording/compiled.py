"""Modules inside compiled regions: operators of their graphs that tell a recording what passes.

torch's compiler traces the global forward hook of each module that it inlines. The hook puts an operator
into the graph, and the operator calls the recorder back whenever the graph runs, under every backend.
Nothing in the graph depends on whether a step is recorded, nor on which module calls: the number of the
module is read from a tensor that lies at it, so that blocks of one class go on sharing a graph, and no
module is compiled again.

Gradients come from a hook on the tensor, which autograd keeps as the graph is differentiated. It is
placed by the operator's own kernel for autograd, for the compiler itself refuses hooks in some versions.
Both operators are *effectful*: they are neither dropped nor reordered, and write nothing, so that a graph
may run twice before its backward pass (a buffer that is written would be an error of autograd there).
"""

from __future__ import annotations

import logging
import sys
import weakref
from collections.abc import Iterable
from typing import Any, Protocol

import torch
from torch._higher_order_ops.effects import _EffectType, _register_effectful_op
from torch.library import Library, register_fake

from mpdiag.tracing.dispatch import is_dynamo_tracing

logger = logging.getLogger("mpdiag")

_PLACE = "_mpdiag_point"
_DEEPEST = 4
_LIBRARY = Library("mpdiag", "FRAGMENT")
_TAGS = tuple(
    getattr(torch.Tag, name)
    for name in ("pt2_compliant_tag", "flexible_layout", "cudagraph_unsafe")
    if hasattr(torch.Tag, name)
)
_RECEIPT = 3


class Receiver(Protocol):
    """Hears what passes a module inside a compiled region, as the graph runs."""

    def called(self, *, training: bool, ends: bool) -> None:
        """A whole model is called, or returns (``ends``), with gradients on (``training``) or off."""

    def returned(
        self, output: torch.Tensor, index: int, inputs: list[int], *, training: bool, grad: bool
    ) -> tuple[int, int]:
        """A module has returned a tensor.

        Args:
            output: The tensor.
            index: Which one of those that it returned, from 0.
            inputs: Sizes of its inputs one after another, each after its number of dimensions.
            training: Whether gradients were on where the call stands.
            grad: Whether the tensor requires a gradient.

        Returns:
            Numbers that come back with the gradient of the tensor.
        """

    def differentiated(self, gradient: torch.Tensor, numbers: tuple[int, int]) -> None:
        """The gradient of such a tensor arrived."""


class Point:
    """What lies at a module: its number as a tensor, for graphs that several modules share.

    A copy of the module gets none, and neither does a file that holds the module.

    Attributes:
        number: int64, on the CPU, as it is read while a graph runs.
        root: Whether the module is a whole model.
    """

    def __init__(self, number: int, *, root: bool) -> None:
        self.number = torch.tensor(number)
        self.root = root

    def __deepcopy__(self, memo: Any) -> None:
        """Nothing: what is recorded is this module, not its copies."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Nothing, that is None, in a file."""
        return type(None), ()


_receivers: dict[int, list[weakref.ref[Receiver]]] = {}
"""Who hears of each point, by its number; a graph that outlives a recording finds nobody."""


def place(module: torch.nn.Module, receiver: Receiver, *, root: bool) -> bool:
    """Let a receiver hear of a module in graphs that are made from now on.

    Returns:
        Whether graphs that were made before show the module, as an earlier recording has placed it.
    """
    point = vars(module).get(_PLACE)
    known = isinstance(point, Point)
    if not isinstance(point, Point):
        point = vars(module)[_PLACE] = Point(len(_receivers), root=root)
        _receivers[len(_receivers)] = []
    point.root = point.root or root
    _receivers[int(point.number)].append(weakref.ref(receiver))
    return known


def forget(receivers: Iterable[Receiver]) -> None:
    """Tell these nothing any more. Points stay: without them, graphs would be made again."""
    gone = set(map(id, receivers))
    for heard in _receivers.values():
        heard[:] = [ref for ref in heard if id(ref()) not in gone and ref() is not None]


def compile_again() -> None:
    """Forget all graphs that were made: those show no module, and torch does not look at hooks again."""
    dynamo = sys.modules.get("torch._dynamo")
    if dynamo is not None and dynamo.utils.counters["stats"]["unique_graphs"]:
        logger.info("what was compiled before is compiled again, so that its modules are seen")
        dynamo.reset()


def enter_graph(module: torch.nn.Module) -> None:
    """Called as the compiler traces a call: note it in the graph, if it is one of a whole model."""
    point = getattr(module, _PLACE, None)
    if point is not None and point.root:
        torch.ops.mpdiag.called(point.number, torch.is_grad_enabled(), False)


def leave_graph(module: torch.nn.Module, args: Any, output: Any) -> None:
    """Called as the compiler traces the end of a call: note its tensors in the graph.

    Only what every version of the compiler can trace may stand here: an error would end the training.
    """
    point = getattr(module, _PLACE, None)
    if point is None:
        return
    training = torch.is_grad_enabled()
    inputs: list[int] = []
    for tensor in _tensors(args):
        inputs.append(tensor.dim())
        inputs.extend(tensor.shape)
    for index, tensor in enumerate(_tensors(output)):
        if tensor.is_floating_point() or tensor.is_complex():
            torch.ops.mpdiag.returned(
                tensor, point.number, inputs, index, training, tensor.requires_grad
            )
    if point.root:
        torch.ops.mpdiag.called(point.number, training, True)


def _tensors(value: Any, depth: int = 0) -> list[torch.Tensor]:
    """As ``counting.tensors.tensors_in``, of what a compiler can trace."""
    if isinstance(value, torch.Tensor):
        return [value]
    if depth < _DEEPEST and isinstance(value, dict):
        return [t for one in value.values() for t in _tensors(one, depth + 1)]
    if depth < _DEEPEST and isinstance(value, (tuple, list)):
        return [t for one in value for t in _tensors(one, depth + 1)]
    return []


# -- the operators ---------------------------------------------------------------------------------


def _heard_by(number: int) -> list[Receiver]:
    return [heard for ref in _receivers.get(number, ()) if (heard := ref()) is not None]


def _called(point: torch.Tensor, training: bool, ends: bool) -> None:
    for receiver in _heard_by(int(point)):
        receiver.called(training=training, ends=ends)


def _returned(
    output: torch.Tensor,
    point: torch.Tensor,
    inputs: list[int],
    index: int,
    training: bool,
    grad: bool,
) -> torch.Tensor:
    number = int(point)
    about = (0, 0)
    for receiver in _heard_by(number):
        about = receiver.returned(output, index, inputs, training=training, grad=grad)
    return torch.tensor((number, *about))


def _returned_with_gradient(
    output: torch.Tensor, point: torch.Tensor, *rest: Any
) -> torch.Tensor:
    with torch._C._AutoDispatchBelowAutograd():
        receipt: torch.Tensor = torch.ops.mpdiag.returned(output, point, *rest)
    if output.requires_grad and torch.is_grad_enabled():

        def hook(gradient: torch.Tensor) -> None:
            torch.ops.mpdiag.differentiated(gradient, receipt)

        output.register_hook(hook)
    return receipt


def _differentiated(gradient: torch.Tensor, receipt: torch.Tensor) -> None:
    number, *about = receipt.tolist()
    for receiver in _heard_by(number):
        receiver.differentiated(gradient, (about[0], about[1]))


def _define() -> None:
    rest = "SymInt[] inputs, int index, bool training, bool grad"
    for schema, kernel, fake in (
        ("called(Tensor point, bool training, bool ends) -> ()", _called, _nothing),
        (f"returned(Tensor output, Tensor point, {rest}) -> Tensor", _returned, _receipt),
        ("differentiated(Tensor gradient, Tensor receipt) -> ()", _differentiated, _nothing),
    ):
        _LIBRARY.define(schema, tags=_TAGS)
        name = schema.partition("(")[0]
        _LIBRARY.impl(name, kernel, "CompositeExplicitAutograd")
        register_fake(f"mpdiag::{name}", fake, lib=_LIBRARY)
        operator = getattr(torch.ops.mpdiag, name).default
        _register_effectful_op(operator, _EffectType.ORDERED)
        torch.fx.node.has_side_effect(operator)
    _LIBRARY.impl("returned", _returned_with_gradient, "Autograd")


def _nothing(*_: Any) -> None:
    """What an operator returns that returns nothing."""


def _receipt(*_: Any) -> torch.Tensor:
    return torch.empty(_RECEIPT, dtype=torch.int64)


_define()
