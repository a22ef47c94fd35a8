"""The traps a recorder must survive, each with the real construct in it."""

from __future__ import annotations

import dataclasses
import gc
import random
import weakref

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import mpdiag
from mpdiag.errors import RunExists, UsageError
from mpdiag.numerics.histograms import ExponentHistogram
from mpdiag.recording.counting.tensors import tensors_in
from mpdiag.recording.ledger import Ledger
from mpdiag.runs.writer import RunWriter


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


def not_recorded(folder):
    coverage = mpdiag.open_run(folder).meta["coverage"]
    return {entry["name"]: entry["reason"] for entry in coverage["not_recorded"]}


def assert_same_histogram(folder, truth, **where):
    """The one row with these columns counts exactly the values of ``truth``."""
    records = mpdiag.open_run(folder).records
    mask = np.ones(len(records), bool)
    for column, value in where.items():
        held = records.texts(column) if column in records.words else getattr(records, column)
        mask &= held == value
    assert mask.sum() == 1, where
    found = records.select(mask).histograms()[0]
    expected = ExponentHistogram.of(truth.detach().numpy())
    assert np.array_equal(found.counts, expected.counts), where
    for field in ("zeros", "subnormals", "infs", "nans", "absmax", "absmin"):
        assert getattr(found, field) == getattr(expected, field), (where, field)


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


def test_in_place_operations_leave_each_gradient_to_its_own_module(tmp_path):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 8), nn.ReLU(inplace=True), nn.Linear(8, 8), nn.Sigmoid())
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    x = torch.randn(5, 8)
    with torch.no_grad():
        before_relu = net[0](x)
    before_relu.requires_grad_()
    after_relu = torch.relu(before_relu)
    after_relu.retain_grad()
    net[3](net[2](after_relu)).square().mean().backward()
    with mpdiag.record(net, optimizer, tmp_path / "run"):
        step(net, optimizer, x)
    for name, truth in (("0", before_relu), ("1", after_relu)):
        assert_same_histogram(tmp_path / "run", truth, kind="activation", name=name)
        assert_same_histogram(tmp_path / "run", truth.grad, kind="activation_grad", name=name)


class Structured(nn.Module):
    def __init__(self, wrap):
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.wrap = wrap

    def forward(self, x):
        y = self.inner(x)
        return self.wrap(y * 2, y * 3)


@dataclasses.dataclass
class Output:
    logits: torch.Tensor
    hidden: list[torch.Tensor]
    name: str = "output"


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
    model = Structured(wrap)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with mpdiag.record(model, optimizer, tmp_path / "run"):
        output = model(torch.randn(5, 8))
        outputs = list(tensors_in(output))
        assert len(outputs) == 2
        sum(o.square().mean() for o in outputs).backward()
        optimizer.step()
    for kind in ("activation", "activation_grad"):
        row = rows(tmp_path / "run", kind=kind, name="")
        assert (row["tensors"].item(), row["numel"].item()) == (2, 80), kind


def test_a_first_layer_whose_input_needs_no_gradient_has_one_itself(tmp_path):
    model, optimizer = model_and_optimizer()
    with mpdiag.record(model, optimizer, tmp_path / "run"):
        step(model, optimizer)
    gradient = rows(tmp_path / "run", kind="activation_grad", name="0")
    assert (gradient["tensors"].item(), gradient["numel"].item()) == (1, 80)
    assert gradient["absmax"].item() > 0


def test_no_activation_and_no_graph_outlives_its_backward(tmp_path):
    model, optimizer = model_and_optimizer()
    model[1].inplace = False
    dead = []
    for module in model:
        module.register_forward_hook(lambda _m, _i, out: dead.append(weakref.ref(out)))
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


