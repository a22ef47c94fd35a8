"""What the GPU sections make of a card's answers: stand-ins for NVML, ncu and finished trainings."""

from __future__ import annotations

import json
import math
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
if str(BENCHMARKS) not in sys.path:
    sys.path.append(str(BENCHMARKS))

from gpu_sections import (  # noqa: E402
    counters,
    device,
    document,
    families,
    files,
    matrix_cases,
    memory,
    page,
    programs,
    runner,
    tensor_cores,
)
from gpu_sections.child import Context  # noqa: E402

from mpdiag.errors import DamagedTrace  # noqa: E402
from mpdiag.hardware.devices import DeviceFacts, NvmlReading  # noqa: E402


def card(part: str, tmp_path, seconds: float = 100.0) -> Context:
    """The context of a part on a card."""
    ends = time.monotonic() + seconds
    return Context(part, "cuda", False, tmp_path / "report.jsonl", tmp_path, ends)


def said(context: Context) -> dict[str, dict]:
    """What was reported of each promise."""
    return {x["promise"]: x for x in runner.lines(context.report) if "promise" in x}


# -- (e) -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("value", "held"), [("1,048,576", True), ("0", False), ("n/a", None)])
def test_a_metric_that_a_card_does_not_have_breaks_no_promise(tmp_path, value, held):
    context = card("e-counters", tmp_path)
    table = tmp_path / "counters.csv"
    first = "\n".join(counters.SAMPLE.splitlines()[:2])  # up to the kernel on Tensor Cores
    table.write_text(first.replace('"1,048,576"', f'"{value}"') + "\n", encoding="utf-8")
    assert counters.check(context, table) is (held is not None)
    assert said(context).get("e-counters", {"held": None})["held"] is held


def test_ncu_without_permission_is_not_testable_and_says_why(tmp_path, monkeypatch):
    context = card("e-counters", tmp_path)
    refusal = "==ERROR== ERR_NVGPUCTRPERM - The user does not have permission\n"

    def run(words, seconds, folder=None):
        Path(words[words.index("--log-file") + 1]).write_text(refusal, encoding="utf-8")
        return programs.Ran(1, "", "")

    monkeypatch.setattr(counters.shutil, "which", lambda name: name)
    monkeypatch.setattr(programs, "run", run)
    counters.compare(context)
    found = said(context)["e-counters"]
    assert found["held"] is None
    assert "ERR_NVGPUCTRPERM" in found["reason"]


def test_a_case_whose_profile_fails_leaves_the_others_judged(tmp_path, monkeypatch):
    shares = {"tensor_core_fraction": 0.0, "unknown_fraction": 0.0, "kernels": []}
    shares["matrix_cuda_core_fraction"] = 1.0
    answers = iter([DamagedTrace("no kernel"), {**shares, "kernels": []}])

    def profiled(ctx, run, model=None):
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    made = [matrix_cases.Case(name, "fp32", 1.0, lambda: lambda: None, never=True) for name in "ab"]
    monkeypatch.setattr(matrix_cases, "cases", lambda *_: made)
    monkeypatch.setattr(tensor_cores, "profiled", profiled)
    monkeypatch.setattr(tensor_cores, "kernel_seconds", lambda *_: 1.0)
    monkeypatch.setattr(tensor_cores, "device_facts", lambda _: DeviceFacts("NVIDIA H200", (9, 0)))
    context = card("e-verdicts", tmp_path)
    tensor_cores.compare_verdicts(context)
    found = said(context)["e-verdicts"]
    assert found["held"] is False
    assert "a (the profile failed: no kernel)" in found["reason"]
    assert found["figure"] == "1 of 1 proven cases agree, 0 of all 1 unknown"


def test_where_torch_itself_sees_no_kernel_nothing_is_broken(tmp_path, monkeypatch):
    monkeypatch.setattr(tensor_cores, "kernels_are_seen", lambda _: False)
    context = card("e-verdicts", tmp_path)
    tensor_cores.judge(context)
    assert {k: v["held"] for k, v in said(context).items()} == {
        "e-verdicts": None,
        "e-padding": None,
        "e-trainer": None,
    }


