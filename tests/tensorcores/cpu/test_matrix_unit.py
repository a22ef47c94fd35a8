"""The matrix unit of a CPU: oneDNN's log read, and joined with operator times by shape."""

from __future__ import annotations

import json

import pytest

from mpdiag.hardware.cpu_instructions import CpuInstructions
from mpdiag.hardware.matrix_work import convolution, matmul, recurrent
from mpdiag.tensorcores.cpu.matrix_unit import join
from mpdiag.tensorcores.cpu.onednn import read_log
from mpdiag.tensorcores.cpu.operation import CpuFacts
from mpdiag.tensorcores.cpu.operators import OperatorTime, operator_times

AMX = CpuFacts("Xeon", has_amx=True, has_avx512_bf16=True)
NONE = CpuFacts("EPYC", has_amx=False, has_avx512_bf16=True)

HEAD = """\
onednn_verbose,v1,info,oneDNN v3.12.0 (commit 80afa71049cd69a3df32adcccb623b12cd7baa22)
onednn_verbose,v1,info,cpu,runtime:OpenMP,nthr:2
onednn_verbose,v1,info,cpu,isa:Intel AVX-512 with float16, Intel DL Boost and bfloat16 support and Intel AMX with bfloat16 and 8-bit integer support
onednn_verbose,v1,primitive,info,template:operation,engine,primitive,implementation,prop_kind,memory_descriptors,attributes,auxiliary,problem_desc,exec_time
"""  # noqa: E501 - one line each
MATMUL = (
    "onednn_verbose,v1,primitive,exec,cpu,matmul,{implementation},undef,"
    "src:{dtype}::blocked:ab::f0 wei:{dtype}::blocked:ba::f0 dst:{dtype}::blocked:ab::f0,"
    "attr-scratchpad:user attr-post-ops:sum,,{shape},{ms}\n"
)
CONVOLUTION = (
    "onednn_verbose,v1,primitive,exec,cpu,convolution,brgconv:avx512_core_amx,{direction},"
    "src:bf16:a:blocked:acdb::f0 wei:bf16:a:blocked:Acdb16a2b::f0 bia:undef::undef::: "
    "dst:bf16:a:blocked:acdb::f0,attr-scratchpad:user,alg:convolution_direct,"
    "{groups}mb8_ic16oc32_ih14oh12kh3sh1dh0ph0_iw14ow12kw3sw1dw0pw0,0.5\n"
)
RNN = (
    "onednn_verbose,v1,primitive,exec,cpu,rnn,brgemm:avx512_core_amx,forward_inference,"
    "src_layer:bf16::blocked:abc::f0 src_iter:f32::blocked:abcd::f0 wei_layer:bf16:a:any:any::f0,"
    "attr-scratchpad:user,alg:vanilla_lstm direction:unidirectional_left2right activation:undef,"
    "l1t5mb2sic32slc16dhc32dic32,0.175\n"
)
REORDER = (
    "onednn_verbose,v1,primitive,exec,cpu,reorder,jit:uni,undef,src:bf16::blocked:abcd::f0 "
    "dst:bf16::blocked:aBcd16b::f0,attr-scratchpad:user,,8x16x14x14,0.25\n"
)


def product(
    implementation="brg_matmul:avx10_1_512_amx", dtype="bf16", shape="32x1024:1024x64", ms=1.0
):
    return MATMUL.format(implementation=implementation, dtype=dtype, shape=shape, ms=ms)


def log_of(*lines):
    return read_log([*HEAD.splitlines(keepends=True), *lines])


def time_of(work, us=1000.0, op="aten::addmm"):
    return OperatorTime(op, "head", "forward", work, 1, us)


# -- the log ---------------------------------------------------------------------------------------


def test_the_head_of_a_log():
    log = log_of()
    assert log.version.startswith("v3.12.0")
    assert "Intel AMX" in log.isa
    assert log.primitives == ()


