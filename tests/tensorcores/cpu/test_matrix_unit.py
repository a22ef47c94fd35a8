"""The matrix unit of a CPU: oneDNN's log read, and joined with operator times by shape."""

import json
import os
from pathlib import Path

import pytest
from calls import printed
from goldens import assert_as_kept
from tensorcores.traces import module, op

from mpdiag.hardware.cpu_instructions import CpuInstructions
from mpdiag.hardware.tables import read_table
from mpdiag.tensorcores.cpu import onednn
from mpdiag.tensorcores.cpu.matrix_unit import CpuFacts, join
from mpdiag.tensorcores.cpu.onednn import StdoutCapture, read_log
from mpdiag.tensorcores.cpu.operators import operator_times
from mpdiag.tensorcores.reports.profile import cpu_profile_text
from mpdiag.tensorcores.work.products import convolution, matmul, recurrent
from mpdiag.tensorcores.work.traced_operation import OperationTime

HERE = Path(__file__).parent
LOG = HERE / "onednn_log.txt"
LINES = LOG.read_text(encoding="utf-8").splitlines(keepends=True)
HEAD, PRODUCT, REORDER = LINES[:4], LINES[4], LINES[-1]
ARM = frozenset({"neon", "sme"})
DEVICES = {
    "AMX": CpuFacts("Xeon", has_amx=True, has_avx512_bf16=True),
    "no AMX": CpuFacts("EPYC", has_amx=False, has_avx512_bf16=True),
    "AMX of BF16 and INT8": CpuFacts(
        "Xeon", True, True, instructions=CpuInstructions(frozenset({"amx_bf16", "amx_int8"}))
    ),
    "SME": CpuFacts("Arm", False, False, instructions=CpuInstructions(ARM)),
    "Apple": CpuFacts("M3", False, False, instructions=CpuInstructions(ARM, apple=True)),
}
AMX, NONE = DEVICES["AMX"], DEVICES["no AMX"]


def log_of(*lines):
    return read_log([*HEAD, *lines])


def work_of(text):
    """``matmul M N K [BATCH] DTYPE``, ``convolution DIRECTION GROUPS DTYPE``, ``rnn …`` or none."""
    kind, *sizes, dtype = text.split() if text not in ("", "none") else ("none", "")
    if kind == "matmul":
        return matmul(*map(int, sizes), dtype=dtype)
    if kind == "convolution":
        direction, groups = sizes
        ends, pixels = (16, 32), (196, 144)
        return convolution(8, ends, 9, pixels, groups=int(groups), dtype=dtype, direction=direction)
    if kind == "rnn":
        batch, steps, entering, hidden = map(int, sizes)
        return recurrent(batch, steps, (entering, hidden), 4, dtype=dtype)
    return None


def time_of(work, us=1000.0, op="aten::addmm"):
    return OperationTime(op, "head", work, None, 1, us, phase="forward")


def test_a_log():
    log = read_log(LINES)
    assert log.version.startswith("v3.12.0")
    assert "Intel AMX" in log.isa
    assert log.damaged == 0
    rows = read_table(HERE / "primitives.tsv")
    for line, primitive, row in zip(LINES[4:], log.primitives, rows, strict=True):
        assert primitive.implementation == row["implementation"]
        assert primitive.work == work_of(row["work"]), line
        assert (primitive.unit, primitive.reduced or "") == (row["unit"], row["reduced"]), line
        assert primitive.time_us == pytest.approx(float(line.rsplit(",", 1)[1]) * 1000)


def test_older_and_stamped_lines():
    old = PRODUCT.replace("v1,primitive,", "").replace("src:", "src_").replace("wei:", "wei_")
    stamped = PRODUCT.replace("v1,primitive,", "v1,1790857026.25,primitive,")
    assert log_of(PRODUCT).primitives == log_of(old).primitives == log_of(stamped).primitives


@pytest.mark.parametrize("cut", [40, 80, 150])
def test_a_line_cut_short_is_counted_not_believed(cut):
    log = log_of(PRODUCT[:cut] + "\n", PRODUCT.replace(",1\n", ",soon\n"), "something else\n")
    assert log.primitives == ()
    assert log.damaged == 2


@pytest.fixture
def captured(monkeypatch):
    """What ``StdoutCapture`` returns where a text is printed, in a process of its own."""
    monkeypatch.setattr(onednn, "_introduction", [])

    def capture(*lines: str) -> list[str]:
        stdout = StdoutCapture()
        stdout.open()
        os.write(1, "".join(lines).encode())
        lines = stdout.close()
        assert stdout.close() == []
        return lines

    return capture


def test_what_onednn_says_once_leads_each_capture(captured, capfd):
    first = read_log(captured(*HEAD, "mine\n", PRODUCT))
    second = read_log(captured("and mine\n", PRODUCT, PRODUCT))
    assert first.version.startswith("v3.12.0")
    assert (second.version, second.isa) == (first.version, first.isa)
    assert (len(first.primitives), len(second.primitives)) == (1, 2)
    assert captured("mine too\n") == []
    assert capfd.readouterr().out == "mine\nand mine\nmine too\n"


def test_a_script_that_let_it_speak_before_leaves_it_unknown(captured, capfd):
    assert read_log(captured(PRODUCT)).version is None
    assert capfd.readouterr().out == ""


