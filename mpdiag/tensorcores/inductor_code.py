"""What ``torch.compile`` fused into each kernel: operations, modules and source lines.

Inductor writes the operations of a kernel into the comments of the code that calls it. That code, and
the graph with the source line of each operation, are kept in its cache (``fxgraph/``, default
``/tmp/torchinductor_USER``) and logged by ``TORCH_TRACE=FOLDER``. The log also has Dynamo's graph, which
names the parameters that an operation reads. All are read as text; nothing is unpickled or run.
"""

import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

LOG_FOLDER = "compiled"
"""Where a profiled script's log of ``TORCH_TRACE`` lies beside its trace."""
MOST_BYTES = 256 * 2**20
"""Longer files are not read."""

_COMMENT = re.compile(
    r"# (?:[\w ]*)Source Nodes: \[(?P<nodes>.*?)\], Original ATen: \[(?P<ops>.*?)\]"
)
_MAPPED = re.compile(r"#   (?P<source>\w+) => (?P<nodes>\w+(?:, \w+)*)$")
_USED = re.compile(r"(?P<kernel>(?:triton|cpp_fused)_\w+)(?: = async_compile\.|\.run\(|\()")
_FILE = re.compile(r"# File: (?P<file>.+?):(?P<line>\d+) in \S+, code: (?P<code>.*)$")
_NODE = re.compile(r"(?P<node>\w+)(?:: \"[^\"]*\")? = (?P<value>.*)")
_READ = re.compile(r"l_\w+?_?(?P<path>_modules_\w+?)_(?:parameters|buffers)_\w+?_\b")
_FRAME = re.compile(r'"frame_id": \d+, "frame_compile_id": \d+')
_RECORD = re.compile(r"^[VIWEC]\d{4} [^\]\n]*\] (?P<kind>\{.*)$", re.MULTILINE)


class SourceLine(NamedTuple):
    """A line of a script.

    Attributes:
        file, line: Where, as it was when the graph was compiled.
        code: Its text.
    """

    file: str
    line: int
    code: str


@dataclass(frozen=True)
class Fused:
    """What one kernel computes.

    Attributes:
        operations: ATen's names, such as ``aten.gelu``.
        modules: It reads parameters or buffers of these, as far as Dynamo's graph names them; named
            from the module that was compiled.
        lines: Source lines of the operations.
        graphs: How many compiled graphs have a kernel of this name; the rest holds for all of them.
    """

    operations: tuple[str, ...]
    modules: tuple[str, ...]
    lines: tuple[SourceLine, ...]
    graphs: int = 1

    def to_json(self) -> dict[str, Any]:
        """The field ``fused`` of an entry of ``kernels``."""
        return {
            "operations": list(self.operations),
            "modules": list(self.modules),
            "lines": [line._asdict() for line in self.lines],
            "graphs": self.graphs,
        }


class _Node(NamedTuple):
    """An operation of a graph."""

    line: SourceLine
    modules: tuple[str, ...]


_Nodes = dict[str, _Node]


def read_fused(place: Path) -> dict[str, Fused]:
    """What each kernel of inductor fused, by its name; {} if the place holds none.

    One name may stand for different kernels in different graphs. Their facts are joined then.

    Args:
        place: Inductor's cache folder, a folder of ``TORCH_TRACE``, or one file of either.
    """
    found: dict[object, dict[str, _Kernel]] = {}
    for code, nodes, sources in (graph for text in _texts(place) for graph in _graphs(text)):
        kernels = _kernels(code, nodes, sources)
        # The cache keeps the code of a graph twice, and once without its lines.
        key = tuple((name, *sorted(kernel.used)) for name, kernel in kernels.items())
        for name, kernel in found.setdefault(key, kernels).items():
            kernel.lines |= kernels[name].lines
            kernel.modules |= kernels[name].modules
    together = defaultdict[str, list[_Kernel]](list)
    for kernels in found.values():
        for name, kernel in kernels.items():
            together[name].append(kernel)
    return {name: _joined(kernels) for name, kernels in together.items()}


