"""The report of a run as Markdown, for a pull request or a wiki: the same numbers.

Every name that comes from a run is escaped, so that none can end a table's cell or become a link;
nothing else is, so that the file reads well as text, too.
"""

import html
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from rich.console import Console

from mpdiag.analysis.analyzer import Analysis
from mpdiag.analysis.figures import Key
from mpdiag.display.wording import counted, layer_name, percent, sentence
from mpdiag.numerics.formats import FORMATS
from mpdiag.precision.audit import Audit
from mpdiag.reports.documents.page import PageTable, frame_table
from mpdiag.reports.documents.run_report import next_command, reasons
from mpdiag.reports.text.analysis import gradients_picture, grounds
from mpdiag.reports.views.operations import operations_frame
from mpdiag.reports.views.precision import precision_frame
from mpdiag.reports.views.verdict import MEMORY, facts, formats_frame, formats_note, levels_frame

TOP = 8
"""Layers and shapes shown; the plan has them all."""
COLUMNS = 88
"""Width of the histogram that is drawn with characters."""
_ALWAYS = re.compile(r"[\\`*\[\]|~$]|<(?=[A-Za-z/!?])")
_SOMETIMES = re.compile(
    r"""(?<![^\W_])_|_(?![^\W_])      # an underscore, but not one inside of a word
      | &(?=\#?\w+;)                  # what would be an entity
      | :(?=//)                       # what would be an address
      | (?<=www)\.                    # an address again
    """,
    re.VERBOSE,
)
_LOOKED_FOR_LATER = re.compile(
    r"""@(?=[A-Za-z])|(?<!\w)@(?=\w)  # what would call somebody, or be an address of mail
      | \#(?=\d)                      # what would be an issue
      | (?<!\w)GH-(?=\d)              # an issue again
      | :(?=[\w+-]+:)                 # what would be an emoji
    """,
    re.VERBOSE,
)
"""GitHub looks for these in the finished page, where no escape is left: they are parted instead."""
PARTED = "&#8203;"
"""A space without width."""
_AT_THE_START = re.compile(r"(\s*\d+)([.)])(?=\s|$)|(\s*)([#>+=-])")


def escaped(text: str) -> str:
    """Text of any origin with all that GitHub's Markdown would interpret escaped, and no more."""
    plain = " ".join(text.splitlines())
    marks = {m.start() for pattern in (_ALWAYS, _SOMETIMES) for m in pattern.finditer(plain)}
    first = _AT_THE_START.match(plain)
    if first is not None:
        marks.add(first.end() - 1)
    parted = {m.end() for m in _LOOKED_FOR_LATER.finditer(plain)}
    shown = (f"\\{c}" if i in marks else c for i, c in enumerate(plain))
    return "".join(f"{PARTED if i in parted else ''}{c}" for i, c in enumerate(shown))


def code(text: str) -> str:
    """Text of any origin as code, whatever marks it holds."""
    plain = " ".join(text.splitlines())
    longest = max((len(run) for run in re.findall("`+", plain)), default=0)
    mark = "`" * (longest + 1)
    space = " " if plain.startswith("`") or plain.endswith("`") else ""
    return f"{mark}{space}{plain}{space}{mark}"


def folded(words: str, content: str) -> str:
    """What opens on a click; ``words`` is text."""
    return f"<details><summary>{html.escape(words)}</summary>\n\n{content}\n\n</details>"


def findings_list(found: Iterable[Mapping[str, Any]]) -> str:
    """Findings, each as ``Finding.to_json`` has it."""
    lines = []
    for f in found:
        fix = f" → {escaped(f['fix'])}" if f["fix"] else ""
        lines.append(f"- **{f['severity']}** {escaped(f['message'])}{fix} ({code(f['code'])})")
    return "\n".join(lines)


def run_markdown(analysis: Analysis, audit: Audit | None = None) -> str:
    """The whole document.

    Args:
        analysis: Of the run.
        audit: Of its precision, if that is known.
    """
    return "\n\n".join(_parts(analysis, audit)) + "\n"


