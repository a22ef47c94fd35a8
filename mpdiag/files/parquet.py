"""Parquet files that are small on the disk and without end in memory.

Runs of equal values are stored once: a few KB can hold a billion rows. The number of rows is read from
the file's footer, before anything is unpacked. Nothing else of the footer is looked at: pyarrow 26
aborts the process where the description of a damaged file's columns contradicts itself.
"""

from __future__ import annotations

from typing import Any

MOST_ROWS = 1 << 22
"""A part is written from 20,000 rows on, after the step that reached them."""


def refuse_bomb(footer: Any) -> None:
    """Check a ``pyarrow.parquet.FileMetaData``.

    Raises:
        ValueError: If the file would unpack into what no recorder writes.
    """
    if footer.num_rows > MOST_ROWS:
        message = f"{footer.num_rows:,} rows are more than a part can have"
        raise ValueError(message)