@pytest.mark.parametrize(
    ("line", "work"),
    [
        (product(), matmul(32, 64, 1024, dtype="bf16")),
        (product(shape="4x8x16:4x16x2", dtype="s8"), matmul(8, 2, 16, 4, dtype="int8")),
        (product(shape="4x8x16:1x16x2", dtype="f16"), matmul(8, 2, 16, 4, dtype="fp16")),
        (
            CONVOLUTION.format(direction="forward_training", groups=""),
            convolution(8, (16, 32), 9, (196, 144), dtype="bf16"),
        ),
        (
            CONVOLUTION.format(direction="backward_weights", groups="g4"),
            convolution(8, (16, 32), 9, (196, 144), groups=4, dtype="bf16", direction="wgrad"),
        ),
        (RNN, recurrent(2, 5, (16, 32), 4, dtype="bf16")),
    ],
)
def test_a_primitives_work(line, work):
    (primitive,) = log_of(line).primitives
    assert primitive.work == work
    assert primitive.unit == "matrix"
    assert primitive.time_us == pytest.approx(float(line.rsplit(",", 1)[1]) * 1000)


@pytest.mark.parametrize(
    ("implementation", "unit"),
    [
        ("brg_matmul:avx10_1_512_amx", "matrix"),
        ("brgconv:avx512_core_amx_fp16", "matrix"),
        ("jit_bf16:avx512_core_bf16", "vector"),
        ("brg_matmul:avx512_core_bf16", "vector"),
        ("gemm:jit:f32", "vector"),
        ("ref:any", "vector"),
        ("acl", "unknown"),
    ],
)
def test_the_unit_an_implementation_uses(implementation, unit):
    (primitive,) = log_of(product(implementation)).primitives
    assert primitive.unit == unit


def test_older_and_stamped_lines():
    plain = product()
    old = plain.replace("v1,primitive,", "").replace("src:", "src_").replace("wei:", "wei_")
    stamped = plain.replace("v1,primitive,", "v1,1790857026.25,primitive,")
    assert log_of(plain).primitives == log_of(old).primitives == log_of(stamped).primitives


@pytest.mark.parametrize("cut", [40, 80, 150])
def test_a_line_cut_short_is_counted_not_believed(cut):
    log = log_of(product()[:cut] + "\n", product().replace("1.0\n", "soon\n"), "something else\n")
    assert log.primitives == ()
    assert log.damaged == 2


# -- operators -------------------------------------------------------------------------------------


def event(name, start, end, tid=1, cat="cpu_op", **args):
    return {
        "ph": "X",
        "cat": cat,
        "name": name,
        "ts": start,
        "dur": end - start,
        "tid": tid,
        "args": args,
    }


def test_times_add_up_and_go_to_the_innermost_matrix_work():
    shapes = {"Input Dims": [[4, 8], [8, 2]], "Input type": ["float", "float"]}
    linear = {"Input Dims": [[4, 8], [2, 8]], "Input type": ["float", "float"]}
    events = [
        event("nn.Module: head", 0, 100, cat="python_function"),
        event("aten::linear", 10, 90, **linear),
        event("aten::mm", 20, 70, **shapes, **{"Sequence number": 3, "Fwd thread id": 0}),
        event("aten::empty", 30, 40),
        event("MmBackward0", 200, 300, 2, **{"Sequence number": 3, "Fwd thread id": 1}),
        event("aten::mm", 210, 290, 2, **shapes),
        event("aten::add", 400, 410),
        {"ph": "X", "name": "damaged", "ts": "now"},
        {"ph": "i", "name": "mark"},
    ]
    found = {(o.op, o.module, o.phase): o for o in operator_times(events)}
    assert {key: o.time_us for key, o in found.items()} == {
        ("aten::mm", "head", "forward"): 50,  # what it allocates is its own
        ("aten::linear", "head", "forward"): 30,
        ("aten::mm", "head", "backward"): 80,
        ("MmBackward0", "head", "backward"): 20,
        ("aten::add", "", ""): 10,
    }
    assert found["aten::mm", "head", "forward"].work == matmul(4, 2, 8, dtype="fp32")
    assert found["aten::linear", "head", "forward"].work is None


# -- joined ----------------------------------------------------------------------------------------