def test_a_fused_optimizer_under_a_grad_scaler(tmp_path):
    torch.manual_seed(0)
    model = nn.Linear(8, 4)
    optimizer = torch.optim.Adam(model.parameters(), 0.1, fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    gradients = []
    with mpdiag.record(model, optimizer, tmp_path / "run", every=1) as recorder:
        for i in range(3):
            optimizer.zero_grad()
            loss = model(torch.randn(5, 8)).square().mean()
            scaler.scale(loss * (float("inf") if i == 1 else 1.0)).backward()
            gradients.append(model.weight.grad.clone())
            scaler.step(optimizer)
            scaler.update()
    assert recorder.failures == []
    found = rows(tmp_path / "run", kind="weight_grad", name="weight")
    assert found["scale"].tolist() == [1024.0, 1024.0, 512.0]
    assert found["skipped"].tolist() == [False, True, False]
    assert_same_histogram(
        tmp_path / "run", gradients[0] / 1024, kind="weight_grad", name="weight", step=0
    )


def test_unscaling_before_clipping_leaves_true_weight_gradients(tmp_path):
    model, optimizer = model_and_optimizer()
    scaler = torch.amp.GradScaler("cpu", init_scale=4096.0)
    with mpdiag.record(model, optimizer, tmp_path / "run"):
        scaler.scale(model(torch.randn(5, 8)).square().mean()).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        clipped = model[0].weight.grad.clone()
        scaler.step(optimizer)
        scaler.update()
    assert_same_histogram(tmp_path / "run", clipped, kind="weight_grad", name="0.weight")
    assert (rows(tmp_path / "run", kind="weight_grad")["scale"] == 1).all()
    assert (rows(tmp_path / "run", kind="activation_grad")["scale"] == 4096).all()


def test_contributions_of_micro_batches_are_what_each_backward_added(tmp_path):
    model, optimizer = model_and_optimizer()
    parts, total = [], None
    with mpdiag.record(model, optimizer, tmp_path / "run", every=1):
        for _ in range(2):
            optimizer.zero_grad()
            parts, sofar = [], torch.zeros(16, 8)
            for _ in range(2):
                model(torch.randn(5, 8)).square().mean().backward()
                parts.append(model[0].weight.grad - sofar)
                sofar = model[0].weight.grad.clone()
            total = sofar
            optimizer.step()
    where = {"kind": "weight_grad", "name": "0.weight", "step": 1}
    assert_same_histogram(tmp_path / "run", total, micro=-1, **where)
    assert_same_histogram(tmp_path / "run", parts[0], micro=0, **where)
    second = rows(tmp_path / "run", micro=1, **where)  # a difference is rounded once more
    assert second["absmax"].item() == pytest.approx(parts[1].abs().max().item(), rel=1e-5)


def test_no_gradient_no_row(tmp_path):
    model = nn.ModuleDict({"used": nn.Linear(8, 4), "unused": nn.Linear(8, 4)})
    model["frozen"] = nn.Linear(4, 4).requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), 0.1)
    with mpdiag.record(model, optimizer, tmp_path / "run", every=1) as recorder:
        for _ in range(2):
            optimizer.zero_grad()
            model["frozen"](model["used"](torch.randn(5, 8))).square().mean().backward()
            optimizer.step()
    assert recorder.failures == []
    for kind in ("weight_grad", "update"):
        names = set(rows(tmp_path / "run", kind=kind)["name"])
        assert names == {"used.weight", "used.bias"}, kind
    reasons = not_recorded(tmp_path / "run")
    assert "no gradient" in reasons["unused.weight"]
    assert "frozen" in reasons["frozen.weight"]
    assert "never called" in reasons["unused"]
    frozen = rows(tmp_path / "run", kind="weight", name="frozen.weight")
    assert frozen["numel"].tolist() == [16]  # once, it never changes


class Odd(nn.Module):
    """Returns a tensor of an unusual kind; has a weight, which is 0-dimensional."""

    def __init__(self, returns):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.returns = returns

    def forward(self, x):
        return self.returns(x, self.weight)


