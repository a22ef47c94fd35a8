"""The page about the run folder: every column, and queries that agree with the analysis."""

from __future__ import annotations

import re

import numpy as np
import pytest
from doc_pages import blocks, ran, text

from mpdiag.analysis.layers import merge_layers
from mpdiag.numerics.formats import FP16
from mpdiag.runs.run import open_run
from mpdiag.runs.schema import schema

PAGE = "docs/run-folder.md"


def test_every_column_is_documented_and_no_other():
    table = (
        text(PAGE).partition("The columns of `stats/*.parquet`:")[2].partition("A bin is closed")[0]
    )
    documented = {
        name
        for line in table.splitlines()
        if line.startswith("| `")
        for name in re.findall(r"`(\w+)`", line.split("|")[1])
    }
    assert documented == set(schema().names)


def test_pandas_alone_tells_what_a_loss_scale_would_lose():
    left = ran(PAGE)
    records = open_run(left.folder / "runs" / "mine").records
    first = records.select(np.flatnonzero(records.of_kind("activation_grad"))[:1])
    expected = first.histograms().lost_to_zero(FP16, left.names["scale_exponent"])
    assert left.names["lost"] == expected.value[0]
    assert 0 < left.names["lost"] < left.names["row"]["numel"]  # an example that shows something


def test_counts_add_up_as_documented():
    frame = ran(PAGE).names["stats"]
    apart = frame[["zeros", "subnormals", "infs", "nans"]].sum(axis=1)
    assert (frame["numel"] == apart + frame["counts"].map(sum)).all()
    assert (frame["means"].map(len) == frame["counts"].map(len)).all()


def test_duckdb_says_what_the_analysis_says(monkeypatch):
    duckdb = pytest.importorskip("duckdb")
    monkeypatch.chdir(ran(PAGE).folder)
    query, histograms = blocks(PAGE, "sql")
    rows = duckdb.sql(query).fetchall()
    merged = merge_layers(open_run("runs/mine").records)
    h = merged.histograms
    counted = {
        (kind, name, e): n
        for kind, name, counts in zip(merged.kinds, merged.names, h.counts.tolist(), strict=True)
        for e, n in zip(h.exponents.tolist(), counts, strict=True)
        if n
    }
    assert {tuple(key): n for *key, n in duckdb.sql(histograms).fetchall() if n} == counted
    layers = merged.of_kind("activation_grad")
    h = layers.histograms
    lost = h.lost_to_zero(FP16).value / h.nonzero
    expected = {
        n: (float(h.absmax[i]), int(h.numel[i]), float(lost[i])) for i, n in enumerate(layers.names)
    }
    assert {name: tuple(rest) for name, *rest in rows} == {
        name: pytest.approx(rest) for name, rest in expected.items()
    }
    assert rows[0][3] > 0
    assert [row[3] for row in rows] == sorted((row[3] for row in rows), reverse=True)
