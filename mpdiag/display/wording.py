"""Numbers in sentences."""

from __future__ import annotations


def counted(number: int, one: str, several: str = "") -> str:
    """So many of something: ``1 layer``, ``2 layers``.

    Args:
        number: How many.
        one: What one is called.
        several: What several are called; by default with an s at the end.
    """
    return f"{number:,} {one if number == 1 else several or one + 's'}"
