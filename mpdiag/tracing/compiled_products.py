"""Products in compiled code, which no dispatch mode sees: counted from the graphs that Dynamo makes.

A graph is run once for each set of input shapes, forward and backward, on tensors that are shapes
alone, with the casts in force; that computes nothing. From then on, each of its calls counts as much.
Each product counts once, though a compiler may compute it again in the backward pass to save memory.
"""

import copy
import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from mpdiag.tracing.autograd_graph import nodes_behind
from mpdiag.tracing.precision_share import PrecisionShare, ProductCount
from mpdiag.tracing.tap import OperationTap

_Watch = Callable[[fx.GraphModule, Callable[..., Any]], Callable[..., Any]]
_watches: list[_Watch] = []
_plain: list[Callable[..., Any]] = []  # what is replaced while somebody watches


def watch_graphs(watch: _Watch | None = None) -> Callable[[], None]:
    """Count products in graphs made from now on; what is compiled already must be compiled again.

    Args:
        watch: Takes a graph as Dynamo made it, and what was compiled, and returns what is to be called;
            by default, it counts the products of each call for the shares that count.

    Returns:
        What ends it.
    """
    from torch._dynamo.output_graph import OutputGraph

    watch = watch or _counted
    _watches.append(watch)
    if not _plain:
        compile_graph: Callable[..., Any] = OutputGraph.call_user_compiler

        @functools.wraps(compile_graph)
        def compiled(self: Any, graph: fx.GraphModule, *args: Any) -> Any:
            kept = fx.GraphModule(graph, copy.deepcopy(graph.graph))  # a backend may change it
            with _paused(_counting()):  # it may try kernels out
                result = compile_graph(self, graph, *args)
                for one in _watches:
                    result = one(kept, result)
            return result

        _plain.append(compile_graph)
        OutputGraph.call_user_compiler = compiled  # type: ignore[assignment, method-assign]

    def release() -> None:
        _watches.remove(watch)
        if not _watches:
            OutputGraph.call_user_compiler = _plain.pop()  # type: ignore[method-assign]

    return release


@dataclass
class ForwardFlops:
    """FLOPs of the products in the forward passes of graphs, each graph once.

    Attributes:
        all: Of all products.
        hidden: Of those in ``modules``.
        unknown: Products whose FLOPs could not be counted.
        modules: Names of modules that the next graph hides, as the graph has them.
    """

    all: int = 0
    hidden: int = 0
    unknown: int = 0
    modules: set[str] = field(default_factory=set)

    def add(self, graph: fx.GraphModule, compiled: Callable[..., Any]) -> Callable[..., Any]:
        """Take a graph as Dynamo made it, which is not run; a ``watch`` of ``watch_graphs``."""
        parts = [part for part in graph.modules() if isinstance(part, fx.GraphModule)]
        for node in (node for part in parts for node in part.graph.nodes):
            if getattr(node.target, "__name__", node.target) in _PRODUCTS:
                flops = _flops_of(node)
                stack = list((node.meta.get("nn_module_stack") or {"": ("", None)}).values())
                self.all += flops
                self.hidden += flops if stack[-1][0] in self.modules else 0
                self.unknown += not flops
        self.modules.clear()
        return compiled


_PRODUCTS = {
    *("linear", "matmul", "bmm", "mm", "addmm", "baddbmm", "einsum"),
    *(f"conv{kind}{axes}d" for kind in ("", "_transpose") for axes in (1, 2, 3)),
    "scaled_dot_product_attention",
}
"""Functions as a graph of Dynamo has them, before they are taken apart."""


def _flops_of(node: fx.Node) -> int:
    """FLOPs of one product, from the shapes that its graph has; 0 where they are not known."""
    count = ProductCount()
    try:
        args: Any = fx.map_arg(node.args, _shape_of)
        kwargs: Any = fx.map_arg(node.kwargs, _shape_of)
        call: Any = node.target
        if node.op == "call_method":
            call, args = getattr(args[0], str(node.target)), args[1:]
        with torch.no_grad(), OperationTap(count):
            call(*args, **kwargs)
    except Exception:  # noqa: BLE001 - what it is counted for goes on without it
        return 0
    return count.flops


def _shape_of(node: fx.Node) -> Any:
    """A node's example as a tensor without values; its sizes are read so that nothing guards them."""
    example = node.meta.get("example_value")
    if not isinstance(example, Tensor):
        return example
    while torch._C._functorch.is_functorch_wrapped_tensor(example):
        example = torch._C._functorch.get_unwrapped(example)
    sizes: list[Any] = list(example.shape)
    sizes = [size.node.hint if isinstance(size, torch.SymInt) else size for size in sizes]
    return torch.empty(sizes, dtype=example.dtype, device="meta")


