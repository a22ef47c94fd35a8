"""What the timeline takes from an export of nsys: launches, waits and copies beside the kernels."""

from __future__ import annotations

import sqlite3

from mpdiag.tensorcores.events import Copy, HostSpan
from mpdiag.tensorcores.readers.recognition import read
from mpdiag.tensorcores.trace_analysis import profile_trace


def export(path):
    base = sqlite3.connect(path)
    base.executescript(
        """
        CREATE TABLE StringIds (id INTEGER, value TEXT);
        CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (start INTEGER, end INTEGER, deviceId INTEGER,
            streamId INTEGER, correlationId INTEGER, demangledName INTEGER);
        CREATE TABLE CUPTI_ACTIVITY_KIND_MEMCPY (start INTEGER, end INTEGER, deviceId INTEGER,
            streamId INTEGER, correlationId INTEGER, bytes INTEGER);
        CREATE TABLE CUPTI_ACTIVITY_KIND_MEMSET (start INTEGER, end INTEGER);
        CREATE TABLE CUPTI_ACTIVITY_KIND_RUNTIME (start INTEGER, end INTEGER, globalTid INTEGER,
            correlationId INTEGER, nameId INTEGER);
        INSERT INTO StringIds VALUES (1, 'volta_sgemm_64x64_tn'), (2, 'cudaLaunchKernel_v7000'),
            (3, 'cudaMemcpyAsync_v3020'), (4, 'cudaStreamSynchronize_v3020'), (5, 'cudaMalloc_v3020');
        INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES (1000, 5000, 0, 7, 11, 1),
            (30000, 40000, 0, 7, 13, 1);
        INSERT INTO CUPTI_ACTIVITY_KIND_MEMCPY VALUES (5000, 15000, 0, 7, 12, 64),
            ('damaged', 1, 0, 7, 12, 64);
        INSERT INTO CUPTI_ACTIVITY_KIND_RUNTIME VALUES (500, 600, 5, 11, 2), (700, 800, 5, 12, 3),
            (900, 16000, 5, 0, 4), (25000, 25100, 5, 13, 2), (1, 2, 5, 9, 5);
        """
    )
    base.commit()
    base.close()
    return path


def test_copies_and_waits_of_nsys(tmp_path):
    path = export(tmp_path / "report.sqlite")
    events = list(read(path))
    assert [e for e in events if isinstance(e, Copy)] == [Copy(5.0, 10.0, 0, 7, 12)]
    assert [e for e in events if isinstance(e, HostSpan)] == [
        HostSpan("wait", "cudaStreamSynchronize", 0.9, 16.0)
    ]
    found = profile_trace(path).timeline
    assert (found.whole.wall_us, found.whole.copying_us, found.whole.idle_us) == (39, 10, 15)
    (gap,) = found.longest
    assert (gap.cause, gap.host, gap.start_us) == ("wait", "cudaStreamSynchronize", 15.0)
    assert "copies alone 25.6 %" in " ".join(profile_trace(path).to_json()["summary"])
