"""Roofline, Amdahl and causes, against cases worked out by hand."""

from __future__ import annotations

import math

import pytest

from mpdiag.hardware.devices import DeviceFacts
from mpdiag.hardware.peaks import peaks_of
from mpdiag.tensorcores.causes import judge, misaligned, worth
from mpdiag.tensorcores.roofline import roofline_point, speedup
from mpdiag.tensorcores.work.products import convolution, matmul, recurrent
from mpdiag.tensorcores.work.traced_operation import OperationTime

V100 = DeviceFacts("Tesla V100-SXM2-16GB", (7, 0), 80)
A100 = DeviceFacts("NVIDIA A100-SXM4-40GB", (8, 0), 108)
H100 = DeviceFacts("NVIDIA H100 80GB HBM3", (9, 0), 132)
GTX1660 = DeviceFacts("NVIDIA GeForce GTX 1660", (7, 5), 22)
UNKNOWN = DeviceFacts("NVIDIA Graphics Device", (8, 6))
BIG = 4096


def product(m=BIG, n=BIG, k=BIG, dtype="fp16", **more):
    return matmul(m, n, k, dtype=dtype, **more)


def measured(work, *, us=1000.0, calls=1, on="cuda_core_us", **more):
    dtype = more.pop("dtype", work.dtype if work else None)
    return OperationTime("aten::mm", "head", work, dtype, calls, us, **{on: us}, **more)


def cause_of(operation, device):
    (judged,) = judge([operation], device)
    return judged.cause


def test_amdahl_by_hand():
    assert speedup(0.5, 5) == pytest.approx(1 / (0.5 + 0.5 / 5)) == pytest.approx(1.67, abs=0.004)
    assert speedup(0.416) == pytest.approx(1.71, abs=0.003)
    assert speedup(0, 5) == speedup(0.5, 1) == 1
    assert speedup(1) == math.inf
    assert speedup(1, 4) == 4


def test_the_roofline_by_hand():
    peaks = peaks_of(V100.name)
    # 4096 cubed in FP16: 2·4096³ FLOP over 3·4096²·2 bytes is 4096/3 a byte; 125 TFLOP/s take
    # 1.0995 ms for it.
    placed = roofline_point(product(), peaks, "fp16")
    assert placed.intensity == pytest.approx(4096 / 3)
    assert (placed.ridge, placed.bound) == (pytest.approx(125e12 / 900e9), "compute")
    assert placed.least_us == pytest.approx(2 * 4096**3 / 125e12 * 1e6)
    # One row of it reads the whole matrix: a FLOP a byte, so memory decides.
    placed = roofline_point(product(m=1), peaks, "fp16")
    assert placed.intensity == pytest.approx(1, rel=0.001)
    assert placed.bound == "memory"
    assert placed.least_us == pytest.approx(2 * (4096 * 4096 + 2 * 4096) / 900e9 * 1e6)
    # A layer of the guide: 4096 outputs, 1024 inputs, batch 512 has an intensity of 315.
    assert roofline_point(product(512, 4096, 1024), peaks, "fp16").intensity == pytest.approx(
        315, abs=1
    )
    assert roofline_point(product(), peaks, "bf16") is None


def test_four_bits_have_their_own_roof():
    b200 = peaks_of("NVIDIA B200")
    point = roofline_point(product(8192, 8192, 8192), b200, "fp4")
    assert point.least_us == pytest.approx(2 * 8192**3 / 9e15 * 1e6)
    assert point.ridge == pytest.approx(9e15 / 7.7e12)
    assert roofline_point(product(), peaks_of("NVIDIA H100 PCIe"), "fp4") is None