def test_a_primitive_is_found_by_shape_and_dtype():
    log = log_of(product(), product("brg_matmul:avx512_core", "f32"), REORDER)
    times = [
        time_of(matmul(32, 64, 1024, dtype="bf16"), 600),
        time_of(matmul(64, 32, 1024, dtype="bf16"), 100),  # oneDNN may compute the transposed one
        time_of(matmul(32, 64, 1024, dtype="fp32"), 200),
        time_of(matmul(9, 9, 9, dtype="bf16"), 50),
        time_of(None, 50, "aten::relu"),
    ]
    profile = join(times, log, AMX, steps=2)
    document = profile.to_json()
    assert json.loads(json.dumps(document, allow_nan=False)) == document
    assert document["source"] == "onednn"
    assert document["kernel_time_us"] == 1000
    assert document["tensor_core_fraction"] == pytest.approx(0.7)
    assert document["matrix_cuda_core_fraction"] == pytest.approx(0.2)
    assert document["unknown_fraction"] == pytest.approx(0.05)
    assert document["layout_fraction"] == pytest.approx(0.25)
    assert document["linked_fraction"] == pytest.approx(900 / 950)
    assert [o["verdict"] for o in document["operations"]] == [
        "tensor_core", "tensor_core", "cuda_core", "unknown", "other",
    ]  # fmt: skip
    assert [o["cause"] for o in document["operations"]] == [
        "none",
        "none",
        "dtype",
        "unknown",
        "outside",
    ]
    assert document["operations"][2]["amdahl_bound"] == pytest.approx(1 / 0.8)
    assert {k["verdict"] for k in document["kernels"]} == {"tensor_core", "cuda_core", "layout"}
    assert profile.verdict.startswith("70.0 % of operator time is on the matrix unit")


def test_both_gradients_of_a_convolution_are_found_by_one_of_them():
    log = log_of(CONVOLUTION.format(direction="backward_data", groups=""))
    work = convolution(8, (16, 32), 9, (196, 144), dtype="bf16", direction="backward")
    profile = join([time_of(work, op="aten::convolution_backward")], log, AMX)
    assert profile.operations[0].evidence == "onednn: brgconv:avx512_core_amx"


def test_fp32_that_the_log_leaves_out_was_not_on_the_matrix_unit():
    profile = join([time_of(matmul(4, 4, 4, dtype="fp32"))], log_of(), AMX)
    assert profile.operations[0].verdict == "cuda_core"
    assert "AMX has no FP32" in profile.operations[0].evidence
    codes = {f["code"] for f in profile.findings}
    assert codes == {"matrix-unit-idle", "no-log"}
    assert "BF16" in profile.operations[0].fix


@pytest.mark.parametrize(
    ("work", "line"),
    [
        (matmul(4, 4, 4, dtype="fp32"), 'torch.set_float32_matmul_precision("medium")'),
        (
            convolution(8, (16, 32), 9, (196, 144), dtype="fp32"),
            'torch.backends.mkldnn.conv.fp32_precision = "bf16"',
        ),
        (
            recurrent(2, 5, (16, 32), 4, dtype="fp32"),
            'torch.backends.mkldnn.rnn.fp32_precision = "bf16"',
        ),
        (matmul(4, 4, 4, dtype="fp64"), "run it in BF16 (torch.autocast)"),
    ],
)
def test_the_line_that_brings_fp32_onto_the_matrix_unit(work, line):
    """The training stays in FP32 but for its products, and what BF16 loses there is to be judged."""
    (operation,) = join([time_of(work)], log_of(), AMX).operations
    assert operation.fix.startswith(line)
    if work.dtype == "fp32":
        assert "multiplies in BF16 on AMX" in operation.fix
        assert "mpdiag analyze RUN --target bf16" in operation.fix
        (idle,) = [
            f for f in join([time_of(work)], log_of(), AMX).findings if f["severity"] == "warning"
        ]
        assert idle["fix"] == operation.fix


def test_fp32_that_is_multiplied_in_bf16_is_said_to_be():
    line = product("brg_matmul:avx10_1_512_amx", "f32").replace(
        "attr-scratchpad:user", "attr-scratchpad:user attr-fpmath:bf16"
    )
    profile = join([time_of(matmul(32, 64, 1024, dtype="fp32"))], log_of(line), AMX)
    assert profile.operations[0].verdict == "tensor_core"
    assert profile.operations[0].evidence.endswith("amx, FP32 multiplied in BF16")
    (finding,) = profile.findings
    assert (finding["code"], finding["evidence"]["formats"]) == ("fp32-multiplied-lower", ["BF16"])
    # What is allowed need not be used: on a vector unit it is not.
    vector = line.replace("avx10_1_512_amx", "avx512_core")
    assert join([], log_of(vector), AMX).findings == ()


