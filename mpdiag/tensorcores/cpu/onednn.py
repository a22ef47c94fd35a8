"""oneDNN's verbose log: which implementation each primitive ran on a CPU, and for how long.

A line of ``ONEDNN_VERBOSE=1`` (oneDNN 3)::

    onednn_verbose,v1,primitive,exec,cpu,matmul,brg_matmul:avx10_1_512_amx,undef,
        src:bf16::blocked:ab::f0 wei:… dst:…,attr…,,32x1024:1024x4096,0.21

Older versions leave out ``v1`` or ``primitive``. The log does not include products that MKL
computes (FP32 ``Linear``), nor attention.

oneDNN prints from C, bypassing ``sys.stdout``, so ``StdoutCapture`` redirects the file descriptor itself
into a file. Everything else that was printed meanwhile is printed afterwards, in its order.

Source: *oneDNN Developer Guide*, Verbose Mode.
"""

import ctypes
import math
import os
import re
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from typing import IO, Literal

from mpdiag.hardware.alignment import dtype_name
from mpdiag.tensorcores.work.products import Direction, MatrixWork, convolution, matmul, recurrent

ExecutionUnit = Literal["matrix", "vector", "unknown"]

PREFIX = "onednn_verbose,"
_VECTOR = re.compile(r"avx|sse41|sve|asimd|neon|\bref\b|gemm|jit|simple")
_DIRECTIONS: dict[str, Direction] = {
    "backward_data": "dgrad",
    "backward_weights": "wgrad",
    "backward": "backward",
}


@dataclass(frozen=True)
class Primitive:
    """A primitive that oneDNN executed.

    Attributes:
        kind: ``matmul``, ``convolution``, ``inner_product``, ``rnn``, ``reorder`` …
        implementation: Its name, such as ``"brg_matmul:avx512_core_bf16"``.
        work: Its matrix work; None if it has none, or if this reader does not know its shape.
        dtype: Of the source tensor, by mpdiag's name.
        time_us: As measured by the log.
        allowed: The format in which FP32 may be multiplied, as the log writes it (``fpmath``).
    """

    kind: str
    implementation: str
    work: MatrixWork | None
    dtype: str | None
    time_us: float
    allowed: str | None = None

    @property
    def reduced(self) -> str | None:
        """The format that FP32 operands were multiplied in; None if in their own.

        A format that is allowed need not be used, but AMX has no FP32.
        """
        lower = self.dtype == "fp32" and self.unit == "matrix"
        return dtype_name(self.allowed) if lower else None

    @property
    def unit(self) -> ExecutionUnit:
        """The matrix unit (AMX), the vector unit, or unknown if the name does not say."""
        name = self.implementation.lower()
        if "amx" in name:
            return "matrix"
        return "vector" if _VECTOR.search(name) else "unknown"


@dataclass(frozen=True)
class OnednnLog:
    """The contents of a log.

    Attributes:
        version: Version of oneDNN.
        isa: The instruction set it detected, in its own words; None if it does not say.
        primitives: All primitives executed on the CPU.
        damaged: Number of oneDNN lines that could not be read.
    """

    version: str | None
    isa: str | None
    primitives: tuple[Primitive, ...]
    damaged: int


def _fields(line: str) -> list[str]:
    """A line's fields after what older versions and other settings leave out."""
    fields = [f for f in line.rstrip("\n").split(",")[1:] if f not in {"v0", "v1", "primitive"}]
    if fields and re.fullmatch(r"\d+\.\d+", fields[0]):  # ONEDNN_VERBOSE_TIMESTAMP=1
        fields = [f for f in fields[1:] if f != "primitive"]
    return fields


def read_log(lines: Iterable[str]) -> OnednnLog:
    """Read a log; lines that are not oneDNN's are skipped."""
    version = isa = None
    primitives, damaged = [], 0
    for line in lines:
        if not line.startswith(PREFIX):
            continue
        fields = _fields(line)
        if fields[:1] == ["info"]:
            text = ",".join(fields[1:])
            version = text.removeprefix("oneDNN ") if text.startswith("oneDNN ") else version
            isa = text.removeprefix("cpu,isa:") if text.startswith("cpu,isa:") else isa
        elif fields[:2] == ["exec", "cpu"]:
            primitive = _primitive(fields[2:])
            damaged += primitive is None
            primitives.append(primitive)
    return OnednnLog(version, isa, tuple(p for p in primitives if p is not None), damaged)


