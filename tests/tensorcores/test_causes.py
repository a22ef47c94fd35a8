"""Roofline, Amdahl, eligibility and causes, against cases worked out by hand."""

from pathlib import Path

import pytest
from tensorcores.traces import H100 as H100_TRACE
from tensorcores.traces import SGEMM, TENSOR, kernel, launch, op, product, write

from mpdiag.hardware.devices import DeviceFacts
from mpdiag.hardware.peaks import peaks_of
from mpdiag.hardware.tables import read_table
from mpdiag.tensorcores.causes import is_eligible, is_used, judge, misaligned, worth
from mpdiag.tensorcores.roofline import AchievedRate, achieved_rate, roofline_point
from mpdiag.tensorcores.summary import cause_groups, eligible_sentence, rate_text, sum_eligibility
from mpdiag.tensorcores.trace_analysis import profile_trace
from mpdiag.tensorcores.work.products import attention, convolution, matmul, recurrent
from mpdiag.tensorcores.work.traced_operation import OperationTime

DEVICES = {
    "V100": DeviceFacts("Tesla V100-SXM2-16GB", (7, 0), 80),
    "A100": DeviceFacts("NVIDIA A100-SXM4-80GB", (8, 0), 108),
    "H100": DeviceFacts("NVIDIA H100 80GB HBM3", (9, 0), 132),
    "GTX 1660": DeviceFacts("NVIDIA GeForce GTX 1660", (7, 5), 22),
    "RTX 4090": DeviceFacts("NVIDIA GeForce RTX 4090", (8, 9)),
    "unknown": DeviceFacts("NVIDIA Graphics Device", (8, 6)),
    "nameless": DeviceFacts("", None),
    "none": None,
}
V100, A100 = DEVICES["V100"], DEVICES["A100"]
ROWS = read_table(Path(__file__).with_name("operations.tsv"))


def work_of(text):
    """A kind and its sizes, as the table's head says; the last word is the dtype."""
    kind, *words, dtype = text.split() if text != "none" else ("none", "")
    sizes, dtype = list(map(int, words)), None if dtype == "?" else dtype
    if kind == "matmul":
        return matmul(*sizes, dtype=dtype)
    if kind == "convolution":
        images, *channels, taps, before, after, groups = sizes
        ends, pixels = tuple(channels), (before, after)
        return convolution(images, ends, taps, pixels, groups=groups, dtype=dtype)
    if kind == "attention":
        heads, queries, keys, width = sizes
        return attention(heads, (queries, keys), (width, width), dtype=dtype)
    if kind == "recurrent":
        batch, steps, entering, hidden, gates = sizes
        return recurrent(batch, steps, (entering, hidden), gates, dtype=dtype)
    return None


def operation(work, *, dtype=None, calls=1, alignment=None, name="aten::mm", **times):
    """An operation that took ``cuda``, ``tensor``, ... microseconds on what they name."""
    work = work_of(work) if isinstance(work, str) else work
    dtype = dtype or (work.dtype if work else None)
    parts = {"cuda": "cuda_core_us", "tensor": "tensor_core_us"}
    spent = {parts.get(key, f"{key}_us"): us for key, us in times.items()}
    return OperationTime(
        name, "head", work, dtype, calls, sum(times.values()), kernel_alignment=alignment, **spent
    )


def operation_of(row):
    words = dict(word.split("=") for word in row["took"].split())
    text = {key: words.pop(key) for key in ("dtype", "name") if key in words}
    whole = {key: int(words.pop(key)) for key in ("calls", "alignment") if key in words}
    return operation(row["work"], **text, **whole, **{k: float(v) for k, v in words.items()})


def as_word(answer):
    return {True: "yes", False: "no", None: "?"}[answer]


@pytest.mark.parametrize("row", ROWS, ids=lambda r: f"{r['device']} {r['work']} {r['took']}")
def test_what_is_said_of_an_operation(row):
    asked, device = operation_of(row), DEVICES[row["device"]]
    (judged,) = judge([asked], device)
    said = (judged.cause, as_word(judged.aligned), f"{judged.affected_us:g}", judged.fix)
    assert said == tuple(row[column] for column in ("cause", "aligned", "affected", "fix"))
    if device is not None:
        answers = as_word(is_eligible(asked, device)), as_word(is_used(asked, device))
        assert answers == (row["eligible"], row["used"])


