"""Compiled against eager: the first operation whose difference is more than rounding explains.

    python studies/compiled.py [--only NAME] [--json studies/results/compiled.json]

Dynamo's graph of a model runs operation by operation (eager) and compiled by inductor on this CPU, with
``aot_eager`` as the control. Both return the value of every operation, and the gradients of all
parameters. What rounding explains comes from two sides:

- The formats. One operation may be off by an ulp of its output. A product also by the unit roundoff of
  its FP32 accumulator times √K times the sum of its terms' magnitudes; any other operation also by twice
  the error that it makes here, measured against FP64 on the same inputs.
- Twins. In eight further eager runs every input moves by one ulp and every operation's output and its
  gradient move by that much, up or down by chance. The largest distance of a twin is what rounding
  explains. A difference of more than twice that is not explained.

FP64 says which side is nearer to the exact values.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.backends.registry import lookup_backend
from torch.fx import GraphModule, Interpreter, Node

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import mpdiag

TWINS = 8
LIMIT = 2.0
"""A difference of more than the farthest twin's times this is not explained."""
PLANTED = "aot_eager, GELU by tanh"
PRODUCTS = ("linear", "matmul", "bmm", "conv2d", "addmm", "mm")
MOVES = (
    *("view", "reshape", "transpose", "permute", "cat", "chunk", "getitem", "stack", "contiguous"),
    *("flatten", "unsqueeze", "unbind", "expand", "split", "detach", "clone", "float", "zeros"),
)
"""Operations that move values, or convert them to FP32: they do not round."""


@dataclass(frozen=True)
class Difference:
    """One value of a graph: how far compiled is from eager.

    Attributes:
        name: The operation, or the parameter whose gradient it is.
        where: Module and source line.
        kind: ``"value"`` or ``"gradient"``.
        difference: ‖compiled − eager‖₂ / ‖eager‖₂; infinite where one is not finite and the other is.
        ratio: The same over the farthest twin's.
        noise: The farthest twin's distance over the second farthest's: how much the measure wavers.
        eager_error, compiled_error: ‖· − FP64‖₂ / ‖FP64‖₂.
    """

    name: str
    where: str
    kind: str
    difference: float
    ratio: float
    noise: float
    eager_error: float
    compiled_error: float


def first_beyond(found: Sequence[Difference], limit: float = LIMIT) -> Difference | None:
    """The first value, in the order of the computation, that rounding does not explain."""
    return next((d for d in found if d.ratio > limit), None)


def distance(a: Tensor, b: Tensor) -> float:
    """‖a − b‖₂; 0 where both are the same infinity or NaN, infinite where only one of them is."""
    a, b = a.double(), b.double()
    same = (a == b) | (a.isnan() & b.isnan())
    return float((a - b).where(~same, torch.zeros(())).nan_to_num(nan=math.inf).norm())


def ulp(x: Tensor) -> Tensor:
    """The distance to the next larger magnitude in the dtype."""
    magnitude = x.abs()
    step = torch.nextafter(magnitude, torch.full_like(magnitude, math.inf)) - magnitude
    return step.nan_to_num(0.0, 0.0, 0.0)  # infinities and NaN stay


def name_of(node: Node) -> str:
    """``linear``, ``softmax``, … for a node of any kind."""
    if node.op == "call_method":
        return str(node.target)
    return str(getattr(node.target, "__name__", node.target)).strip("_")


def may_be_off(node: Node, out: Tensor, inputs: Sequence[Any], exact: Tensor) -> Tensor:
    """By how much rounding may move each element of an operation's output.

    Args:
        node: The operation.
        out: Its output.
        inputs: Its arguments.
        exact: Its output in FP64.
    """
    name = name_of(node)
    if name in MOVES:
        return torch.zeros_like(out)
    if name in PRODUCTS:
        a, b = inputs[0], inputs[1]
        depth = b[0].numel() if name in ("linear", "conv2d") else a.shape[-1]
        tensors = (x.detach().abs().float() if isinstance(x, Tensor) else x for x in inputs)
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            terms = node.target(*tensors)  # type: ignore[operator]
        summed = terms.double() * math.sqrt(depth) * 2.0**-24
        return (summed + ulp(out).double()).to(out.dtype)
    error = (out.double() - exact).nan_to_num(0.0, 0.0, 0.0).square().mean().sqrt()
    return (ulp(out).double() + 2 * error).to(out.dtype)