@pytest.mark.parametrize(
    ("operation", "device", "expected"),
    [
        (measured(product(), on="tensor_core_us"), A100, "none"),
        (measured(product(dtype="fp32")), A100, "tf32_off"),
        (measured(product(dtype="fp32")), UNKNOWN, "tf32_off"),
        (measured(product(dtype="fp32")), V100, "dtype"),
        (measured(product(dtype="bf16")), V100, "dtype"),
        (measured(product(dtype="fp8_e4m3")), A100, "dtype"),
        (measured(product()), GTX1660, "no_tensor_cores"),
        (measured(product(n=33278)), V100, "alignment"),
        (measured(product()), V100, "library_choice"),
        (measured(product(n=1)), V100, "matrix_vector"),
        (measured(product(m=64, n=64, k=64), us=2.0), V100, "latency_limited"),
        (measured(product(m=64, n=64, k=64), us=200.0, calls=100), V100, "latency_limited"),
        (measured(product(m=4, n=65536)), V100, "memory_bound"),
        (measured(convolution(8, (64, 64), 9, (196, 196), groups=64, dtype="fp16")), V100, "depthwise"),
        (measured(None, us=5, on="other_us"), V100, "outside"),
        (measured(None, us=5, on="unknown_us"), V100, "unknown"),
        (measured(product(), on="unknown_us"), V100, "unknown"),
        (measured(product(), on="tensor_core_us"), None, "none"),
        (measured(product(n=33279), on="tensor_core_us", kernel_alignment=1), H100, "alignment"),
        (measured(product(m=33279), on="tensor_core_us", kernel_alignment=8), H100, "none"),
    ],
)  # fmt: skip
def test_the_cause(operation, device, expected):
    assert cause_of(operation, device) == expected


def test_an_unlinked_kernel_asks_for_shapes():
    kernel = measured(None, us=9, on="tensor_core_us", kernel_alignment=1, dtype="bf16")
    (judged,) = judge([kernel], H100)
    assert judged.cause == "alignment"
    assert "record_shapes" in judged.fix


def test_layout_conversions_are_charged_to_their_convolution():
    work = convolution(8, (64, 64), 9, (196, 196), dtype="fp16")
    operation = OperationTime(
        "aten::cudnn_convolution", "", work, "fp16", 1, 1000, tensor_core_us=900, layout_us=100
    )
    (judged,) = judge([operation], A100)
    assert (judged.cause, judged.affected_us) == ("layout", 100)
    assert "channels_last" in judged.fix
    assert judged.amdahl_bound == pytest.approx(1 / 0.9)
    assert judged.win_us == 100


def test_the_fix_names_the_padded_size():
    (judged,) = judge([measured(product(n=33278, k=325))], V100)
    assert judged.fix == "pad K 325 → 328, N 33278 → 33280"
    assert judged.aligned is False
    assert [(f.dimension, f.padded) for f in judged.faults] == [("K", 328), ("N", 33280)]
    document = judged.to_json()
    assert document["padded"][1] == {"dimension": "N", "size": 33278, "padded": 33280}
    assert {"op", "module", "m", "n", "k", "dtype", "aligned", "cause", "fix", "time_us"} < set(
        document
    )


def test_padding_that_costs_more_than_it_saves_is_no_advice():
    images = convolution(64, (3, 64), 49, (50176, 12544), dtype="fp16")
    on_cores = measured(images, on="tensor_core_us", kernel_alignment=1)
    (judged,) = judge([on_cores], A100)
    assert (judged.cause, judged.faults, judged.fix) == ("none", (), "")
    assert judged.aligned is False  # which stays a fact
    odd = convolution(
        64, (3, 65), 49, (50176, 12544), dtype="fp16"
    )  # 65 → 72 is worth it, 3 → 8 not
    (judged,) = judge([measured(odd, on="tensor_core_us", kernel_alignment=1)], A100)
    assert judged.fix == "pad output channels 65 → 72"
    (judged,) = judge([measured(images)], A100)
    assert "pad" not in judged.fix


def test_tiny_products_are_too_small_not_misaligned():
    tiny = product(m=5, n=5, k=64)
    for device in (H100, None):
        slow = measured(tiny, us=3.0, on="tensor_core_us", kernel_alignment=1)
        assert cause_of(slow, device) == "latency_limited"
        assert cause_of(measured(tiny, us=3.0), device) == "latency_limited"