def _primitive(fields: list[str]) -> Primitive | None:
    """(kind, implementation, propagation, memory, attributes, auxiliary, problem, time)."""
    if len(fields) < 8:
        return None
    kind, implementation, propagation, memory = fields[:4]
    auxiliary, problem = fields[-3], fields[-2]
    try:
        time_us = float(fields[-1]) * 1000
    except ValueError:
        return None
    if not 0 <= time_us < math.inf:
        return None
    source = re.search(r"\bsrc(?:_layer)?[:_](\w+?):", memory)
    dtype = dtype_name(source.group(1)) if source is not None else None
    direction = _DIRECTIONS.get(propagation, "forward")
    work = _work(kind, problem, auxiliary, dtype, direction)
    allowed = re.search(r"\battr-fpmath:(\w+)", ",".join(fields[4:-3]))
    fpmath = allowed.group(1) if allowed is not None else None
    return Primitive(kind, implementation, work, dtype, time_us, fpmath)


def _work(
    kind: str, problem: str, auxiliary: str, dtype: str | None, direction: Direction
) -> MatrixWork | None:
    if kind == "matmul":
        return _matmul(problem, dtype)
    sizes = {name: int(size) for name, size in re.findall(r"([a-z]+)(\d+)", problem)}
    try:
        if kind == "inner_product":
            rest = [sizes.get(n, 1) for n in ("id", "ih", "iw")]
            return matmul(sizes["mb"], sizes["oc"], sizes["ic"] * math.prod(rest), dtype=dtype)
        if kind in {"convolution", "deconvolution"}:
            return _convolution(sizes, dtype, direction, transposed=kind == "deconvolution")
        if kind == "rnn":
            return _rnn(sizes, auxiliary, dtype, direction)
    except (KeyError, ZeroDivisionError):
        return None
    return None


def _matmul(problem: str, dtype: str | None) -> MatrixWork | None:
    """``8x2304:2304x10``, with batch dimensions in front."""
    sides = [[int(n) for n in re.findall(r"\d+", side)] for side in problem.split(":")[:2]]
    if len(sides) != 2 or any(len(s) < 2 for s in sides) or sides[0][-1] != sides[1][-2]:
        return None
    left, right = sides
    batch = max(math.prod(left[:-2]), math.prod(right[:-2]))
    return matmul(left[-2], right[-1], left[-1], batch, dtype=dtype)


def _convolution(
    sizes: dict[str, int], dtype: str | None, direction: Direction, *, transposed: bool
) -> MatrixWork:
    """``mb8_ic3oc16_ih16oh14kh3sh1dh0ph0_iw16ow14kw3…``, ``g4`` in front where grouped."""

    def every(letter: str) -> int:
        return math.prod(sizes.get(letter + axis, 1) for axis in "dhw")

    return convolution(
        sizes["mb"],
        (sizes["ic"], sizes["oc"]),
        every("k"),
        (every("i"), every("o")),
        groups=sizes.get("g", 1),
        dtype=dtype,
        direction=direction,
        transposed=transposed,
    )


def _rnn(
    sizes: dict[str, int], auxiliary: str, dtype: str | None, direction: Direction
) -> MatrixWork:
    """The sizes of an RNN, such as ``l1t5mb2sic32slc16dhc32dic32``."""
    gates = 4 if "lstm" in auxiliary else 3 if "gru" in auxiliary else 1
    both = "bidirectional" in auxiliary
    hidden = sizes["dhc"]
    return recurrent(
        sizes["mb"],
        sizes["t"],
        (sizes["slc"], hidden),
        gates,
        layers=sizes["l"],
        directions=2 if both else 1,
        dtype=dtype,
        direction=direction,
    )


_STDOUT = 1
_introduction: list[str] = []
"""What oneDNN says of itself once in a process; it leads each later capture."""


class StdoutCapture:
    """Collects standard output in a file between ``open`` and ``close``."""

    def __init__(self) -> None:
        self._file: IO[bytes] | None = None
        self._saved = -1

    def open(self) -> None:
        """Redirect standard output into a file."""
        _flush()
        self._file = tempfile.TemporaryFile()  # noqa: SIM115 - closed in close()
        self._saved = os.dup(_STDOUT)
        os.dup2(self._file.fileno(), _STDOUT)

    def close(self) -> list[str]:
        """Restore standard output, print everyone else's lines, and return oneDNN's."""
        if self._file is None:
            return []
        _flush()
        os.dup2(self._saved, _STDOUT)
        os.close(self._saved)
        with self._file as written:
            written.seek(0)
            lines = written.read().decode("utf-8", "replace").splitlines(keepends=True)
        self._file = None
        others = "".join(line for line in lines if not line.startswith(PREFIX))
        if others:
            os.write(_STDOUT, others.encode())
        own = [line for line in lines if line.startswith(PREFIX)]
        said = [line for line in own if _fields(line)[:1] == ["info"]]  # not what it executed
        if said:
            _introduction[:] = said
            return own
        return [*_introduction, *own] if own else []


def _flush() -> None:
    """Flush Python's and C's buffers, so that text stays on its side of the redirection."""
    sys.stdout.flush()
    if os.name == "posix":
        ctypes.CDLL(None).fflush(None)