class Eager(Interpreter):
    """Runs a graph operation by operation and keeps every value; moved by rounding if asked.

    Args:
        graph: Dynamo's.
        off: By how much each operation's output may move; None moves none.
        signs: Draws the directions.
    """

    def __init__(
        self, graph: GraphModule, off: dict[str, Tensor] | None = None, signs: Any = None
    ) -> None:
        super().__init__(graph)
        self.off, self.signs = off, signs
        self.values: dict[str, Tensor] = {}
        self.arguments: dict[str, tuple[Any, ...]] = {}

    def run_node(self, n: Node) -> Any:
        """The node's value."""
        if n.op in ("call_function", "call_method"):
            self.arguments[n.name] = self.fetch_args_kwargs_from_env(n)[0]
        out = super().run_node(n)
        if not observed(n, out):
            return out
        if self.off is not None and n.name in self.off:
            out = self._moved(out, self.off[n.name])
        self.values[n.name] = out.detach().clone()
        return out

    def _moved(self, out: Tensor, by: Tensor) -> Tensor:
        def sign(like: Tensor) -> Tensor:
            return torch.randint(0, 2, like.shape, generator=self.signs).to(like.dtype) * 2 - 1

        out = out + (by * sign(out)).detach()
        if out.requires_grad:
            out.register_hook(lambda g: g + ulp(g) * sign(g) * (g != 0))
        return out


def observed(node: Node, out: Any) -> bool:
    """Whether a node computes floating-point values."""
    floating = isinstance(out, Tensor) and out.is_floating_point()
    return node.op in ("call_function", "call_method") and floating


def captured(function: Callable[..., Any], *inputs: Any) -> tuple[GraphModule, list[Tensor]]:
    """Dynamo's graph of a function, and the tensors that it takes: parameters and inputs."""
    found: list[tuple[GraphModule, list[Tensor]]] = []

    def backend(graph: GraphModule, _: Any) -> Callable[..., Any]:
        def run(*arguments: Tensor) -> Any:
            found.append((graph, list(arguments)))
            return graph(*arguments)

        return run

    torch._dynamo.reset()
    torch.compile(function, backend=backend, fullgraph=True)(*inputs)
    ((graph, arguments),) = found
    return graph, arguments


def with_all_values(graph: GraphModule, names: Sequence[str]) -> GraphModule:
    """A copy of the graph that also returns the values of the named nodes, detached."""
    copied = copy.deepcopy(graph)
    nodes = {node.name: node for node in copied.graph.nodes}
    *_, output = copied.graph.nodes
    with copied.graph.inserting_before(output):
        seen = tuple(copied.graph.call_method("detach", (nodes[name],)) for name in names)
    output.args = ((*output.args[0], *seen),)
    copied.recompile()
    return copied


def gradients(loss: Tensor, arguments: Sequence[Tensor]) -> list[Tensor | None]:
    """Of every argument that is trained."""
    trained = [x for x in arguments if x.requires_grad]
    return list(torch.autograd.grad(loss, trained, allow_unused=True))


Run = Callable[[GraphModule, Sequence[str], Sequence[Tensor]], tuple[list[Tensor], list[Any]]]


def compiled_by(backend: str) -> Run:
    """Runs a graph compiled by a backend: the named values, and the gradients of the first output."""

    def run(
        graph: GraphModule, names: Sequence[str], arguments: Sequence[Tensor]
    ) -> tuple[list[Tensor], list[Any]]:
        whole = with_all_values(graph, names)
        loss, *seen = lookup_backend(backend)(whole, list(arguments))(*arguments)
        return seen, gradients(loss, arguments)

    return run


