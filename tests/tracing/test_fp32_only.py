"""``--fp32``: a script that asks for half precision is recorded as the training that FP32 gives."""

import logging

import pytest
import script_loops as loops
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import mpdiag
from mpdiag.tracing.fp32_only import Fp32Only

BF16, FP16 = torch.bfloat16, torch.float16
PLAIN = {n: vars(nn.Module)[n] for n in ("to", "type", "half", "bfloat16", "__call__")}
PLAIN_DDP = vars(DistributedDataParallel)["__init__"]


@pytest.fixture(autouse=True)
def nothing_is_left_behind():
    yield
    assert {name: vars(nn.Module)[name] for name in PLAIN} == PLAIN
    assert vars(DistributedDataParallel)["__init__"] is PLAIN_DDP


class Net(nn.Module):
    """Is called by a keyword, with a mask in a list; returns what its parameters' dtype gives."""

    def __init__(self, dtype=None):
        super().__init__()
        self.first = nn.Linear(4, 8, dtype=dtype)
        self.norm = nn.BatchNorm1d(8, dtype=dtype)
        self.last = nn.Linear(8, 1, dtype=dtype)

    def forward(self, x, masks):
        return self.last(torch.tanh(self.norm(self.first(x * masks[0]))))


def train(model, dtype=torch.float32, steps=3, make=torch.optim.AdamW):
    """A loop that gives inputs of a dtype; returns its losses and weights."""
    optimizer = make(model.parameters(), lr=0.05)
    generator = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(steps):
        x = torch.randn(8, 4, generator=generator).bfloat16().to(dtype)
        loss = model(x=x, masks=[torch.ones(4, dtype=dtype)]).float().square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, [p.detach().clone() for p in model.parameters()], optimizer


def net(dtype=None):
    torch.manual_seed(0)
    return Net(dtype)


def loaded(dtype):
    """Weights that nothing casts: they arrive in half precision."""
    model = net()
    for p in model.parameters():
        p.data = p.data.to(dtype)
    return model


def compiled(model):
    model.compile(backend="eager", fullgraph=True)
    return model


SCRIPTS = {
    "bfloat16": (lambda: net().bfloat16(), net, "Net.bfloat16() at tests/tracing/"),
    "half": (lambda: net().half(), net, "Net.half() at"),
    "to": (lambda: net().to("cpu", BF16), net, "Net.to(torch.bfloat16) at"),
    "type": (lambda: net().type(FP16), net, "Net.type(torch.float16) at"),
    "dtype": (
        lambda: net(BF16),
        lambda: net(BF16).float(),
        "the bfloat16 weights of Net (made in ",
    ),
    "loaded": (lambda: loaded(FP16), lambda: loaded(FP16).float(), "the float16 weights of Net"),
    "compiled": (lambda: compiled(net().bfloat16()), net, "Net.bfloat16() at"),
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_in_half_precision_trains_as_its_fp32_twin_bit_for_bit(tmp_path, name, capsys):
    half, twin, words = SCRIPTS[name]
    with loops.recording(tmp_path / "run", fp32=True):
        losses, weights, optimizer = train(half(), FP16 if "16" not in name else BF16)
    expected, expected_weights, _ = train(twin())
    assert losses == expected
    assert all(map(torch.equal, weights, expected_weights))
    states = [t for state in optimizer.state.values() for t in state.values()]
    assert {t.dtype for t in states} == {torch.float32}
    run = mpdiag.open_run(tmp_path / "run")
    (line,) = run.meta["precision"]["switched_off"]
    assert line.startswith(words)
    assert "not-fp32" not in {f.code for f in mpdiag.analyze(run.folder).findings}
    told = capsys.readouterr().err
    assert told.count(f"--fp32 switches off {words}") == 1
    assert "weights and gradients take 0.00052 MB in FP32, 0.00026 MB in half" in told
    assert "FP32 weights and AdamW states" in told


def test_in_code_weights_inputs_and_states_are_fp32_until_recording_stops(tmp_path, caplog):
    model = net().bfloat16()
    losses, _, optimizer = train(model, BF16)
    recording = mpdiag.record(model, optimizer, tmp_path / "run", fp32=True)
    with caplog.at_level(logging.INFO, logger="mpdiag"), recording:
        assert {p.dtype for p in model.parameters()} == {torch.float32}
        step(model, optimizer)
    assert "--fp32 switches off AdamW's bfloat16 exp_avg" in caplog.messages
    assert "not-fp32" not in {f.code for f in mpdiag.analyze(tmp_path / "run").findings}
    moments = [t for s in optimizer.state.values() for n, t in s.items() if n != "step"]
    assert {t.dtype for t in (*model.parameters(), *model.buffers(), *moments)} <= {
        BF16,
        torch.int64,
    }
    step(model, optimizer)  # and it goes on as before
    assert len(losses) == 3


def step(model, optimizer):
    x = torch.ones(8, 4, dtype=BF16)
    model(x, [x[:1]]).float().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def test_a_cast_inside_the_model_is_named_with_its_line_and_the_run_is_not_fp32(tmp_path, capsys):
    class Casting(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 1)

        def forward(self, x, masks):
            return self.last(self.first(x).bfloat16())

    with loops.recording(tmp_path / "run", fp32=True):
        train(Casting())
    (line,) = mpdiag.open_run(tmp_path / "run").meta["precision"]["not_switched_off"]
    assert line.startswith("a cast to bfloat16 before the call at tests/tracing/test_fp32_only.py:")
    assert f"cannot switch off {line}" in capsys.readouterr().err
    (finding,) = (f for f in mpdiag.analyze(tmp_path / "run").findings if f.code == "not-fp32")
    assert line in finding.message


@pytest.mark.parametrize("given", [None, "a policy"])
def test_ddp_is_made_without_its_mixed_precision(monkeypatch, given):
    """Its mixed precision needs an accelerator: a stub of its constructor says what it was given."""
    made = []

    def make(self, module, device_ids=None, *, mixed_precision=None):
        made.append((module, device_ids, mixed_precision))

    monkeypatch.setattr(DistributedDataParallel, "__init__", make)
    told = []
    only = Fp32Only(told.append)
    only.attach()
    try:
        model = loaded(BF16)
        DistributedDataParallel(model, [0], mixed_precision=given)
    finally:
        only.detach()
    monkeypatch.undo()
    assert made == [(model, [0], None)]
    assert {p.dtype for p in model.parameters()} == {torch.float32}  # before buckets are made
    assert [t for t in told if "DDP" in t] == [
        f"--fp32 switches off {line}" for line in only.refused if line.startswith("DDP's mixed")
    ]
    assert any("DDP" in t for t in told) == (given is not None)


def test_a_list_that_a_model_fills_is_the_callers_own():
    only = Fp32Only([].append)
    kept = [torch.ones(2)]
    assert only._wide((kept,))[0] is kept
    packed = nn.utils.rnn.pack_sequence([torch.ones(2, 3)]).to(BF16)
    wide = only._wide(packed)
    assert type(wide) is type(packed)
    assert wide.data.dtype == torch.float32
