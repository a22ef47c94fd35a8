"""Live capture: the window, the names, the script in its child; on this machine's CPU for real."""

import json
import threading

import pytest
import torch
from schemas import assert_described
from torch import nn
from torch.nn.modules import module as module_hooks

import mpdiag
from mpdiag.errors import UsageError
from mpdiag.tensorcores import step_profiler

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="what a CPU says; a GPU's capture is read as a trace"
)


# oneDNN computes BF16 from AVX-512 on; on older CPUs torch's own kernels do, which write no log.
BF16_IN_ONEDNN = torch.ops.mkldnn._is_mkldnn_bf16_supported()


def train(steps, after=lambda: None, model=None, bf16=True):
    model = model or nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(8 * 36, 4))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    for _ in range(steps):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            loss = model(torch.randn(4, 3, 8, 8)).sum()
        loss.backward()
        optimizer.step()
        after()


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_this_machine_says_what_ran_where(dtype):
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(8 * 36, 4))
    with mpdiag.profile(model, steps=2, warmup=1) as p:
        train(5, model=model, bf16=dtype == "bf16")
    assert (p.done, p.seen, p.measured) == (True, 5, 2)
    document = p.result.to_json()
    assert_described("profile", document)
    assert document["steps"] == 2
    assert document["device"]["has_amx"] == bool(torch.cpu._is_amx_tile_supported())
    operations = {(o["op"], o["module"], o["phase"]): o for o in document["operations"]}
    by_onednn = dtype == "fp32" or BF16_IN_ONEDNN
    forward = "aten::mkldnn_convolution" if by_onednn else "aten::_slow_conv2d_forward"
    backward = "aten::convolution_backward" if by_onednn else "aten::_slow_conv2d_backward"
    convolution = operations[forward, "0", "forward"]
    assert (convolution["m"], convolution["n"], convolution["k"]) == (4 * 36, 8, 27)
    assert convolution["dtype"] == dtype
    assert convolution["calls"] == 2
    assert bool(document["device"]["onednn"]) == by_onednn
    assert convolution["evidence"].startswith("onednn: ") == by_onednn
    assert operations[backward, "0", "backward"]["evidence"].startswith("onednn: ") == by_onednn
    if dtype == "bf16":  # FP32 products go to MKL
        linear = operations["aten::addmm", "2", "forward"]
        assert linear["evidence"].startswith("onednn: ") == by_onednn
    assert sum(o["time_us"] for o in document["operations"]) == pytest.approx(
        document["kernel_time_us"]
    )
    if not document["device"]["has_amx"]:
        assert document["tensor_core_fraction"] == 0
        assert document["matrix_cuda_core_fraction"] > 0


HAS_AMX = torch.cpu._is_amx_tile_supported()
_NO_AMX = pytest.mark.skipif(not HAS_AMX, reason="this CPU has no AMX: nothing can run on it")


@_NO_AMX
@pytest.mark.parametrize("kind", ["lstm", "depthwise"])
def test_what_amx_does_with_layers_that_are_no_plain_products(kind):
    """Whatever it is, it is told: oneDNN's log names the implementation of both."""
    layers = {
        "lstm": lambda: nn.LSTM(64, 64),
        "depthwise": lambda: nn.Conv2d(64, 64, 3, groups=64),
    }
    model = layers[kind]()
    x = torch.randn(8, 16, 64) if kind == "lstm" else torch.randn(4, 64, 16, 16)
    with torch.no_grad(), mpdiag.profile(model, steps=1, warmup=1) as p:
        while not p.done:
            with torch.autocast("cpu", torch.bfloat16):
                model(x)
            p.step()
    matrix = [o for o in p.result.operations if o.time.work is not None]
    assert any(o.evidence.startswith("onednn: ") for o in matrix)
    assert all(o.verdict != "unknown" for o in matrix)


@_NO_AMX
def test_medium_brings_fp32_products_onto_amx():
    before = torch.get_float32_matmul_precision()
    model = nn.Linear(256, 256)
    shares = {}
    try:
        for precision in ("highest", "medium"):
            torch.set_float32_matmul_precision(precision)
            with torch.no_grad(), mpdiag.profile(model, steps=1, warmup=1) as p:
                while not p.done:
                    model(torch.randn(256, 256))
                    p.step()
            shares[precision] = p.result.tensor_core_fraction
    finally:
        torch.set_float32_matmul_precision(before)
    assert shares["highest"] == 0 < shares["medium"]
    codes = {f["code"] for f in p.result.findings}
    assert "fp32-multiplied-lower" in codes


def test_nothing_is_left_behind(capfd):
    with mpdiag.profile(steps=1, warmup=0):
        train(2, after=lambda: print("mine"))
    assert module_hooks._global_forward_hooks == {}
    assert module_hooks._global_forward_pre_hooks == {}
    train(1)
    assert capfd.readouterr().out == "mine\nmine\n"  # nothing of oneDNN's, nothing lost


