"""Modules inside compiled regions: operators of their graphs that tell a recording what passes.

torch's compiler traces the global forward hook of each module that it inlines. The hook puts an operator
into the graph, and the operator calls the recorder back whenever the graph runs, under every backend.
Nothing in the graph depends on whether a step is recorded, nor on which module calls: the number of the
module is read from a tensor that lies at it, so that blocks of one class go on sharing a graph, and no
module is compiled again.

Gradients come from a hook on the tensor, which autograd keeps as the graph is differentiated. It is
placed by the operator's own kernel for autograd, for the compiler itself refuses hooks in some versions.
Operators of the forward pass are *effectful*: they are neither dropped nor reordered, and write nothing,
so that a graph may run twice before its backward pass (a buffer that is written would be an error of
autograd there). Those of the backward pass may come in any order, and ``aot_eager`` takes ten times as
long to call an effectful one.
"""

import itertools
import logging
import sys
import weakref
from collections.abc import Callable, Iterable
from operator import getitem
from typing import Any, Protocol

import numpy as np
import torch
from torch._higher_order_ops.effects import _EffectType, _register_effectful_op
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.library import Library, register_fake
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils.checkpoint import CheckpointPolicy

from mpdiag.recording.counting.tensors import local_part
from mpdiag.runs.schema import Placement
from mpdiag.tracing.compiled_products import ForwardFlops, watch_graphs
from mpdiag.tracing.uncompiled import constant_when_traced

logger = logging.getLogger("mpdiag")

NO_OPERATIONS = "the model is compiled", "record the eager one"
"""Why no operations are recorded: compiled code shows none."""
_PLACE = "_mpdiag_point"
_DEEPEST = 4
_LIBRARY = Library("mpdiag", "FRAGMENT")
_TAGS = tuple(
    getattr(torch.Tag, name)
    for name in ("pt2_compliant_tag", "flexible_layout", "cudagraph_unsafe")
    if hasattr(torch.Tag, name)
)
_HOST = torch.device("cpu")  # where a number is read without waiting for a device
_RECEIPT = 4
_RECOMPUTE = "recompute"
"""The name under which torch notes at a node what checkpointing wants of it."""
_PART = "partitioner_tag"
"""The name under which it notes which of the two graphs a node belongs to."""
_KEPT = hasattr(torch._library.utils, "is_impure")  # torch 2.11; not in 2.6
"""Whether inductor keeps an operator without a result that is not effectful."""


class Receiver(Protocol):
    """Hears what passes a module inside a compiled region, as the graph runs."""

    def called(self, *, training: bool, ends: bool) -> None:
        """A whole model is called, or returns (``ends``), with gradients on (``training``) or off."""

    def returned(
        self,
        output: torch.Tensor,
        inputs: list[int],
        outputs: list[int],
        index: int,
        *,
        placement: Placement,
        training: bool,
        grad: bool,
    ) -> tuple[int, int, int]:
        """A module has returned a tensor.

        Args:
            output: The tensor, or this rank's part of it.
            inputs: Sizes of its inputs one after another, each after its number of dimensions.
            outputs: Those of all tensors that it returned.
            index: Which of these the tensor is.
            placement: How the tensor lies over the ranks.
            training: Whether gradients were on where the call stands.
            grad: Whether the tensor requires a gradient.

        Returns:
            Numbers that come back with the gradient of the tensor.
        """

    def differentiated(
        self, gradient: torch.Tensor, placement: Placement, numbers: tuple[int, int, int]
    ) -> None:
        """The gradient of such a tensor arrived."""


class Point:
    """What lies at a module: its number as a tensor, for graphs that several modules share.

    A copy of the module gets none, and neither does a file that holds the module.

    Attributes:
        number: int64, on the CPU, as it is read while a graph runs.
        root: Whether the module is a whole model.
    """

    def __init__(self, number: int, *, root: bool) -> None:
        self.number = torch.tensor(number, device=_HOST)
        self.root = root

    def __deepcopy__(self, memo: Any) -> None:
        """Nothing: what is recorded is this module, not its copies."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Nothing, that is None, in a file."""
        return type(None), ()


graph_flops = ForwardFlops()
"""Of the graphs that were made while something was last recorded."""
_watches: list[Callable[[], None]] = []
_receivers: dict[int, list[weakref.ref[Receiver]]] = {}
"""Who hears of each point, by its number; a graph that outlives a recording finds none."""


