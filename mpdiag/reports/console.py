"""A console of rich's that shows names from files as text; rich takes a while to import."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NoReturn

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from mpdiag.display.wording import shown


class Terminal(Console):
    """A console that shows names from files as text, whatever characters they hold."""

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterator[Segment]:
        """As rich does, with control characters made visible."""
        for segment in super().render(renderable, options):
            if segment.control or (segment.text.isascii() and segment.text.isprintable()):
                yield segment
            else:
                yield Segment(shown(segment.text), segment.style)

    def on_broken_pipe(self) -> NoReturn:
        """Let the error pass: rich would exit with 1, which means findings."""
        raise  # noqa: PLE0704