def test_times_add_up_and_go_to_the_innermost_matrix_work():
    shapes = {"Input Dims": [[4, 8], [8, 2]], "Input type": ["float", "float"]}
    linear = {"Input Dims": [[4, 8], [2, 8]], "Input type": ["float", "float"]}
    events = [
        module("head", 0, 100),
        op("aten::linear", 10, 90, **linear),
        op("aten::mm", 20, 70, **shapes, **{"Sequence number": 3, "Fwd thread id": 0}),
        op("aten::empty", 30, 40),
        op("MmBackward0", 200, 300, 2, **{"Sequence number": 3, "Fwd thread id": 1}),
        op("aten::mm", 210, 290, 2, **shapes),
        op("aten::add", 400, 410),
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


def test_a_profile():
    """Time on each unit by shape and dtype, in the words of a GPU's profile and in a CPU's own."""
    log = log_of(PRODUCT, LINES[12].replace(" attr-fpmath:bf16", ""), REORDER)
    times = [
        time_of(matmul(32, 64, 1024, dtype="bf16"), 600),
        time_of(matmul(64, 32, 1024, dtype="bf16"), 100),  # oneDNN may compute the transposed one
        time_of(matmul(32, 64, 1024, dtype="fp32"), 200),
        time_of(matmul(9, 9, 9, dtype="bf16"), 50),
        time_of(None, 50, "aten::relu"),
    ]
    profile = join(times, log, AMX, steps=2)
    document = json.dumps(profile.to_json(), indent=1, allow_nan=False)
    assert_as_kept(HERE / "profile.json", document)
    assert_as_kept(HERE / "profile.txt", printed(cpu_profile_text(profile)))
    nothing = join([], log_of(), AMX)  # a finding, and its fix on a line of its own
    assert_as_kept(HERE / "nothing.txt", printed(cpu_profile_text(nothing)))


def test_an_advice_is_given_once():
    """At the operation that takes most time; below, it is pointed to."""
    times = [time_of(None, us, name) for us, name in ((50, "aten::relu"), (30, "aten::add_"))]
    told = " ".join(printed(cpu_profile_text(join(times, log_of(), NONE))).split())
    assert told.count("torch.compile fuses what") == 1
    assert told.count("as above") == 1


@pytest.mark.parametrize(
    "row", read_table(HERE / "operations.tsv"), ids=lambda row: f"{row['device']}: {row['work']}"
)
def test_what_is_said_of_an_operation(row):
    profile = join([time_of(work_of(row["work"]))], read_log(LINES), DEVICES[row["device"]])
    (operation,) = profile.operations
    said = (operation.verdict, operation.cause, operation.evidence, operation.fix)
    assert said == (row["verdict"], row["cause"], row["evidence"], row["fix"])
    idle = [f["fix"] for f in profile.findings if f["code"] == "matrix-unit-idle"]
    assert idle == ([row["fix"]] if row["cause"] == "dtype" else [])


@pytest.mark.parametrize(
    ("device", "words", "codes"),
    [
        ("AMX", "0 % of operator time is on the matrix unit (AMX), 0 %", {"no-log"}),
        ("no AMX", "No matrix unit: this CPU has no AMX; 0 %", {"no-log", "no-matrix-unit"}),
        ("SME", "Whether this CPU's matrix unit (SME) was used is not known", {"no-log"}),
        ("Apple", "Whether this CPU's matrix unit (Apple's) was used is not", {"no-log"}),
    ],
)
def test_a_profile_of_nothing(device, words, codes):
    profile = join([], log_of(), DEVICES[device])
    assert profile.verdict.startswith(words)
    assert (profile.tensor_core_fraction, profile.to_json()["kernel_time_us"]) == (0, 0)
    assert {f["code"] for f in profile.findings} == codes


def test_fp32_that_is_multiplied_in_bf16_is_said_to_be():
    lower, allowed = LINES[13], LINES[12]
    (finding,) = join([], log_of(lower), AMX).findings
    assert (finding["code"], finding["evidence"]["formats"]) == ("fp32-multiplied-lower", ["BF16"])
    assert join([], log_of(allowed), AMX).findings == ()  # on a vector unit it is not used


def test_sizes_that_tensor_cores_could_not_read():
    """One padded size wherever a size occurs: the one that a group of four needs holds for all."""
    grouped = convolution(8, (36, 36), 9, (196, 144), groups=3, dtype="fp32")
    linear = matmul(128, 36, 64, dtype="fp32")
    tiny, vector = matmul(5, 5, 63, dtype="fp32"), matmul(1, 1001, 63, dtype="fp32")
    times = [time_of(w) for w in (grouped, linear, tiny, vector, matmul(128, 64, 64, dtype="fp32"))]
    document = join(times, log_of(), NONE).to_json()
    assert_as_kept(HERE / "padded.json", json.dumps(document, indent=1, ensure_ascii=False))
    image = [time_of(convolution(8, (3, 64), 9, (196, 144), dtype="fp32"))]
    first = join(image, log_of(), NONE).to_json()["operations"][0]
    assert (first["padded"], first["aligned"]) == ([], None)  # 3 → 8 is 167 % more work
    few = [time_of(linear, 1.0), time_of(matmul(128, 64, 64, dtype="fp32"), 1000.0)]
    codes = {f["code"] for f in join(few, log_of(), NONE).findings}
    assert "shapes-for-tensor-cores" not in codes
