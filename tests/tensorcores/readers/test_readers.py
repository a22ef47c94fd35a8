"""Every format yields the same records; hostile input ends in one sentence or a partial read."""

import contextlib
import gzip
import json
import random
import sqlite3

import pytest
from tensorcores.readers.test_kernel_table import TRACES
from tensorcores.traces import A100, ADD, SGEMM, TENSOR, kernel, op, step, write

from mpdiag.errors import InputError
from mpdiag.tensorcores.events import Copy, HostOperation, HostSpan, Kernel, Launch
from mpdiag.tensorcores.readers import json_stream
from mpdiag.tensorcores.readers.recognition import read
from mpdiag.tensorcores.readers.tables import microseconds, number
from mpdiag.tensorcores.trace_analysis import profile_trace


def kernels(path):
    trace = read(path)
    return trace, [event for event in trace if isinstance(event, Kernel)]


@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize("window", [7, 100, 1 << 18])
def test_plain_and_pretty_in_windows_of_any_size(tmp_path, monkeypatch, indent, window):
    monkeypatch.setattr(json_stream, "WINDOW", window)
    monkeypatch.setattr(json_stream, "LOW", window)
    text = json.dumps({"deviceProperties": [A100], "traceEvents": step()}, indent=indent)
    path = tmp_path / "t.json"
    path.write_text(text, encoding="utf-8")
    trace = read(path)
    events = list(trace)
    assert [type(e) for e in events].count(Kernel) == 3
    assert [type(e) for e in events].count(Launch) == 3
    assert [type(e) for e in events].count(HostOperation) == 3
    assert (trace.problems, trace.devices[0].capability) == ([], (8, 0))


def test_compressed_bare_array_and_devices_behind_the_events(tmp_path):
    packed = tmp_path / "t.json.gz"
    packed.write_bytes(gzip.compress(json.dumps({"traceEvents": step()}).encode()))
    assert len(kernels(packed)[1]) == 3
    bare = tmp_path / "bare"
    bare.write_text(json.dumps(step()), encoding="utf-8")
    assert len(kernels(bare)[1]) == 3
    behind = tmp_path / "behind.json"
    behind.write_text(json.dumps({"traceEvents": step(), "deviceProperties": [A100]}), "utf-8")
    assert kernels(behind)[0].devices[0].name == A100["name"]


def test_the_old_schema(tmp_path):
    events = [
        {"ph": "X", "cat": "Operator", "name": "aten::mm", "pid": 3, "tid": "3", "ts": 1, "dur": 9,
         "args": {"Input dims": [[2, 3], [3, 4]]}},
        {"ph": "X", "cat": "Runtime", "name": "cudaLaunchKernel", "pid": 3, "tid": "3", "ts": 5,
         "dur": 1, "args": {"correlation": 4, "external id": 1}},
        {"ph": "X", "cat": "Kernel", "name": SGEMM, "pid": 0, "tid": "stream 7", "ts": 9, "dur": 2,
         "args": {"correlation": 4}},
    ]  # fmt: skip
    operation, launch, run = read(write(tmp_path / "t.json", events))
    assert operation.dims == [[2, 3], [3, 4]]
    assert operation.thread == launch.thread == (3, "3")
    assert (run.name, run.correlation, run.duration_us) == (SGEMM, 4, 2.0)


def test_keys_in_any_order_and_braces_in_names(tmp_path):
    odd = op('a "brace" } and ], {"ph": "X"', 0, 5)
    frame = op("file.py(1): f} g", 0, 5) | {"cat": "python_function"}
    events = [odd, frame, dict(sorted(kernel(TENSOR, 1, 4).items())), kernel(ADD, 2, 1)]
    trace = read(write(tmp_path / "t.json", events))
    assert [e.name for e in trace] == [odd["name"], TENSOR, ADD]
    assert trace.problems == []


def test_the_environment_is_never_kept(tmp_path):
    secret = "hf_VerySecretToken"
    top = {"metadata": {"env": {"HF_TOKEN": secret}}, "HF_TOKEN": secret}
    trace = read(write(tmp_path / "t.json", step(), **top))
    assert secret not in repr(list(trace)) + repr(vars(trace))


