"""The run folder: whole parts, several writers, and what a reader says about a bad one."""

import json
import os
import shutil
import threading

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from made_runs import write_run
from row_buffer import table_of

import mpdiag
from mpdiag.errors import DamagedRun, RunExists, RunNotFound
from mpdiag.runs.records import Records
from mpdiag.runs.run import META, SCHEMA_VERSION, Run, free_name, list_runs, open_run
from mpdiag.runs.schema import schema
from mpdiag.runs.writer import RunWriter


def table(step=0, rank=0, name="layer", kind="activation_grad", values=(2.0**-20, 1.0, 0.0)):
    return table_of([(step, kind, name, values, {"rank": rank})])


def write(folder, *tables, state="complete", rank=0, world=1):
    writer = RunWriter(folder, rank=rank, world_size=world)
    writer.write_meta({"state": state, "created": "2026-01-01", "steps_recorded": len(tables)})
    for rows in tables:
        writer.append(rows)
    return writer


# -- writing ---------------------------------------------------------------------------------------


def test_leftovers_of_a_kill_are_no_parts(tmp_path):
    write(tmp_path / "run", table())
    (tmp_path / "run" / "stats" / ".rank00000-000002.parquet.123.part").write_bytes(b"PAR1 half")
    (tmp_path / "run" / "stats" / "notes.txt").write_text("mine")
    assert len(open_run(tmp_path / "run").records) == 1
    assert pd.read_parquet(tmp_path / "run" / "stats" / "rank00000-000001.parquet").shape[0] == 1


def test_an_earlier_run_is_replaced_only_when_told(tmp_path):
    write(tmp_path / "run", table(), table())
    made = ["plan.json", "search.json", "probe.json", "capsules/step000003/capsule.json"]
    (tmp_path / "run" / "capsules" / "step000003").mkdir(parents=True)
    for name in made:
        (tmp_path / "run" / name).write_text("{}")
    (tmp_path / "run" / "notes.md").write_text("mine")
    with pytest.raises(RunExists, match="overwrite"):
        RunWriter(tmp_path / "run")
    assert len(open_run(tmp_path / "run").parts()) == 2
    writer = RunWriter(tmp_path / "run", overwrite=True)
    writer.write_meta({"state": "recording"})
    assert open_run(tmp_path / "run").parts() == []
    assert not any((tmp_path / "run" / name).exists() for name in made)
    assert (tmp_path / "run" / "notes.md").read_text() == "mine"


def test_what_a_link_in_a_replaced_run_leads_to_stays(tmp_path):
    other = write_run(tmp_path / "other")
    before = sorted(p.name for p in other.rglob("*"))
    run = write_run(tmp_path / "run")
    shutil.rmtree(run / "stats")
    (run / "stats").symlink_to(other / "stats", target_is_directory=True)
    RunWriter(run, overwrite=True)
    assert not (run / "stats").is_symlink()
    assert sorted(p.name for p in other.rglob("*")) == before


