"""What a reader refuses: endless files, odd fields, pipes, and operations that name nothing."""

import json
import os
import shutil
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from made_runs import assert_one_sentence, write_run

from mpdiag.analysis.analyzer import analyze
from mpdiag.errors import DamagedRun
from mpdiag.runs.operations import encode
from mpdiag.runs.reader import MOST_ROWS
from mpdiag.runs.records import Records
from mpdiag.runs.results import read_profile
from mpdiag.runs.run import open_run
from mpdiag.runs.schema import TEXT
from mpdiag.runs.training_log import read_log


@pytest.fixture
def run(tmp_path):
    return write_run(tmp_path / "run")


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


@pytest.mark.parametrize(
    ("column", "value", "named"),
    [("numel", -5, "shape"), ("settings", "{", "settings"), ("type", None, "type")],
)
def test_a_row_of_that_table_that_nothing_writes_is_damage(run, column, value, named):
    path = run / "modules" / "rank00000.parquet"
    table = pq.read_table(path)
    first, *others = table.to_pylist()
    rows = [{**first, column: value}, *others]
    pq.write_table(pa.Table.from_pylist(rows, table.schema), path)
    with pytest.raises(DamagedRun) as caught:
        open_run(run).modules()
    assert_one_sentence(caught, "modules", f"the column '{named}'")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *((field, [None]) for field in ("optimizers", "failures", "argv")),
        ("optimizers", [{"type": "SGD", "steps_taken": "many"}]),
    ],
)
def test_a_field_with_a_hole_or_of_another_type_is_named(run, field, value):
    meta = json.loads((run / "meta.json").read_text(encoding="utf-8"))
    (run / "meta.json").write_text(json.dumps({**meta, field: value}), encoding="utf-8")
    with pytest.raises(DamagedRun) as caught:
        open_run(run)
    assert_one_sentence(caught, "meta.json", field)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no pipes in folders")
def test_a_pipe_in_a_run_keeps_nobody_waiting(run):
    for place in (
        *("stats/rank00000-000009.parquet", "modules/rank00009.parquet", "training.jsonl"),
        *("ranks/rank00009.json", "operations/rank00000-000001.parquet", "profile.json"),
    ):
        (run / place).parent.mkdir(exist_ok=True)
        (run / place).unlink(missing_ok=True)
        os.mkfifo(run / place)
    opened = open_run(run)
    assert len(opened.parts()) == 1
    assert opened.modules()
    assert opened.operations() == []
    assert set(opened.rank_metas()) == {0}
    with pytest.raises(DamagedRun):
        read_log(run)
    with pytest.raises(DamagedRun):
        read_profile(run)


def of_inputs(**changes):
    return lambda op: replace(op, inputs=tuple(replace(t, **changes) for t in op.inputs))


@pytest.mark.parametrize(
    "change",
    [
        lambda op: replace(op, forward=10**6),
        lambda op: replace(op, forward=-7),
        lambda op: replace(op, index=op.index + 1),
        of_inputs(producer=10**6),
        of_inputs(producer=-7),
        *(of_inputs(shape=shape) for shape in ((2, -1), (-1, -1), (2**40, 2**40))),
        lambda op: replace(op, facts={"error_fp16": "large"}),
        lambda op: replace(op, facts={"error_fp16": None}),
        lambda op: replace(op, scalars={"value": 10**400}),
    ],
)
def test_an_operation_that_names_what_is_not_there_is_damage(root, tmp_path, change):
    whole = open_run(root / "sample_runs" / "translation").operations()
    first = [op for op in whole if (op.rank, op.step) == (whole[0].rank, whole[0].step)]
    shutil.copytree(root / "sample_runs" / "translation", tmp_path / "run")
    part = tmp_path / "run" / "operations" / "rank00000-000001.parquet"
    pq.write_table(encode(first), part)
    assert len(open_run(tmp_path / "run").operations()) == len(whole)
    pq.write_table(encode([change(op) if op.inputs else op for op in first]), part)
    with pytest.raises(DamagedRun) as caught:
        analyze(tmp_path / "run")
    assert_one_sentence(caught, "rank00000-000001.parquet", "remove it")


def test_columns_that_are_not_read_are_empty_and_the_others_as_ever(root):
    run = open_run(root / "sample_runs" / "digits")
    whole, some = run.records, Records.concatenate(list(run.pieces(histograms=False)))
    for name in ("kind", "name", "step", "scale", "numel", "absmax", "absmin"):
        values = [
            each.texts(name) if name in TEXT else getattr(each, name) for each in (whole, some)
        ]
        np.testing.assert_array_equal(*values)
    assert len(whole.bins.counts) > 0
    assert len(some.bins.counts) == 0
    assert some.facts == {}
