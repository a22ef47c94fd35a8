"""XSpace profiles of JAX and TensorFlow, built field by field as the protocol's page says."""

from __future__ import annotations

import gzip
import struct

import pytest

from mpdiag.errors import DamagedTrace
from mpdiag.tensorcores.events import HostOperation, Kernel, ModuleSpan, Placement
from mpdiag.tensorcores.readers.formats.protobuf_wire import CutOff, fields
from mpdiag.tensorcores.readers.recognition import read
from mpdiag.tensorcores.trace_analysis import profile_trace

GEMM = (
    "sm80_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x32_stage4_warpsize2x2x1_tensor16x8x16"
)


# -- the wire format: https://protobuf.dev/programming-guides/encoding/ ----------------------------


def varint(value):
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def field(number, value):
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    if isinstance(value, float):
        return varint(number << 3 | 1) + struct.pack("<d", value)
    data = value.encode() if isinstance(value, str) else value
    return varint(number << 3 | 2) + varint(len(data)) + data


# -- messages: xla/third_party/tsl/tsl/profiler/protobuf/xplane.proto ------------------------------


def entry(number, key, name):
    return field(number, field(1, key) + field(2, field(1, key) + field(2, name)))


def stat(key, value):
    return field(1, key) + (field(3, value) if isinstance(value, int) else field(5, value))


def event(name, offset, duration, *stats):
    fixed = field(1, name) + field(2, offset) + field(3, duration)
    return field(4, fixed + b"".join(field(4, s) for s in stats))


def line(number, name, *events):
    return field(3, field(1, number) + field(2, name) + field(3, 1000) + b"".join(events))


STATS = (
    "tf_op",
    "compute_cap_major",
    "compute_cap_minor",
    "core_count",
    "gpu_device_name",
    "hlo_op",
)


def plane(name, *lines, facts=()):
    names = {1: GEMM, 2: "loop_add_fusion", 3: "MemcpyD2H"}
    body = field(1, 7) + field(2, name) + b"".join(lines)
    body += b"".join(entry(4, key, said) for key, said in names.items())
    body += b"".join(entry(5, key, said) for key, said in enumerate(STATS, 1))
    return field(1, body + b"".join(field(6, s) for s in facts))


OP = stat(1, "jit(step)/layer/transpose(jvp)/dot_general:")
REFERENCE = field(1, 6) + field(7, 1)  # a value that is itself a numbered name
STREAM = line(
    13, "Stream #13(Compute,MemcpyD2H)",
    event(1, 2_000_000, 60_000_000, OP), event(2, 70_000_000, 5_000_000, REFERENCE),
    event(3, 80_000_000, 9_000_000),
)  # fmt: skip
DERIVED = line(14, "XLA Ops", event(1, 2_000_000, 60_000_000))
FACTS = (stat(2, 8), stat(3, 0), stat(4, 108), stat(5, "NVIDIA A100-SXM4-80GB"))
HOST = plane("/host:CPU", line(1, "python", event(2, 0, 10**12)))
GPU = plane("/device:GPU:0", STREAM, DERIVED, facts=FACTS)
SPACE = HOST + GPU + field(4, "hostname")


def written(path, data):
    path.write_bytes(data)
    return path


@pytest.mark.parametrize("pack", [bytes, gzip.compress], ids=["plain", "gz"])
def test_kernels_of_streams_with_their_operations(tmp_path, pack):
    trace = read(written(tmp_path / "host.xplane.pb", pack(SPACE)))
    events = list(trace)
    gemm, add = (e for e in events if isinstance(e, Kernel))
    assert (gemm.name, gemm.start_us, gemm.duration_us, gemm.device) == (GEMM, 3.0, 60.0, 0)
    assert (add.name, add.duration_us) == ("loop_add_fusion", 5.0)
    (module,) = (e for e in events if isinstance(e, ModuleSpan))
    operation, named_by_reference = (e for e in events if isinstance(e, HostOperation))
    assert (module.name, operation.name) == ("jit(step)/layer/transpose(jvp)", "dot_general")
    assert (operation.backward, named_by_reference.name) == (True, "tf_op")
    assert [e.correlation for e in events if isinstance(e, Placement)] == [1, 2]
    device = trace.devices[0]
    assert (device.name, device.capability, device.processors) == (
        "NVIDIA A100-SXM4-80GB", (8, 0), 108,
    )  # fmt: skip
    assert (trace.source, trace.problems) == ("xla", [])


def test_a_profile_of_it(tmp_path):
    profile = profile_trace(written(tmp_path / "a.pb", SPACE))
    assert profile.fraction("tensor_core") == pytest.approx(60 / 65)
    assert (profile.kernels[0].op, profile.linked_fraction) == ("dot_general", 1.0)


def test_without_streams_lines_that_are_not_derived_count(tmp_path):
    data = plane("/device:GPU:1", line(1, "Compute", event(2, 0, 10**6)), DERIVED)
    (only,) = read(written(tmp_path / "a.xplane.pb", data))
    assert (only.name, only.device) == ("loop_add_fusion", 1)


def test_a_profile_that_breaks_off_is_read_as_far_as_it_goes(tmp_path):
    second = plane("/device:GPU:1", STREAM)
    trace = read(written(tmp_path / "a.xplane.pb", GPU + second[:-20]))
    assert len([e for e in trace if isinstance(e, Kernel)]) == 2
    assert any("cut off" in problem for problem in trace.problems)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (HOST, "holds no GPU's kernels"),
        (plane("/device:TPU:0", STREAM), "was recorded on a TPU"),
        (b"\x00\x01\x02", "holds no GPU's kernels"),
        (b"\x0a\xff\xff\xff", "holds no GPU's kernels"),
    ],
)
def test_what_has_no_gpu_is_refused(tmp_path, data, words):
    with pytest.raises(DamagedTrace, match=words):
        list(read(written(tmp_path / "a.xplane.pb", data)))


def test_fields_of_every_kind_are_read_and_damage_is_noticed():
    data = field(1, 300) + field(2, 1.5) + field(3, "abc") + varint(4 << 3 | 5) + b"\1\0\0\0"
    view = memoryview(data)
    assert [(n, k) for n, k, *_ in fields(view, 0, len(data))] == [(1, 0), (2, 1), (3, 2), (4, 5)]
    for damaged in (data[:-1], b"\x00", b"\x0b", b"\xff" * 12, field(3, "abc")[:-1]):
        with pytest.raises(CutOff):
            list(fields(memoryview(damaged), 0, len(damaged)))
