"""Activations and their gradients: each counted once, for the module it belongs to."""

import weakref
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from recorded import (
    Output,
    Wrapped,
    around_linear,
    assert_same_histogram,
    model_and_optimizer,
    not_recorded,
    recorded_steps,
    rows,
    step,
)
from recorded_steps import record_steps
from torch import nn

import mpdiag
from mpdiag.recording.counting.tensors import tensors_in
from mpdiag.recording.ledger import Ledger
from mpdiag.runs.training_log import read_log


def test_a_module_called_twice_merges_and_tied_weights_count_once(tmp_path):
    layers = nn.ModuleDict({"a": nn.Linear(8, 8), "b": nn.Linear(8, 8)})
    layers["b"].weight = layers["a"].weight
    model = Wrapped(layers, lambda b, x: b["b"](b["a"](torch.tanh(b["a"](x)))))
    recorded_steps(tmp_path / "run", model)
    twice = rows(tmp_path / "run", kind="activation", name="body.a")
    assert (twice["tensors"].item(), twice["numel"].item()) == (2, 80)
    run = mpdiag.open_run(tmp_path / "run")
    weights = [r for r in run.modules() if r["what"] == "parameter" and "weight" in r["name"]]
    assert [(r["name"], r["aliases"]) for r in weights] == [("body.a.weight", ["body.b.weight"])]


class Unneeded(torch.autograd.Function):
    """A function that has no gradient of its second argument; autograd hands None to hooks."""

    @staticmethod
    def forward(_context, x, _weight):
        return x.clone()

    @staticmethod
    def backward(_context, gradient):
        return gradient, None


def test_hooks_that_are_called_without_a_gradient(tmp_path):
    model = around_linear(lambda b, x: Unneeded.apply(b(x), b.bias))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with mpdiag.record(model, optimizer, tmp_path / "run", every=1) as recorder:
        for _ in range(3):
            for _ in range(2):
                model(torch.randn(4, 8)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert recorder.failures == []


@pytest.mark.parametrize("no_grad", [True, False])
def test_evaluation_between_steps_is_not_training(tmp_path, no_grad):
    model, optimizer = model_and_optimizer()
    with mpdiag.record(model, optimizer, tmp_path / "run", every=1):
        for _ in range(2):
            step(model, optimizer)
            with torch.set_grad_enabled(not no_grad):
                model(torch.randn(100, 8))
    assert (rows(tmp_path / "run", kind="activation", name="0")["numel"] == 5 * 16).all()


def test_in_place_operations_leave_each_gradient_to_its_own_module(tmp_path):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 8), nn.ReLU(inplace=True), nn.Linear(8, 8), nn.Sigmoid())
    x = torch.randn(5, 8)
    with torch.no_grad():
        before_relu = net[0](x)
    before_relu.requires_grad_()
    after_relu = torch.relu(before_relu)
    after_relu.retain_grad()
    net[3](net[2](after_relu)).square().mean().backward()
    recorded_steps(tmp_path / "run", net, x=x)
    for name, truth in (("0", before_relu), ("1", after_relu)):
        assert_same_histogram(tmp_path / "run", truth, kind="activation", name=name)
        assert_same_histogram(tmp_path / "run", truth.grad, kind="activation_grad", name=name)


def model_output(a, b):
    from transformers.modeling_outputs import BaseModelOutput

    return BaseModelOutput(last_hidden_state=a, hidden_states=(b,))


@pytest.mark.parametrize(
    "wrap",
    [
        lambda a, b: {"a": a, "deep": {"b": [b, None, 3]}},
        lambda a, b: Output(a, [b]),
        lambda a, b: (a, [(b, "text")]),
        model_output,
    ],
    ids=["dict", "dataclass", "tuple", "ModelOutput"],
)
def test_every_tensor_of_a_structured_output_is_seen(tmp_path, wrap):
    def loss(model, _step):
        outputs = list(tensors_in(model(torch.randn(5, 8))))
        assert len(outputs) == 2
        return sum(o.square().mean() for o in outputs)

    model = around_linear(lambda b, x: wrap((y := b(x)) * 2, y * 3))
    record_steps(tmp_path / "run", model, loss)
    for kind in ("activation", "activation_grad"):
        row = rows(tmp_path / "run", kind=kind, name="")
        assert (row["tensors"].item(), row["numel"].item()) == (2, 80), kind


def test_no_activation_no_graph_and_no_hook_outlives_its_backward(tmp_path):
    model, optimizer = model_and_optimizer()
    model[1].inplace = False
    dead = []
    handles = [
        module.register_forward_hook(lambda _m, _i, out: dead.append(weakref.ref(out)))
        for module in model
    ]
    with mpdiag.record(model, optimizer, tmp_path / "run", every=1):
        for _ in range(2):
            optimizer.zero_grad()
            loss = model(torch.randn(5, 8)).square().mean()
            loss.backward()
            del loss
            assert all(ref() is None for ref in dead)  # with no garbage collection: no cycle
            optimizer.step()
    assert len(dead) == 6
    for p in model.parameters():
        assert not p._backward_hooks
        assert not p._post_accumulate_grad_hooks
    for handle in handles:
        handle.remove()
    assert not any(m._forward_hooks or m._backward_hooks for m in model.modules())
    assert not nn.modules.module._global_forward_hooks
    assert not optimizer._optimizer_step_pre_hooks