def place(module: torch.nn.Module, receiver: Receiver, *, root: bool) -> bool:
    """Let a receiver hear of a module in graphs that are made from now on.

    Returns:
        Whether another one hears of it, so that the graphs that there are show the module.
    """
    point = vars(module).get(_PLACE)
    if not isinstance(point, Point):
        point = vars(module)[_PLACE] = Point(len(_receivers), root=root)
    point.root = point.root or root
    heard = _receivers.setdefault(int(point.number), [])
    shown = any(ref() is not None for ref in heard)
    heard.append(weakref.ref(receiver))
    return shown


def forget(receivers: Iterable[Receiver]) -> None:
    """Tell these nothing any more. Points stay: without them, graphs would be made again."""
    gone = set(map(id, receivers))
    for heard in _receivers.values():
        heard[:] = [ref for ref in heard if id(ref()) not in gone and ref() is not None]
    while _watches and not any(_receivers.values()):
        _watches.pop()()


def compile_again() -> None:
    """Forget all graphs that were made: those show no module, and torch does not look at hooks again."""
    dynamo = sys.modules.get("torch._dynamo")
    if torch._guards.TracingContext.try_get() is not None:
        return  # it makes one now
    if dynamo is not None and dynamo.utils.counters["stats"]["unique_graphs"]:
        logger.info("what was compiled before is compiled again, so that its modules are seen")
        dynamo.reset()


def _takes_operators() -> bool:
    """Whether what is traced may hold our operators, as no export, branch, loop or transform may.

    What it hides is noted, and its FLOPs are counted.
    """
    if _is_exporting():
        return False
    if not _watches:
        graph_flops.all = graph_flops.hidden = graph_flops.unknown = 0
        _watches.append(watch_graphs(graph_flops.add))
    from torch._dynamo.symbolic_convert import InstructionTranslator

    output: Any = InstructionTranslator.current_tx().output
    tracer = output.current_tracer
    able = torch._C._functorch.peek_interpreter_stack() is None
    while able and tracer.parent is not None:
        able = "checkpoint" in str(tracer.source_fn_stack[-1])
        tracer = tracer.parent
    if not able and (stack := output.current_tx.nn_module_stack):
        graph_flops.modules.add(list(stack.values())[-1][0])
    return able


constant_when_traced(_takes_operators)


_is_exporting: Callable[[], bool] = getattr(torch.compiler, "is_exporting", bool)  # torch 2.7


def enter_graph(module: torch.nn.Module) -> None:
    """Called as the compiler traces a call: note it in the graph, if it is one of a whole model."""
    point = getattr(module, _PLACE, None)
    if point is not None and point.root and _takes_operators():
        torch.ops.mpdiag.called(point.number, torch.is_grad_enabled(), False)


def leave_graph(module: torch.nn.Module, args: Any, output: Any) -> None:
    """Called as the compiler traces the end of a call: note its tensors in the graph.

    Only what every version of the compiler can trace may stand here: an error would end the training.
    """
    point = getattr(module, _PLACE, None)
    if point is None or not _takes_operators():
        return
    training = torch.is_grad_enabled()
    returned = _tensors(output)
    inputs, outputs = _sizes(_tensors(args)), _sizes(returned)
    for index, tensor in enumerate(returned):
        if tensor.is_floating_point() or tensor.is_complex():
            rest = index, "local", training, tensor.requires_grad
            torch.ops.mpdiag.returned(tensor, point.number, inputs, outputs, *rest)
    if point.root:
        torch.ops.mpdiag.called(point.number, training, True)


def _sizes(tensors: list[torch.Tensor]) -> list[int]:
    return [size for tensor in tensors for size in (tensor.dim(), *tensor.shape)]


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
    outputs: list[int],
    index: int,
    placement: Placement,
    training: bool,
    grad: bool,
) -> torch.Tensor:
    number = int(point)
    about = (0, 0, 0)
    for receiver in _heard_by(number):
        about = receiver.returned(
            output, inputs, outputs, index, placement=placement, training=training, grad=grad
        )
    return torch.from_numpy(np.array((number, *about), np.int64))  # the fastest way to make one


def _runs(tensor: torch.Tensor) -> bool:
    """Whether a graph runs, so that nothing need hear of an operator but what it calls."""
    if type(tensor) is not torch.Tensor or torch.compiler.is_dynamo_compiling():
        return False
    return not (torch.is_grad_enabled() and torch._C._len_torch_dispatch_stack())


