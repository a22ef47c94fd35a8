"""From a trace to the document: fractions, witnesses, findings, and the command."""

import json
import subprocess
import sys

import pytest
from calls import run
from tensorcores.traces import (
    A100,
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

from mpdiag.errors import DamagedTrace, ExitCode
from mpdiag.tensorcores.trace_analysis import profile_trace

SHARES = ["tensor_core", "matrix_cuda_core", "helper", "layout", "other", "unknown"]
NCCL = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
OPAQUE = "void cutlass::device_kernel<x>(y)"
HELPER = "void splitKreduce_kernel<float, float>(x)"
NATIVE = "nvjet_tst_128x256_64x4_2x1_v_bz_coopA_TNT"
TENSILE = "Cijk_Ailk_Bljk_HHS_BH_MT128x128x32_MI32x32x8x1_SN_1LDSB0_ISA90a"
VALU = "Cijk_Ailk_Bljk_HB_MT64x64x16_SN_ISA90a"
Z999 = {"id": 0, "name": "NVIDIA Z999", "computeMajor": 8, "computeMinor": 0}
MI300 = {"id": 0, "name": "AMD Instinct MI300X", "computeMajor": 9, "computeMinor": 4}
V100 = {"id": 0, "name": "Tesla V100-SXM2-16GB", "computeMajor": 7, "computeMinor": 0}
CUDA = "matrix-on-cuda-cores"
FLOAT = [product(256, 256, 256, 0, 10, dtype="float"), launch(1, 5), kernel(SGEMM, 1, 30)]
ODD = (product(512, 513, 513, 0, 10, "c10::BFloat16"), launch(1, 5))


def multiplied(name, microseconds):
    """2 · 4096³ FLOP; an A100's CUDA cores do at most 19.5 TFLOP/s in FP32, 78 in FP16."""
    return [product(4096, 4096, 4096, 0, 10), launch(1, 5), kernel(name, 1, microseconds)]


def codes(document):
    return {finding["code"] for finding in document["findings"]}


# Name -> events, device, fields of the document, findings that are there (what they say), and are not.
DOCUMENTS = {
    "a step": (
        step(), A100,
        {"tensor_core_fraction": 0.6, "matrix_cuda_core_fraction": 0.3, "linked_fraction": 1.0},
        {"matrix-on-cuda-cores": ""}, {"contradiction"},
    ),
    "collectives count and copies do not": (
        [*step(), kernel(NCCL, 8, 100), kernel("Memcpy HtoD", 9, 1000) | {"cat": "gpu_memcpy"}], A100,
        {"kernel_time_us": 200.0, "tensor_core_fraction": 0.3}, {}, set(),
    ),
    "all classes are the whole": (
        [*step(), kernel(OPAQUE, 7, 40)], A100, {"unknown_fraction": 40 / 140}, {}, set()
    ),
    "an older generation": (
        [*ODD, kernel(FALLBACK, 1, 41.6), kernel(NATIVE, 2, 58.4)], H100,
        {"tensor_core_fraction": 1.0, "native_generation_fraction": 0.584},
        {"older-generation": "'amdahl_bound': 1.712", "misaligned": "pad the dim"}, set(),
    ),
    "a Triton product does not say for which GPU it was compiled, and is not called old": (
        [kernel("_chunk_scan_fwd_kernel", 1, 20), kernel(NATIVE, 2, 80)], H100,
        {"tensor_core_fraction": 1.0, "native_generation_fraction": 0.8,
         "unnamed_generation_fraction": 0.2}, {}, {"older-generation"},
    ),
    "helpers are charged to their parent in a field of their own": (
        [*step(), launch(4, 6), kernel(HELPER, 4, 100)], A100,  # within the first product
        {"tensor_core_fraction": 0.3, "tensor_core_fraction_with_helpers": 0.8,
         "helper_fraction": 0.5}, {}, set(),
    ),
    "on a tie helpers are charged once": (
        [product(256, 256, 256, 0, 10), *(launch(i, 4 + i) for i in (1, 2, 3)),
         kernel(TENSOR, 1, 40), kernel(SGEMM, 2, 40), kernel(HELPER, 3, 20)], A100,
        {"tensor_core_fraction_with_helpers": 0.6, "matrix_cuda_core_fraction_with_helpers": 0.4},
        {}, set(),
    ),
    "a rate of 229 TFLOP/s proves an unknown kernel": (
        multiplied(OPAQUE, 600), A100,
        {"tensor_core_fraction": 0.0, "tensor_core_fraction_witnessed": 1.0},
        {}, {"contradiction", "unknown-kernels"},
    ),
    "a low rate proves nothing": (
        multiplied(OPAQUE, 6000), A100, {"unknown_fraction_witnessed": 1.0},
        {"unknown-kernels": ""}, set(),
    ),
    "a rate against the name": (multiplied(SGEMM, 600), A100, {}, {"contradiction": ""}, set()),
    "an unknown GPU is said and not guessed": (step(), Z999, {}, {"unknown-device": ""}, set()),
    "padding is advised only where a size is named": (
        [kernel(FALLBACK, 1, 10)], H100, {}, {"misaligned": "names no dimension"}, set()
    ),
    "communication comes first": (
        [*step(), kernel(NCCL, 8, 900)], A100,
        {"verdict": "90.0 % of kernel time is communication (NCCL, RCCL), 6.0 % of kernel time ran on "
         "Tensor Cores, 3.0 % is matrix work on CUDA cores"}, {}, set(),
    ),
    "communication that is not most comes later": (
        [*step(), kernel(NCCL, 8, 90)], A100,
        {"verdict": "31.6 % of kernel time ran on Tensor Cores, 15.8 % is matrix work on CUDA cores"},
        {}, set(),
    ),
    "AMD's units have other names": (
        [product(256, 256, 256, 0, 10), launch(1, 5), kernel(TENSILE, 1, 60),
         product(512, 256, 256, 20, 30), launch(2, 25), kernel(VALU, 2, 40)], {},
        {"verdict": "60.0 % of kernel time ran on matrix cores, 40.0 % is matrix work on vector units"},
        {CUDA: "on vector units {'fraction': 0.4, 'amdahl_bound': 1.6666666666666667} "
         "train in mixed precision\n"}, set(),
    ),
    "a GPU of AMD's by its name alone is measured with AMD's profiler": (
        [kernel(OPAQUE, 7, 40)], MI300, {"unknown_fraction": 1.0},
        {"unknown-kernels": "measure them with rocprofv3 --pmc SQ_INSTS_MFMA"}, set(),
    ),
    "TF32 where there is none": (FLOAT, V100, {}, {CUDA: "train in mixed precision\n"}, set()),
    "TF32 where there is some": (FLOAT, H100, {}, {CUDA: '"high")\n'}, set()),
    "TF32 where the GPU is not known": (FLOAT, {}, {}, {CUDA: "where the GPU has TF32\n"}, set()),
}  # fmt: skip


def test_no_sentence_about_an_amd_gpu_names_nvidias_units(tmp_path):
    events, device, *_ = DOCUMENTS["AMD's units have other names"]
    profile = profile_trace(write(tmp_path / "t.json", events, device))
    said = [profile.verdict, *profile.sentences, *(g.sentence for g in profile.cause_groups)]
    said += [g.advice for g in profile.cause_groups] + [j.fix for j in profile.operations]
    said += [f[field] for f in profile.findings for field in ("message", "fix")]
    assert [s for s in said if "Tensor Core" in s or "CUDA" in s or "channels_last" in s] == []
    assert any("PYTORCH_TUNABLEOP_ENABLED=1" in s for s in said)


@pytest.mark.parametrize("name", DOCUMENTS)
def test_the_document(tmp_path, name):
    events, device, fields, there, absent = DOCUMENTS[name]
    document = profile_trace(write(tmp_path / "t.json", events, device)).to_json()
    assert json.loads(json.dumps(document, allow_nan=False)) == document
    assert {field: document[field] for field in fields} == pytest.approx(fields)
    said = {f["code"]: f"{f['message']} {f['evidence']} {f['fix']}\n" for f in document["findings"]}
    assert [code for code, words in there.items() if words not in said.get(code, "")] == []
    assert there.keys() <= said.keys()
    assert not absent & codes(document)
    for end in ("", "_witnessed"):
        assert sum(document[f"{share}_fraction{end}"] for share in SHARES) == pytest.approx(1)
    placed = [o["intensity"] is not None for o in document["operations"]]
    assert not any(placed) or device is not Z999


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


def test_tf32_is_known_from_the_kernels_where_the_gpu_is_not(tmp_path):
    events = [e for e in step() if "mm" in str(e) or e.get("args", {}).get("correlation") == 2]
    path = write(tmp_path / "t.json", events)
    path.write_text(path.read_text().replace("deviceProperties", "other"), encoding="utf-8")
    profile = profile_trace(path)
    assert profile.device is None
    assert "tf32_off" in {o.cause for o in profile.operations}


def test_sizes_that_are_none_are_null_in_the_document(tmp_path):
    (call, *others) = step()
    call["args"]["Input Dims"] = [[float("inf"), 8], [8, "wide"], [[8, 2.5]]]
    document = profile_trace(write(tmp_path / "t.json", [call, *others])).to_json()
    json.dumps(document, allow_nan=False)
    assert [[None, 8], [8, None], [[8, None]]] in [k["shapes"] for k in document["kernels"]]


def test_what_was_left_out_is_said(tmp_path):
    text = write(tmp_path / "t.json", step() * 20).read_text(encoding="utf-8")
    (tmp_path / "half.json").write_text(text[: len(text) // 2], encoding="utf-8")
    assert "damaged-trace" in codes(profile_trace(tmp_path / "half.json").to_json())


def test_json_is_one_document_and_strict_exits_with_1(tmp_path):
    path = write(tmp_path / "t.json", step())
    result = run("profile", path, "--json", "--strict")
    assert result.exit_code == ExitCode.FINDINGS
    assert json.loads(result.stdout)["source"] == "torch.profiler"
