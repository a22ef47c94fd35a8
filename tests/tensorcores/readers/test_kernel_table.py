"""Tables of kernels, as their programs document them (``tests/data/traces``), whole and damaged."""

import csv
import gzip
from itertools import groupby
from pathlib import Path

import pytest

from mpdiag.errors import DamagedTrace
from mpdiag.tensorcores.readers import tables
from mpdiag.tensorcores.readers.recognition import read

TRACES = Path(__file__).parents[2] / "data" / "traces"
with (TRACES / "kernels.tsv").open(encoding="utf-8") as table:
    ROWS = list(csv.DictReader(table, delimiter="\t"))
FILES = {name: list(rows) for name, rows in groupby(ROWS, key=lambda row: row["file"])}
WRAPS = {
    "plain": str.encode,
    "gz": lambda text: gzip.compress(text.encode()),
    "utf-16": lambda text: text.encode("utf-16"),  # as PowerShell redirects tables
}


def text_of(name):
    return (TRACES / name).read_text(encoding="utf-8")


def described(kernel):
    counters = (kernel.counters or {}).items()
    return {
        "name": kernel.name,
        "start_us": f"{kernel.start_us:.15g}",
        "duration_us": f"{kernel.duration_us:.10g}",
        "calls": str(kernel.calls),
        "device": "" if kernel.device is None else str(kernel.device),
        "counters": " ".join(f"{name}={value:.12g}" for name, value in counters),
    }


@pytest.mark.parametrize(
    ("name", "wrap"),
    [(n, w) for n in FILES for w in WRAPS if w != "utf-16" or not n.endswith(".json")],
)
def test_every_program(tmp_path, name, wrap):
    path = tmp_path / "table"
    path.write_bytes(WRAPS[wrap](text_of(name)))
    trace = read(path)
    found = [{"file": name, "source": trace.source} | described(kernel) for kernel in trace]
    assert (found, trace.problems) == (FILES[name], [])


@pytest.mark.parametrize(
    ("name", "device", "capability"),
    [
        ("nsys-trace.csv", "NVIDIA H100", None),
        ("nvprof-trace.csv", "Tesla V100-SXM2-16GB", None),
        ("ncu.csv", "", (9, 0)),
        ("ncu-raw.csv", "", (8, 0)),
        ("rocprofv3.json", "AMD Instinct MI300X", (9, 4)),
    ],
)
def test_the_device_is_named(name, device, capability):
    trace = read(TRACES / name)
    list(trace)
    assert (trace.devices[0].name, trace.devices[0].capability) == (device, capability)


def test_a_table_without_times_says_so(tmp_path):
    path = tmp_path / "a.csv"
    table = "Dispatch_Id,Kernel_Name,Counter_Name,Counter_Value\n0,mine,SQ_INSTS_MFMA,5\n"
    path.write_text(table, encoding="utf-8")
    trace = read(path)
    (only,) = trace
    assert (only.duration_us, only.counters) == (0, {"SQ_INSTS_MFMA": 5})
    assert trace.problems == ["the table has no times, so all shares of time are 0"]


def test_unreadable_rows_are_counted_and_a_cut_file_is_read_as_far_as_it_goes(tmp_path):
    path, text = tmp_path / "a.csv", text_of("nsys-sum.csv")
    path.write_text(text.replace("2500,5", "x,5") + "1,2\n", encoding="utf-8")
    trace = read(path)
    assert [k.calls for k in trace] == [50]
    assert trace.problems == ["left out 2 unreadable rows of the table"]
    packed = gzip.compress((text + text.splitlines()[-1] * 50).encode())
    path.write_bytes(packed[: len(packed) - 20])
    assert next(iter(read(path))).calls == 50


def test_a_table_without_kernels_is_refused(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text(text_of("rocprofv3-trace.csv").splitlines()[0] + "\n", encoding="utf-8")
    with pytest.raises(DamagedTrace, match="but no kernel"):
        list(read(path))


def test_a_line_as_long_as_the_disk_is_passed_over(tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "LONGEST_FIELD", 100)
    path = tmp_path / "a.csv"
    path.write_text("a,b\n" + "x" * 1000 + ",y\n==PROF== c\nc,d\n" + "z" * 99)
    limit = csv.field_size_limit()  # of the process
    try:
        assert list(tables.rows(path)) == [["a", "b"], ["c", "d"], ["z" * 99]]
    finally:
        csv.field_size_limit(limit)