def _counting() -> list[PrecisionShare]:
    """Who counts what runs here."""
    listeners = [
        m.listener for m in _get_current_dispatch_mode_stack() if isinstance(m, OperationTap)
    ]
    found = [one for one in listeners if isinstance(one, PrecisionShare) and one.is_counting]
    return list(dict.fromkeys(found))


@contextmanager
def _paused(shares: Iterable[PrecisionShare]) -> Iterator[None]:
    with ExitStack() as stack:
        for share in shares:
            stack.enter_context(share.paused())
        yield


def _counted(graph: fx.GraphModule, compiled: Callable[..., Any]) -> Callable[..., Any]:
    """A compiled graph whose calls are counted while somebody counts."""
    known: dict[Any, tuple[ProductCount, ProductCount]] = {}

    @functools.wraps(compiled)
    def call(*args: Any) -> Any:
        shares = _counting() if torch.is_grad_enabled() else []
        if not shares:
            return compiled(*args)
        key = tuple(map(_described, args))
        with _paused(shares):
            if key not in known:
                known[key] = count_graph(graph, args)
            result = compiled(*args)
        forward, backward = known[key]
        for share in shares:
            share.add(forward)
        _count_backward(result, backward)
        return result

    return call


def _described(value: Any) -> Any:
    if isinstance(value, Tensor):
        return type(value), value.shape, value.stride(), value.dtype, value.requires_grad
    return value if isinstance(value, (int, float)) else type(value)


def count_graph(graph: fx.GraphModule, args: Iterable[Any]) -> tuple[ProductCount, ProductCount]:
    """Products in a graph's forward pass, and in a backward pass from all of its results.

    Args:
        graph: As Dynamo hands it to a backend.
        args: What it is called with; tensors are not read.
    """
    from torch._guards import TracingContext, tracing
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.utils._pytree import tree_leaves

    counts = ProductCount(), ProductCount()
    shapes = FakeTensorMode(allow_non_fake_inputs=True)

    def like(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if type(value) not in (Tensor, torch.nn.Parameter):
            raise TypeError(f"it takes a {type(value).__name__}")
        options: dict[str, Any] = {"dtype": value.dtype, "device": value.device}
        empty = torch.empty_strided(value.shape, value.stride(), **options)
        return empty.requires_grad_().clone() if value.requires_grad else empty

    try:
        # What regions of a graph switch is as it was afterwards, also after an error.
        around = (
            tracing(TracingContext(shapes)),
            torch._C._PreserveDispatchKeyGuard(),
            # Not checkpointing's.
            torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t),
            shapes,
        )
        with ExitStack() as stack:
            for context in around:
                stack.enter_context(context)
            inputs = [like(value) for value in args]
            with OperationTap(counts[0]):
                results = tree_leaves(graph(*inputs))
            ends = [r for r in results if isinstance(r, Tensor) and r.grad_fn is not None]
            begins = [t for t in inputs if isinstance(t, Tensor) and t.requires_grad]
            if ends and begins:
                with torch._C._DisableAutocast(), OperationTap(counts[1]):
                    torch.autograd.grad(
                        ends, begins, [torch.empty_like(e) for e in ends], allow_unused=True
                    )
    except Exception as error:  # noqa: BLE001 - a count must never end a training
        reason = " ".join(str(error).split()) or type(error).__name__
        counts[0].unknown = f"mpdiag cannot count the FLOPs of a compiled graph ({reason[:100]})"
    return counts


def _count_backward(result: Any, count: ProductCount) -> None:
    """Count once, as the backward pass reaches what is compiled; what that shows of it does not count.

    Where nothing is compiled backward (backend ``eager``), operations are seen as ever.
    """
    from torch.utils._pytree import tree_leaves

    leaves = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
    waiting = [count]
    for node in nodes_behind(leaf.grad_fn for leaf in leaves if leaf.grad_fn is not None):
        if node.name() != "CompiledFunctionBackward" or "mpdiag_counted" in node.metadata:
            continue
        node.metadata["mpdiag_counted"] = True
        pause = ExitStack()

        def begin(*_gradients: Any, pause: ExitStack = pause) -> None:
            shares = _counting()
            for share in shares:
                share.add(waiting[0] if waiting else ProductCount())
            waiting.clear()
            pause.enter_context(_paused(shares))

        def end(*_gradients: Any, pause: ExitStack = pause) -> None:
            pause.close()

        node.register_prehook(begin)
        node.register_hook(end)
