"""rocprofv3's JSON: names and counters are found by number; damage ends the reading alone."""

import gzip
import json

import pytest
from tensorcores.readers.test_kernel_table import TRACES

from mpdiag.errors import DamagedTrace
from mpdiag.tensorcores.readers.recognition import read
from mpdiag.tensorcores.readers.rocprof_json import amd_device

NAME = "Cijk_Alik_Bljk_BBS_BH_MT128x128x32_MI32x32x8x1_SN_1LDSB0_ISA942"


def dispatch(kernel, start, spent, number=1):
    info = {"agent_id": {"handle": 91}, "kernel_id": kernel, "dispatch_id": number}
    return {"start_timestamp": start, "end_timestamp": start + spent, "dispatch_info": info}


def tool(**changed):
    """As rocprofv3 writes it: rocprofiler-sdk/source/lib/output/generateJSON.cpp."""
    (process,) = json.loads((TRACES / "rocprofv3.json").read_text())["rocprofiler-sdk-tool"]
    return {"rocprofiler-sdk-tool": [process | changed]}


def written(path, document):
    path.write_text(json.dumps(document), encoding="utf-8")
    return path


def test_counters_alone_bring_their_times_and_names_may_come_last(tmp_path):
    (process,) = tool(buffer_records={})["rocprofiler-sdk-tool"]
    turned = dict(sorted(process.items(), key=lambda item: item[0] == "kernel_symbols"))
    (only,) = read(written(tmp_path / "a.json", {"rocprofiler-sdk-tool": turned}))
    assert (only.name, only.duration_us) == (NAME, 2.0)


def test_a_trace_that_breaks_off_is_read_as_far_as_it_goes(tmp_path):
    text = json.dumps(tool())
    path = tmp_path / "a.json"
    path.write_text(text[: text.index('"start_timestamp": 4000')], encoding="utf-8")
    trace = read(path)
    (only,) = trace
    assert (only.duration_us, len(trace.problems)) == (2.0, 1)
    packed = gzip.compress(text.encode())
    path.write_bytes(packed)
    assert len(list(read(path))) == 2


@pytest.mark.parametrize(
    "record", [{}, 5, dispatch(4, 9, -5), {"dispatch_info": {"kernel_id": []}}]
)
def test_damaged_records_are_counted(tmp_path, record):
    records = {"kernel_dispatch": [record, dispatch(5, 1, 10)]}
    trace = read(written(tmp_path / "a.json", tool(buffer_records=records, callback_records={})))
    assert [k.name for k in trace] == ["add"]
    assert trace.problems == ["left out 1 damaged record of the trace"]


def test_kernels_without_names_are_numbered(tmp_path):
    trace = read(written(tmp_path / "a.json", tool(kernel_symbols=[{"kernel_id": 4}, 7])))
    assert [k.name for k in trace] == ["(kernel 4)", "(kernel 5)"]
    assert trace.problems == ["left out 2 damaged records of the trace"]


@pytest.mark.parametrize(
    "document", [tool(buffer_records={}, callback_records={}), {"rocprofiler-sdk-tool": 5}]
)
def test_no_kernels_is_said(tmp_path, document):
    with pytest.raises(DamagedTrace, match="rocprofv3 --kernel-trace"):
        list(read(written(tmp_path / "a.json", document)))


@pytest.mark.parametrize(
    ("gfx", "capability"),
    [("gfx90a", (9, 0)), ("gfx950", (9, 5)), ("gfx1100", (11, 0)), ("x", None), (None, None)],
)
def test_capabilities(gfx, capability):
    assert amd_device(gfx, None, None).capability == capability