def test_no_time_for_a_trace_is_no_crash(tmp_path, monkeypatch):
    monkeypatch.setattr(tensor_cores, "capture", lambda ctx, folder: ctx.skip("so", "e-command"))
    context = card("e-command", tmp_path, seconds=5.0)
    tensor_cores.run_command(context)
    assert {"note": "no trace was kept: there was no time for it"} in runner.lines(context.report)


def test_ncu_runs_an_lstm_of_few_steps():
    flops = [
        {case.name: case.flops for case in matrix_cases.cases("cpu", size)}
        for size in ("once", "full")
    ]
    assert flops[0]["LSTM FP16"] == flops[1]["LSTM FP16"] / 8
    assert flops[0]["product FP16"] == flops[1]["product FP16"]


# -- (f) -------------------------------------------------------------------------------------------


class NVMLError(Exception):
    """What a call that is not permitted raises."""


def refused(*_):
    raise NVMLError("insufficient permissions")


def nvml(**calls: object) -> SimpleNamespace:
    """A stand-in for pynvml with two GPUs, on buses 1 and 2."""
    made = {
        "NVMLError": NVMLError,
        "NVML_CLOCK_SM": 1,
        "NVML_CLOCK_MEM": 2,
        "NVML_TEMPERATURE_GPU": 0,
        "nvmlInit": lambda: None,
        "nvmlShutdown": lambda: None,
        "nvmlDeviceGetCount": lambda: 2,
        "nvmlDeviceGetHandleByIndex": lambda index: index,
        "nvmlDeviceGetName": lambda handle: "NVIDIA H200",
        "nvmlDeviceGetPciInfo": lambda handle: SimpleNamespace(domain=0, bus=handle + 1, device=0),
        "nvmlSystemGetDriverVersion": lambda: "580.1",
        "nvmlDeviceGetClockInfo": lambda handle, clock: 1980,
        "nvmlDeviceGetMaxClockInfo": lambda handle, clock: 1980,
        "nvmlDeviceGetPowerUsage": lambda handle: 400_000,
        "nvmlDeviceGetEnforcedPowerLimit": lambda handle: 700_000,
        "nvmlDeviceGetTemperature": lambda handle, sensor: 50,
        "nvmlDeviceGetCurrentClocksEventReasons": lambda handle: 4,
    }
    return SimpleNamespace(**{**made, **calls})


HERE = SimpleNamespace(
    name="NVIDIA H200", major=9, minor=0, total_memory=150_000_000_000,
    pci_domain_id=0, pci_bus_id=2, pci_device_id=0,
)  # fmt: skip
GPU = DeviceFacts(
    "NVIDIA H200", (9, 0), memory_bytes=150_700_000_000, driver="580.1", clock_mhz=1980,
    max_clock_mhz=1980, memory_clock_mhz=3201, power_watts=400.0, power_limit_watts=700.0,
    temperature=50,
)  # fmt: skip


@pytest.fixture
def on_card(monkeypatch, tmp_path):
    """A card on the second bus; returns what sets NVML's reading and calls."""
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: HERE)

    def set_up(*gpus: DeviceFacts, **calls: object) -> Context:
        monkeypatch.setitem(sys.modules, "pynvml", nvml(**calls))
        monkeypatch.setattr(device, "read_nvml", lambda: NvmlReading(gpus))
        return card("f-device", tmp_path)

    return set_up


def test_facts_are_those_of_the_device_on_torchs_bus(on_card):
    context = on_card(DeviceFacts("NVIDIA A10", (8, 6)), GPU)
    device.compare_facts(context)
    assert said(context)["f-nvml"]["held"] is True
    assert "1980 of 1980 MHz" in said(context)["f-nvml"]["figure"]


def test_a_fact_that_nvml_refuses_is_not_ours_to_read(on_card):
    from dataclasses import replace

    quiet = replace(GPU, power_watts=None)
    context = on_card(GPU, quiet, nvmlDeviceGetPowerUsage=refused)
    device.compare_facts(context)
    found = said(context)["f-nvml"]
    assert (found["held"], found["reason"]) == (True, "NVML itself refuses power_watts")


