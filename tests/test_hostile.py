"""Files made to mislead or to exhaust: small to send, refused in one sentence, nothing else touched."""

from __future__ import annotations

import json
import os
import shutil
import sys
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from runs_by_hand import write_run

from mpdiag.analysis.analyzer import analyze
from mpdiag.errors import DamagedPlan, DamagedRun
from mpdiag.exports.registry import EXPORTERS, export_plan
from mpdiag.files import documents
from mpdiag.files.parquet import MOST_ROWS
from mpdiag.launching.processes import claim_run
from mpdiag.plan import Fp32Choice, PrecisionPlan
from mpdiag.runs import provenance
from mpdiag.runs.operations import encode
from mpdiag.runs.run import open_run
from mpdiag.runs.stored_profile import read_profile
from mpdiag.runs.training_log import read_log
from mpdiag.tensorcores.readers import tables


@pytest.fixture
def run(tmp_path):
    write_run(tmp_path / "run")
    return tmp_path / "run"


# -- files that are small on the disk alone --------------------------------------------------------


def make_sparse(path, size=documents.LARGEST + 1):
    """A file of any size that takes no room on the disk."""
    path.touch()
    with path.open("r+b") as file:
        file.truncate(size)


def assert_one_sentence(caught, *words):
    message = str(caught.value)
    assert "\n" not in message
    assert all(word in message for word in words), message


@pytest.mark.parametrize("field", ["optimizers", "failures", "argv"])
def test_a_list_with_a_hole_is_no_meta(run, field):
    meta = json.loads((run / "meta.json").read_text(encoding="utf-8"))
    (run / "meta.json").write_text(json.dumps({**meta, field: [None]}), encoding="utf-8")
    with pytest.raises(DamagedRun) as caught:
        open_run(run)
    assert_one_sentence(caught, "meta.json", field)


def test_a_sparse_meta_json_is_refused_unread(run):
    make_sparse(run / "meta.json")
    with pytest.raises(DamagedRun) as caught:
        open_run(run)
    assert_one_sentence(caught, "meta.json", "bytes")


def test_a_sparse_plan_is_refused_unread(tmp_path):
    make_sparse(tmp_path / "plan.json")
    with pytest.raises(DamagedPlan) as caught:
        PrecisionPlan.load(tmp_path / "plan.json")
    assert_one_sentence(caught, "plan.json", "bytes")


def test_a_document_of_usual_size_is_read(tmp_path):
    (tmp_path / "a.json").write_text('{"a": [1]}')
    assert documents.read_document(tmp_path / "a.json") == {"a": [1]}


def test_a_line_as_long_as_the_disk_is_passed_over(tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "LONGEST_FIELD", 100)
    path = tmp_path / "a.csv"
    path.write_text("a,b\n" + "x" * 1000 + ",y\n==PROF== c\nc,d\n" + "z" * 99)
    assert list(tables.rows(path)) == [["a", "b"], ["c", "d"], ["z" * 99]]


# -- Parquet that unpacks without end --------------------------------------------------------------


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


# -- operations whose graph is none ----------------------------------------------------------------


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


# -- names -----------------------------------------------------------------------------------------

COMMANDS = "\x1b]0;title\x07\x1b[2J\x9b1m\u202egnp.exe\x00"


@pytest.mark.parametrize("name", EXPORTERS)
def test_an_export_commands_no_terminal(name):
    plan = PrecisionPlan(run=COMMANDS, verdict=COMMANDS, fp32_modules=(Fp32Choice("", COMMANDS),))
    for level in ("O1", "O2"):
        text = export_plan(replace(plan, level=level), name).text
        odd = {c for c in text if not c.isprintable()} - {"\n"}
        assert odd == set(), odd


def test_a_claim_names_a_folder_beside_it_and_no_other(tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert claim_run(tmp_path, "train") == claim_run(tmp_path, "train") == tmp_path / "train"
    (claim,) = tmp_path.glob(".*.claim")
    claim.write_text("../elsewhere")
    assert claim_run(tmp_path, "train").parent == tmp_path


# -- secrets ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (["--hf-token", "abc", "--lr", "1"], ["--hf-token", "(hidden)", "--lr", "1"]),
        (["--wandb_api_key=abc"], ["--wandb_api_key=(hidden)"]),
        (["logger.wandb.api-key=abc"], ["logger.wandb.api-key=(hidden)"]),
        (["--password", "abc"], ["--password", "(hidden)"]),
        (["--token"], ["--token"]),
        (["--token", "--lr"], ["--token", "--lr"]),
        (["s3://key:word@host/data"], ["s3://(hidden)@host/data"]),
        (["--tokenizer", "bpe", "--max-tokens=5"], ["--tokenizer", "bpe", "--max-tokens=5"]),
        (["token", "ring"], ["token", "ring"]),
        (["--data", "https://host/a@b"], ["--data", "https://host/a@b"]),
    ],
)
def test_a_run_keeps_no_secret_of_the_command_line(words, shown, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["train.py", *words])
    assert provenance.arguments() == ["train.py", *shown]
