"""Receipts: the lines of pandas that reproduce a figure's numbers from the run folder alone.

Each receipt is a complete script that does not import this package and leaves its numbers in ``frame``;
tests run every one and compare. A receipt reads the rows that count, and makes the columns of its table:
``COLUMNS`` has how each is computed. Receipts are exact where a bin is exact; shares of Σ|x| are
estimates, as they are in the tables. Their lines stand in ``receipts.txt``, in parts.
"""

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from string import Template

from mpdiag.analysis.scaling.windows import Window
from mpdiag.numerics.formats import FloatFormat

COLUMNS = {
    "absmax": '(rows["absmax"] / rows["scale"]).groupby(rows[key]).max()',
    "nonzero": 'added(bins, "counts") + small',
    "lost": 'added(below, "counts") + (small if zero >= -126 else 0)  # without them a lower bound',
    "lost_share": '(frame["lost"] / frame["nonzero"]).fillna(0)',
    "whole": 'added(bins, "sum") + small * 2.0**-126 / 2',
    "gone": 'added(below, "sum") + small * 2.0 ** min(-126, zero) / 2',
    "sum_share": '(frame["gone"] / frame["whole"]).fillna(0)',
}
"""Of a group of rows: how each column is computed. What is lost becomes 0, at the scale 2^k."""
_SHARES = ("nonzero", "lost", "lost_share", "whole", "gone", "sum_share")


def texts_in(file: Path) -> dict[str, Template]:
    """The parts of a file such as ``receipts.txt``, by name."""
    parts = re.split(r"^=== (\w+)\n", file.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return dict(zip(parts[1::2], map(Template, parts[2::2]), strict=True))


_TEXTS = texts_in(Path(__file__).with_suffix(".txt"))


def receipt(part: str, **words: object) -> str:
    """A part of ``receipts.txt``, with words in place of its ``${names}``."""
    return _TEXTS[part].substitute(words)


@dataclass(frozen=True)
class Rows:
    """The rows of a run's statistics that a table is of: receipts begin by reading them.

    Attributes:
        run: The run folder.
        kind: The kind of tensors.
        layer: Of one layer alone.
        window: Of its steps alone.
    """

    run: str
    kind: str
    layer: str | None = None
    window: Window | None = None

    @property
    def read(self) -> str:
        """Lines that leave the rows that count in ``rows``."""
        which = f'stats["kind"] == {self.kind!r}'
        if self.kind == "update":
            which = f'({which}) & ~stats["skipped"]'
        if self.layer is not None:
            which = f'({which}) & (stats["name"] == {self.layer!r})'
        if self.window is not None:
            which = f"({which}) & {_inside('stats', self.window)}"
        totals = receipt("totals") if self.kind == "weight_grad" else ""
        return receipt("rows", run=repr(self.run), which=which, totals=totals)

    def bins(self, *keys: str) -> str:
        """Receipt of the values by ``name``, ``step`` or ``exponent``: how many are in each."""
        renamed = {"counts": "count", **({"name": "layer"} if "name" in keys else {})}
        grouped = f'bins.groupby({list(keys)!r})["counts"].sum().reset_index()'
        return self.read + receipt("bins") + f"frame = {grouped}.rename(columns={renamed!r})\n"

    def every_scale(self, fmt: FloatFormat, scales: range) -> str:
        """Receipt of ``layer_scales_frame``: losses of the window, and the overflow in any step."""
        limit = f"{'>=' if fmt.tie_overflows else '>'} {fmt.overflow_threshold!r} / 2.0**k"
        chosen = "" if self.window is None else f"rows = rows[{_inside('rows', self.window)}]\n"
        return (
            replace(self, window=None).read
            + 'largest = (rows["absmax"] / rows["scale"]).groupby(rows["name"]).max()\n'
            + chosen
            + receipt("sum_bins")
            + _at_scale(fmt, "name", _SHARES)
            + receipt("every_scale", scales=scales, limit=limit)
        )

    def course(self, fmt: FloatFormat, exponent: int) -> str:
        """Receipt of ``layer_course_frame``."""
        join = f'at_scale(0).join(at_scale({exponent}).add_suffix("_scaled"))'
        columns = _at_scale(fmt, "step", ("absmax", *_SHARES))
        return f"{self.read}{receipt('sum_bins')}{columns}frame = {join}.reset_index()\n"

    def ratios(self) -> str:
        """Receipt of ``ratio_frame``."""
        return self.read + receipt("ratios")

    def errors(self, fmt: FloatFormat) -> str:
        """Receipt of a ranking by the modules' outputs, where no operations were recorded."""
        return self.read + receipt("sum_bins") + _error(fmt) + receipt("output_errors")


def _inside(rows: str, window: Window) -> str:
    """The condition that rows are of the steps of a window."""
    return f'({rows}["step"] >= {window.first:g}) & ({rows}["step"] < {window.end:g})'


def _at_scale(fmt: FloatFormat, key: str, columns: Collection[str]) -> str:
    """Lines after the bins that define ``at_scale``: a table by ``key`` of some of ``COLUMNS``."""
    lines = [
        f'    frame["{name}"] = {expression}\n'
        for name, expression in COLUMNS.items()
        if name in columns
    ]
    head = receipt("at_scale", key=repr(key), label=fmt.label, zero=fmt.zero_exponent)
    return f"{head}{''.join(lines)}    return frame\n"


def _error(fmt: FloatFormat) -> str:
    """Lines that define the relative error of storing one tensor in a format."""
    return receipt(
        "error",
        label=fmt.label,
        least=fmt.min_exponent,
        bits=fmt.mantissa_bits,
        zero=fmt.zero_exponent,
        threshold=fmt.overflow_threshold,
    )


def operation_errors(run: str, fmt: FloatFormat) -> str:
    """Receipt of a ranking by recorded operations: the forward error, by module and line."""
    return receipt("operation_errors", error=_error(fmt), run=repr(run))


def training_logs(
    folder: str, runs: Sequence[str], columns: Sequence[str], *, known: bool = False
) -> str:
    """A receipt of columns of several training logs.

    Args:
        folder: The folder that holds the runs.
        runs: Their names.
        columns: Numbers, and ``skipped``.
        known: Whether steps without one of them are left out.
    """
    types = ", ".join(f'"{name}": {"bool" if name == "skipped" else "float"}' for name in columns)
    return receipt(
        "training_logs", types=types, runs=list(runs), folder=repr(folder), end=".dropna()" * known
    )


def of_run(part: str, run: str, **words: object) -> str:
    """A receipt that is a part of ``receipts.txt`` as it stands, with some words."""
    return receipt(part, run=repr(run), **words)


def command(words: str) -> str:
    """A receipt for numbers that a command prints: it runs the command."""
    return receipt("command", words=words.split())
