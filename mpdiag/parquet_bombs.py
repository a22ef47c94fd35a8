"""Parquet files that are small on the disk and without end in memory.

Runs of equal values are stored once: a few KB can hold a billion rows, a row with a list of a billion
counts, or a gigabyte of blanks for a name. What a recorder writes stays far below these limits; they
are read from the file's footer, before anything is unpacked.
"""

from __future__ import annotations

from typing import Any

MOST_ROWS = 1 << 22
"""A part is written from 20,000 rows on, after the step that reached them."""
MOST_VALUES = 1 << 12
"""Of a row in one column. A histogram has 254 bins, a ratio histogram 560."""
LARGEST = 1 << 30
"""Bytes of one column of a row group, unpacked."""


def refuse_bomb(footer: Any) -> None:
    """Check a ``pyarrow.parquet.FileMetaData``.

    Raises:
        ValueError: If the file would unpack into what no recorder writes.
    """
    if footer.num_rows > MOST_ROWS:
        message = f"{footer.num_rows:,} rows are more than a part can have"
        raise ValueError(message)
    for i in range(footer.num_row_groups):
        group = footer.row_group(i)
        for j in range(group.num_columns):
            column = group.column(j)
            if column.num_values > MOST_VALUES * max(group.num_rows, 1):
                message = f"the column {column.path_in_schema!r} has too many values in a row"
                raise ValueError(message)
            if column.total_uncompressed_size > LARGEST:
                message = f"the column {column.path_in_schema!r} is too large unpacked"
                raise ValueError(message)
