"""Counters decide only what they count, on the generation that ran; a missing one is no zero."""

import gzip
import json
from pathlib import Path

import pytest
from tensorcores.traces import ADD, H100, SGEMM, TENSOR, kernel, write

from mpdiag.errors import InputError
from mpdiag.hardware.devices import DeviceFacts
from mpdiag.hardware.tables import read_table
from mpdiag.tensorcores.events import Kernel
from mpdiag.tensorcores.kernel_evidence import (
    by_counters,
    by_measured_rate,
    contradicts,
    read_code,
)
from mpdiag.tensorcores.kernels.classification import KernelFacts, classify
from mpdiag.tensorcores.trace_analysis import profile_trace
from mpdiag.tensorcores.trace_profile import KernelTime

HERE = Path(__file__).parent
PIPE = "sm__inst_executed_pipe_tensor"
CYCLES = "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active"
TC = "sm__pipe_tc_cycles_active.avg.pct_of_peak_sustained_active"
MFMA = "SQ_INSTS_VALU_MFMA_MOPS_"
UNKNOWN = KernelFacts("unknown")


def truth(word):
    return {"yes": True, "no": False, "nothing": None}[word]


@pytest.mark.parametrize(
    "row",
    read_table(HERE / "counted.tsv"),
    ids=lambda row: f"{row['capability']} {row['counters']}",
)
def test_what_counters_decide(row):
    pairs = (pair.split("=") for pair in row["counters"].split())
    counters = {name: float(value) for name, value in pairs}
    major, _, minor = row["capability"].partition(".")
    capability = (int(major), int(minor)) if minor else None
    found = by_counters([Kernel("k", 0, 1, counters=counters)], capability)
    assert (None if found is None else found.tensor_core) is truth(row["decides"])


def test_dtype_and_instruction_are_read_from_counters():
    runs = [Kernel("k", 0, 1, counters={f"{PIPE}.sum": 9.0, f"{PIPE}_op_dmma.sum": 9.0})]
    found = by_counters(runs, (8, 0))
    assert (found.dtype, found.instruction) == ("fp64", "DMMA")
    runs = [Kernel("k", 0, 1, counters={f"{MFMA}BF16": 7.0, f"{MFMA}F32": 2.0})]
    assert by_counters(runs).dtype == ""  # both ran
    document = KernelTime("k", UNKNOWN, 1, 1.0, measured=found).to_json()
    assert (document["dtype"], document["dtype_witnessed"]) == (None, "fp64")
    assert document["instruction_witnessed"] == "DMMA"


DECODE = "void flashinfer::BatchDecodeWithPagedKVCacheKernel<128u, 8u>(Params)"
MINE, CONVERTING = "_ZN5mine7combineEPf", "convert_dtype_kernel"
NONE, SOME = {f"{PIPE}.sum": 0.0}, {f"{PIPE}.sum": 9.0}


@pytest.mark.parametrize(
    ("name", "op", "counters", "capability", "verdict", "against"),
    [
        # A zero resolves an unknown kernel; its words say whether it is matrix work.
        (DECODE, "", {CYCLES: 0.0}, (10, 0), "cuda_core", False),
        (MINE, "", {CYCLES: 0.0}, (10, 0), "other", False),
        (MINE, "aten::bmm", {CYCLES: 0.0}, (10, 0), "cuda_core", False),
        (CONVERTING, "", {CYCLES: 0.0}, (10, 0), "other", False),
        # What certainly ran, or did not, outweighs the name.
        (SGEMM, "", SOME, None, "tensor_core", True),
        (TENSOR, "", NONE, None, "cuda_core", True),
        (ADD, "", NONE, None, "other", False),
        (MINE, "", SOME, None, "tensor_core", False),
        # A pipe that may have run something else overrules less.
        (MINE, "", SOME, (8, 0), "tensor_core", False),
        (ADD, "", SOME, (8, 0), "other", False),
        (ADD, "", SOME, (7, 5), "tensor_core", True),
    ],
)
def test_what_counters_make_of_a_name(name, op, counters, capability, verdict, against):
    unknown = name in (DECODE, MINE, CONVERTING)
    facts = UNKNOWN if unknown else classify(name)
    found = by_counters([Kernel(name, 0, 1, counters=counters)], capability)
    assert KernelTime(name, facts, 1, 1.0, op, measured=found).measured_verdict == verdict
    assert contradicts(facts, found) is against