def test_the_roofline_by_hand():
    peaks, square = peaks_of(V100.name), matmul(4096, 4096, 4096, dtype="fp16")
    # 4096 cubed in FP16: 2·4096³ FLOP over 3·4096²·2 bytes is 4096/3 a byte; 125 TFLOP/s take
    # 1.0995 ms for it.
    placed = roofline_point(square, peaks, "fp16")
    assert placed.intensity == pytest.approx(4096 / 3)
    assert (placed.ridge, placed.bound) == (pytest.approx(125e12 / 900e9), "compute")
    assert placed.least_us == pytest.approx(2 * 4096**3 / 125e12 * 1e6)
    # One row of it reads the whole matrix: a FLOP a byte, so memory decides.
    placed = roofline_point(matmul(1, 4096, 4096, dtype="fp16"), peaks, "fp16")
    assert (placed.intensity, placed.bound) == (pytest.approx(1, rel=0.001), "memory")
    assert placed.least_us == pytest.approx(2 * (4096 * 4096 + 2 * 4096) / 900e9 * 1e6)
    # A layer of the guide: 4096 outputs, 1024 inputs, batch 512 has an intensity of 315.
    layer = roofline_point(matmul(512, 4096, 1024, dtype="fp16"), peaks, "fp16")
    assert layer.intensity == pytest.approx(315, abs=1)
    assert roofline_point(square, peaks, "bf16") is None
    # Four bits have their own roof.
    point = roofline_point(matmul(8192, 8192, 8192), peaks_of("NVIDIA B200"), "fp4")
    assert point.least_us == pytest.approx(2 * 8192**3 / 9e15 * 1e6)
    assert point.ridge == pytest.approx(9e15 / 7.7e12)
    assert roofline_point(square, peaks_of("NVIDIA H100 PCIe"), "fp4") is None


def test_the_padded_sizes_are_in_the_document():
    (judged,) = judge([operation("matmul 4096 33278 325 fp16", cuda=1000.0)], V100)
    assert [(f.dimension, f.padded) for f in judged.faults] == [("K", 328), ("N", 33280)]
    document = judged.to_json()
    assert document["padded"][1] == {"dimension": "N", "size": 33278, "padded": 33280}


def test_groups_are_padded_each_and_no_advice_contradicts_another():
    grouped = operation("convolution 8 36 36 9 196 196 3 fp16", cuda=1000.0)
    judged = judge([grouped, operation("matmul 4096 36 4096 fp16", cuda=1000.0)], V100)
    assert {j.cause for j in judged} == {"alignment"}
    assert {f.padded for j in judged for f in j.faults if f.size == 36} == {48}
    fixes = " ".join(j.fix for j in judged)
    assert "input channels 36 → 48 (12 → 16 in each of 3 groups)" in fixes
    assert "N 36 → 48" in fixes


def test_strides_count_and_rows_that_begin_nowhere_do_not():
    for m, leading, faults in (
        (33, (), ["M"]),
        (33, (64, 64, 64), []),  # row major
        (33, (33, 64, 64), ["M"]),  # transposed
        (32, (65, 64, 64), ["leading dimension of A"]),  # a view
    ):
        work = matmul(m, 64, 64, dtype="fp16", leading=leading)
        assert [f.dimension for f in misaligned(work, "fp16", None)] == faults


def test_the_most_to_win_comes_first():
    # A big product near the V100's roof has less to win than a smaller one far from it.
    near = operation("matmul 4096 4096 4096 fp32", cuda=1200.0)  # must take 1100 µs
    far = operation("matmul 512 33278 512 fp16", cuda=800.0)  # must take 140 µs
    judged = judge([near, operation("none", other=10.0), far], V100)
    assert [j.cause for j in judged] == ["alignment", "dtype", "outside"]
    assert judged[1].win_us == pytest.approx(1200 - 2 * 4096**3 / 125e12 * 1e6)
    assert judged[1].amdahl_bound == pytest.approx(1 / (1 - 1200 / 2010))
    found = {w.cause: w for w in worth(judged, 2010)}
    assert found["alignment"].amdahl_bound == pytest.approx(2010 / 1210)
    assert found["all"].affected_us == pytest.approx(2010)
    assert found["all"].to_json()["amdahl_bound"] is None  # everything could vanish: no bound
    assert worth([], 0)[-1].amdahl_bound == 1
    # Of all kernels, where the operations are some of them; of a layout what it alone takes.
    (part,) = judge([operation("matmul 4096 4096 4096 fp32", cuda=416.0)], A100, total_us=1000.0)
    assert part.amdahl_bound == pytest.approx(1.712, abs=0.001)
    turned = operation("convolution 8 64 64 9 196 196 1 fp16", tensor=900.0, layout=100.0)
    (judged,) = judge([turned], A100)
    assert (judged.win_us, judged.amdahl_bound) == (100, pytest.approx(1 / 0.9))


