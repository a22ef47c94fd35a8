"""From a trace to the document: fractions, witnesses, findings, and trace against trace."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from tensorcores.traces import (
    ADD,
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
from typer.testing import CliRunner

from mpdiag.cli import app
from mpdiag.errors import DamagedTrace, ExitCode
from mpdiag.hardware.devices import DeviceFacts
from mpdiag.tensorcores.events import Kernel
from mpdiag.tensorcores.kernel_evidence import (
    by_counters,
    by_measured_rate,
    contradicts,
    measured_verdict,
)
from mpdiag.tensorcores.kernels.classification import classify
from mpdiag.tensorcores.trace_analysis import profile_trace
from mpdiag.tensorcores.views.roofline import roofline_frame

CONTRACT = """schema_version source device kernel_time_us tensor_core_fraction
    matrix_cuda_core_fraction layout_fraction unknown_fraction native_generation_fraction
    linked_fraction kernels operations findings""".split()
KERNEL = (
    """name calls time_us verdict instruction dtype evidence alignment op module shapes""".split()
)
OPERATION = "op module m n k dtype aligned cause fix time_us amdahl_bound".split()
NCCL = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
OPAQUE = "void cutlass::device_kernel<x>(y)"


def codes(profile):
    return {finding["code"] for finding in profile.findings}


def test_the_document_keeps_the_contract(tmp_path):
    document = profile_trace(write(tmp_path / "t.json", step())).to_json()
    assert json.loads(json.dumps(document, allow_nan=False)) == document
    assert set(CONTRACT) <= set(document)
    assert all(set(KERNEL) <= set(k) for k in document["kernels"])
    assert all(set(OPERATION) <= set(o) for o in document["operations"])
    assert len(document["kernels"]) == len(document["operations"]) == 3
    assert document["tensor_core_fraction"] == pytest.approx(0.6)
    assert document["matrix_cuda_core_fraction"] == pytest.approx(0.3)
    assert document["linked_fraction"] == 1
    assert document["device"]["name"] == "NVIDIA A100-SXM4-80GB"
    first = document["kernels"][0]
    assert (first["op"], first["shapes"]) == ("aten::mm", [[256, 256], [256, 256]])
    assert first["evidence"] == "name: arch 16816 (ampere_fp16_s16816gemm)"


def test_what_a_roofline_needs_stands_in_the_document(tmp_path):
    document = profile_trace(write(tmp_path / "t.json", step())).to_json()
    products = {o["dtype"]: o for o in document["operations"] if o["op"] == "aten::mm"}
    assert (products["fp32"]["verdict"], products["fp32"]["kernel"]) == ("cuda_core", SGEMM)
    product_ = products["fp16"]
    assert product_["verdict"] == "tensor_core"
    assert product_["kernel"] == TENSOR
    assert product_["flops"] == 2 * 256**3
    assert product_["bytes"] == 3 * 256 * 256 * 2  # FP16: A, B and C once
    frame = roofline_frame(document)
    row = frame[frame["kernel"] == TENSOR].iloc[0]
    assert row["intensity"] == pytest.approx(2 * 256**3 / (3 * 256 * 256 * 2))
    assert row["rate"] == pytest.approx(2 * 256**3 / product_["time_us"] / 1e6)
    assert row["roof"] == pytest.approx(min(312, row["intensity"] * 2.039))  # of an A100


def test_collectives_count_as_time_and_copies_do_not(tmp_path):
    copy = kernel("Memcpy HtoD", 9, 1000) | {"cat": "gpu_memcpy"}
    profile = profile_trace(write(tmp_path / "t.json", [*step(), kernel(NCCL, 8, 100), copy]))
    assert profile.kernel_time_us == 200
    assert profile.fraction("tensor_core") == pytest.approx(0.3)


def test_shares_of_all_classes_are_the_whole(tmp_path):
    document = profile_trace(write(tmp_path / "t.json", [*step(), kernel(OPAQUE, 7, 40)])).to_json()
    shares = ["tensor_core", "matrix_cuda_core", "helper", "layout", "other", "unknown"]
    assert sum(document[f"{name}_fraction"] for name in shares) == pytest.approx(1)
    assert sum(document[f"{name}_fraction_witnessed"] for name in shares) == pytest.approx(1)


def test_an_older_generation_is_a_finding_with_its_bound(tmp_path):
    events = [
        product(512, 513, 513, 0, 10, "c10::BFloat16"),
        launch(1, 5),
        kernel(FALLBACK, 1, 41.6),
        kernel("nvjet_tst_128x256_64x4_2x1_v_bz_coopA_TNT", 2, 58.4),
    ]
    profile = profile_trace(write(tmp_path / "t.json", events, H100))
    assert profile.fraction("tensor_core") == 1
    assert profile.native_generation_fraction == pytest.approx(0.584)
    assert {"older-generation", "misaligned"} <= codes(profile)
    (finding,) = (f for f in profile.findings if f["code"] == "older-generation")
    assert finding["evidence"]["amdahl_bound"] == pytest.approx(1.712, abs=1e-3)
    assert finding["severity"] == "warning"


def test_padding_is_advised_only_where_a_size_is_named(tmp_path):
    def fix(*events):
        profile = profile_trace(
            write(tmp_path / "t.json", [*events, kernel(FALLBACK, 1, 10)], H100)
        )
        (finding,) = (f for f in profile.findings if f["code"] == "misaligned")
        return finding["fix"]

    assert fix(product(512, 513, 513, 0, 10, "c10::BFloat16"), launch(1, 5)).startswith(
        "pad the dim"
    )
    assert "names no dimension" in fix()


def test_a_name_without_a_generation_is_not_called_old(tmp_path):
    """A Triton product says that it multiplies, but not for which GPU it was compiled."""
    events = [
        kernel("_chunk_scan_fwd_kernel", 1, 20),
        kernel("nvjet_tst_128x256_64x4_2x1_v_bz_coopA_TNT", 2, 80),
    ]
    profile = profile_trace(write(tmp_path / "t.json", events, H100))
    assert profile.fraction("tensor_core") == 1
    assert profile.native_generation_fraction == pytest.approx(0.8)
    assert profile.to_json()["unnamed_generation_fraction"] == pytest.approx(0.2)
    assert "older-generation" not in codes(profile)


def test_helpers_are_charged_to_their_parent_in_a_field_of_their_own(tmp_path):
    reduce = "void splitKreduce_kernel<float, float>(x)"
    events = [*step(), launch(4, 6), kernel(reduce, 4, 100)]  # within the first product
    document = profile_trace(write(tmp_path / "t.json", events)).to_json()
    assert document["tensor_core_fraction"] == pytest.approx(0.3)
    assert document["tensor_core_fraction_with_helpers"] == pytest.approx(0.8)
    assert document["helper_fraction"] == pytest.approx(0.5)


# -- witnesses -------------------------------------------------------------------------------------


def rate_trace(path, name, microseconds):
    # 2 · 4096³ FLOP; an A100's CUDA cores do at most 19.5 TFLOP/s in FP32, 78 in FP16.
    events = [product(4096, 4096, 4096, 0, 10), launch(1, 5), kernel(name, 1, microseconds)]
    return profile_trace(write(path, events))


def test_the_rate_proves_an_unknown_kernel(tmp_path):
    profile = rate_trace(tmp_path / "fast.json", OPAQUE, 600)  # 229 TFLOP/s
    assert profile.kernels[0].measured.kind == "rate"
    assert profile.fraction("tensor_core") == 0  # by name alone
    assert profile.fraction("tensor_core", measured=True) == 1
    assert "contradiction" not in codes(profile)


def test_a_low_rate_proves_nothing(tmp_path):
    profile = rate_trace(tmp_path / "slow.json", OPAQUE, 6000)
    assert profile.kernels[0].measured is None
    assert profile.fraction("unknown", measured=True) == 1
    assert "unknown-kernels" in codes(profile)


def test_a_rate_against_the_name_is_a_finding(tmp_path):
    assert "contradiction" in codes(rate_trace(tmp_path / "t.json", SGEMM, 600))


@pytest.mark.parametrize(
    ("counters", "expected"),
    [
        ({"sm__inst_executed_pipe_tensor.sum": 5.0}, True),
        ({"sm__inst_executed_pipe_tensor.sum": 0.0}, False),
        ({"sm__inst_executed_pipe_tensor_op_hmma.sum": 0.0}, None),  # may be wgmma
        ({"sm__inst_executed_pipe_tensor_op_gmma.sum": 9.0}, True),
        ({"sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active": 31.0}, True),
        ({"sm__ops_path_tensor_op_utcqmma_src_fp8_dst_fp32.sum": 7.0}, True),
        ({"sm__cycles_active.avg": 100.0}, None),
    ],
)
def test_counters(counters, expected):
    witness = by_counters([Kernel("k", 0, 1, counters=counters)])
    assert (None if witness is None else witness.tensor_core) is expected


def test_counters_outweigh_the_name():
    yes = by_counters([Kernel("k", 0, 1, counters={"sm__inst_executed_pipe_tensor.sum": 5.0})])
    no = by_counters([Kernel("k", 0, 1, counters={"sm__inst_executed_pipe_tensor.sum": 0.0})])
    assert measured_verdict(classify(SGEMM), yes) == "tensor_core"
    assert measured_verdict(classify(TENSOR), no) == "cuda_core"
    assert measured_verdict(classify(ADD), no) == "other"
    assert contradicts(classify(SGEMM), yes)
    assert contradicts(classify(TENSOR), no)
    assert not contradicts(classify(OPAQUE), yes)
    assert not contradicts(classify(ADD), no)


def test_the_measured_clock_bounds_the_ordinary_cores():
    # 152 processors × 512 FLOP × 1 GHz = 77.8 TFLOP/s
    counters = {"# SMs": 152.0, "SM Frequency": 1e9}
    device = DeviceFacts("", (10, 0))
    fast = Kernel("k", 0, 1.0, counters=counters, flops=78e6)
    slow = Kernel("k", 0, 1.0, counters=counters, flops=77e6)
    assert by_measured_rate([fast], device).tensor_core
    assert by_measured_rate([slow], device) is None
    assert by_measured_rate([fast], None) is None


# -- findings about reading ------------------------------------------------------------------------


def test_no_kernels_is_an_input_error(tmp_path):
    with pytest.raises(DamagedTrace, match="no GPU kernels"):
        profile_trace(write(tmp_path / "t.json", [op("aten::mm", 0, 5)]))


def test_a_trace_cut_off_before_its_first_kernel_is_not_told_to_record_kernels(tmp_path):
    events = [op("aten::mm", i, i + 1) for i in range(100)]
    text = write(tmp_path / "t.json", events).read_text(encoding="utf-8")
    (tmp_path / "half.json").write_text(text[: len(text) // 2], encoding="utf-8")
    with pytest.raises(DamagedTrace, match="in its readable part: the trace ends"):
        profile_trace(tmp_path / "half.json")


def test_standard_input_and_pipes(tmp_path):
    path = write(tmp_path / "t.json", step())
    command = [sys.executable, "-m", "mpdiag", "profile", "--json"]
    with path.open("rb") as file:
        whole = subprocess.run([*command, "-"], stdin=file, capture_output=True, check=True)
    piped = f"cat {path} | {' '.join(command)} /dev/stdin"
    piece = subprocess.run(["sh", "-c", piped], capture_output=True, check=True)
    expected = profile_trace(path).verdict
    found = [json.loads(done.stdout) for done in (whole, piece)]
    assert [document["verdict"] for document in found] == [expected] * 2
    assert [document["trace"] for document in found] == ["-", "/dev/stdin"]


@pytest.mark.parametrize(
    ("device", "fix"),
    [
        ({"id": 0, "name": "Tesla V100-SXM2-16GB", "computeMajor": 7, "computeMinor": 0}, None),
        (H100, '"high")'),
        ({}, "where the GPU has TF32"),
    ],
)
def test_tf32_is_advised_where_there_is_some(tmp_path, device, fix):
    events = [product(256, 256, 256, 0, 10, dtype="float"), launch(1, 5), kernel(SGEMM, 1, 30)]
    profile = profile_trace(write(tmp_path / "t.json", events, device=device))
    (found,) = (f for f in profile.findings if f["code"] == "matrix-on-cuda-cores")
    assert found["fix"].endswith(fix or "train in mixed precision")


def test_an_unknown_gpu_is_said_and_not_guessed(tmp_path):
    device = {"id": 0, "name": "NVIDIA Z999", "computeMajor": 8, "computeMinor": 0}
    profile = profile_trace(write(tmp_path / "t.json", step(), device))
    assert "unknown-device" in codes(profile)
    assert all(o.placement is None for o in profile.operations)


def test_tf32_is_known_from_the_kernels_where_the_gpu_is_not(tmp_path):
    events = [e for e in step() if "mm" in str(e) or e.get("args", {}).get("correlation") == 2]
    path = write(tmp_path / "t.json", events)
    path.write_text(path.read_text().replace("deviceProperties", "other"), encoding="utf-8")
    profile = profile_trace(path)
    assert profile.device is None
    assert "tf32_off" in {o.cause for o in profile.operations}


# -- trace against trace ---------------------------------------------------------------------------


# -- the command -----------------------------------------------------------------------------------


def run(*words):
    return CliRunner().invoke(app, ["profile", *map(str, words)])


def test_json_is_one_document_and_strict_exits_with_1(tmp_path):
    path = write(tmp_path / "t.json", step())
    result = run(path, "--json", "--strict")
    assert result.exit_code == ExitCode.FINDINGS
    assert json.loads(result.stdout)["source"] == "torch.profiler"


@pytest.mark.parametrize(
    ("words", "code"), [(["nowhere.json"], 3), ([], 2), (["a.json", "b.json"], 3)]
)
def test_exit_codes(words, code):
    result = run(*words)
    assert (result.exit_code, result.stdout) == (code, "")
    assert len(result.stderr.splitlines()) == 1


def test_sizes_that_are_none_are_null_in_the_document(tmp_path):
    (call, *others) = step()
    call["args"]["Input Dims"] = [[float("inf"), 8], [8, "wide"], [[8, 2.5]]]
    document = profile_trace(write(tmp_path / "t.json", [call, *others])).to_json()
    json.dumps(document, allow_nan=False)
    assert [[None, 8], [8, None], [[8, None]]] in [k["shapes"] for k in document["kernels"]]


def test_on_a_tie_helpers_are_charged_once(tmp_path):
    call = product(256, 256, 256, 0, 10)
    helper = "void splitKreduce_kernel<32, 16, int, float, float>(cublasSplitKParams<float>)"
    starts = [launch(i, 4 + i) for i in (1, 2, 3)]
    ran = [kernel(TENSOR, 1, 40), kernel(SGEMM, 2, 40), kernel(helper, 3, 20)]
    profile = profile_trace(write(tmp_path / "t.json", [call, *starts, *ran]))
    (judged,) = profile.operations
    assert judged.operation.helper_us == 20
    assert profile.charged_fraction("tensor_core") == pytest.approx(0.6)
    assert profile.charged_fraction("cuda_core") == pytest.approx(0.4)
