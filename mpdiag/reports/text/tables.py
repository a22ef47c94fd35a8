"""Tables and findings that fit any terminal: words are never cut.

Empty columns are left out. A table is drawn as one while its figures fit on one line and its sentences
have room to wrap. Otherwise the columns that matter least go first, then each row becomes a few lines.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from mpdiag.analysis.findings import Finding
from mpdiag.display.wording import counted

COLOURS = {"error": "bold red", "warning": "yellow", "info": "cyan"}
EXPLAIN = "what a finding means: mpdiag explain CODE"
"""The line below findings whose codes are shown."""
ROOM = 26
"""Columns of the terminal that a sentence needs at least."""
NAME = 44
"""Columns beyond which a name that may fold does."""


@dataclass
class Fitted:
    """A table that fits the terminal.

    Attributes:
        columns: Their headings.
        title, caption: Above and below.
        sentences: Headings of columns whose cells may wrap.
        names: Headings of columns whose long words may go on in the next line.
        right: Headings of columns of numbers.
        charts: Headings of columns that get a line of their own where rows become lines.
        spare: Headings of columns that may be left out, the least important first.
        lead: How many columns make up a row's first line where rows become lines.
        boxed: Whether the table has lines.
        rows: A cell for each column; text is text, never markup.
    """

    columns: tuple[str, ...]
    title: str = ""
    caption: str = ""
    sentences: frozenset[str] = frozenset()
    names: frozenset[str] = frozenset()
    right: frozenset[str] = frozenset()
    charts: frozenset[str] = frozenset()
    spare: tuple[str, ...] = ()
    lead: int = 1
    boxed: bool = True
    rows: list[tuple[Text, ...]] = field(default_factory=list)

    def add_row(self, *cells: str | Text) -> None:
        """Add a row with a cell for each column."""
        self.rows.append(tuple(Text(c) if isinstance(c, str) else c for c in cells))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """How rich draws it: as a table, or row by row where that is too wide."""
        del console
        used = [any(cell.plain for cell in cells) for cells in zip(*self.rows, strict=True)]
        shown = [i for i, _ in enumerate(self.columns) if not used or used[i]]
        spare = [i for i in map(self.columns.index, self.spare) if i in shown]
        while self._least(shown) > options.max_width and spare:
            shown.remove(spare.pop(0))
        if self._least(shown) <= options.max_width:
            yield self._table(shown, options.max_width - self._least(shown))
        else:
            yield from self._lines()

    def _least(self, shown: list[int]) -> int:
        """The width below which a figure or a word would be cut."""
        widths = [self._width(i) for i in shown]
        lines = 3 * len(shown) + 1 if self.boxed else 2 * len(shown)
        return sum(widths) + lines

    def _width(self, column: int) -> int:
        cells = [row[column].plain for row in self.rows]
        heading = max(map(cell_len, self.columns[column].split()), default=0)
        if self.columns[column] in self.sentences:
            longest = max((cell_len(cell) for cell in cells), default=0)
            words = max((cell_len(w) for cell in cells for w in cell.split()), default=0)
            return max(heading, words, min(ROOM, longest))
        if self.columns[column] in self.names:
            return max(heading, min(NAME, self._wished(column)))
        inside = (cell_len(line) for cell in cells for line in cell.split("\n"))
        return max(heading, max(inside, default=0))

    def _wished(self, column: int) -> int:
        """The width in which nothing of a column wraps."""
        cells = (line for row in self.rows for line in row[column].plain.split("\n"))
        return max(cell_len(self.columns[column]), max(map(cell_len, cells), default=0))

    def _table(self, shown: list[int], room: int) -> Table:
        """The table; ``room`` is the width beyond the least one, which sentences get last."""
        widths = {i: self._width(i) for i in shown}
        for i in sorted(shown, key=lambda i: self.columns[i] in self.sentences):
            more = min(room, max(0, self._wished(i) - widths[i]))
            widths[i] += more
            room -= more
        table = Table(
            title=Text(self.title, "bold") if self.title else None,
            title_justify="left",
            caption=Text(self.caption) if self.caption else None,
            header_style="bold",
        )
        if not self.boxed:
            table.box = None
        for i in shown:
            name = self.columns[i]
            table.add_column(
                Text(name),
                justify="right" if name in self.right else "left",
                width=widths[i],
                overflow="fold",
            )
        for row in self.rows:
            table.add_row(*(row[i] for i in shown))
        return table

    def _lines(self) -> RenderResult:
        """A row: its first cells in one line, then the others with their headings."""
        if self.title:
            yield Text(self.title, "bold")
        for row in self.rows:
            yield Text("  ").join(
                Text(" ").join(c.split("\n")) for c in row[: self.lead] if c.plain
            )
            facts = [
                Text.assemble((f"{name} ", "dim"), cell)
                for name, cell in zip(self.columns[self.lead :], row[self.lead :], strict=True)
                if cell.plain and name not in self.sentences | self.charts
            ]
            if facts:
                yield Padding(Text(", ").join(facts), (0, 0, 0, 4))
            for name, cell in zip(self.columns[self.lead :], row[self.lead :], strict=True):
                if cell.plain and name in self.sentences | self.charts:
                    yield Padding(Text.assemble((f"{name}: ", "dim"), cell), (0, 0, 0, 4))
        if self.caption:
            yield Text(self.caption, "dim")


def finding_lines(findings: Sequence[Finding]) -> list[RenderableType]:
    """Findings in order; a fix that several in a row share is said once, after the last of them."""
    lines: list[RenderableType] = []
    for i, f in enumerate(findings):
        lines.append(Text.assemble((f"{f.severity}: ", COLOURS[f.severity]), f.message))
        following = findings[i + 1] if i + 1 < len(findings) else None
        if following is None or (following.fix, following.code) != (f.fix, f.code):
            fix = Text(f"{f.fix}  [{f.code}]".lstrip(), style="dim")
            lines.append(Padding(fix, (0, 0, 0, 2), expand=False))
    return lines


def titled_rows() -> Table:
    """Rows of a bold title and words."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column(overflow="fold")
    return grid


def add_findings(
    rows: Table, findings: Sequence[Finding], *, more: int = 0, whole: bool = False
) -> None:
    """Findings as titled rows, and the command that explains them.

    Args:
        rows: Of ``titled_rows``.
        findings: The findings to show.
        more: How many are left out.
        whole: Their whole messages, else what was found alone.
    """
    for finding in findings:
        severity = Text(finding.severity, COLOURS[finding.severity])
        rows.add_row(severity, Text(finding.message if whole else finding.headline))
        if finding.fix:
            rows.add_row("", Text(f"→ {finding.fix}", "dim"))
    if more > 0:
        rows.add_row("", Text(f"and {counted(more, 'finding')} more: -v", "dim"))
    if findings:
        codes = dict.fromkeys(f.code for f in findings)
        rows.add_row(Text("mpdiag explain", "not bold dim"), Text(" | ".join(codes), "dim"))