def test_a_trace_that_breaks_off_is_read_as_far_as_it_goes(tmp_path):
    text = json.dumps({"traceEvents": step() * 50})
    path = tmp_path / "t.json"
    path.write_text(text[: len(text) // 2], encoding="utf-8")
    trace, found = kernels(path)
    assert 70 <= len(found) <= 75
    assert any("ends in the middle" in problem for problem in trace.problems)


def test_a_compressed_trace_that_breaks_off(tmp_path):
    rng = random.Random(0)
    events = [kernel(TENSOR, rng.getrandbits(40), rng.random()) for _ in range(3000)]
    packed = gzip.compress(json.dumps({"traceEvents": events}).encode())
    path = tmp_path / "t.json.gz"
    path.write_bytes(packed[: len(packed) // 2])
    trace, found = kernels(path)
    assert 0 < len(found) < 3000
    assert trace.problems


@pytest.mark.parametrize(
    "damaged",
    [
        '{"ph": "X", "cat": "kernel", "name": "a "quoted" name", "ts": 1, "dur": 2, "args": {}}',
        '{"ph": "X", "cat": "kernel", "name": "huge", "ts": 1' + "0" * 5000 + ', "dur": 2}',
        '{"ph": "X", "cat": "kernel", "name": "huge", "ts": 1' + "0" * 400 + ', "dur": 2}',
        '{"ph": "X", "cat": "kernel", "name": "k", "ts": 1, "dur": -5}',
        '{"ph": "X", "cat": "kernel", "name": "k", "ts": 1, "dur": NaN}',
        '{"ph": "X", "cat": "kernel", "name": "k", "ts": [], "dur": 2}',
        '{"ph": "X", "cat": "kernel", "ts": 1, "dur": 2}',
        '{"ph": "X", "cat": "kernel", "name": ' + "[" * 5000 + "}",
        '{"ph": "X", "cat": "kernel", "name": "k" "ts": 1}',
        "17",
    ],
    ids=["quotes", "digits", "int64", "negative", "nan", "list", "nameless", "deep", "comma", "17"],
)
def test_a_damaged_event_is_left_out_and_counted(tmp_path, damaged):
    whole = json.dumps(kernel(TENSOR, 1, 4))
    path = tmp_path / "t.json"
    path.write_text(f'{{"traceEvents": [{whole}, {damaged}, {whole}]}}', encoding="utf-8")
    trace, found = kernels(path)
    assert [k.name for k in found] == [TENSOR, TENSOR]
    assert any("damaged" in problem for problem in trace.problems)


def test_bytes_that_are_no_text(tmp_path):
    text = json.dumps({"traceEvents": [kernel("name XX", 1, 4)]}).encode()
    path = tmp_path / "t.json"
    path.write_bytes(text.replace(b"XX", b"\xff\xfe"))
    assert kernels(path)[1][0].name == "name \ufffd\ufffd"


def test_huge_correlations_and_odd_arguments_do_no_harm(tmp_path):
    events = [
        kernel(TENSOR, 1, 4) | {"args": {"correlation": 10**30, "device": {"a": 1}}},
        kernel(TENSOR, 2, 4) | {"args": "none"},
        op("aten::mm", 0, 5, **{"Input Dims": "x", "Sequence number": 2**70}),
    ]
    found = list(read(write(tmp_path / "t.json", events)))
    assert [e.correlation for e in found[:2]] == [None, None]
    assert (found[2].dims, found[2].sequence) == ([], -1)


@pytest.mark.parametrize("seed", range(30))
def test_random_damage_is_survived(tmp_path, seed):
    rng = random.Random(seed)
    raw = bytearray(json.dumps({"deviceProperties": [A100], "traceEvents": step() * 5}).encode())
    for _ in range(20):
        raw[rng.randrange(len(raw))] = rng.randrange(256)
    path = tmp_path / "t.json"
    path.write_bytes(b"{" + raw[1:])
    with contextlib.suppress(InputError):  # anything else is a failure
        list(read(path))


@pytest.fixture
def export(tmp_path):
    path = tmp_path / "report.sqlite"
    with contextlib.closing(sqlite3.connect(path)) as base:
        base.executescript((TRACES / "nsys.sql").read_text(encoding="utf-8"))
        base.commit()
    return path


def test_what_is_read_of_nsys(export):
    trace = read(export)
    events = list(trace)
    assert events[:2] == [
        Kernel("volta_sgemm_64x64_tn", 1.0, 4.0, 0, 7, 11),  # the demangled name
        Kernel("(unnamed kernel)", 30.0, 10.0, 0, 7, 13),
    ]
    assert [e for e in events if isinstance(e, Copy)] == [Copy(5.0, 10.0, 0, 7, 12)]
    wait = HostSpan("wait", "cudaStreamSynchronize", 0.9, 16.0)
    assert [e for e in events if isinstance(e, HostSpan)] == [wait]
    launched = {e.correlation: e.start_us for e in events if isinstance(e, Launch)}
    assert launched == {11: 0.5, 12: 0.7, 13: 25.0}
    assert trace.tensor_active == pytest.approx(0.30)
    assert trace.problems == ["left out 1 kernel without times"]


def test_copies_and_waits_of_nsys_are_in_the_timeline(export):
    found = profile_trace(export)
    whole = found.timeline.whole
    assert (whole.wall_us, whole.copying_us, whole.idle_us) == (39, 10, 15)
    (gap,) = found.timeline.longest
    assert (gap.cause, gap.host, gap.start_us) == ("wait", "cudaStreamSynchronize", 15.0)
    assert "copies alone 25.6 %" in " ".join(found.to_json()["summary"])


def test_nsys_is_opened_for_reading_only(export):
    before = export.read_bytes()
    export.chmod(0o400)
    list(read(export))
    assert export.read_bytes() == before
    assert [p.name for p in export.parent.iterdir()] == [export.name]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1,234,567", 1234567), ("1.234.567", 1234567), ("1,5", 1.5), ("1,234", 1234),
        ("1.234,5", 1234.5), ("1,234.5", 1234.5), ("12 345", 12345), ("3.5e2", 350),
        ("1 234", 1234), ("0,123", 0.123), ("-0,123", -0.123), ("x", None), ("", None),
        ("inf", None), ("nan", None),
    ],
)  # fmt: skip
def test_numbers_of_many_locales(text, value):
    assert number(text) == value


def test_units():
    assert microseconds("1.5", "msecond") == 1500
    assert microseconds("1.5", "fortnight") is None
    assert microseconds("-1", "us") is None


@pytest.mark.parametrize(
    ("name", "words"),
    [("", "is a folder: name one of the traces"), ("nowhere.json", "there is no trace")],
)
def test_what_is_no_file(tmp_path, name, words):
    with pytest.raises(InputError, match=words):
        read(tmp_path / name)