def test_collectives_are_not_to_be_fused():
    collective = operation("none", name="record_param_comms", other=400.0)
    judged = judge([collective, operation("none", other=10.0)], A100)
    assert [j.operation.op for j in judged] == ["aten::mm", "record_param_comms"]
    assert (judged[1].fix, judged[1].affected_us, judged[1].amdahl_bound) == ("", 0.0, 1.0)


def test_a_rate_proves_use_where_names_do_not_say():
    fast = operation("matmul 8192 8192 8192 fp16", unknown=5000.0)  # 220 TFLOP/s
    slow = operation("matmul 8192 8192 8192 fp16", unknown=50_000.0)
    assert is_used(fast, DEVICES["nameless"]) is None
    found = sum_eligibility(judge([fast, slow], A100), 55_000.0)
    assert list(found.times.values()) == [5000.0, 0.0, 50_000.0, 0.0]


def test_times_add_up_and_the_unknown_is_a_range():
    rows = [
        operation("matmul 256 256 256 fp16", tensor=30.0, cuda=10.0, other=8.0),  # 36 and 12
        operation("matmul 256 256 256 fp32", cuda=20.0),
        operation("none", dtype="fp32", cuda=12.0),
        operation("none", other=40.0),
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


def test_the_rate_is_work_over_time_and_a_share_of_the_peak_of_its_dtype():
    products = operation("matmul 4096 4096 4096 bf16", tensor=5000.0, calls=10)
    rate = achieved_rate(products, A100, used=True)
    assert rate.most == rate.least == pytest.approx(10 * 2 * 4096**3 / 5000e-6 / 1e12)
    assert (rate.peak, rate.shares[0]) == (312, pytest.approx(rate.most / 312))
    assert achieved_rate(products, DEVICES["nameless"], used=True).shares is None
    assert achieved_rate(operation("none", dtype="bf16", tensor=5.0), A100, used=True) is None
    for dtype, peak in (("fp32", 19.5), ("int8", None)):
        plain = operation(f"matmul 256 256 256 {dtype}", cuda=100.0)
        assert achieved_rate(plain, A100, used=False).peak == peak


@pytest.mark.parametrize(
    ("rate", "shares", "text"),
    [
        (AchievedRate(400.0, 400.0, 312.0), None, "400 (> peak)"),  # no share is above one
        (AchievedRate(200.0, 400.0, 312.0), (200 / 312, 1.0), "200–400 (64–100 %)"),
        (AchievedRate(0.0, 50.0, 312.0), (0.0, 50 / 312), "≤ 50 (16 %)"),
        (AchievedRate(0.1, 0.1, 312.0), (0.1 / 312, 0.1 / 312), "0.1 (< 1 %)"),
        (AchievedRate(3.0, 3.0, None), None, "3"),
        (None, None, ""),
    ],
)
def test_a_rate_in_words(rate, shares, text):
    assert rate_text(rate) == text
    assert rate is None or (rate.shares, rate.above_peak) == (shares, "> peak" in text)


def test_different_fixes_of_one_cause_are_counted(tmp_path):
    shapes = {"Input Dims": [[8, 64, 56, 56], [64, 64, 3, 3]], "Input type": ["float", "float"]}
    events = [
        product(256, 256, 256, 0, 10, dtype="float"), launch(1, 5), kernel(SGEMM, 1, 90),
        op("aten::cudnn_convolution", 20, 30, **shapes), launch(2, 25), kernel(SGEMM, 2, 30),
    ]  # fmt: skip
    profile = profile_trace(write(tmp_path / "t.json", events, H100_TRACE))
    (group,) = cause_groups(profile.operations, profile.worth, profile.kernel_time_us)
    assert (group.operations, group.others) == (2, 1)
    assert group.advice.endswith("(1 operation needs another fix)")


def test_a_rate_above_the_peak_is_a_finding(tmp_path):
    events = [product(4096, 4096, 4096, 0, 10), launch(1, 5), kernel(TENSOR, 1, 300)]
    profile = profile_trace(write(tmp_path / "t.json", events))
    (finding,) = (f for f in profile.findings if f["code"] == "rate-above-peak")
    assert "458 of 312 TFLOP/s" in finding["message"]
    row = profile.to_json()["operations"][0]
    assert (row["above_peak"], row["peak_share"]) == (True, None)