def test_steps_said_by_hand_count_once():
    with mpdiag.profile(steps=2, warmup=1) as p:
        train(4, after=p.step)
    assert (p.seen, p.measured) == (4, 2)


def test_inference_counts_by_hand():
    model = nn.Linear(4, 4)
    with torch.no_grad(), mpdiag.profile(model, steps=1, warmup=1) as p:
        while not p.done:
            model(torch.randn(2, 4))
            p.step()
    assert p.seen == 2
    assert "Linear" in {o.time.module for o in p.result.operations}


def test_of_two_optimizers_the_first_ones_steps_count():
    parameters = [nn.Parameter(torch.ones(2)) for _ in range(2)]
    optimizers = [torch.optim.SGD([p], 0.1) for p in parameters]
    with mpdiag.profile(steps=1, warmup=2) as p:
        for _ in range(3):
            for parameter, optimizer in zip(parameters, optimizers, strict=True):
                parameter.sum().backward()
                optimizer.step()
    assert (p.seen, p.measured) == (3, 1)


@pytest.mark.parametrize(
    ("steps", "sentence"), [(0, "no step was seen"), (2, "only 2 steps ran, and the first 2 are")]
)
def test_too_few_steps_are_one_sentence(steps, sentence):
    with mpdiag.profile(warmup=2) as p:
        train(steps)
    with pytest.raises(UsageError, match=sentence):
        _ = p.result


@pytest.mark.parametrize("wrong", [{"steps": 0}, {"steps": 1.5}, {"warmup": -1}, {"warmup": True}])
def test_numbers_that_make_no_sense(wrong):
    with pytest.raises(UsageError, match=next(iter(wrong))):
        mpdiag.profile(**wrong)


def test_the_callers_exception_goes_on():
    with pytest.raises(ZeroDivisionError), mpdiag.profile(steps=1, warmup=0):
        train(1)
        1 / 0  # noqa: B018


def test_a_trace_of_a_gpu_goes_to_the_reader_of_traces(tmp_path, monkeypatch):
    (tmp_path / "trace.json").write_text("{}")
    read = []

    def profile_trace(path, *, triton_code):
        read.append((path.name, triton_code))
        return "verdict"

    monkeypatch.setattr(step_profiler, "profile_trace", profile_trace)
    assert step_profiler.read_capture(tmp_path, 3) == "verdict"
    assert read == [("trace.json", None)]  # the script compiled nothing


@pytest.mark.filterwarnings("ignore:The .grad:UserWarning")
def test_a_model_is_compiled_before_what_is_measured():
    """Hooks that come with the window would have it compiled again, inside the window."""
    torch._dynamo.reset()

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(16, 4)

        def forward(self, x):
            return self.layer(x).softmax(-1)

    model = Net()
    compiled, optimizer = torch.compile(model, backend="eager"), torch.optim.SGD(model.parameters())
    with mpdiag.profile(model, steps=2, warmup=2) as p:
        for _ in range(5):
            compiled(torch.randn(8, 16)).square().sum().backward()
            optimizer.step()
    operations = [o["op"] for o in p.result.to_json()["operations"]]
    assert "TorchDynamo Cache Lookup" in operations
    assert not [op for op in operations if "dynamo_timed" in op]


def test_modules_may_run_on_several_threads():
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    with torch.no_grad(), mpdiag.profile(model, steps=1, warmup=0) as p:
        threads = [threading.Thread(target=model, args=(torch.randn(2, 4),)) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        model(torch.randn(2, 4))
        p.step()
    assert "0" in {o.time.module for o in p.result.operations}


def test_modules_run_anew_in_the_backward_pass():
    model = nn.Linear(4, 4)
    with mpdiag.profile(model, steps=1, warmup=0) as p:
        x = torch.randn(2, 4, requires_grad=True)
        torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False).sum().backward()
        p.step()
    products = [o for o in p.result.operations if o.time.op in {"aten::addmm", "aten::mm"}]
    assert {o.time.module for o in products} == {"Linear"}
    whole = sum(o.time.time_us for o in p.result.operations)
    assert whole == pytest.approx(p.result.time_us)


def test_where_the_model_lies_decides(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    assert step_profiler._Names(None).on_gpu
    assert not step_profiler._Names(nn.Linear(2, 2)).on_gpu  # on the CPU of a machine with a GPU
    assert step_profiler._Names(nn.Identity()).on_gpu
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    assert not step_profiler._Names(None).on_gpu


def test_the_trace_marks_the_measured_steps(tmp_path):
    with step_profiler.StepProfiler(steps=2, warmup=1, folder=tmp_path) as p:
        train(4)
    assert p.measured == 2
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    marks = {e["name"]: e for e in events if str(e.get("name")).startswith("ProfilerStep#")}
    assert sorted(marks) == ["ProfilerStep#0", "ProfilerStep#1"]
    inside = [e for e in events if e.get("name") == "aten::mkldnn_convolution"]
    for mark in marks.values():
        until = mark["ts"] + mark["dur"]
        assert sum(mark["ts"] <= e["ts"] <= until for e in inside) == len(inside) / 2
