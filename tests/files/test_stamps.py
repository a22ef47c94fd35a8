"""A stamp changes with the files it is of."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from mpdiag.files.stamps import stamp_of

if TYPE_CHECKING:
    from pathlib import Path


def test_a_stamp_changes_with_content_time_and_presence(tmp_path: Path) -> None:
    first, second = tmp_path / "a", tmp_path / "b"
    first.write_text("1")
    alone = stamp_of([first, second])
    assert alone == stamp_of([first, second])

    second.write_text("2")
    both = stamp_of([first, second])
    assert [name for name, _, _ in both] == [str(first), str(second)]

    second.write_text("22")
    longer = stamp_of([first, second])
    os.utime(first, ns=(1, 1))
    older = stamp_of([first, second])
    second.unlink()
    assert len({alone, both, longer, older, stamp_of([first, second])}) == 5