def test_what_amx_multiplies_is_what_this_one_has():
    known = CpuInstructions("x86", frozenset({"amx_tile", "amx_bf16", "amx_int8"}))
    device = CpuFacts("Xeon", has_amx=True, has_avx512_bf16=True, instructions=known)
    (operation,) = join([time_of(matmul(4, 4, 4, dtype="fp16"))], log_of(), device).operations
    assert (operation.verdict, operation.cause) == ("cuda_core", "dtype")
    assert "AMX multiplies BF16, INT8" in operation.fix


@pytest.mark.parametrize(("apple", "words"), [(True, "Apple's"), (False, "SME")])
def test_a_matrix_unit_that_nobody_reports_is_unknown(apple, words):
    known = CpuInstructions("arm", frozenset({"neon", "sme"}), apple=apple)
    device = CpuFacts("Arm", has_amx=False, has_avx512_bf16=False, instructions=known)
    profile = join([time_of(matmul(4, 4, 4, dtype="fp32"))], log_of(), device)
    assert profile.operations[0].verdict == "unknown"
    assert words in profile.verdict


def test_a_cpus_units_have_their_own_words():
    log = log_of(product(), product("brg_matmul:avx512_core", "f32"), REORDER)
    times = [time_of(matmul(32, 64, 1024, dtype=d)) for d in ("bf16", "fp32")]
    document = join(times, log, AMX).to_json()
    assert [o["unit"] for o in document["operations"]] == ["matrix unit", "vector unit"]
    assert {k["unit"] for k in document["kernels"]} == {
        "matrix unit", "vector unit", "layout conversion",
    }  # fmt: skip
    assert document["matrix_unit_fraction"] == document["tensor_core_fraction"]
    assert document["vector_unit_fraction"] == document["matrix_cuda_core_fraction"]


def test_a_cpu_without_a_matrix_unit_says_so():
    profile = join([time_of(matmul(4, 4, 4, dtype="bf16"))], log_of(), NONE)
    assert profile.verdict.startswith("No matrix unit")
    assert profile.operations[0].cause == "no_tensor_cores"
    assert profile.tensor_core_fraction == 0
    assert {f["code"] for f in profile.findings} == {"no-matrix-unit", "no-log"}
    assert join([], log_of(), NONE).to_json()["kernel_time_us"] == 0


def test_sizes_that_tensor_cores_could_not_read():
    """One padded size wherever a size occurs: the one that a group of four needs holds for all."""
    grouped = convolution(8, (36, 36), 9, (196, 144), groups=3, dtype="fp32")
    linear = matmul(128, 36, 64, dtype="fp32")
    tiny, vector = matmul(5, 5, 63, dtype="fp32"), matmul(1, 1001, 63, dtype="fp32")
    times = [time_of(w) for w in (grouped, linear, tiny, vector, matmul(128, 64, 64, dtype="fp32"))]
    document = join(times, log_of(), NONE).to_json()
    padded = [{p["size"]: p["padded"] for p in o["padded"]} for o in document["operations"]]
    assert padded == [{36: 48}, {36: 48}, {}, {}, {}]
    assert [o["aligned"] for o in document["operations"]] == [False, False, None, None, True]
    (finding,) = [f for f in document["findings"] if f["code"] == "shapes-for-tensor-cores"]
    assert finding["evidence"]["sizes"] == [{"size": 36, "padded": 48}]
    assert "2 products (40" in finding["message"]
    assert "36 → 48" in finding["message"]
    image = [time_of(convolution(8, (3, 64), 9, (196, 144), dtype="fp32"))]
    first = join(image, log_of(), NONE).to_json()["operations"][0]
    assert (first["padded"], first["aligned"]) == ([], None)  # 3 → 8 is 167 % more work
    few = [time_of(linear, 1.0), time_of(matmul(128, 64, 64, dtype="fp32"), 1000.0)]
    codes = {f["code"] for f in join(few, log_of(), NONE).findings}
    assert "shapes-for-tensor-cores" not in codes
