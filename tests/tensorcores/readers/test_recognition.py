"""What is no trace is named and refused at once, however large it is."""

import codecs
import contextlib
import gzip
import sqlite3
import time
from pathlib import Path

import pytest

from mpdiag.errors import DamagedTrace, ExitCode
from mpdiag.hardware.tables import read_table
from mpdiag.tensorcores.readers import recognition
from mpdiag.tensorcores.readers.recognition import read

ROWS = read_table(Path(__file__).with_name("not_read.tsv"))


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row['name']}: {row['words']}")
def test_what_is_said(tmp_path, row):
    content = codecs.decode(row["content"], "unicode_escape").encode("latin-1")
    path = tmp_path / row["name"]
    for data in (content, gzip.compress(content))[: 1 + (path.name == "a")]:
        path.write_bytes(data)
        with pytest.raises(DamagedTrace, match=row["words"]) as told:
            list(read(path))
        assert "\n" not in str(told.value)
        assert str(path) in str(told.value)
        assert told.value.exit_code == ExitCode.INPUT


def test_a_line_longer_than_what_is_read_of_it(tmp_path):
    (tmp_path / "a").write_text('{"data": ["' + "x" * 100_000)
    with pytest.raises(DamagedTrace, match=r"JSON lines.*sqlite"):
        read(tmp_path / "a")


def test_a_database_of_rocprofv3_is_named(tmp_path):
    path = tmp_path / "out.db"
    with contextlib.closing(sqlite3.connect(path)) as base:
        base.execute("CREATE TABLE `rocpd_kernel_dispatch_1a` (id INTEGER)")
    with pytest.raises(DamagedTrace, match="rocprofv3 --kernel-trace --output-format csv"):
        list(read(path))


OBJECTS = b'{"name": "x", "values": [1, 2, 3]}, '
CHROME = (
    b'{"ph": "X", "cat": "toplevel", "name": "RunTask", "pid": 1, "tid": 1, "ts": 1, "dur": 2},'
)


@pytest.mark.parametrize(
    ("start", "part"),
    [
        (b'{"rows": [', OBJECTS), (b"[", OBJECTS), (b'{"traceEvents": [', CHROME), (b"[", CHROME),
        (b'{"traceEvents": [', bytes(range(256))), (b"", b"name,duration,age\n1,2,3\n"),
        (b"", bytes(range(256))),
    ],
    ids=["objects", "list", "chrome", "chrome-list", "damaged", "csv", "binary"],
)  # fmt: skip
def test_a_large_file_is_refused_in_under_a_second(tmp_path, start, part):
    path = tmp_path / "large"
    with path.open("wb") as file:
        file.write(start + part * (1 + (1 << 20) // len(part)))
        file.truncate(1 << 31)  # the rest is a hole
    begun = time.process_time()
    with pytest.raises(DamagedTrace):
        list(read(path))
    assert time.process_time() - begun < 1


def test_events_behind_a_long_beginning_are_found(tmp_path, monkeypatch):
    monkeypatch.setattr(recognition, "HEAD", 100)
    monkeypatch.setattr(recognition, "TABLE", 100)
    monkeypatch.setattr(recognition, "SEARCHED", 5000)
    path = tmp_path / "a.json"
    event = '{"ph": "X", "cat": "kernel", "name": "k", "ts": 1, "dur": 2}'
    for filler, found in ((3000, True), (9000, False)):
        path.write_text(f'{{"a": "{"x" * filler}", "traceEvents": [{event}]}}', encoding="utf-8")
        if found:
            assert [k.name for k in read(path)] == ["k"]
        else:
            with pytest.raises(DamagedTrace):
                read(path)
