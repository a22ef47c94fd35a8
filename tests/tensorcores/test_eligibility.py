"""Eligible against used, achieved rates, and the causes in one sentence each."""

from __future__ import annotations

import pytest
from tensorcores.traces import (
    FALLBACK,
    H100,
    SGEMM,
    TENSOR,
    kernel,
    launch,
    op,
    product,
    step,
    write,
)

from mpdiag.hardware.devices import DeviceFacts
from mpdiag.tensorcores.causes import is_eligible, is_used, judge
from mpdiag.tensorcores.roofline import AchievedRate, achieved_rate
from mpdiag.tensorcores.summary import cause_groups, eligible_sentence, rate_text, sum_eligibility
from mpdiag.tensorcores.trace_analysis import profile_trace
from mpdiag.tensorcores.work.products import attention, convolution, matmul
from mpdiag.tensorcores.work.traced_operation import OperationTime

A100 = DeviceFacts("NVIDIA A100-SXM4-80GB", (8, 0), 108)
V100 = DeviceFacts("Tesla V100-SXM2-16GB", (7, 0), 80)
GTX = DeviceFacts("NVIDIA GeForce GTX 1660", (7, 5))
RTX = DeviceFacts("NVIDIA GeForce RTX 4090", (8, 9))
NOWHERE = DeviceFacts("", None)


def operation(work, dtype, *, cuda=0.0, tensor=0.0, unknown=0.0, other=0.0, calls=1):
    return OperationTime(
        "aten::mm", "", work, dtype, calls, cuda + tensor + unknown + other,
        cuda_core_us=cuda, tensor_core_us=tensor, unknown_us=unknown, other_us=other,
    )  # fmt: skip


SQUARE = matmul(256, 256, 256)


@pytest.mark.parametrize(
    ("work", "dtype", "device", "expected"),
    [
        (SQUARE, "fp32", A100, True),  # as TF32
        (SQUARE, "fp32", V100, True),  # as FP16, by mixed precision
        (SQUARE, "bf16", V100, False),
        (SQUARE, "bf16", A100, True),
        (SQUARE, "fp64", A100, True),
        (SQUARE, "fp64", RTX, False),
        (SQUARE, "complex64", A100, None),
        (SQUARE, "fp16", GTX, False),
        (SQUARE, "fp16", NOWHERE, None),
        (SQUARE, None, A100, None),
        (None, "fp32", A100, None),  # the kernel multiplied, and no shapes were recorded
        (matmul(1, 256, 256), "fp16", A100, False),
        (matmul(256, 256, 1), "fp16", A100, True),
        (convolution(8, (32, 32), 9, (64, 64), groups=32), "fp16", A100, False),
        (convolution(8, (32, 32), 9, (64, 64), groups=2), "fp16", A100, True),
        (attention(8, (64, 64), (64, 64)), "bf16", A100, True),
    ],
)
def test_eligible(work, dtype, device, expected):
    assert is_eligible(operation(work, dtype, cuda=5.0), device) is expected


def test_what_ran_there_was_eligible_whatever_else_is_known():
    assert is_eligible(operation(None, None, tensor=1.0, cuda=9.0), NOWHERE) is True
    assert is_eligible(operation(None, None, other=9.0), A100) is False
    assert is_used(operation(None, None, tensor=1.0, cuda=9.0), NOWHERE) is False


def test_a_rate_proves_use_where_names_do_not_say():
    fast = operation(matmul(8192, 8192, 8192), "fp16", unknown=5000.0)  # 220 TFLOP/s
    slow = operation(matmul(8192, 8192, 8192), "fp16", unknown=50_000.0)
    assert (is_used(fast, A100), is_used(slow, A100), is_used(fast, NOWHERE)) == (True, None, None)
    judged = judge([fast, slow], A100)
    found = sum_eligibility(judged, 55_000.0)
    assert list(found.times.values()) == [5000.0, 0.0, 50_000.0, 0.0]


def test_times_add_up_and_the_unknown_is_a_range():
    rows = [
        operation(SQUARE, "fp16", tensor=30.0, cuda=10.0, other=8.0),  # 4 parts: 36 and 12
        operation(SQUARE, "fp32", cuda=20.0),
        operation(None, "fp32", cuda=12.0),
        operation(None, None, other=40.0),
    ]
    found = sum_eligibility(judge(rows, A100), 120.0)
    assert list(found.times.values()) == [36.0, 32.0, 0.0, 12.0]
    assert list(found.counts.values()) == [1, 1, 0, 1]
    assert found.used_range == (36 / 80, 48 / 80)
    assert eligible_sentence(found) == (
        "Eligible for Tensor Cores: 2 operations, 56.7 % of kernel time with all their kernels; "
        "30.0 % used them, 26.7 % did not; eligibility unknown: 10.0 %"
    )
    assert sum_eligibility([], 0.0).used_range is None
    assert eligible_sentence(sum_eligibility([], 10.0)) == ""


