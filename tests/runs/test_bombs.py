"""Parquet files that are small on the disk and endless in memory are refused unread."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from made_runs import write_run

from mpdiag.errors import DamagedRun
from mpdiag.runs.reader import MOST_ROWS
from mpdiag.runs.run import open_run


@pytest.fixture
def run(tmp_path):
    return write_run(tmp_path / "run")


def assert_one_sentence(caught, *words):
    message = str(caught.value)
    assert "\n" not in message
    assert all(word in message for word in words), message


def test_a_part_of_endless_rows_is_refused_unread(run):
    path = run / "stats" / "rank00000-000002.parquet"
    pq.write_table(pa.table({"step": np.zeros(MOST_ROWS + 1, np.int8)}), path)
    assert path.stat().st_size < 50_000
    with pytest.raises(DamagedRun) as caught:
        _ = open_run(run).records
    assert_one_sentence(caught, "rank00000-000002.parquet", "rows")


def test_the_table_of_modules_is_checked_likewise(run):
    path = run / "modules" / "rank00000.parquet"
    pq.write_table(pa.table({"name": pa.array(["a"] * (MOST_ROWS + 1)).dictionary_encode()}), path)
    with pytest.raises(DamagedRun) as caught:
        open_run(run).modules()
    assert_one_sentence(caught, "modules", "rows")
