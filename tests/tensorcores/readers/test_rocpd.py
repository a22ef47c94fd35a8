"""rocprofv3's databases, whose tables bear the number of their process."""

from __future__ import annotations

import sqlite3

import pytest

from mpdiag.errors import DamagedTrace
from mpdiag.tensorcores.readers.recognition import read

# rocprofiler-sdk/source/share/rocprofiler-sdk-rocpd/rocpd_tables.sql, schema version 3
SCHEMA = """
    CREATE TABLE IF NOT EXISTS `rocpd_info_agent_1a` ("id" INTEGER PRIMARY KEY, "guid" TEXT, "type" TEXT,
        "name" TEXT, "product_name" TEXT);
    CREATE TABLE `rocpd_info_kernel_symbol_1a` ("id" INTEGER PRIMARY KEY, "kernel_name" TEXT,
        "display_name" TEXT);
    CREATE TABLE `rocpd_kernel_dispatch_1a` ("id" INTEGER PRIMARY KEY, "agent_id" INTEGER,
        "kernel_id" INTEGER, "dispatch_id" INTEGER, "start" BIGINT, "end" BIGINT, "event_id" INTEGER);
    CREATE TABLE `rocpd_info_pmc_1a` ("id" INTEGER PRIMARY KEY, "name" TEXT, "symbol" TEXT);
    CREATE TABLE `rocpd_pmc_event_1a` ("id" INTEGER PRIMARY KEY, "event_id" INTEGER, "pmc_id" INTEGER,
        "value" REAL);
    CREATE VIEW rocpd_kernel_dispatch AS SELECT * FROM rocpd_kernel_dispatch_1a;
    INSERT INTO rocpd_info_agent_1a VALUES (1, 'g', 'CPU', 'EPYC', ''),
        (2, 'g', 'GPU', 'gfx90a', 'AMD Instinct MI250X');
"""
ROWS = """
    INSERT INTO rocpd_info_kernel_symbol_1a VALUES (3, 'mine.kd', 'mine(float*)'), (4, 'other.kd', NULL);
    INSERT INTO rocpd_kernel_dispatch_1a VALUES (1, 2, 3, 1, 1000, 3000, 11),
        (2, 2, 3, 2, 5000, 6000, 12),
        (3, 2, 4, 3, 10, 20, 13);
    INSERT INTO rocpd_info_pmc_1a VALUES (8, 'SQ_INSTS_MFMA', 'SQ_INSTS_MFMA');
    INSERT INTO rocpd_pmc_event_1a VALUES (1, 11, 8, 40.0), (2, 11, 8, 2.0), (3, 12, 8, 5.0);
"""


def database(path, script):
    base = sqlite3.connect(path)
    base.executescript(script)
    base.commit()
    base.close()
    return path


def test_kernels_counters_and_devices(tmp_path):
    path = database(tmp_path / "out.db", SCHEMA + ROWS)
    before = path.read_bytes()
    trace = read(path)
    first, second = trace
    assert (first.name, first.duration_us, first.calls, first.device) == ("mine(float*)", 3.0, 2, 0)
    assert first.counters == {"SQ_INSTS_MFMA": 42.0}
    assert (second.name, second.duration_us, second.counters) == ("other", 0.01, None)
    assert (trace.source, trace.problems) == ("rocprofv3", [])
    assert (trace.devices[0].name, trace.devices[0].capability) == ("AMD Instinct MI250X", (9, 0))
    assert path.read_bytes() == before


def test_runs_without_times_are_left_out_and_counted(tmp_path):
    wrong = "INSERT INTO rocpd_kernel_dispatch_1a VALUES (9, 2, 4, 3, 20, 10, 13);"
    trace = read(database(tmp_path / "out.db", SCHEMA + ROWS + wrong))
    assert [k.name for k in trace] == ["mine(float*)"]
    assert trace.problems == ["left out 2 runs of a kernel, without times"]


@pytest.mark.parametrize(
    "script", [SCHEMA, "CREATE TABLE rocpd_kernel_dispatch_1 (x);",
               "CREATE TABLE rocpd_kernel_dispatch_1 (x); CREATE TABLE rocpd_info_kernel_symbol_1 (y);"]
)  # fmt: skip
def test_a_database_without_kernels_is_refused(tmp_path, script):
    with pytest.raises(DamagedTrace, match="rocprofv3"):
        list(read(database(tmp_path / "out.db", script)))