def test_a_fact_that_nvml_gives_and_we_do_not_read_breaks_the_promise(on_card):
    from dataclasses import replace

    context = on_card(GPU, replace(GPU, power_watts=None))
    device.compare_facts(context)
    found = said(context)["f-nvml"]
    assert (found["held"], found["reason"]) == (False, "not read: power_watts")


def test_a_slice_of_a_gpu_is_not_compared(on_card):
    from dataclasses import replace

    context = on_card(GPU, replace(GPU, mig=True))
    device.compare_facts(context)
    assert said(context)["f-nvml"]["held"] is None


@pytest.mark.parametrize(
    ("bits", "words", "held"),
    [
        (0, (), None),
        (0x1 | 0x2 | 0x100, (), None),
        (0x4, ("the software power cap holds clocks down",), True),
        (0x4, (), False),
        (0x4 | 0x200, ("the software power cap holds clocks down",), False),
    ],
)
def test_reasons_are_held_against_the_bits_themselves(tmp_path, bits, words, held):
    context = card("f-device", tmp_path)
    device.report_load(context, [GPU], [(bits, words)])
    found = said(context)["f-throttling"]
    assert found["held"] is held
    assert ("0x200" in found["reason"]) == (bits > 0x200)


def test_an_old_driver_gives_its_reasons_under_their_old_name(monkeypatch):
    old = nvml(
        nvmlDeviceGetCurrentClocksEventReasons=refused,
        nvmlDeviceGetCurrentClocksThrottleReasons=lambda handle: 8,
    )
    monkeypatch.setitem(sys.modules, "pynvml", old)
    assert device.raw_bits(0) == 8


@pytest.mark.parametrize(("how", "fits"), [("tensor cores", True), ("no", False)])
def test_formats_fit_the_capability(monkeypatch, how, fits):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA H200")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    names = ("fp16", "bf16", "tf32", "fp8")
    found = [{"device": "NVIDIA H200", "format": name, "how": "tensor cores"} for name in names]
    found[-1]["how"] = how
    assert device.abilities_fit(found) is fits


# -- (g) and (i) -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("used", "held"), [([0.9, 1.0], True), ([0.9], None), ([], None), ([1.2], False)]
)
def test_a_batch_that_was_not_tried_is_not_said_to_fit(tmp_path, used, held):
    context = card("g-memory", tmp_path)
    memory.report_batches(context, "g-batch-gpt", used, ["O1: one", "O2: other"])
    assert said(context)["g-batch-gpt"]["held"] is held


@pytest.mark.parametrize(
    ("measured", "held"),
    [
        ({"O0": 100}, None),
        ({"O0": 100, "O1": 75}, True),
        ({"O0": 100, "O1": 120}, False),
        ({"O0": 150}, False),
    ],
)
def test_levels_that_were_not_measured_are_not_said_to_be_near(tmp_path, measured, held):
    context = card("g-memory", tmp_path)
    advice = {"O0": SimpleNamespace(memory_bytes=110), "O1": SimpleNamespace(memory_bytes=80)}
    memory.report_levels(context, "g-memory-gpt", advice, measured)
    assert said(context)["g-memory-gpt"]["held"] is held


def log(metric: float, loss: float, stopped: str = "") -> families.Log:
    return families.Log(metric, (9.0, 9.0, 9.0, 9.0, loss), stopped)


@pytest.mark.parametrize(
    ("plan", "held"),
    [
        (log(300.0, 2.1), True),  # few steps: the metric is not there yet
        (log(201.0, 3.0), True),
        (log(300.0, 3.0), False),
        (log(200.0, 2.0, "no scale fits"), False),
        (log(math.nan, math.nan), False),
    ],
)
def test_a_few_steps_are_judged_by_their_loss_or_their_metric(tmp_path, plan, held):
    context = card("i-families", tmp_path)
    logs = {"ssd": log(200.0, 2.0), "ssd-fp16-plan": plan}
    families.judge(context, "i-ssd", 5, 4.0, logs)
    assert said(context)["i-ssd"]["held"] is held


