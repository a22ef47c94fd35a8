"""Which hardware counters count what, and which zeros deny matrix instructions."""

from pathlib import Path

import pytest

from mpdiag.hardware.tables import read_table
from mpdiag.tensorcores.kernels.counters import covers, meaning, without_hfma2

ROWS, COVERS = (read_table(Path(__file__).with_name(f"{n}.tsv")) for n in ("counters", "covers"))


def capability_of(row):
    text = row["capability"]
    return None if text == "any" else tuple(map(int, text.split(".")))


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row['metric']} on {row['capability']}")
def test_what_is_counted(row):
    counted = meaning(row["metric"], capability_of(row))
    if row["paths"] == "none":
        assert counted is None
        return
    paths = " ".join(sorted(counted.paths)) or "-"
    shared = "yes" if counted.shared else ""
    assert (paths, shared, counted.dtype) == (row["paths"], row["shared"], row["dtype"])


@pytest.mark.parametrize("row", COVERS, ids=lambda row: " ".join(row.values()))
def test_zeros_that_cover(row):
    found = covers(frozenset(row["paths"].split()), capability_of(row), row["vendor"])
    assert found is (row["covered"] == "yes")


def test_hfma2_is_subtracted_where_it_was_counted():
    pipe, hmma = (f"sm__inst_executed_pipe_tensor{x}.sum" for x in ("", "_op_hmma"))
    counted = {pipe: 9.0, hmma: 7.0, "sm__inst_executed_pipe_tensor_op_hmma_type_hfma2.sum": 7.0}
    assert (without_hfma2(pipe, counted), without_hfma2(hmma, counted)) == (2.0, 0.0)
    assert without_hfma2(pipe, {pipe: 9.0}) is None