def _called_below(point: torch.Tensor, *switches: bool) -> None:
    if _runs(point):
        _called(point, *switches)
    else:
        _below_autograd(torch.ops.mpdiag.called, point, *switches)


def _returned_below(
    output: torch.Tensor,
    point: torch.Tensor,
    inputs: list[int],
    outputs: list[int],
    index: int,
    placement: Placement,
    *switches: bool,
) -> torch.Tensor:
    receipt: torch.Tensor
    if _runs(output):
        receipt = _returned(output, point, inputs, outputs, index, placement, *switches)
    else:
        part, found = local_part(output)
        placement = placement if part is output else found  # of a part, it was asked of the whole
        is_wrapped: bool = is_traceable_wrapper_subclass(part)
        if is_wrapped:
            return _receipt()
        more = inputs, outputs, index, placement, *switches
        receipt = _below_autograd(torch.ops.mpdiag.returned, part, point, *more)
    if output.requires_grad and torch.is_grad_enabled():
        output.register_hook(lambda gradient: _gradient_arrived(gradient, receipt))
    return receipt


def _gradient_arrived(gradient: torch.Tensor | None, receipt: torch.Tensor) -> None:
    if gradient is None:
        return
    operator = torch.ops.mpdiag.differentiated
    if _runs(gradient):
        _differentiated(gradient, "local", receipt)
    elif torch.compiler.is_dynamo_compiling():
        operator(*local_part(gradient), receipt)
    else:
        _, nodes = _nodes_of(operator, *local_part(gradient), receipt)
        for node in nodes:
            node.meta[_PART] = "must_be_in_backward"


def _below_autograd(operator: Any, *args: Any) -> Any:
    """Call an operator, and let what it becomes in a graph run once, though checkpointing is around.

    torch keeps the result of an effectful operator for the backward pass, unless checkpointing has noted
    that it is to be computed again.
    """
    with torch._C._AutoDispatchBelowAutograd():
        result, nodes = _nodes_of(operator, *args)
    for node in nodes:
        if node.meta.pop(_RECOMPUTE, None) is not None and node.target is getitem:
            node.meta[_RECOMPUTE] = CheckpointPolicy.MUST_SAVE
    return result


def _nodes_of(operator: Any, *args: Any) -> tuple[Any, list[torch.fx.Node]]:
    """Call an operator; returns its result, and what it becomes in the graph that is made, if any."""
    mode = get_proxy_mode()
    nodes = () if mode is None else mode.tracer.graph.nodes
    before = len(nodes)
    result = operator(*args)
    return result, list(itertools.islice(reversed(nodes), len(nodes) - before))


def _differentiated(gradient: torch.Tensor, placement: Placement, receipt: torch.Tensor) -> None:
    number, *about = receipt.tolist()
    for receiver in _heard_by(number):
        receiver.differentiated(gradient, placement, (about[0], about[1], about[2]))


def _define() -> None:
    gradient = "Tensor gradient, str placement, Tensor receipt"
    rest = "SymInt[] inputs, SymInt[] outputs, int index, str placement, bool training, bool grad"
    for schema, kernel, fake in (
        ("called(Tensor point, bool training, bool ends) -> ()", _called, _nothing),
        (f"returned(Tensor output, Tensor point, {rest}) -> Tensor", _returned, _receipt),
        (f"differentiated({gradient}) -> ()", _differentiated, _nothing),
    ):
        _LIBRARY.define(schema, tags=_TAGS)
        name = schema.partition("(")[0]
        _LIBRARY.impl(name, kernel, "CompositeExplicitAutograd")
        register_fake(f"mpdiag::{name}", fake, lib=_LIBRARY)
        operator = getattr(torch.ops.mpdiag, name).default
        if name != "differentiated" or not _KEPT:
            _register_effectful_op(operator, _EffectType.ORDERED)
        torch.fx.node.has_side_effect(operator)
    _LIBRARY.impl("called", _called_below, "Autograd")
    _LIBRARY.impl("returned", _returned_below, "Autograd")


def _nothing(*_: Any) -> None:
    """What an operator returns that returns nothing."""


def _receipt(*_: Any) -> torch.Tensor:
    return torch.empty(_RECEIPT, dtype=torch.int64, device=_HOST)


_define()