def test_a_log_is_read_with_its_losses_that_are_no_numbers(tmp_path):
    entries = [{"step": 0, "loss": 1.0}, {"step": 1, "loss": "nan"}, {"step": 2, "loss": None}]
    entries += [{"metric": "mAP", "value": "inf"}, {"stopped": "too small"}]
    text = "".join(json.dumps(entry) + "\n" for entry in entries)
    (tmp_path / "training.jsonl").write_text(text, encoding="utf-8")
    found = families.log_of(tmp_path)
    assert (found.metric, found.stopped, len(found.losses)) == (math.inf, "too small", 3)
    assert math.isnan(found.last)


# -- results ---------------------------------------------------------------------------------------


def test_a_full_pass_comes_before_a_later_quick_one(tmp_path):
    for mode, date in (("full", "2026-01-01"), ("quick", "2026-02-02")):
        facts = {"date": date, "device": {"name": "Card"}, "versions": {}}
        document.save(tmp_path / f"gpu-card-{mode}.json", document.new(mode, facts, {}))
    assert page.last_pass(tmp_path)["mode"] == "full"


def test_files_of_another_pass_are_not_listed(tmp_path):
    for name in ("gpu-card-quick.json", "gpu-card-quick-trace.json.gz", "gpu-card-runs.zip"):
        (tmp_path / name).write_text("")
    (tmp_path / "keep").mkdir()
    assert files.publish(tmp_path / "keep", tmp_path / "gpu-card") == ["gpu-card-runs.zip"]


# -- (a) to (d) -------------------------------------------------------------------------------------


def test_losses_that_are_no_numbers_are_far_apart():
    from gpu_sections.compiled import furthest

    assert furthest([1.0, 2.2], [1.0, 2.0]) == pytest.approx(0.1)
    assert furthest([1.0, float("nan")], [1.0, 2.0]) == float("inf")


@pytest.mark.parametrize(
    ("over", "notes", "absent", "held"),
    [
        ({"O1 FP16": 0.5, "O2 FP16": 0.4}, [], False, True),
        ({"O1 FP16": 0.5, "O2 FP16": 1.1}, [], False, False),
        ({"O1 FP16": 0.5}, ["O3 FP16 diverged: at step 3"], False, False),
        ({"O1 FP16": 0.5}, ["O1 FP16 skipped 1 steps"], False, True),
        ({"O1 FP16": 0.5}, [], True, None),
        ({"O1 FP16": 1.5}, [], True, False),
    ],
)
def test_levels_that_were_not_timed_hold_nothing(over, notes, absent, held, tmp_path):
    from gpu_sections.training import report_levels

    context = card("d-steps", tmp_path)
    report_levels(context, "gpt", over, notes, absent=absent)
    assert said(context)["d-levels-gpt"]["held"] is held


@pytest.mark.parametrize(("scale", "held"), [(8.0, True), (1.0, None)])
def test_a_plan_without_a_scale_is_no_test_of_one(scale, held, tmp_path):
    from gpu_sections.native import Trained, compare_endings

    from mpdiag.plan import LossScalePlan, PrecisionPlan

    method = "constant" if scale > 1 else "none"
    plan = PrecisionPlan(loss_scale=LossScalePlan(method=method, init_scale=scale))
    native, bare = (Trained([x] * 10, [scale] * 10, 0, None, "") for x in (1.01, 1.2))
    context = card("c-ssd", tmp_path)
    compare_endings(context, "ssd", [1.0] * 10, native, bare, plan)
    assert said(context)["c-plan-ssd"]["held"] is held


def test_without_a_c_compiler_nothing_is_broken(tmp_path):
    context = card("a-counting", tmp_path)
    with context.settling("a-counts"):
        raise RuntimeError("Failed to find C compiler. Please specify via CC environment variable")
    found = said(context)["a-counts"]
    assert found["held"] is None
    assert "C compiler" in found["reason"]


def test_variants_take_turns_only_as_long_as_they_may(tmp_path):
    from gpu_sections.measuring import in_turns

    calls = []
    here = replace(card("b-steps", tmp_path), device="cpu")
    steps = {"one": lambda: calls.append(1) or time.sleep(0.02)}
    in_turns(here, steps, rounds=50, count=1, warm=0, seconds=0.1)
    assert 1 <= len(calls) <= 5