# -- rates -----------------------------------------------------------------------------------------


def test_the_rate_is_work_over_time_and_a_share_of_the_peak_of_its_dtype():
    o = operation(matmul(4096, 4096, 4096, dtype="bf16"), "bf16", tensor=5000.0, calls=10)
    rate = achieved_rate(o, A100, used=True)
    assert rate.most == rate.least == pytest.approx(10 * 2 * 4096**3 / 5000e-6 / 1e12)
    assert (rate.peak, rate.shares[0]) == (312, pytest.approx(rate.most / 312))
    assert achieved_rate(o, NOWHERE, used=True).shares is None
    assert achieved_rate(operation(None, "bf16", tensor=5.0), A100, used=True) is None
    plain = operation(SQUARE, "fp32", cuda=100.0)
    assert achieved_rate(plain, A100, used=False).peak == 19.5
    assert achieved_rate(operation(SQUARE, "int8", cuda=9.0), A100, used=False).peak is None


def test_no_share_is_ever_above_one():
    above = AchievedRate(400.0, 400.0, 312.0)
    assert (above.above_peak, above.shares) == (True, None)
    assert rate_text(above) == "400 (> peak)"
    across = AchievedRate(200.0, 400.0, 312.0)
    assert (across.above_peak, across.shares) == (False, (200 / 312, 1.0))
    assert rate_text(across) == "200–400 (64–100 %)"
    assert rate_text(AchievedRate(0.0, 50.0, 312.0)) == "≤ 50 (16 %)"
    assert rate_text(AchievedRate(0.1, 0.1, 312.0)) == "0.1 (< 1 %)"
    assert rate_text(AchievedRate(3.0, 3.0, None)) == "3"
    assert rate_text(None) == ""


def test_a_rate_above_the_peak_is_a_finding(tmp_path):
    events = [product(4096, 4096, 4096, 0, 10), launch(1, 5), kernel(TENSOR, 1, 300)]
    profile = profile_trace(write(tmp_path / "t.json", events))
    (finding,) = (f for f in profile.findings if f["code"] == "rate-above-peak")
    assert "458 of 312 TFLOP/s" in finding["message"]
    row = profile.to_json()["operations"][0]
    assert (row["above_peak"], row["peak_share"]) == (True, None)


# -- the document ----------------------------------------------------------------------------------


def test_causes_come_grouped_with_one_bound(tmp_path):
    events = [
        *step(),
        product(128, 512, 256, 60, 70, dtype="float"), launch(5, 65), kernel(SGEMM, 5, 20),
        product(512, 513, 513, 80, 90, "c10::BFloat16"), launch(6, 85), kernel(FALLBACK, 6, 40),
        product(512, 77, 512, 95, 98, "c10::BFloat16"), launch(7, 97), kernel(FALLBACK, 7, 40),
        op("aten::relu", 99, 100),
    ]  # fmt: skip
    document = profile_trace(write(tmp_path / "t.json", events)).to_json()
    groups = {g["cause"]: g for g in document["causes"]}
    assert list(groups) == ["alignment", "tf32_off", "outside"]
    sentence = "TF32 off: 2 operations, 25.0 % of kernel time, at most 1.33×"
    assert groups["tf32_off"]["sentence"] == sentence
    assert groups["alignment"]["fix"] == "pad 77 → 80, 513 → 520"
    whole = document["eligibility"]
    assert whole["used_fraction"] == pytest.approx(0.7)
    assert whole["not_used_fraction"] == pytest.approx(0.25)
    assert whole["eligible_fraction"] == pytest.approx(0.95)
    assert (
        "95.0 % of kernel time with all their kernels; 70.0 % used them" in document["summary"][0]
    )
    rows = {o["kernel"]: o for o in document["operations"]}
    assert (rows[SGEMM]["eligible"], rows[SGEMM]["used"]) == (True, False)
    assert rows[TENSOR]["tflops"] == pytest.approx(2 * 256**3 / 60e-6 / 1e12)


def test_different_fixes_of_one_cause_are_counted(tmp_path):
    shapes = {"Input Dims": [[8, 64, 56, 56], [64, 64, 3, 3]], "Input type": ["float", "float"]}
    events = [
        product(256, 256, 256, 0, 10, dtype="float"), launch(1, 5), kernel(SGEMM, 1, 90),
        op("aten::cudnn_convolution", 20, 30, **shapes), launch(2, 25), kernel(SGEMM, 2, 30),
    ]  # fmt: skip
    profile = profile_trace(write(tmp_path / "t.json", events, H100))
    (group,) = cause_groups(profile.operations, profile.worth, profile.kernel_time_us)
    assert (group.operations, group.others) == (2, 1)
    assert group.advice.endswith("(1 operation needs another fix)")
