"""A Triton kernel's own code decides what its name leaves open; variants that disagree do not."""

from __future__ import annotations

import gzip
import json

import pytest
from tensorcores.traces import H100, kernel, write

from mpdiag.errors import InputError
from mpdiag.tensorcores.trace_analysis import profile_trace
from mpdiag.tensorcores.triton_code import read_code

PTX = """.version 8.7
.target sm_90a
.file 1 "/models/mma.py"
// mma.sync would be here
.visible .entry {name}(
\t.param .u64 {name}_param_0
)
{{
\t{line}
\tret;
}}
"""
AMDGCN = "\t{line}\n\t.amdhsa_kernel {name}\n\t\t.amdhsa_kernarg_size 64\n"


@pytest.fixture
def cache(tmp_path):
    def put(name, line, text=PTX, ending="ptx", place="HASH"):
        folder = tmp_path / "cache" / place
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"fn.{ending}").write_text(text.format(name=name, line=line))
        return tmp_path / "cache"

    return put


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {", (True, "HGMMA", "bf16")),
        ("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {", (True, "HMMA", "fp16")),
        ("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {", (True, "HMMA", "tf32")),
        ("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {", (True, "HMMA", "int8")),
        ("tcgen05.mma.cta_group::1.kind::f16 [%r1], %rd1, %rd2, %r3, p;", (True, "UTCHMMA", "")),
        ("@p tcgen05.mma.cta_group::1.kind::tf32 [%r1];", (True, "UTCHMMA", "tf32")),
        ("fma.rn.f32 \t%f1, %f2, %f3, %f4;", (False, "", "")),
    ],
)
def test_ptx(cache, line, expected):
    found = read_code(cache("my_kernel", line))["my_kernel"]
    assert (found.tensor_core, found.instruction, found.dtype) == expected
    assert "fn.ptx" in found.text


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("v_mfma_f32_32x32x8_bf16_1k a[0:15], v[0:1], v[2:3], a[0:15]", (True, "MFMA", "bf16")),
        ("v_mfma_f32_16x16x32_fp8_fp8 a[0:3], v[0:1], v[2:3], 0", (True, "MFMA", "fp8_e4m3")),
        ("v_mfma_f32_32x32x8f16 a[0:15], v[0:1], v[2:3], a[0:15]", (True, "MFMA", "fp16")),
        ("v_wmma_f32_16x16x16_f16 v[0:7], v[8:15], v[16:23], v[0:7]", (True, "WMMA", "fp16")),
        ("v_fma_f32 v6, v7, v8, v9", (False, "", "")),
    ],
)
def test_assembly_of_amd(cache, line, expected):
    found = read_code(cache("k", line, AMDGCN, "amdgcn"))["k"]
    assert (found.tensor_core, found.instruction, found.dtype) == expected


def test_variants_that_disagree_decide_nothing(cache):
    product = "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {"
    cache("k", product, place="A")
    other = cache("k", product.replace("f16", "bf16"), place="B")
    assert (read_code(other)["k"].tensor_core, read_code(other)["k"].dtype) == (True, "")
    cache("lone", "ret;", place="D")
    assert read_code(cache("k", "fma.rn.f32 %f1;", place="C")).keys() == {"lone"}


def test_the_log_of_tritonparse(tmp_path):
    ptx = PTX.format(name="k", line="mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {")
    event = {"event_type": "compilation", "payload": {"file_content": {"k.ptx": ptx, "k.ttir": ""}}}
    log = tmp_path / "log.ndjson.gz"
    log.write_bytes(gzip.compress(f"{json.dumps(event)}\nnot json\n[1]\n".encode()))
    assert read_code(log)["k"].dtype == "fp16"


def test_a_place_without_code_is_refused(tmp_path):
    with pytest.raises(InputError, match="no compiled Triton kernel"):
        read_code(tmp_path)
    with pytest.raises(InputError):
        read_code(tmp_path / "absent")


def test_code_judges_the_kernels_of_a_trace(tmp_path, cache):
    cache("my_own", "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {", place="A")
    place = cache("_attn_fwd", "fma.rn.f32 %f1, %f2, %f3, %f4;", place="B")
    trace = write(tmp_path / "t.json", [kernel("my_own", 1, 60), kernel("_attn_fwd", 2, 40)], H100)
    by_name = {k["name"]: k for k in profile_trace(trace, triton_code=place).to_json()["kernels"]}
    assert by_name["my_own"]["verdict"] == "unknown"
    assert by_name["my_own"]["verdict_witnessed"] == "tensor_core"
    assert by_name["my_own"]["dtype_witnessed"] == "bf16"
    assert by_name["_attn_fwd"]["verdict_witnessed"] == "cuda_core"