def test_the_measured_clock_bounds_the_ordinary_cores():
    # 152 processors × 512 FLOP × 1 GHz = 77.8 TFLOP/s
    counters = {"# SMs": 152.0, "SM Frequency": 1e9}
    device = DeviceFacts("", (10, 0))
    fast = Kernel("k", 0, 1.0, counters=counters, flops=78e6)
    slow = Kernel("k", 0, 1.0, counters=counters, flops=77e6)
    assert by_measured_rate([fast], device).tensor_core
    assert by_measured_rate([slow], device) is None
    assert by_measured_rate([fast], None) is None


FLASH = "void flash_fwd_splitkv_kernel<Flash_fwd_kernel_traits<128, 64, 128, 4, cutlass::bfloat16_t>>(P)"


def ncu_document(path, cc, name, **metrics):
    columns = ["ID", "Kernel Name", "CC", "gpu__time_duration.sum", *metrics]
    units = ["", "", "", "us", *("%" for _ in metrics)]
    row = ["0", name, cc, "5.0", *map(str, metrics.values())]
    lines = (",".join(f'"{cell}"' for cell in cells) for cells in (columns, units, row))
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return profile_trace(path).to_json()


def test_the_tcgen05_pipe_alone_denies_nothing(tmp_path):
    document = ncu_document(tmp_path / "a.csv", "10.0", FLASH, **{TC: 0})
    assert document["tensor_core_fraction_witnessed"] == 1
    assert document["kernels"][0]["witness"] is None
    assert "contradiction" not in codes(document)
    document = ncu_document(tmp_path / "a.csv", "10.0", FLASH, **{TC: 0, CYCLES: 79})
    assert document["kernels"][0]["witness"] == f"counters: {CYCLES} = 79"
    document = ncu_document(tmp_path / "a.csv", "10.0", FLASH, **{TC: 0, CYCLES: 0})
    assert document["tensor_core_fraction_witnessed"] == 0
    assert "contradiction" in codes(document)


def codes(document):
    return {finding["code"] for finding in document["findings"]}


def test_counters_of_amd_resolve_triton_kernels(tmp_path):
    path = tmp_path / "counter_collection.csv"
    busy, products = "SQ_VALU_MFMA_BUSY_CYCLES", "SQ_INSTS_VALU_MFMA_MOPS_F16"
    rows = [
        "Dispatch_Id,Kernel_Name,Counter_Name,Counter_Value,Start_Timestamp,End_Timestamp",
        f"0,f17,{busy},900.0,1000,4000",
        f"0,f17,{products},512.0,1000,4000",
        f"1,f18,{busy},0.0,5000,6000",
        f"1,f18,{products},0.0,5000,6000",
    ]
    path.write_text("\n".join(rows), encoding="utf-8")
    document = profile_trace(path).to_json()
    assert document["tensor_core_fraction_witnessed"] == 0.75
    assert document["verdict"] == (
        "75.0 % of kernel time ran on Tensor Cores, as measured "
        "(by name: 0 % on Tensor Cores, 100 % unknown)"
    )
    assert [k["verdict_witnessed"] for k in document["kernels"]] == ["tensor_core", "other"]
    assert document["kernels"][0]["dtype_witnessed"] == "fp16"


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

CODES = {"ptx": PTX, "amdgcn": AMDGCN}


@pytest.fixture
def cache(tmp_path):
    def put(name, line, text=PTX, ending="ptx", place="HASH"):
        folder = tmp_path / "cache" / place
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"fn.{ending}").write_text(text.format(name=name, line=line))
        return tmp_path / "cache"

    return put


@pytest.mark.parametrize("row", read_table(HERE / "triton_code.tsv"), ids=lambda row: row["line"])
def test_what_code_says(cache, row):
    folder = cache("my_kernel", row["line"], CODES[row["code"]], row["code"])
    found = read_code(folder)["my_kernel"]
    said = (found.tensor_core, found.instruction, found.dtype)
    assert said == (truth(row["tensor_core"]), row["instruction"], row["dtype"])
    assert f"fn.{row['code']}" in found.text


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
