"""The one-line check after the first steps: what it says, and that it never ends a training."""

import json
import logging

import pytest
import torch
from support import loss_of_batch, network, wrapped

import mpdiag
from mpdiag.plan import PrecisionPlan
from mpdiag.runs.training_log import read_log
from mpdiag.tensorcores.step_profiler import StepProfiler
from mpdiag.training import setup
from mpdiag.training.tensor_core_check import TensorCoreCheck, check_for, judge_use

NOTHING = {"cause": "outside", "op": "aten::relu", "module": "1", "fix": "torch.compile"}
CAUSE = {
    "cause": "tf32_off",
    "op": "aten::mm",
    "module": "head",
    "fix": "allow TF32",
}


def document(fraction, unknown=0.0):
    return {
        "tensor_core_fraction": fraction,
        "unknown_fraction": unknown,
        "operations": [NOTHING, CAUSE],
    }


class Fake:
    """Measures nothing, and says what it is told."""

    def __init__(self, fraction=0.0, fail_at=None):
        def noting(name, answer=None):
            def do(*_):
                self.log.append(name)
                if name == fail_at:
                    raise RuntimeError(f"no {name}\nhere")
                return answer

            return do

        self.log, self.result = [], self
        self.enter, self.exit, self.step = map(noting, ("enter", "exit", "step"))
        self.to_json = noting("result", document(fraction))

    def __enter__(self):
        self.enter()

    def __exit__(self, *_):
        self.exit()


def trained(monkeypatch, measure, steps=6, **options):
    """A training on the CPU under a check that a GPU would have."""
    model = network()
    check = TensorCoreCheck(lambda: measure(model), 2)
    monkeypatch.setattr(setup, "check_for", lambda *_, **__: check)
    with wrapped(model, **options) as mp:
        for _ in range(steps):
            assert not mp.step(loss_of_batch(model, mp)).skipped
    return mp


def test_the_answer_is_logged_once_and_kept(monkeypatch, tmp_path, caplog):
    fake = Fake(fraction=0.7)
    with caplog.at_level(logging.INFO, "mpdiag"):
        mp = trained(monkeypatch, lambda _: fake, run=tmp_path / "run")
    assert fake.log == ["enter", "step", "exit", "result"]
    assert mp.tensor_cores.in_use is True
    assert [r.message for r in caplog.records] == ["Tensor Cores in use: 70 % of kernel time"]
    lines = (tmp_path / "run" / "training.jsonl").read_text().splitlines()
    noted = [json.loads(line) for line in lines if "check" in line]
    assert noted == [mp.tensor_cores.to_json()]
    assert noted[0]["at_step"] == 2  # the third step was measured
    assert len(read_log(tmp_path / "run").steps) == 6


@pytest.mark.skipif(torch.cuda.is_available(), reason="what a CPU says")
def test_a_step_of_a_training_is_really_measured(monkeypatch):
    """The real capture, on the CPU, where no training has a check of its own."""
    bf16 = PrecisionPlan(target="bf16")
    mp = trained(monkeypatch, lambda m: StepProfiler(m, steps=1, warmup=0), steps=4, plan=bf16)
    assert mp.tensor_cores.message.startswith("Tensor Cores")
    if not torch.cpu._is_amx_tile_supported():
        assert mp.tensor_cores.in_use is False
        assert "(no_tensor_cores): this CPU has no matrix unit" in mp.tensor_cores.message


def test_the_cause_is_named_as_a_warning(monkeypatch, caplog):
    mp = trained(monkeypatch, lambda _: Fake(fraction=0.01))
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert record.message == (
        "Tensor Cores not in use (1 % of kernel time): mm of head (tf32_off): allow TF32"
    )
    assert mp.tensor_cores.in_use is False


@pytest.mark.parametrize("where", ["enter", "step", "exit", "result"])
def test_whatever_fails_training_goes_on(monkeypatch, where):
    mp = trained(monkeypatch, lambda _: Fake(fail_at=where))
    assert mp.steps == 6
    assert mp.tensor_cores.in_use is None
    assert mp.tensor_cores.message == f"Tensor Cores not checked: no {where} here"


def test_a_training_that_ends_in_between_leaves_nothing_open(monkeypatch):
    fake = Fake()
    mp = trained(monkeypatch, lambda _: fake, steps=2)
    assert fake.log == ["enter", "exit"]
    assert mp.tensor_cores is None


@pytest.mark.parametrize(
    ("device", "native", "rank", "environment", "checked"),
    [
        ("cuda", True, 0, {}, True),
        ("cpu", True, 0, {}, False),
        ("cuda", False, 0, {}, False),
        ("cuda", True, 1, {}, False),
        ("cuda", True, 0, {"NSYS_PROFILING_SESSION_ID": "1"}, False),  # another profiler
    ],
)
def test_who_is_checked(monkeypatch, device, native, rank, environment, checked):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    check = check_for(network(), torch.device(device), native=native, rank=rank)
    assert (check is not None) == checked


@pytest.mark.parametrize(
    "options", [{"options": mpdiag.TrainerOptions(check_tensor_cores=False)}, {"level": "O0"}]
)
def test_it_can_be_left_out(monkeypatch, options):
    made = []
    mp = trained(monkeypatch, made.append, **options)
    assert (mp.tensor_cores, made) == (None, [])


def test_unknown_names_are_no_no():
    use = judge_use(document(0.0, unknown=0.9), 3)
    assert use.in_use is None
    assert "90 % of kernel time is in kernels of unknown names" in use.message
    assert judge_use({"tensor_core_fraction": 0.0}, 3).message.endswith("(0 % of kernel time)")