def planted(
    graph: GraphModule, names: Sequence[str], arguments: Sequence[Tensor]
) -> tuple[list[Tensor], list[Any]]:
    """Runs a graph in which every GELU is its tanh approximation: a fault that is to be found."""
    wrong = copy.deepcopy(graph)
    for node in wrong.graph.nodes:
        if node.target is F.gelu:
            node.kwargs = {**node.kwargs, "approximate": "tanh"}
    wrong.recompile()
    return compiled_by("aot_eager")(wrong, names, arguments)


def moved_inputs(arguments: Sequence[Tensor], signs: torch.Generator) -> list[Tensor]:
    """Each floating-point argument moved by one ulp, up or down by chance."""
    found = []
    for x in arguments:
        if x.is_floating_point():
            sign = torch.randint(0, 2, x.shape, generator=signs).to(x.dtype) * 2 - 1
            moved = x.detach() + ulp(x.detach()) * sign
            found.append(moved.requires_grad_(x.requires_grad))
        else:
            found.append(x)
    return found


def in_fp64(arguments: Sequence[Any]) -> list[Any]:
    """Floating-point tensors in FP64."""
    return [
        x.detach().double().requires_grad_(x.requires_grad)
        if isinstance(x, Tensor) and x.is_floating_point()
        else x
        for x in arguments
    ]


def exactly(node: Node, inputs: Sequence[Any]) -> Tensor:
    """One operation in FP64, on the inputs that it had."""
    keywords = {k: v for k, v in node.kwargs.items() if not isinstance(v, torch.dtype)}
    with torch.no_grad(), torch.autocast("cpu", enabled=False):
        if node.op == "call_method":
            first, *rest = in_fp64(inputs)
            out = getattr(first, str(node.target))(*rest, **keywords)
        else:
            out = node.target(*in_fp64(inputs), **keywords)  # type: ignore[operator]
    return out if isinstance(out, Tensor) else torch.zeros(())


class Comparison:
    """Eager, its twins and FP64 of one graph, to compare other ways of running it with.

    Args:
        graph: Dynamo's; its first output is the loss.
        arguments: Parameters and inputs.
    """

    def __init__(self, graph: GraphModule, arguments: Sequence[Tensor]) -> None:
        self.graph, self.arguments = graph, arguments
        eager, off = Eager(graph), dict[str, Tensor]()
        nodes = {node.name: node for node in graph.graph.nodes}
        self.ours = (eager, gradients(eager.run(*arguments)[0], arguments))
        for name, out in eager.values.items():
            node, given = nodes[name], eager.arguments[name]
            moves = name_of(node) in MOVES
            exact = out.double() if moves else exactly(node, given)
            off[name] = may_be_off(node, out, given, exact)
        self.twins = [self._twin(off, seed) for seed in range(TWINS)]
        exact, inputs = Eager(without_autocast(graph)), in_fp64(arguments)
        self.exact = (exact, gradients(exact.run(*inputs)[0], inputs))
        self.names = list(eager.values)
        self.places = {name: where(nodes[name]) for name in self.names}
        self.trained = [
            readable(str(node.target))
            for node, x in zip(placeholders(graph), arguments, strict=True)
            if x.requires_grad
        ]

    def _twin(self, off: dict[str, Tensor], seed: int) -> tuple[Eager, list[Tensor]]:
        signs = torch.Generator().manual_seed(seed)
        twin, inputs = Eager(self.graph, off, signs), moved_inputs(self.arguments, signs)
        return twin, gradients(twin.run(*inputs)[0], inputs)

    def of(self, run: Run, names: Sequence[str]) -> list[Difference]:
        """How far another way of running the graph is from eager.

        Args:
            run: The way.
            names: The operations whose values it returns; they stand first, in their order. The
                gradients follow, from the last operation's to the first's.
        """
        values, grads = run(self.graph, names, self.arguments)
        found = []
        for name, value in zip(names, values, strict=True):
            sides = [side.values[name] for side, _ in (self.ours, *self.twins)]
            true = self.exact[0].values.get(name, sides[0])
            found.append(difference((name, self.places[name], "value"), value, sides, true))
        for i in reversed(range(len(grads))):
            sides = [side[i] for _, side in (self.ours, *self.twins)]
            if sides[0] is not None:
                label = (self.trained[i], "", "gradient")
                found.append(difference(label, grads[i], sides, self.exact[1][i]))
        return found