def fake(x, _w):
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode().from_tensor(x.detach())


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.filterwarnings("ignore:.*quantize:UserWarning")
@pytest.mark.filterwarnings("ignore:.*quantize:DeprecationWarning")
def test_tensors_of_unusual_kinds_are_counted_or_skipped_with_a_reason(tmp_path):
    skipped = {
        "meta": (lambda x, w: x.to("meta"), "meta tensor"),
        "fake": (fake, "fake tensor"),
        "strided": (lambda x, w: torch.nested.nested_tensor([x[0], x[1]]), "nested"),
        "jagged": (
            lambda x, w: torch.nested.nested_tensor([x[0], x[1]], layout=torch.jagged),
            "nested",
        ),
        "integers": (lambda x, w: x.long(), "not floating point"),
        "text": (lambda x, w: "text", "returned no tensor"),
    }
    counted = {
        "empty": (lambda x, w: x[:0] * w, 0),
        "scalar": (lambda x, w: x.sum() * w, 1),
        "complex": (lambda x, w: torch.complex(x, x) * w, 80),
        "conjugate": (lambda x, w: (torch.complex(x, x) * w).conj().imag, 40),
        "expanded": (lambda x, w: w.expand(3, 4), 12),
        "transposed": (lambda x, w: (x * w).T, 40),
        "gappy": (lambda x, w: (x * w)[:, ::2], 20),
        "halved": (lambda x, w: (x * w).half(), 40),
        "doubled": (lambda x, w: (x * w).double(), 40),
    }

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = nn.ModuleDict({n: Odd(f) for n, (f, _) in {**skipped, **counted}.items()})

        def forward(self, x):
            outputs = {name: part(x) for name, part in self.parts.items()}
            return sum(outputs[name].abs().sum() for name in counted)

    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with mpdiag.record(model, optimizer, tmp_path / "run", every=1) as recorder:
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.randn(5, 8)).backward()
            optimizer.step()
    assert recorder.failures == []
    reasons = not_recorded(tmp_path / "run")
    for name, (_, reason) in skipped.items():
        assert reason in reasons[f"parts.{name}"], name
    for kind in ("activation", "activation_grad"):
        for name, (_, numel) in counted.items():
            found = rows(tmp_path / "run", kind=kind, name=f"parts.{name}")
            assert found["numel"].tolist() == [numel] * 2, (kind, name)
    for kind in ("weight", "weight_grad", "update"):
        found = rows(tmp_path / "run", kind=kind, name="parts.scalar.weight")
        assert found["numel"].tolist() == [1, 1], kind