def test_groups_are_padded_each_and_no_advice_contradicts_another():
    grouped = measured(convolution(8, (36, 36), 9, (196, 196), groups=3, dtype="fp16"))
    same = measured(product(n=36))
    judged = judge([grouped, same], V100)
    assert {j.cause for j in judged} == {"alignment"}
    assert {f.padded for j in judged for f in j.faults if f.size == 36} == {48}
    fixes = " ".join(j.fix for j in judged)
    assert "input channels 36 → 48 (12 → 16 in each of 3 groups)" in fixes
    assert "N 36 → 48" in fixes


def test_strides_count_and_rows_that_begin_nowhere_do_not():
    plain = product(m=33, n=64, k=64)
    assert [f.dimension for f in misaligned(plain, "fp16", None)] == ["M"]
    row_major = product(m=33, n=64, k=64, leading=(64, 64, 64))
    assert misaligned(row_major, "fp16", None) == ()
    transposed = product(m=33, n=64, k=64, leading=(33, 64, 64))
    assert [f.dimension for f in misaligned(transposed, "fp16", None)] == ["M"]
    view = product(m=32, n=64, k=64, leading=(65, 64, 64))
    assert [f.dimension for f in misaligned(view, "fp16", None)] == ["leading dimension of A"]


def test_the_most_to_win_comes_first():
    # A big product near the V100's roof has less to win than a smaller one far from it.
    near = measured(product(dtype="fp32"), us=1200.0)  # must take 1100 µs
    far = measured(product(n=33278, k=512, m=512), us=800.0)  # must take 140 µs
    outside = measured(None, us=10, on="other_us")
    judged = judge([near, outside, far], V100)
    assert [j.cause for j in judged] == ["alignment", "dtype", "outside"]
    assert judged[1].win_us == pytest.approx(1200 - 2 * 4096**3 / 125e12 * 1e6)
    assert judged[1].amdahl_bound == pytest.approx(1 / (1 - 1200 / 2010))
    found = {w.cause: w for w in worth(judged, 2010)}
    assert found["alignment"].amdahl_bound == pytest.approx(2010 / 1210)
    assert found["all"].affected_us == pytest.approx(2010)
    assert found["all"].to_json()["amdahl_bound"] is None  # everything could vanish: no bound
    assert worth([], 0)[-1].amdahl_bound == 1


def test_collectives_are_not_to_be_fused():
    operation = OperationTime("record_param_comms", "", None, None, 1, 400.0, other_us=400.0)
    other = measured(None, us=10, on="other_us")
    judged = judge([operation, other], A100)
    assert [j.operation.op for j in judged] == ["aten::mm", "record_param_comms"]
    assert (judged[1].fix, judged[1].affected_us, judged[1].amdahl_bound) == ("", 0.0, 1.0)


def test_tf32_that_other_calls_used_is_not_off():
    convolution_ = OperationTime(
        "aten::cudnn_convolution", "", None, "fp32", 2, 100, tensor_core_us=30, cuda_core_us=70
    )
    (judged,) = judge([convolution_], A100)
    assert judged.cause == "library_choice"
    off = OperationTime("aten::cudnn_convolution", "", None, "fp32", 2, 70, cuda_core_us=70)
    (judged,) = judge([off], A100)
    assert judged.cause == "tf32_off"
    assert "cudnn.allow_tf32" in judged.fix


def test_an_rnn_is_told_what_helps_an_rnn():
    work = recurrent(2, 35, (64, 64), 4, dtype="fp32")
    (judged,) = judge([measured(work, us=3.0)], A100)
    assert judged.cause == "tf32_off" or "batch" in judged.fix


def test_bounds_are_shares_of_all_kernels():
    operation = measured(product(dtype="fp32"), us=416.0)
    (judged,) = judge([operation], A100, total_us=1000.0)
    assert judged.amdahl_bound == pytest.approx(1.712, abs=0.001)