def difference(
    label: tuple[str, str, str], theirs: Tensor, sides: Sequence[Tensor], true: Tensor
) -> Difference:
    """One value that was computed another way, beside eager's, its twins' and the exact one."""
    ours, *twins = sides
    size, length = (float(x.double().nan_to_num(0.0, 0.0, 0.0).norm()) or 1.0 for x in (ours, true))
    found = distance(theirs, ours)
    nearer, farthest = sorted(distance(t, ours) for t in twins)[-2:]
    return Difference(
        *label,
        difference=found / size,
        ratio=found / farthest if farthest else (math.inf if found else 0.0),
        noise=farthest / nearer if nearer else 1.0,
        eager_error=distance(ours, true) / length,
        compiled_error=distance(theirs, true) / length,
    )


def without_autocast(graph: GraphModule) -> GraphModule:
    """A copy that computes in the dtype of its inputs: no autocast, no conversion."""
    copied = copy.deepcopy(graph)
    for node in reversed(list(copied.graph.nodes)):
        if "autocast" in str(node.target):  # the exit comes after the entrance, and names it
            copied.graph.erase_node(node)
        elif node.op == "call_method" and node.target in ("to", "float", "bfloat16"):
            node.replace_all_uses_with(node.args[0])
    copied.recompile()
    return copied


def placeholders(graph: GraphModule) -> list[Node]:
    """The graph's arguments."""
    return [node for node in graph.graph.nodes if node.op == "placeholder"]


def readable(target: str) -> str:
    """``blocks.0.up.weight`` from Dynamo's name of a parameter."""
    path = target.replace("_parameters_", "_modules_").strip("_").split("_modules_")[1:]
    return ".".join(path) or target


def where(node: Node) -> str:
    """The innermost module of a node, and the line that it stands in."""
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    module = str(stack[-1][0]) if stack else ""
    module = module.partition("']")[2].replace("._modules['", ".").replace("']", "")
    trace = [line.strip() for line in (node.meta.get("stack_trace") or "").splitlines()]
    code = [
        line for line in trace if line and not line.startswith("File") and set(line) - {"^", "~"}
    ]
    return f"{module.strip('.')}: {code[-1]}" if code else module.strip(".")


