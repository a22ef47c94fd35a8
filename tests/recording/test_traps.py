"""The traps a recorder must survive, each with the real construct in it."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import mpdiag
from mpdiag.errors import RunExists, UsageError
from mpdiag.histogram import ExponentHistogram
from mpdiag.recording.ledger import Ledger
from mpdiag.runs import RunWriter


def model_and_optimizer(seed: int = 0):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(inplace=True), nn.Linear(16, 4))
    return model, torch.optim.SGD(model.parameters(), 0.1)


def step(model, optimizer, x=None):
    x = torch.randn(5, 8) if x is None else x
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()


def rows(folder, **where):
    frame = mpdiag.open_run(folder).frame()
    for column, value in where.items():
        frame = frame[frame[column] == value]
    return frame


def test_numbers_equal_gradients_worked_out_by_hand(tmp_path):
    torch.manual_seed(0)
    layer = nn.Linear(3, 2, bias=False)
    optimizer = torch.optim.SGD(layer.parameters(), 0.5)
    x = torch.randn(4, 3)
    before = layer.weight.detach().clone()
    y = x @ before.T
    gradient = 2 * y / y.numel()  # of the mean of squares
    with mpdiag.record(layer, optimizer, tmp_path / "run"):
        layer(x).square().mean().backward()
        weight_gradient = layer.weight.grad.clone()
        optimizer.step()
    records = mpdiag.open_run(tmp_path / "run").records
    for kind, truth in (
        ("activation", y),
        ("activation_grad", gradient),
        ("weight", before),
        ("weight_grad", weight_gradient),
        ("update", layer.weight.detach() - before),
    ):
        h = records.select(records.of_kind(kind)).histograms()[0]
        expected = ExponentHistogram.of(truth.numpy())
        assert np.array_equal(h.counts, expected.counts), kind
        assert h.absmax == expected.absmax
        assert h.absmin == expected.absmin


def test_accumulation_records_contributions_and_total_apart(tmp_path):
    model, optimizer = model_and_optimizer()
    with mpdiag.record(model, optimizer, tmp_path / "run", every=1):
        for _ in range(2):
            optimizer.zero_grad()
            for _ in range(3):
                model(torch.randn(5, 8)).square().mean().backward()
            total = model[0].weight.grad.abs().max().item()
            optimizer.step()
    gradients = rows(tmp_path / "run", step=1, kind="weight_grad", name="0.weight")
    assert sorted(gradients["micro"]) == [-1, 0, 1, 2]
    assert gradients[gradients["micro"] == -1]["absmax"].item() == total
    activations = rows(tmp_path / "run", step=1, kind="activation_grad", name="0")
    assert sorted(activations["micro"]) == [0, 1, 2]


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_counts_each_activation_once(tmp_path, reentrant):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(8, 8)

        def forward(self, x):
            return checkpoint(self.inner, x.requires_grad_(), use_reentrant=reentrant)

    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with mpdiag.record(model, optimizer, tmp_path / "run", every=1):
        step(model, optimizer)
    for kind in ("activation", "activation_grad", "weight_grad"):
        found = rows(tmp_path / "run", kind=kind)
        assert (found["tensors"] == 1).all(), kind
    assert set(rows(tmp_path / "run", kind="activation_grad")["name"]) == {"", "inner"}


def test_a_module_called_twice_merges_and_tied_weights_count_once(tmp_path):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
            self.b.weight = self.a.weight

        def forward(self, x):
            return self.b(self.a(torch.tanh(self.a(x))))

    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with mpdiag.record(model, optimizer, tmp_path / "run"):
        step(model, optimizer)
    twice = rows(tmp_path / "run", kind="activation", name="a")
    assert (twice["tensors"].item(), twice["numel"].item()) == (2, 80)
    run = mpdiag.open_run(tmp_path / "run")
    weights = [r for r in run.modules() if r["what"] == "parameter" and "weight" in r["name"]]
    assert [(r["name"], r["aliases"]) for r in weights] == [("a.weight", ["b.weight"])]


def test_grad_scaler_is_seen_with_its_scale_and_its_skips(tmp_path):
    model, optimizer = model_and_optimizer()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    with mpdiag.record(model, optimizer, tmp_path / "run", every=1) as recorder:
        for i in range(3):
            optimizer.zero_grad()
            loss = model(torch.randn(5, 8)).square().mean()
            scaler.scale(loss * (float("inf") if i == 1 else 1.0)).backward()
            scaler.step(optimizer)
            scaler.update()
    assert recorder.failures == []
    assert "step" not in vars(scaler)
    activations = rows(tmp_path / "run", kind="activation_grad", name="2")
    assert activations["scale"].tolist() == [1024.0, 1024.0, 512.0]
    assert activations["skipped"].tolist() == [False, True, False]
    updates = rows(tmp_path / "run", kind="update", name="2.weight")
    assert updates["step"].tolist() == [0, 2]
    assert (rows(tmp_path / "run", kind="weight_grad")["scale"] == 1).all()


def test_optimizer_in_backward(tmp_path):
    model, _ = model_and_optimizer()
    optimizers = {p: torch.optim.SGD([p], 0.1) for p in model.parameters()}

    def apply(parameter):
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(apply)
    with mpdiag.record(model, list(optimizers.values()), tmp_path / "run", every=1):
        for _ in range(3):
            model(torch.randn(5, 8)).square().mean().backward()
    for kind, names in (("weight_grad", 4), ("update", 4), ("activation_grad", 4)):
        found = rows(tmp_path / "run", kind=kind)
        assert found.groupby("step").size().tolist() == [names] * 3, kind


def test_closures_two_optimizers_and_none(tmp_path):
    model, _ = model_and_optimizer()
    lbfgs = torch.optim.LBFGS(model.parameters(), max_iter=3)
    x = torch.randn(5, 8)

    def closure():
        lbfgs.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        return loss

    with mpdiag.record(model, lbfgs, tmp_path / "lbfgs", every=1):
        lbfgs.step(closure)
    assert set(rows(tmp_path / "lbfgs")["kind"]) >= {"weight_grad", "update", "activation_grad"}

    models = {"generator": nn.Linear(8, 8), "critic": nn.Linear(8, 1)}
    optimizers = [torch.optim.SGD(m.parameters(), 0.1) for m in models.values()]
    with mpdiag.record(models, optimizers, tmp_path / "gan", every=1):
        for _ in range(2):
            for model_, optimizer in zip(models.values(), optimizers, strict=True):
                step(model_, optimizer)
    assert set(rows(tmp_path / "gan", kind="update")["name"]) == {
        f"{m}.{p}" for m in models for p in ("weight", "bias")
    }

    model, _ = model_and_optimizer()
    with mpdiag.record(model, None, tmp_path / "none", every=1):
        for _ in range(3):
            model(x).square().mean().backward()
    found = rows(tmp_path / "none", kind="weight_grad", name="0.weight")
    assert found["step"].tolist() == [0, 1, 2]


@pytest.mark.parametrize("no_grad", [True, False])
def test_evaluation_between_steps_is_not_training(tmp_path, no_grad):
    model, optimizer = model_and_optimizer()
    with mpdiag.record(model, optimizer, tmp_path / "run", every=1):
        for _ in range(2):
            step(model, optimizer)
            with torch.set_grad_enabled(not no_grad):
                model(torch.randn(100, 8))
    assert (rows(tmp_path / "run", kind="activation", name="0")["numel"] == 5 * 16).all()


@pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore:Using `torch.compile.module.` when"
)
def test_compiled_models_say_so_and_train(tmp_path):
    model, optimizer = model_and_optimizer()
    compiled = torch.compile(model, backend="eager")
    with mpdiag.record(compiled, optimizer, tmp_path / "before") as recorder:
        step(compiled, optimizer)
    assert recorder.failures == []
    reasons = [
        r["reason"] for r in mpdiag.open_run(tmp_path / "before").meta["coverage"]["not_recorded"]
    ]
    assert any("compiled" in reason for reason in reasons)
    assert len(rows(tmp_path / "before", kind="update")) == 4

    model, optimizer = model_and_optimizer()
    with mpdiag.record(model, optimizer, tmp_path / "after") as recorder:
        compiled = torch.compile(model, backend="eager")
        step(compiled, optimizer)
    assert recorder.failures == []
    assert len(rows(tmp_path / "after", kind="update")) == 4


def test_no_tensor_and_no_hook_outlives_its_use(tmp_path):
    model, optimizer = model_and_optimizer()
    with mpdiag.record(model, optimizer, tmp_path / "run", every=1):
        optimizer.zero_grad()
        y = model(torch.randn(5, 8))
        dead = weakref.ref(y)
        y.square().mean().backward()
        optimizer.step()
        del y
        gc.collect()
        assert dead() is None
    assert not any(m._forward_hooks or m._backward_hooks for m in model.modules())
    assert not nn.modules.module._global_forward_hooks
    assert not optimizer._optimizer_step_pre_hooks


def test_a_failing_hook_is_reported_once_and_training_goes_on(tmp_path, monkeypatch):
    plain, optimizer = model_and_optimizer()
    for _ in range(3):
        step(plain, optimizer)

    def fail(self, tensor):
        raise ZeroDivisionError("broken")

    monkeypatch.setattr(Ledger, "count", fail)
    model, optimizer = model_and_optimizer()
    with pytest.warns(RuntimeWarning, match="training goes on") as warned:  # noqa: SIM117
        with mpdiag.record(model, optimizer, tmp_path / "run", every=1):
            for _ in range(3):
                step(model, optimizer)
    assert len(warned) == 1
    assert all(
        torch.equal(a, b) for a, b in zip(plain.parameters(), model.parameters(), strict=True)
    )


@pytest.mark.parametrize("method", ["append", "write_meta"])
def test_a_full_disk_warns_once_and_training_ends_the_same(tmp_path, monkeypatch, method):
    plain, optimizer = model_and_optimizer()
    for _ in range(3):
        step(plain, optimizer)

    def full(self, *args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(RunWriter, method, full)
    model, optimizer = model_and_optimizer()
    with pytest.warns(RuntimeWarning, match="No space left") as warned:  # noqa: SIM117
        with mpdiag.record(model, optimizer, tmp_path / "run", every=1):
            for _ in range(3):
                step(model, optimizer)
    assert len(warned) == 1
    assert all(
        torch.equal(a, b) for a, b in zip(plain.parameters(), model.parameters(), strict=True)
    )


def test_cadence_filters_and_limits(tmp_path):
    model, optimizer = model_and_optimizer()
    with mpdiag.record(model, optimizer, tmp_path / "run", every=3, include="0|^$", exclude="bias"):
        for _ in range(7):
            step(model, optimizer)
    found = rows(tmp_path / "run")
    assert sorted(set(found["step"])) == [0, 3, 6]
    assert set(found["name"]) == {"", "0", "0.weight"}

    with mpdiag.record(model, optimizer, tmp_path / "few", max_steps=2) as recorder:
        for _ in range(7):
            step(model, optimizer)
    assert (recorder.steps_recorded, recorder.step) == (2, 7)

    for bad in ({"every": 0}, {"every": 1.5}, {"max_steps": -1}, {"include": "("}):
        with pytest.raises(UsageError, match=next(iter(bad))):
            mpdiag.record(model, optimizer, tmp_path / "bad", **bad)
    with pytest.raises(UsageError, match="Module"):
        mpdiag.record(3, optimizer, tmp_path / "bad")


def test_a_run_is_never_overwritten_unasked(tmp_path):
    model, optimizer = model_and_optimizer()
    for _ in range(2):
        with mpdiag.record(model, optimizer, tmp_path / "run", overwrite=True):
            step(model, optimizer)
    with pytest.raises(RunExists, match="overwrite"):
        mpdiag.record(model, optimizer, tmp_path / "run")
    assert set(rows(tmp_path / "run")["step"]) == {0}


def test_an_interrupted_training_leaves_a_good_run(tmp_path):
    model, optimizer = model_and_optimizer()
    with pytest.raises(KeyboardInterrupt), mpdiag.record(model, optimizer, tmp_path / "run"):
        step(model, optimizer)
        step(model, optimizer)
        raise KeyboardInterrupt
    run = mpdiag.open_run(tmp_path / "run")
    assert run.meta["state"] == "interrupted"
    assert set(run.frame()["step"]) == {0, 1}


def test_sparse_gradients_count_their_zeros(tmp_path):
    model = nn.Embedding(50, 4, sparse=True)
    optimizer = torch.optim.SparseAdam(model.parameters())
    with mpdiag.record(model, optimizer, tmp_path / "run"):
        optimizer.zero_grad()
        model(torch.tensor([1, 1, 7])).square().mean().backward()
        optimizer.step()
    gradient = rows(tmp_path / "run", kind="weight_grad")
    assert (gradient["numel"].item(), gradient["zeros"].item()) == (200, 192)
