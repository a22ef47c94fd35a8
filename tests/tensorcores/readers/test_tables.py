"""CSV tables of profilers: lines too long to be a profiler's."""

from __future__ import annotations

import csv

from mpdiag.tensorcores.readers import tables


def test_a_line_as_long_as_the_disk_is_passed_over(tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "LONGEST_FIELD", 100)
    path = tmp_path / "a.csv"
    path.write_text("a,b\n" + "x" * 1000 + ",y\n==PROF== c\nc,d\n" + "z" * 99)
    limit = csv.field_size_limit()  # of the process
    try:
        assert list(tables.rows(path)) == [["a", "b"], ["c", "d"], ["z" * 99]]
    finally:
        csv.field_size_limit(limit)