class Block(nn.Module):
    """LayerNorm, attention with its softmax written out, and a GELU network."""

    def __init__(self, width: int, heads: int = 4) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.heads = heads

    def forward(self, x: Tensor) -> Tensor:
        """(N, T, C) to (N, T, C)."""
        n, t, c = x.shape
        q, k, v = self.qkv(self.norm_1(x)).view(n, t, 3, self.heads, c // self.heads).unbind(2)
        scores = q.transpose(1, 2) @ k.transpose(1, 2).transpose(2, 3) / math.sqrt(c // self.heads)
        hidden = torch.softmax(scores, -1) @ v.transpose(1, 2)
        x = x + self.out(hidden.transpose(1, 2).reshape(n, t, c))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class Cell(nn.Module):
    """An LSTM written out: Dynamo does not trace ``nn.LSTM``."""

    def __init__(self) -> None:
        super().__init__()
        self.gates, self.head = nn.Linear(24 + 48, 4 * 48), nn.Linear(48, 8)

    def forward(self, x: Tensor) -> Tensor:
        """(N, T, 24) to (N, 8)."""
        h = c = x.new_zeros(x.shape[0], 48)
        for step in x.unbind(1):
            i, f, g, o = self.gates(torch.cat((step, h), -1)).chunk(4, -1)
            c = f.sigmoid() * c + i.sigmoid() * g.tanh()
            h = o.sigmoid() * c.tanh()
        return self.head(h)


class Triangle(nn.Module):
    """The gated product of pytorch#168126, small."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.norm_in, self.norm_out = nn.LayerNorm(width), nn.LayerNorm(width)
        self.p_in, self.g_in = (nn.Linear(width, 2 * width, bias=False) for _ in range(2))
        self.p_out, self.g_out = (nn.Linear(width, width, bias=False) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        """(N, T, T, C) to (N, T, T, C)."""
        x = self.norm_in(x)
        gate = x
        a, b = torch.chunk((self.p_in(x) * self.g_in(x).sigmoid()).float(), 2, dim=-1)
        product = a.permute(0, 3, 1, 2) @ b.permute(0, 3, 2, 1)
        return self.p_out(self.norm_out(product.permute(0, 2, 3, 1))) * self.g_out(gate).sigmoid()


class Rope(nn.Module):
    """The rotation of pytorch#183122."""

    def forward(self, q: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """(N, H, T, C), (N, T, C), (N, T, C) to (N, H, T, C)."""
        half = q.shape[-1] // 2
        rotated = torch.cat((-q[..., half:], q[..., :half]), dim=-1)
        return q * cos.unsqueeze(1) + rotated * sin.unsqueeze(1)


class ScaledSoftmax(nn.Module):
    """The softmax of scores times 1e14 in pytorch#163932."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.tensor([1e14]))

    def forward(self, x: Tensor) -> Tensor:
        """(N, 2) to (N,)."""
        scores = x.sin().t()[0] * self.scale
        return torch.softmax(scores, 0)


def mlp() -> nn.Module:
    """Linear layers, LayerNorm, GELU."""
    layers: list[nn.Module] = []
    for a, b in ((64, 128), (128, 128), (128, 10)):
        layers += [nn.LayerNorm(a), nn.Linear(a, b), nn.GELU()]
    return nn.Sequential(*layers[:-1])


def cnn() -> nn.Module:
    """Convolutions, batch normalization, ReLU."""
    blocks = (
        nn.Sequential(nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU(), nn.MaxPool2d(2))
        for a, b in ((3, 16), (16, 32))
    )
    return nn.Sequential(*blocks, nn.Flatten(), nn.Linear(32 * 16, 10))


def transformer() -> nn.Module:
    """Two blocks and a head."""
    return nn.Sequential(Block(64), Block(64), nn.LayerNorm(64), nn.Linear(64, 32))


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[tuple[int, ...], ...]]] = {
    "MLP with LayerNorm": (mlp, ((32, 64),)),
    "CNN with BatchNorm": (cnn, ((16, 3, 16, 16),)),
    "transformer, softmax written out": (transformer, ((4, 32, 64),)),
    "LSTM written out": (Cell, ((16, 12, 24),)),
    "gated triangle product (pytorch#168126)": (Triangle, ((2, 16, 16, 32),)),
    "rotate half (pytorch#183122)": (Rope, ((2, 3, 5, 8), (2, 5, 8), (2, 5, 8))),
    "softmax of scores times 1e14 (pytorch#163932)": (ScaledSoftmax, ((25, 2),)),
}


def study(name: str, dtype: torch.dtype, backend: str) -> dict[str, Any]:
    """One model in one precision: what differs, and whether rounding explains it."""
    torch.manual_seed(0)
    make, shapes = MODELS[name]
    model, low = make(), dtype != torch.float32
    inputs = [torch.randn(shape).requires_grad_() for shape in shapes]
    if low and not list(model.parameters()):
        inputs = [x.detach().to(dtype).requires_grad_() for x in inputs]
    weight: Tensor | None = None

    def loss(*given: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype, enabled=low):
            out = model(*given)
        return (out.float() * weight).mean() if weight is not None else out

    with torch.no_grad():
        weight = torch.randn(loss(*inputs).shape)
    comparison = Comparison(*captured(loss, *inputs))
    run = planted if backend == PLANTED else compiled_by(backend)
    last = comparison.names[-1]
    alone, inside = comparison.of(run, [last]), comparison.of(run, comparison.names)
    first = first_beyond(inside)
    if first is None and first_beyond(alone):
        # To return every value prevents what changes the result, so each is returned by itself.
        each = (comparison.of(run, [name])[0] for name in comparison.names)
        first = first_beyond(list(each))
    gradients_alone = [d.difference for d in alone if d.kind == "gradient"]
    return {
        "model": name,
        "dtype": str(dtype).removeprefix("torch."),
        "backend": backend,
        "values": len(inside),
        "different": sum(d.difference > 0 for d in inside),
        "largest": asdict(max(inside, key=lambda d: d.ratio)),
        "beyond rounding": sum(d.ratio > LIMIT for d in inside),
        "first beyond rounding": asdict(first) if first else None,
        "beyond rounding, only the loss returned": sum(d.ratio > LIMIT for d in alone),
        "same gradients, only the loss returned": gradients_alone
        == [d.difference for d in inside if d.kind == "gradient"],
        "compiled nearer to FP64": sum(d.compiled_error < d.eager_error for d in inside),
        "eager nearer to FP64": sum(d.compiled_error > d.eager_error for d in inside),
        "widest noise": max((d.noise for d in inside if math.isfinite(d.noise)), default=1.0),
    }


class Part(nn.Module):
    """A module of one function, so that a recorder sees its output."""

    def __init__(self, function: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function
        self.register_buffer("scale", torch.tensor([1e14]))
        self.gain = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        """What the function makes of it and the scale or the gain."""
        return self.function(self, x)


def nan_of_scaled_softmax() -> dict[str, int]:
    """NaN outputs of the softmax of pytorch#163932, eager, compiled, and compiled while recorded."""
    found = {}
    for name in ("eager", "compiled", "compiled and recorded"):
        torch._dynamo.reset()
        torch.manual_seed(0)
        parts = (
            Part(lambda _, x: x.sin().t()[0]),
            Part(lambda part, x: x * part.scale),
            nn.Softmax(0),
            Part(lambda part, x: x * part.gain),
        )
        model, x = nn.Sequential(*parts), torch.randn(25, 2)
        optimizer = torch.optim.SGD(model.parameters(), 0.0)
        with ExitStack() as stack:
            if name.endswith("recorded"):
                run = stack.enter_context(TemporaryDirectory())
                stack.enter_context(mpdiag.record(model, optimizer, Path(run) / "run", every=1))
            out = model(x) if name == "eager" else torch.compile(model)(x)
            out.square().sum().backward()
            optimizer.step()
        found[name] = int(out.isnan().sum())
    return found


def rounded(value: Any) -> Any:
    """Numbers to three digits, and what is not finite as a word, for JSON."""
    if isinstance(value, dict):
        return {k: rounded(v) for k, v in value.items()}
    if isinstance(value, float):
        return float(f"{value:.3g}") if math.isfinite(value) else str(value)
    return value


def cpu_name() -> str:
    """As the kernel names it."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    return next((x.partition(": ")[2] for x in lines if x.startswith("model name")), "unknown")


def main() -> None:
    """Compare every model in FP32 and BF16, and write what was found."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", metavar="NAME", default="", help="models with this in their name")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = []
    for name, (make, _) in ((n, m) for n, m in MODELS.items() if options.only in n):
        for dtype in (torch.float32, torch.bfloat16):
            for backend in ("aot_eager", "inductor", *([PLANTED] if make is mlp else [])):
                rows.append(row := rounded(study(name, dtype, backend)))
                print(json.dumps(row), flush=True)
    print(json.dumps(nan := nan_of_scaled_softmax()))
    if options.json:
        facts = {"date": str(date.today()), "torch": torch.__version__, "cpu": cpu_name()}
        options.json.write_text(
            json.dumps({**facts, "limit": LIMIT, "NaN": nan, "rows": rows}, indent=1) + "\n"
        )


if __name__ == "__main__":
    sys.exit(main())