def test_function_transforms_are_left_alone(tmp_path):
    model, optimizer = model_and_optimizer()
    model[1].inplace = False

    def loss(parameters, x):
        return torch.func.functional_call(model, parameters, (x,)).square().mean()

    with mpdiag.record(model, optimizer, tmp_path / "run", every=1) as recorder:
        for _ in range(2):
            parameters = {n: p.detach() for n, p in model.named_parameters()}
            each = torch.func.vmap(torch.func.grad(loss), (None, 0))
            gradients = each(parameters, torch.randn(5, 8))
            for name, p in model.named_parameters():
                p.grad = gradients[name].mean(0)
            optimizer.step()
    assert recorder.failures == []
    assert len(rows(tmp_path / "run", kind="weight_grad")) == 8
    assert "function transform" in not_recorded(tmp_path / "run")["0"]


def test_a_forward_that_fails_is_followed_by_good_records(tmp_path):
    def forward(body, x):
        y = body(x)
        if model.fails:
            raise ValueError
        return y

    model = around_linear(forward)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with mpdiag.record(model, optimizer, tmp_path / "run", every=1) as recorder:
        for i in range(3):
            model.fails = i == 1
            if model.fails:
                with pytest.raises(ValueError):  # noqa: PT011
                    step(model, optimizer)
                continue
            step(model, optimizer)
            with torch.no_grad():
                model(torch.randn(100, 8))
    assert (recorder.failures, recorder.steps_recorded) == ([], 2)
    for name in ("", "body"):
        found = rows(tmp_path / "run", kind="activation", name=name)
        assert found["numel"].tolist() == [40, 40]


def _write_fused(x):
    """Subtracts twice itself; fused kernels raise no counter."""
    held = torch.nn.Parameter(x.detach())
    held.data = x.detach()
    held.grad = x.detach().clone()
    torch.optim.SGD([held], lr=3.0, fused=True).step()


WRITES = [lambda x: x.data.mul_(2), lambda x: x.detach().numpy().__imul__(2), _write_fused]


@pytest.mark.parametrize("write", WRITES, ids=["data", "numpy", "fused"])
def test_memory_written_past_its_version_counter_is_counted_anew(tmp_path, write):
    """Two modules return one tensor; between them it was doubled."""

    def forward(body, x):
        y = body(x)
        version = y._version
        write(y)
        assert y._version == version
        return y

    recorded_steps(tmp_path / "run", around_linear(forward), operations=0)
    inner, root = (rows(tmp_path / "run", kind="activation", name=n) for n in ("body", ""))
    assert root["absmax"].item() == 2 * inner["absmax"].item()


def test_a_tensor_with_another_node_has_another_gradient(tmp_path):
    """A hook belongs to the node that made a tensor, whatever its version counter says."""

    def forward(body, x):
        y = body(x)
        version = y._version
        y.mul_(4)
        torch._C._autograd._unsafe_set_version_counter((y,), (version,))
        return y

    recorded_steps(tmp_path / "run", around_linear(forward), operations=0)
    inner, root = (rows(tmp_path / "run", kind="activation_grad", name=n) for n in ("body", ""))
    assert inner["absmax"].item() == 4 * root["absmax"].item()


def test_torch_with_cuda_records_on_a_machine_without_a_driver(tmp_path, monkeypatch):
    raises = Mock(side_effect=RuntimeError("CUDA driver version is insufficient for CUDA runtime"))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", raises)
    recorded_steps(tmp_path / "run", nn.Linear(8, 4))
    assert mpdiag.open_run(tmp_path / "run").meta["steps_recorded"] == 1


def test_nothing_is_counted_while_a_cuda_graph_is_captured(tmp_path, monkeypatch):
    """A replay would count into memory that holds something else by then."""
    capturing, counted = [False], []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing[0])
    for name in ("count", "count_many", "note_updates", "drain", "flush"):
        plain = getattr(Ledger, name)

        def noted(ledger, *args, plain=plain, **options):
            counted.append(capturing[0])
            return plain(ledger, *args, **options)

        monkeypatch.setattr(Ledger, name, noted)
    model, optimizer = model_and_optimizer()
    with mpdiag.record(model, optimizer, tmp_path / "run", every=1, operations=5) as recorder:
        for captured in (False, False, True, True, False):
            capturing[0] = captured
            step(model, optimizer)
    assert counted
    assert not any(counted)
    assert recorder.failures == []
    run = mpdiag.open_run(tmp_path / "run")
    assert run.meta["steps_seen"] == 3
    assert np.unique(run.records.step).tolist() == [0, 1, 2]
    assert [step.step for step in read_log(tmp_path / "run").steps] == [0, 1, 2]
    reasons = {entry["reason"] for entry in run.meta["coverage"]["not_recorded"]}
    assert "captured in a CUDA graph: hooks do not run in its replays" in reasons