def test_an_empty_parameter(tmp_path):
    model = nn.Linear(8, 4)
    model.none = nn.Parameter(torch.zeros(0, 3))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with mpdiag.record(model, optimizer, tmp_path / "run") as recorder:
        (model(torch.randn(5, 8)).sum() + model.none.sum()).backward()
        optimizer.step()
    assert recorder.failures == []
    for kind in ("weight", "weight_grad", "update"):
        assert rows(tmp_path / "run", kind=kind, name="none")["numel"].tolist() == [0]


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
    class Failing(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.fails = nn.Linear(8, 8), False

        def forward(self, x):
            y = self.inner(x)
            if self.fails:
                raise ValueError
            return y

    model = Failing()
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
    for name in ("", "inner"):
        found = rows(tmp_path / "run", kind="activation", name=name)
        assert found["numel"].tolist() == [40, 40]


def test_alternating_optimizers_lose_no_step_of_either(tmp_path):
    """A GAN whose critic steps twice as often as its generator."""
    torch.manual_seed(0)
    models = {"generator": nn.Linear(8, 8), "critic": nn.Linear(8, 1)}
    g, c = (torch.optim.SGD(m.parameters(), 0.1) for m in models.values())
    updates = {"generator": [], "critic": []}

    def apply(name, optimizer):
        before = models[name].weight.detach().clone()
        optimizer.step()
        updates[name].append((models[name].weight.detach() - before).abs().max().item())

    with mpdiag.record(models, [g, c], tmp_path / "run", every=1) as recorder:
        for _ in range(3):
            for _ in range(2):
                c.zero_grad()
                made = models["generator"](torch.randn(5, 8)).detach()
                (models["critic"](made) - models["critic"](torch.randn(5, 8))).mean().backward()
                apply("critic", c)
            g.zero_grad()
            models["critic"](models["generator"](torch.randn(5, 8))).mean().backward()
            apply("generator", g)
    assert recorder.failures == []
    for name, expected in updates.items():
        found = rows(tmp_path / "run", kind="update", name=f"{name}.weight").sort_values("step")
        assert (found["tensors"] == 1).all()
        assert found["absmax"].tolist() == expected


class Noise(torch.utils.data.Dataset):
    """Runs a module itself, in the worker, as a tokenizer or an augmentation would."""

    def __init__(self, model):
        self.model = model

    def __len__(self):
        return 8

    def __getitem__(self, i):
        return self.model(torch.full((8,), float(i))).detach()


# Forking a process that has threads is what is tried here.
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_data_loader_worker_records_nothing(tmp_path):
    model, optimizer = model_and_optimizer()
    model.add_module("big", nn.Identity())
    with mpdiag.record(model, optimizer, tmp_path / "run", every=1) as recorder:
        loader = torch.utils.data.DataLoader(
            Noise(nn.Sequential(model[0], nn.Tanh(), nn.Linear(16, 8))),
            batch_size=4,
            num_workers=2,
            multiprocessing_context="fork",
        )
        for x in loader:
            step(model, optimizer, x)
    assert recorder.failures == []
    run = mpdiag.open_run(tmp_path / "run")
    assert run.meta["state"] == "complete"
    assert rows(tmp_path / "run", kind="activation", name="0")["numel"].tolist() == [64, 64]


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("in the way")
    plain, optimizer = model_and_optimizer()
    step(plain, optimizer)
    model, optimizer = model_and_optimizer()
    with pytest.warns(RuntimeWarning, match="training goes on") as warned:  # noqa: SIM117
        with mpdiag.record(model, optimizer, tmp_path / "file" / "run"):
            step(model, optimizer)
    assert len(warned) == 1
    assert torch.equal(plain[0].weight, model[0].weight)


def test_update_facts_equal_casts_done_one_by_one(tmp_path):
    torch.manual_seed(0)
    layer = nn.Linear(64, 64, bias=False)
    with torch.no_grad():  # all magnitudes, some zeros
        layer.weight.mul_(torch.exp2(torch.randint(-20, 17, layer.weight.shape)))
        layer.weight[0] = 0
    optimizer = torch.optim.SGD(layer.parameters(), 1.0)
    gradient = torch.randn(64, 64) * torch.exp2(torch.randint(-30, 5, (64, 64)))
    gradient[1] = 0
    w = layer.weight.detach().clone()
    with mpdiag.record(layer, optimizer, tmp_path / "run"):
        layer.weight.grad = gradient
        optimizer.step()
    delta = layer.weight.detach() - w
    moved = delta != 0
    row = rows(tmp_path / "run", kind="update").iloc[0]
    assert row["changed"] == moved.sum().item()
    assert row["vanished_fp16"] == (moved & (delta.half() == 0)).sum().item()
    for name, cast in (("fp16", torch.float16), ("bf16", torch.bfloat16)):
        start, change = w.to(cast), delta.to(cast)
        swallowed = moved & (start + change == start)
        assert row[f"swallowed_{name}"] == swallowed.sum().item(), name
    assert row["ratio_zeros"] == (moved & (w == 0)).sum().item()
    ratio = (w.double() / delta.double()).abs()[moved & (w != 0)]
    exponents = torch.ceil(torch.log2(ratio)).long() - 1
    first = int(row["ratio_first_exponent"])
    expected = torch.bincount(exponents - exponents.min()).tolist()
    assert (first, list(row["ratio_counts"])) == (exponents.min().item(), expected)


def test_random_state_of_python_and_numpy_is_untouched(tmp_path):
    model, optimizer = model_and_optimizer()
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002
    before = random.getstate(), np.random.get_state()[1].tolist()  # noqa: NPY002
    with mpdiag.record(model, optimizer, tmp_path / "run", every=1):
        step(model, optimizer)
    assert before == (random.getstate(), np.random.get_state()[1].tolist())  # noqa: NPY002


@pytest.mark.parametrize(
    ("every", "expected"), [(1, range(45)), (7, range(0, 45, 7)), (None, None)]
)
def test_exactly_the_steps_of_the_cadence(tmp_path, every, expected):
    model, optimizer = model_and_optimizer()
    with mpdiag.record(model, optimizer, tmp_path / "run", every=every) as recorder:
        for _ in range(45):
            step(model, optimizer)
    expected = [*range(20), 20, 40] if expected is None else list(expected)
    for kind in ("activation", "activation_grad", "weight", "weight_grad", "update"):
        assert sorted(set(rows(tmp_path / "run", kind=kind)["step"])) == expected, kind
    assert recorder.steps_recorded == len(expected)


def test_a_failing_training_raises_its_own_error_and_leaves_a_good_run(tmp_path):
    model, optimizer = model_and_optimizer()
    with pytest.raises(ZeroDivisionError), mpdiag.record(model, optimizer, tmp_path / "run"):
        step(model, optimizer)
        raise ZeroDivisionError
    assert mpdiag.open_run(tmp_path / "run").meta["state"] == "failed"
    assert set(rows(tmp_path / "run")["step"]) == {0}
    assert not nn.modules.module._global_forward_hooks