@dataclass
class _Kernel:
    """Keys of dicts are sets that keep their order."""

    used: set[tuple[str, str]] = field(default_factory=set)
    operations: dict[str, None] = field(default_factory=dict)
    modules: dict[str, None] = field(default_factory=dict)
    lines: dict[SourceLine, None] = field(default_factory=dict)


def _joined(kernels: list[_Kernel]) -> Fused:
    operations, modules, lines = (
        tuple(dict.fromkeys(chain.from_iterable(each)))
        for each in zip(*((k.operations, k.modules, k.lines) for k in kernels), strict=True)
    )
    return Fused(operations, modules, lines, len(kernels))


def _texts(place: Path) -> Iterator[str]:
    paths = sorted(place.rglob("*")) if place.is_dir() else [place]
    for path in paths:
        code = path == place or path.suffix in (".py", ".log") or "fxgraph" in path.parts
        if code and path.is_file() and path.stat().st_size <= MOST_BYTES:
            text = path.read_bytes()
            if b"Original ATen" in text:
                yield text.decode("utf-8", errors="replace")


def _graphs(text: str) -> Iterator[tuple[str, _Nodes, _Nodes]]:
    """The code of each graph in a text, its operations, and Dynamo's."""
    records = list(_RECORD.finditer(text))
    if not records:  # an entry of the cache is one graph
        yield text, _nodes(text), {}
        return
    nodes, sources = _Nodes(), defaultdict[str, _Nodes](dict)
    ends = [record.start() for record in records[1:]] + [len(text)]
    for record, end in zip(records, ends, strict=True):
        kind, content = record["kind"], text[record.end() : end]
        frame = _FRAME.search(kind)
        if kind.startswith('{"dynamo_output_graph"') and frame:
            sources[frame[0]] = _nodes(content)
        elif '"inductor_post_grad_graph"' in kind:
            nodes = _nodes(content)
        elif kind.startswith('{"inductor_output_code"'):
            yield content, nodes, sources[frame[0]] if frame else {}


def _nodes(text: str) -> _Nodes:
    """The operations of a graph as ``print_readable`` writes it: lines below the line of code."""
    found: _Nodes = {}
    place: SourceLine | None = None
    for line in map(str.strip, text.splitlines()):
        if match := _FILE.match(line):
            place = SourceLine(match["file"], int(match["line"]), match["code"].strip())
        elif not line:
            place = None
        elif place and (match := _NODE.match(line)):
            read = (m["path"].split("_modules_")[1:] for m in _READ.finditer(match["value"]))
            modules = tuple(dict.fromkeys(".".join(path) for path in read))
            found[match["node"]] = _Node(place, modules)
    return found


def _kernels(code: str, nodes: _Nodes, sources: _Nodes) -> dict[str, _Kernel]:
    """The kernels that some code defines and calls, by the comment above each."""
    found = defaultdict[str, _Kernel](_Kernel)
    backward = "_backward']" in code.partition("\nimport ")[0]
    comment, mapped = None, list[str]()
    for line in map(str.strip, code.splitlines()):
        if match := _COMMENT.match(line):
            comment, mapped = match, []
        elif match := _MAPPED.match(line):
            mapped += match["nodes"].split(", ")
        elif match := _USED.match(line):
            if comment is not None:
                kernel = found[match["kernel"]]
                read = [sources[n] for n in comment["nodes"].split(", ") if n in sources]
                kernel.used.add((comment["nodes"], comment["ops"]))
                kernel.operations |= dict.fromkeys(filter(None, comment["ops"].split(", ")))
                if backward or not read:
                    kernel.lines |= dict.fromkeys(nodes[n].line for n in mapped if n in nodes)
                    # Backward operations have names of their own, which may be Dynamo's too.
                    read = [node for node in read if node.line in kernel.lines]
                for line_of, modules in read:
                    kernel.lines[line_of] = None
                    kernel.modules |= dict.fromkeys(modules)
            comment = None
        elif "extern_kernels." in line or line.partition(" = ")[2].startswith("torch.ops."):
            comment = None  # it belongs to a library's kernel
    return found