def test_ranks_append_at_the_same_time(tmp_path):
    """Four writers, each with parts of its own, none waiting for another."""

    def work(rank):
        rows = [table(step, rank, name=f"rank{rank}") for step in range(5)]
        write(tmp_path / "run", *rows, rank=rank, world=4)

    threads = [threading.Thread(target=work, args=(rank,)) for rank in (3, 1, 0, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    run = open_run(tmp_path / "run")
    records = run.records
    assert len(run.parts()) == len(records) == 20
    assert np.bincount(records.rank).tolist() == [5, 5, 5, 5]
    assert sorted(set(records.texts("name"))) == ["rank0", "rank1", "rank2", "rank3"]
    written = sorted(p.name for p in (run.folder / "ranks").iterdir())
    assert written == [f"rank0000{rank}.json" for rank in (1, 2, 3)]


def test_a_run_reads_while_it_is_written(tmp_path):
    writer = write(tmp_path / "run", table(0), state="recording")
    stop = threading.Event()
    written = []

    def keep_writing():
        while not stop.is_set():
            writer.append(table(len(written) + 1))
            writer.write_meta({"state": "recording", "steps_recorded": len(written)})
            written.append(1)

    thread = threading.Thread(target=keep_writing)
    thread.start()
    try:
        lengths = []
        while len(written) < 60:
            before = len(written)
            length = len(open_run(tmp_path / "run").records)
            assert length > before  # whatever was whole when the reading began is there
            lengths.append(length)
    finally:
        stop.set()
        thread.join()
    assert lengths == sorted(lengths)
    assert lengths[-1] > lengths[0]


def test_parts_with_words_of_their_own_share_a_vocabulary(tmp_path):
    write(tmp_path / "run", table(0, name="b"), table(1, name="a"), table(2, name="b"))
    records = open_run(tmp_path / "run").records
    assert list(records.texts("name")) == ["b", "a", "b"]
    assert records.words["name"] == ("b", "a")
    whole = Records.from_table(open_run(tmp_path / "run").table())
    assert list(whole.texts("name")) == ["b", "a", "b"]
    for column in ("name", "kind"):
        assert list(records.texts(column)) == list(whole.texts(column))
    for field in ("step", "absmax", "numel"):
        assert np.array_equal(getattr(records, field), getattr(whole, field)), field
    for field in ("first_exponent", "offsets", "counts", "means"):
        assert np.array_equal(getattr(records.bins, field), getattr(whole.bins, field)), field
    assert np.array_equal(records.ratio_bins.offsets, whole.ratio_bins.offsets)


def test_naming(tmp_path):
    assert free_name(tmp_path, "run").name == "run"
    write(tmp_path / "run", table())
    (tmp_path / "run-2").mkdir()
    assert free_name(tmp_path, "run").name == "run-3"


# -- bad input, through the real command -----------------------------------------------------------


def second(folder):
    return folder / "stats" / "rank00000-000002.parquet"


def foreign_types(folder):
    columns = {name: pa.array(["?"]) for name in schema().names}
    pq.write_table(pa.table(columns), second(folder))


def contradicting(folder):
    rows = table(0)
    at = rows.schema.get_field_index("means")
    pq.write_table(rows.set_column(at, rows.schema.field(at), pa.array([b"\0"])), second(folder))


def with_meta(content):
    return lambda folder: (folder / "meta.json").write_bytes(content)


HARMED = {  # what is done to a good run of two parts
    "truncated": (lambda run: second(run).write_bytes(second(run).read_bytes()[:-30]), "damaged"),
    "cut to nothing": (lambda run: second(run).write_bytes(b""), "damaged"),
    "foreign": (lambda run: pd.DataFrame({"a": [1]}).to_parquet(second(run)), "lacks the column 'step'"),
    "foreign types": (foreign_types, "damaged"),
    "contradicting": (contradicting, "counts and means differ"),
    "newer": (with_meta(b'{"schema_version": 99, "state": "complete"}'), "upgrade mpdiag"),
    "no schema": (with_meta(b'{"state": "complete"}'), "has no schema_version"),
    "half meta": (with_meta(b'{"schema_version": 1, "sta'), "damaged"),
    "binary meta": (with_meta(bytes(range(256))), "damaged"),
    "odd field": (
        with_meta(
            b'{"schema_version": 1, "state": "complete", "optimizers": [{"steps_taken": "x"}]}'
        ),
        "its field 'optimizers' holds a value that mpdiag never writes there",
    ),
    "no meta": (lambda run: (run / "meta.json").unlink(), "has no meta.json"),
}  # fmt: skip
BAD = {
    "empty": (write, "no step was recorded"),
    "without rows": (lambda run: write(run, schema().empty_table()), "no step was recorded"),
    "killed": (lambda run: write(run, state="recording"), "killed there"),
    "nothing but NaN": (lambda run: write(run, *[table(values=[np.nan, np.inf])] * 3), "fix it and"),
    "missing": (lambda _: None, "there is no run"),
    "a file": (lambda run: run.write_text("no folder"), "is a file, and a run is a folder"),
}  # fmt: skip
for _name, (_harm, _words) in HARMED.items():
    BAD[_name] = (lambda run, harm=_harm: (write(run, table(0), table(1)), harm(run)), _words)


@pytest.fixture
def analyze(fork_server, tmp_path):
    """The command, in a process of its own."""

    def run(folder, *options):
        return fork_server("mpdiag", "analyze", folder, *options, cwd=tmp_path)

    return run


@pytest.fixture
def neighbours(tmp_path):
    """A good run beside the bad one."""
    write(tmp_path / "good", *(table(step) for step in range(3)))
    return tmp_path


@pytest.mark.parametrize(("bad", "words"), BAD.values(), ids=BAD)
def test_bad_input_is_one_sentence_and_exit_code_3(neighbours, analyze, bad, words):
    folder = neighbours / "bad"
    bad(folder)
    child = analyze(folder, "--json")
    assert child.code == 3, child.err
    assert json.loads(child.out)["error"]["exit_code"] == 3
    assert child.err.startswith("error: ")
    assert child.err.count("\n") == 1
    assert words in child.err
    assert str(folder) in child.err
    # The neighbour is none the worse, and the listing survives.
    assert len(open_run(neighbours / "good").records) == 3
    listed = {item.folder.name: item for item in list_runs(neighbours)}
    assert listed["good"].problem is None


def test_every_kind_of_damage_raises_only_what_is_documented(tmp_path):
    """Cut a part at every length: it opens, or it is a DamagedRun, and never anything else."""
    write(tmp_path / "run", table(0))
    part = tmp_path / "run" / "stats" / "rank00000-000001.parquet"
    whole = part.read_bytes()
    for length in range(0, len(whole), 97):
        part.write_bytes(whole[:length])
        with pytest.raises(DamagedRun):
            _ = open_run(tmp_path / "run").records
    rng = np.random.default_rng(0)
    opened = 0
    for _ in range(150):
        damaged = bytearray(whole)
        damaged[rng.integers(len(whole))] ^= 1 << rng.integers(8)
        part.write_bytes(damaged)
        try:
            opened += len(open_run(tmp_path / "run").records)
        except DamagedRun:
            continue
    assert opened < 150


@pytest.mark.skipif(not hasattr(os, "getuid") or os.getuid() == 0, reason="root may read anything")
def test_an_unreadable_part(tmp_path):
    write(tmp_path / "run", table(0))
    (tmp_path / "run" / "stats" / "rank00000-000001.parquet").chmod(0)
    with pytest.raises(DamagedRun, match="Permission"):
        _ = mpdiag.open_run(tmp_path / "run").records


def test_the_script_of_a_recording_is_known_unless_something_of_it_is_hidden(tmp_path):
    meta = {"schema_version": 1, "script": "a b.py", "world_size": 1}
    words = [
        (["a b.py", "--epochs", "3"], "a b.py", ("a b.py", "--epochs", "3")),
        (["/x/pkg/__main__.py", "1"], "-m pkg", ("-m", "pkg", "1")),
        (["a b.py", "--token", "(hidden)"], "a b.py", ()),
    ]
    for argv, script, expected in words:
        found = Run(tmp_path, {**meta, "argv": argv, "script": script})
        assert found.script_words == expected
    several = {**meta, "argv": ["a", "1"], "world_size": 2}
    assert Run(tmp_path, several).script_words == ()
    launched = Run(tmp_path, {**several, "launcher": ["torchrun", "--nproc-per-node=2"]})
    assert launched.script_words == ("a b.py", "1")
    assert launched.command_words == ("torchrun", "--nproc-per-node=2", "a b.py", "1")
    assert Run(tmp_path, several).command_words == ()


def test_a_run_that_can_be_opened_is_named(tmp_path):
    for name in ("broken", "emptyrun", "recorded"):
        (tmp_path / name).mkdir()
        meta = {"schema_version": SCHEMA_VERSION, "steps_recorded": 5 if name == "recorded" else 0}
        (tmp_path / name / META).write_text("{" if name == "broken" else json.dumps(meta))
    with pytest.raises(RunNotFound, match=r"name one, such as .*recorded"):
        open_run(tmp_path)
    (tmp_path / "emptyrun" / META).write_text("{")
    (tmp_path / "recorded" / META).write_text("")
    with pytest.raises(RunNotFound, match="none of them can be read"):
        open_run(tmp_path)


def test_nobody_is_told_to_remove_what_no_run_is_read_without(tmp_path):
    (tmp_path / "meta.json").write_text("{")
    with pytest.raises(DamagedRun, match="restore it, or record again"):
        open_run(tmp_path)
