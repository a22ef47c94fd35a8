"""The matrix work of a recorded model, without any GPU: from the run's table of modules.

The recorder notes the shapes each module was first called with. Together with the
module's settings they give every matrix product of a training step: forward, input gradient, weight
gradient.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mpdiag.hardware.matrix_work import MatrixWork, attention, convolution, matmul, recurrent

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from mpdiag.hardware.matrix_work import Shape


@dataclass(frozen=True)
class ModuleWork:
    """The matrix products of a module in one training step.

    Attributes:
        module: Its name.
        type: Its class.
        kind: ``linear``, ``convolution``, ``rnn``, ``attention`` or ``embedding``.
        works: The products of a training step by name: ``forward``, ``dgrad``, ``wgrad`` …; none
            for an embedding, which is a look-up.
        sizes: The sizes a user can change, by the names the module gives them.
        batch: Size of the batch dimension and rows per entry; (0, 0) if unknown.
    """

    module: str
    type: str
    kind: str
    works: tuple[tuple[str, MatrixWork], ...]
    sizes: tuple[tuple[str, int], ...]
    batch: tuple[int, int] = (0, 0)

    @property
    def flops(self) -> int:
        """FLOP of all its products."""
        return sum(work.flops for _, work in self.works)

    @property
    def depthwise(self) -> bool:
        """Whether it is a depthwise convolution, which no padding helps."""
        return any(work.depthwise for _, work in self.works)


def model_work(rows: Iterable[Mapping[str, Any]]) -> tuple[ModuleWork, ...]:
    """The matrix work of every module that has any and was called.

    Args:
        rows: The table of modules and parameters, as ``Run.modules`` reads it.
    """
    found = [_module_work(row) for row in rows if row.get("what") == "module"]
    return tuple(work for work in found if work is not None)


def _module_work(row: Mapping[str, Any]) -> ModuleWork | None:
    settings = _loaded(row.get("settings"), dict)
    inputs = [_shape(s) for s in _loaded(row.get("input_shapes"), list)]
    outputs = [_shape(s) for s in _loaded(row.get("output_shapes"), list)]
    x, y = (inputs or [()])[0], (outputs or [()])[0]
    name, kind = str(row.get("name")), str(row.get("type"))
    if {"in_features", "out_features"} <= settings.keys():
        return _linear(name, kind, settings, x)
    if {"in_channels", "out_channels", "kernel_size"} <= settings.keys():
        return _convolution(name, kind, settings, x, y)
    if {"input_size", "hidden_size"} <= settings.keys():
        return _recurrent(name, kind, settings, x)
    if {"embed_dim", "num_heads"} <= settings.keys():
        return _attention(name, kind, settings, inputs)
    if {"num_embeddings", "embedding_dim"} <= settings.keys():
        named = tuple((n, int(settings[n])) for n in ("num_embeddings", "embedding_dim"))
        return ModuleWork(name, kind, "embedding", (), named)
    return None


def _linear(name: str, kind: str, settings: Mapping[str, Any], x: Shape) -> ModuleWork | None:
    entering, leaving = int(settings["in_features"]), int(settings["out_features"])
    if not x or x[-1] != entering:
        return None
    rows = math.prod(x[:-1])
    batch = (x[0], rows // x[0]) if len(x) > 1 and x[0] else (0, 0)
    works = (
        ("forward", matmul(rows, leaving, entering)),
        ("dgrad", matmul(rows, entering, leaving)),
        ("wgrad", matmul(leaving, entering, rows)),
    )
    sizes = (("in_features", entering), ("out_features", leaving))
    return ModuleWork(name, kind, "linear", works, sizes, batch)


def _convolution(
    name: str, kind: str, settings: Mapping[str, Any], x: Shape, y: Shape
) -> ModuleWork | None:
    rank = len(settings["kernel_size"])
    entering, leaving = int(settings["in_channels"]), int(settings["out_channels"])
    if len(x) == len(y) == rank + 1:
        x, y = (1, *x), (1, *y)
    if len(x) != rank + 2 or len(y) != rank + 2 or (x[1], y[1]) != (entering, leaving):
        return None
    works = tuple(
        (
            direction,
            convolution(
                x[0],
                (entering, leaving),
                math.prod(settings["kernel_size"]),
                (math.prod(x[2:]), math.prod(y[2:])),
                groups=int(settings.get("groups", 1)),
                direction=direction,
                transposed="Transpose" in kind,
            ),
        )
        for direction in ("forward", "dgrad", "wgrad")
    )
    sizes = (("in_channels", entering), ("out_channels", leaving))
    return ModuleWork(name, kind, "convolution", works, sizes)  # pixels are rows enough: no batch


def _recurrent(name: str, kind: str, settings: Mapping[str, Any], x: Shape) -> ModuleWork | None:
    entering, hidden = int(settings["input_size"]), int(settings["hidden_size"])
    if not x or x[-1] != entering:
        return None
    cell = "Cell" in kind
    if cell:
        batch, steps = (x[0], 1) if len(x) == 2 else (1, 1)
    elif len(x) == 3:
        batch, steps = (x[0], x[1]) if settings.get("batch_first") else (x[1], x[0])
    else:  # one sequence without its batch, or packed ones, whose batches differ from step to step
        batch, steps = 1, x[0]
    gates = 4 if "LSTM" in kind else 3 if "GRU" in kind else 1
    projection = int(settings.get("proj_size") or 0)
    works = tuple(
        (
            phase,
            recurrent(
                batch,
                steps,
                (entering, hidden),
                gates,
                layers=int(settings.get("num_layers", 1)),
                directions=2 if settings.get("bidirectional") else 1,
                projection=projection,
                direction=phase,
            ),
        )
        for phase in ("forward", "backward")
    )
    sizes = [("input_size", entering), ("hidden_size", hidden)]
    if projection:
        sizes.append(("proj_size", projection))
    known = len(x) == (2 if cell else 3)
    return ModuleWork(name, kind, "rnn", works, tuple(sizes), (batch, 1) if known else (0, 0))


def _attention(
    name: str, kind: str, settings: Mapping[str, Any], inputs: list[Shape]
) -> ModuleWork | None:
    width, heads = int(settings["embed_dim"]), int(settings["num_heads"])
    query = inputs[0] if inputs else ()
    key = inputs[1] if len(inputs) > 1 else query
    if len(query) not in (2, 3) or query[-1] != width or not heads or len(key) != len(query):
        return None
    if len(query) == 2:
        batch, lengths = 1, (query[0], key[0])
    elif settings.get("batch_first"):
        batch, lengths = query[0], (query[1], key[1])
    else:
        batch, lengths = query[1], (query[0], key[0])
    head = (width // heads, width // heads)
    # Queries and the output have the query's rows, keys and values the key's.
    projected = [matmul(batch * n, width, width) for n in (*lengths, lengths[1], lengths[0])]
    passes = [("projection", p) for p in projected] * 3
    works = (
        *passes,
        ("forward", attention(batch * heads, lengths, head)),
        ("backward", attention(batch * heads, lengths, head, direction="backward")),
    )
    sizes = (("embed_dim", width), ("embed_dim / num_heads", head[0]), ("sequence", lengths[1]))
    return ModuleWork(name, kind, "attention", works, sizes, (batch, lengths[0]))


def _loaded(text: Any, kind: type[Any]) -> Any:
    """A column's JSON; empty if it is missing or not of the expected type."""
    try:
        value = json.loads(text) if isinstance(text, str) else None
    except ValueError:
        value = None
    return value if isinstance(value, kind) else kind()


def _shape(sizes: Any) -> Shape:
    """A recorded shape; () where a size has no number."""
    if not isinstance(sizes, list) or any(type(n) is not int or n < 0 for n in sizes):
        return ()
    return tuple(sizes)