def _parts(analysis: Analysis, audit: Audit | None) -> Iterator[str]:
    yield f"## {escaped(analysis.run.name)}"
    yield f"**{escaped(analysis.verdict.text)}**"
    if command := next_command(analysis):
        yield f"Next: {code(command)}"
    yield from _histogram(analysis)
    shown = facts(analysis)
    yield rows([f.label for f in shown], [[f.value for f in shown], [f.note for f in shown]])
    for title, clauses in grounds(analysis.verdict):
        yield f"**{title}.** {escaped(sentence(clauses))}"
    if analysis.findings:
        yield "### Findings"
        yield findings_list(f.to_json() for f in analysis.findings)
    for title, words in reasons(analysis):
        yield f"**{title}.** {escaped(words)}"
    if audit is not None:
        yield f"### Precision: {escaped(audit.line)}"
        yield page_table(frame_table(precision_frame(audit)))
        if audit.findings:
            yield findings_list(f.to_json() for f in audit.findings)
    yield from _layers(analysis)
    yield from _folded_tables(analysis)
    meta = analysis.run.meta
    versions = meta.get("versions") or {}
    yield escaped(
        f"{analysis.run.name}: {meta.get('steps_recorded', 0)} of {meta.get('steps_seen', 0)} steps "
        f"recorded, {meta.get('state', 'unknown')}; mpdiag {meta.get('mpdiag', '?')}, "
        f"torch {versions.get('torch', '?')}."
    )


def _folded_tables(analysis: Analysis) -> Iterator[str]:
    """What few need: a table each, closed."""
    plan = analysis.plan
    operations = frame_table(operations_frame(analysis))
    if operations.rows:
        kept = [operations.columns.index(name) for name in ("module", "operation", "why")]
        cells = [[row[i] for i in kept] for row in operations.rows]
        title = f"Stays in FP32: {counted(len(cells), 'module')}"
        yield folded(title, rows(("module", "operation", "why"), cells))
    if plan.shapes:
        shapes = [
            (layer_name(s.module), s.dimension, f"{s.size} → {s.padded}", s.reason)
            for s in plan.shapes[:TOP]
        ]
        title = f"Shapes to pad for Tensor Cores: {len(shapes)} of {len(plan.shapes)}"
        yield folded(title, rows(("module", "dimension", "size", "why"), shapes))
    if plan.levels:
        table = page_table(frame_table(levels_frame(plan)))
        yield folded("Levels, in the order to try them", f"{MEMORY}\n\n{table}")
    formats = formats_frame(analysis.formats).map(percent).reset_index()
    note = escaped(formats_note(analysis))
    yield folded("Lost and rounded, by format", f"{note}\n\n{page_table(frame_table(formats))}")


def _layers(analysis: Analysis) -> Iterator[str]:
    """The layers with the most underflow, by the figures that the verdict is made of."""
    figures = analysis.figures
    first, scaled = figures.find("layer-sum"), figures.find("layer-values-scaled")
    if first is None:
        return
    label = FORMATS[first.format].label
    yield f"### Layers with the most underflow in {label} {first.at_scale}, {escaped(first.where)}"
    keys: list[Key] = ["layer-sum", "layer-values"]
    head = ["layer", "Σ|g| lost", "values lost"]
    if scaled is not None:
        keys.append("layer-values-scaled")
        head.append(f"values lost {scaled.at_scale}")
    found = [
        (layer_name(layer), *(figures.said(key, layer) for key in keys))
        for layer in figures.layers()[:TOP]
    ]
    yield rows(head, found)


def _histogram(analysis: Analysis) -> Iterator[str]:
    """All gradients as the terminal draws them."""
    drawn = gradients_picture(analysis)
    if not drawn:
        return
    console = Console(width=COLUMNS, color_system=None)
    with console.capture() as capture:
        console.print(*drawn[1:])
    lines = "\n".join(line.rstrip() for line in capture.get().rstrip().splitlines())
    yield f"{escaped(str(drawn[0]))}:\n\n```text\n{lines}\n```"


def page_table(table: PageTable) -> str:
    """A table that the HTML page has, too."""
    return rows(table.columns, table.rows) + (f"\n\n{escaped(table.note)}" if table.note else "")


def rows(head: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    """A table; cells are text."""
    cells = [tuple(map(escaped, row)) for row in (head, *body)]
    lines = [cells[0], ("---",) * len(head), *cells[1:]]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
