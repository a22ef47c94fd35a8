"""The roofline: intensity, rate and roof of each product, worked out by hand."""

import math

import pytest
from made_profiles import PEAKS, profile_with_work

from mpdiag.tensorcores.views.roofline import roofline, roofline_frame, roofs_of
from mpdiag.tensorcores.views.tensor_cores import unit_names


def picture_of(run, document):
    return roofline(run, document, unit_names(document))


def test_by_hand():
    frame = roofline_frame(profile_with_work()).set_index("module")
    body, head = frame.loc["body"], frame.loc["<i>head</i>"]
    assert (body["intensity"], head["intensity"]) == (400.0, 2.0)
    assert body["rate"] == pytest.approx(4e9 * 10 / 600e-6 / 1e12)  # 66.7 TFLOP/s
    assert head["rate"] == pytest.approx(2e6 / 200e-6 / 1e12)
    # 2 TB/s: at 400 FLOP per byte it could feed 800 TFLOP/s, the Tensor Cores do 500.
    assert (body["roof"], body["bound"]) == (500.0, "compute")
    assert (head["roof"], head["bound"]) == (4.0, "memory")  # 2 FLOP per byte of 2 TB/s
    assert body["reached"] == pytest.approx(4e10 / 600e-6 / 1e12 / 500)
    assert (body["shape"], head["shape"]) == ("64 × 64 × 64", "33 × 65 × 64")


def test_kernels_of_an_unknown_unit_stand_under_no_roof():
    document = profile_with_work()
    document["operations"][1]["verdict"] = "unknown"
    head = roofline_frame(document).set_index("module").loc["<i>head</i>"]
    assert math.isfinite(head["rate"])
    assert math.isnan(head["roof"])
    assert math.isnan(head["reached"])
    assert head["bound"] == ""
    assert picture_of("RUN", document).figure.data


def test_fields_of_another_type_are_left_out():
    document = profile_with_work()
    document["operations"][1] |= {"flops": [1], "bytes": "many", "calls": {}}
    assert list(roofline_frame(document)["module"]) == ["body"]


def test_what_is_left_out_is_counted():
    document = profile_with_work()
    picture = picture_of("RUN", document)
    assert "1 operation is missing" in picture.caption
    assert PEAKS["source"] in picture.caption


def test_the_roofs_drawn_are_the_device_s():
    document = profile_with_work()
    frame = roofline_frame(document)
    roofs = roofs_of(document).shown(frame)
    assert list(roofs.items()) == [
        (("tensor_core", 500.0), "FP16"),
        (("tensor_core", 250.0), "TF32"),  # what the FP32 product could have run as
        (("cuda_core", 50.0), "FP32"),
    ]
    figure = picture_of("RUN", document).figure
    lines = [trace for trace in figure.data if trace.mode == "lines+text"]
    slope = lines[0]
    assert slope.text[0] == "memory: 2000 GB/s"
    assert lines[1].text[1] == "Tensor Cores, FP16: 500 TFLOP/s"
    assert all(y == pytest.approx(2 * x) for x, y in zip(slope.x, slope.y, strict=True))
    for line, (_, rate) in zip(lines[1:], roofs, strict=True):
        assert tuple(line.y) == (rate, rate)
        assert line.x[0] == pytest.approx(rate / 2)  # its ridge
    marks = {trace.name: trace for trace in figure.data if trace.mode == "markers"}
    assert set(marks) == {"Tensor Cores (1)", "CUDA cores (1)"}
    assert marks["Tensor Cores (1)"].marker.symbol != marks["CUDA cores (1)"].marker.symbol


@pytest.mark.parametrize(
    "peaks", [None, [], {}, {"bandwidth_gbps": "fast"}, {"bandwidth_gbps": 0, "tensor_tflops": {}}]
)
def test_a_device_without_known_rates_has_no_roof(peaks):
    document = profile_with_work(peaks=peaks)
    frame = roofline_frame(document)
    assert len(frame) == 2
    assert frame["roof"].isna().all()
    assert (frame["bound"] == "").all()
    picture = picture_of("RUN", document)
    assert "No roof is drawn" in picture.caption
    assert "Roofline" not in picture.title
    assert {trace.mode for trace in picture.figure.data} == {"markers"}


@pytest.mark.parametrize(
    "operations",
    [
        [],
        [{}],
        [{"flops": "many", "bytes": 1, "calls": 1, "time_us": 1}],
        [{"flops": 1e308, "bytes": 1, "calls": 1e308, "time_us": 1}],
        [{"flops": -1, "bytes": 1, "calls": 1, "time_us": 1}],
        [{"flops": math.nan, "bytes": 0, "calls": 1, "time_us": 0}],
    ],
)
def test_nothing_to_draw_is_a_sentence(operations):
    document = {**profile_with_work(), "operations": operations}
    assert roofline_frame(document).empty
    assert (
        "with known FLOPs and time" in picture_of("RUN", document).figure.layout.annotations[0].text
    )


def test_rates_of_eight_bit_types_are_one_family():
    peaks = {**PEAKS, "tensor_tflops": {"fp16": 500.0, "fp8": 1000.0}}
    document = profile_with_work(peaks=peaks)
    document["operations"][0]["dtype"] = "fp8_e4m3"
    frame = roofline_frame(document)
    assert frame["roof"].iloc[0] == 800.0  # 400 FLOP per byte: memory's, below 1000
