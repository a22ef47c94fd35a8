"""nsys export --type jsonlines: strings first, then an event a line."""

from __future__ import annotations

import json

import pytest

from mpdiag.errors import DamagedTrace
from mpdiag.tensorcores.readers.recognition import read

STRINGS = {
    "data": ["", "ampere_sgemm_128x64_nn", "void add<float>(float*)", "add"],
    "label": "names",
}


def kernel(number, start, end):
    # https://docs.nvidia.com/nsight-systems/UserGuide/ ("JSON and Text Format Description")
    said = {"demangledName": str(number), "shortName": "3"}
    return {"CudaEvent": {"startNs": str(start), "endNs": str(end), "correlationId": 5, "deviceId": 0,
            "streamId": 7, "eventClass": 3, "globalPid": "282", "kernel": said}}  # fmt: skip


COPY = {"CudaEvent": {"startNs": "1", "endNs": "2", "eventClass": 1, "memcpy": {"sizebytes": "8"}}}
CALL = {"TraceProcessEvent": {"startNs": "1", "endNs": "2", "correlationId": 5, "name": "3"}}


def written(path, *lines):
    path.write_text("\n".join(x if isinstance(x, str) else json.dumps(x) for x in lines) + "\n")
    return path


def test_kernels(tmp_path):
    lines = (
        STRINGS,
        CALL,
        COPY,
        kernel(1, 1000, 4500),
        kernel(2, 5000, 5500),
        kernel(99, 6000, 6500),
    )
    trace = read(written(tmp_path / "report.jsonl", *lines))
    found = [(k.name, k.duration_us, k.device) for k in trace]
    assert found == [
        ("ampere_sgemm_128x64_nn", 3.5, 0),
        ("void add<float>(float*)", 0.5, 0),
        ("(unnamed kernel)", 0.5, 0),
    ]
    assert (trace.source, trace.problems) == ("nsys", [])


def test_damaged_lines_are_counted(tmp_path):
    cut = json.dumps(kernel(1, 1000, 4500))[:-30]
    nameless = json.dumps(kernel(1, 1, 2)).replace("Name", "x")
    placeless = json.dumps(kernel(1, 1, 2)).replace('"deviceId": 0', '"deviceId": [0]')
    endless = kernel(1, 1, int("9" * 400))
    wrong = (placeless, endless, kernel(1, 9, 5), '{"CudaEvent": {"kernel": 5}}', cut, nameless)
    lines = (STRINGS, kernel(1, 1000, 4500), *wrong)
    trace = read(written(tmp_path / "report.jsonl", *lines))
    assert len(list(trace)) == 1
    assert trace.problems == ["left out 6 damaged lines of the export"]


def test_an_export_without_kernels_is_refused(tmp_path):
    with pytest.raises(DamagedTrace, match="nsys export --type sqlite"):
        list(read(written(tmp_path / "report.jsonl", STRINGS, CALL)))
