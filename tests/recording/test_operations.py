"""Operation records: what they say is held against torch itself; training is left alone.

That nothing changes by a bit is tested over all architectures in ``test_bit_identical``, which
records operations in its first step.
"""

import contextlib
from unittest.mock import Mock

import pytest
import torch
from recorded import Wrapped, steps
from recorded_steps import Layers, record_steps
from torch import nn
from torch.autograd import grad as grad_by_name
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import mpdiag
from mpdiag.numerics.histograms import ExponentHistogram
from mpdiag.recording.cadence import next_operations
from mpdiag.recording.operations import OperationWatch
from mpdiag.runs.run import open_run
from mpdiag.runs.training_log import read_log


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(8, 6)
        self.inner = nn.Sequential(nn.Linear(6, 6), nn.ReLU())
        self.seen = {}

    def forward(self, x):
        y = self.first(x)
        z = y * 3.0
        self.seen["y"], self.seen["z"] = y.detach().clone(), z.detach().clone()
        return self.inner(z)


def net(model=None):
    model = model or Net()
    return model, torch.optim.SGD(model.parameters(), 0.1)


def recorded(folder, model=None, count=2, x=None, **options):
    model, optimizer = net(model)
    x = torch.randn(4, 8) if x is None else x
    with mpdiag.record(model, optimizer, folder, **options) as recorder:
        for _ in range(count):
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), torch.zeros(4, 6))
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
    assert recorder.failures == []
    return open_run(folder), model


def test_names_places_phases_and_histograms(tmp_path):
    run, model = recorded(tmp_path / "run", count=1)
    operations = run.operations()
    assert [o.index for o in operations] == list(range(len(operations)))
    assert run.meta["operations"]["steps"] == [0]
    mul = next(o for o in operations if o.op == "mul" and o.phase == "forward")
    assert (mul.module, mul.code, mul.scalars["other"]) == ("", "z = y * 3.0", 3.0)
    assert mul.where.endswith(f"test_operations.py:{Net.forward.__code__.co_firstlineno + 2}")
    for record, value in ((mul.inputs[0], model.seen["y"]), (mul.outputs[0], model.seen["z"])):
        h, expected = record.histogram, ExponentHistogram.of(value.numpy())
        assert (h.counts == expected.counts).all()
        assert all(getattr(h, n) == getattr(expected, n) for n in ("absmax", "absmin", "zeros"))
        assert h.abs_sum().value == pytest.approx(float(value.abs().sum()), rel=0.1)
    assert operations[mul.inputs[0].producer].op == "addmm"
    assert operations[mul.inputs[0].producer].module == "first"
    relu = next(o for o in operations if o.op == "relu")
    assert relu.module == "inner.1"
    loss = next(o for o in operations if o.op == "mse_loss")
    assert (loss.module, loss.reduction) == (None, 24)
    weight = next(t for o in operations if o.module == "inner.0" for t in o.inputs if t.parameter)
    assert weight.parameter.startswith("inner.0.")
    assert {o.phase for o in operations} == {"forward", "backward", "update"}


def test_a_backward_operation_knows_its_forward_one(tmp_path):
    operations = recorded(tmp_path / "run", count=1)[0].operations()
    backward = [o for o in operations if o.phase == "backward" and o.node]
    pairs = {(o.op, operations[o.forward].op) for o in backward if o.forward >= 0}
    assert {("mm", "addmm"), ("threshold_backward", "relu"), ("mul", "mul")} <= pairs
    for o in backward:
        if o.forward >= 0:
            before = operations[o.forward]
            assert (o.module, o.where) == (before.module, before.where)
    mse = next(o for o in backward if o.op == "mse_loss_backward")
    assert mse.code.startswith("loss = F.mse_loss")


def test_flops_are_torchs_own(tmp_path):
    run, _ = recorded(tmp_path / "run", count=1)
    products = [o for o in run.operations() if o.op in ("mm", "addmm")]
    with FlopCounterMode(display=False) as counter:
        F.mse_loss(Net()(torch.randn(4, 8)), torch.zeros(4, 6)).backward()
    assert sum(o.flops for o in products) == counter.get_total_flops()


def test_no_operations_are_recorded_where_none_are_asked_for(tmp_path):
    run, _ = recorded(tmp_path / "none", operations=0)
    assert run.operations() == []
    assert mpdiag.analyze(run).operations == ()
    assert not (tmp_path / "none" / "operations").exists()


def test_one_of_the_steps_lies_in_the_last_fifth_of_every_training():
    due = [0]
    while due[-1] < 100_000:
        due.append(next_operations(due[-1]))
    assert due[:7] == [0, 10, 100, 125, 157, 197, 247]
    for length in range(126, 100_000, 7):
        assert max(step for step in due if step < length) >= 0.8 * (length - 1) - 1
    assert next_operations(-1) == 0
    assert [next_operations(step) for step in (3, 10, 40, 104)] == [10, 100, 100, 130]


@pytest.mark.parametrize(
    ("options", "steps"),
    [
        ({}, [0, 10, 31, 62, 100, 125]),  # the growth shows in steps 30 and 61
        ({"operations": 4}, [0, 10, 100, 125]),
        ({"operations": 3}, [0, 10, 100]),
        ({"every": 30}, [0, 30, 90, 120]),
        ({"max_steps": 25}, [0, 10, 31, 62]),
    ],
)
def test_a_layer_that_grows_asks_for_operations(tmp_path, options, steps):
    """Its input is five times as large from step 30 on, and 25 times from step 60 on."""
    x = torch.randn(4, 8)

    def loss(model, step):
        return model(x * (1.0 + 4.0 * (step >= 30) + 20.0 * (step >= 60))).sum()

    model = nn.Linear(8, 2, bias=False)
    run = record_steps(tmp_path / "run", model, loss, 130, budget=None, **options)
    assert run.meta["failures"] == []
    assert run.meta["operations"]["steps"] == steps
    # What rounding does is compared between planned steps; the first one's weights say little.
    shown = {o.step for o in run.operations() if "gradient_error_fp16" in o.facts}
    assert shown == set(steps) - {0, 31, 62} - ({90} if options == {"every": 30} else set())


def test_a_users_own_mode_is_left_as_it_was(tmp_path):
    model, optimizer = net()
    x = torch.randn(4, 8)
    with mpdiag.record(model, optimizer, tmp_path / "run"):
        with FlopCounterMode(display=False) as counter:  # entered before ours, left before it
            loss = model(x).sum()
        assert torch._C._len_torch_dispatch_stack() == 1
        loss.backward()
        optimizer.step()
        assert torch._C._len_torch_dispatch_stack() == 0
    assert counter.get_total_flops() > 0
    operations = open_run(tmp_path / "run").operations()
    assert any(o.op == "addmm" for o in operations)
    assert any(o.phase == "backward" for o in operations)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_parts_have_their_modules(tmp_path, reentrant):
    class Checkpointed(Net):
        def forward(self, x):
            return checkpoint(self.inner, self.first(x), use_reentrant=reentrant)

    run, _ = recorded(tmp_path / "run", Checkpointed(), count=1)
    operations = run.operations()
    again = [o for o in operations if o.phase == "backward" and not o.node]
    assert {o.module for o in again if o.op == "addmm"} == {"inner.0"}
    backward = {o.module for o in operations if o.op == "mm" and o.node}
    assert {"inner.0", "first"} <= backward


def test_a_failure_ends_the_records_and_not_the_training(tmp_path, monkeypatch):
    fail = Mock(side_effect=ValueError("on purpose"))
    monkeypatch.setattr(OperationWatch, "_complete", fail)
    model, optimizer = net()
    with (
        pytest.warns(RuntimeWarning, match="recording operations"),
        mpdiag.record(model, optimizer, tmp_path / "run") as recorder,
    ):
        steps(2, model, optimizer)
    assert len(recorder.failures) == 1
    run = open_run(tmp_path / "run")
    assert run.meta["steps_recorded"] == 2
    assert run.operations() == []
    assert torch._C._len_torch_dispatch_stack() == 0


def test_parts_that_the_loop_calls_alone_are_recorded_too(tmp_path):
    """A model whose own ``forward`` nobody calls, as two-stage detectors are trained."""
    model, optimizer = net()
    with mpdiag.record(model, optimizer, tmp_path / "run") as recorder:
        with torch.no_grad():  # no training, and nothing to record
            model.inner(torch.randn(4, 6))
        model.inner(model.first(torch.randn(4, 8))).square().sum().backward()
        optimizer.step()
    assert recorder.failures == []
    operations = open_run(tmp_path / "run").operations()
    products = [o.module for o in operations if o.phase == "forward" and o.op == "addmm"]
    assert products == ["first", "inner.0"]
    assert {o.phase for o in operations} == {"forward", "backward"}


def test_scratch_memory_of_an_operation_is_no_result(tmp_path):
    """A loss keeps a table for its backward pass, of which short targets leave a part unwritten."""

    def spelling(body, x):
        odds = body(x).log_softmax(-1)
        sizes = torch.tensor([6, 2])
        loss = F.ctc_loss(odds, torch.tensor([[1, 2, 3], [4, 0, 0]]), sizes, torch.tensor([3, 1]))
        return loss.expand(4, 6)

    model, x = Wrapped(nn.Linear(8, 5), spelling), torch.randn(6, 2, 8)
    run, _ = recorded(tmp_path / "run", model, count=1, x=x)
    by_op = {o.op: o for o in run.operations() if "ctc" in o.op}
    (loss,) = by_op["_ctc_loss"].outputs
    assert loss.shape == (2,)  # one for each of the batch, and no table
    backward = by_op["_ctc_loss_backward"]
    assert "log_alpha" not in {record.argument for record in backward.inputs}


@torch.library.custom_op("mpdiag_tests::double", mutates_args=("x",))
def _double(x: torch.Tensor) -> None:
    x.mul_(2)


def _by_torch(x):
    x.data.mul_(2)
    torch._foreach_add_([x], 1.0)


@pytest.mark.parametrize(
    ("write", "value", "writer"),
    [
        # No operation of torch: who wrote the tensor that is read next is not known.
        (_double, 3.0, None),
        (lambda x: x.numpy().__imul__(2), 3.0, None),
        (_by_torch, 4.0, "_foreach_add_"),
    ],
)
def test_what_is_written_in_place_is_known_by_its_writer(tmp_path, write, value, writer):
    def forward(body, x):
        scale = torch.ones(6) + 0.5
        with torch.no_grad():
            write(scale)
        return body(x) * scale

    run, _ = recorded(tmp_path / "run", Wrapped(nn.Linear(8, 6), forward), count=1)
    operations = run.operations()
    read = next(o for o in operations if o.op == "mul" and o.phase == "forward").inputs[1]
    assert read.histogram.absmax == value
    assert (operations[read.producer].op if read.producer >= 0 else None) == writer


def trained_bits(folder, step, count=2):
    """Weights of a small model after some steps, recorded or (without a folder) alone."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(9, 27), nn.Sigmoid())
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    record = mpdiag.record(model, optimizer, folder) if folder else contextlib.nullcontext()
    with record as recorder:
        for _ in range(count):
            optimizer.zero_grad()
            step(model, torch.randn(50, 9))
            optimizer.step()
    assert recorder is None or recorder.failures == []
    return [p.detach().clone() for p in model.parameters()]


def by_grad(model, x):
    """The gradients come from ``torch.autograd.grad``, whose name the script has imported."""
    loss = model(x).view(-1, 9, 3).prod(2).mean()
    for parameter, gradient in zip(
        model.parameters(), grad_by_name(loss, list(model.parameters())), strict=True
    ):
        parameter.grad = gradient


def by_penalty(model, x):
    """A gradient's norm belongs to the loss, and the products lie in both passes."""
    x.requires_grad_()
    loss = model(x).view(-1, 9, 3).prod(2).mean()
    (slope,) = torch.autograd.grad(loss, x, create_graph=True)
    (loss + slope.square().sum()).backward()


def by_product_made_before(model, x):
    """The product is there before the model is called, and the recorder sees operations."""
    size = (model[0].weight + 1).view(-1, 3).prod(1).mean()
    (size + model(x).mean()).backward()


def by_checkpoint(model, x):
    """The product lies in a part that is computed again within the backward pass."""
    y = checkpoint(lambda a: a.view(-1, 9, 3).prod(2), model(x), use_reentrant=True)
    y.mean().backward()


def by_filling(model, x):
    """What is filled in is trained: its gradient is a sum over what was masked."""
    y = model(x)
    filled = y.masked_fill(x.repeat(1, 3) > 0, model[0].bias[0])
    (filled * torch.randn(50, 27)).square().mean().backward()


STEPS = [by_grad, by_penalty, by_product_made_before, by_checkpoint, by_filling]


@pytest.mark.parametrize("step", STEPS, ids=lambda s: s.__name__)
def test_no_backward_pass_computes_other_bits(tmp_path, step):
    engine = torch.autograd._engine_run_backward
    plain, watched = trained_bits(None, step), trained_bits(tmp_path / "run", step)
    assert all(map(torch.equal, plain, watched))
    assert torch.autograd._engine_run_backward is engine  # put back
    assert open_run(tmp_path / "run").meta["operations"]["steps"] == [0]


def test_operations_after_a_pass_left_alone_are_seen_again(tmp_path):
    def step(model, x):
        by_penalty(model, x)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)

    trained_bits(tmp_path / "run", step, count=1)
    operations = open_run(tmp_path / "run").operations()
    by_op = {o.op: o.phase for o in operations}
    assert by_op["prod"] == "forward"
    assert by_op["pow"] == "forward"  # of the penalty, between the passes
    assert by_op["linalg_vector_norm"] == by_op["stack"] == "update"
    assert "update" not in {o.phase for o in operations if o.op in ("addmm", "prod", "pow")}


def test_of_a_closure_the_first_evaluation_is_recorded(tmp_path):
    model = Net()
    optimizer = torch.optim.LBFGS(model.parameters(), 0.1, max_iter=5)
    x, calls = torch.randn(4, 8), []

    def closure():
        optimizer.zero_grad(set_to_none=False)
        loss = model(x).square().mean()
        loss.backward()
        calls.append(loss.item())
        return loss

    with mpdiag.record(model, optimizer, tmp_path / "run") as recorder:
        for _ in range(2):
            optimizer.step(closure)
    assert recorder.failures == []
    assert len(calls) > 4
    run = open_run(tmp_path / "run")
    operations = run.operations()
    assert run.meta["operations"]["steps"] == [0]
    assert sum(o.op == "addmm" for o in operations) == 2  # one forward pass
    assert {o.phase for o in operations} == {"forward", "backward"}  # and no search along a line
    (described,) = run.meta["optimizers"]
    assert described["steps_taken"] == 2  # a step of the optimizer is one, whatever it evaluates
    assert described["evaluations"] == len(calls)
    assert {"weight_grad", "update", "activation_grad"} <= set(run.frame()["kind"])
    assert read_log(run.folder).steps[0].loss == calls[0]  # and no sum over the evaluations


def test_a_tensor_turned_in_place_is_still_known_by_its_writer(tmp_path):
    turned = lambda body, x: body(x).transpose_(0, 1).unsqueeze_(0).sum(0).t()  # noqa: E731
    run, _ = recorded(tmp_path / "run", Wrapped(nn.Linear(8, 6), turned), count=1)
    operations = run.operations()
    read = next(o for o in operations if o.op == "sum" and o.phase == "forward").inputs[0]
    assert operations[read.producer].op == "addmm"


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_nested_tensors_are_noted_with_their_number_of_elements(tmp_path, layout):
    def ragged(layers, x):
        rows = layers.deep(torch.nested.nested_tensor([x[:2], x[2:]], layout=layout)).relu()
        return torch.cat(layers.last(rows).unbind())

    layers = Layers(ragged, deep=nn.Linear(4, 8), last=nn.Linear(8, 1))
    run = record_steps(
        tmp_path / "run", layers, lambda model, _: model(torch.randn(5, 4)).square().sum()
    )
    assert run.meta["failures"] == []
    found = {
        (op.op, op.inputs[0].shape, op.outputs[0].shape)
        for op in run.operations()
        if op.outputs and op.inputs
    }
    assert {("linear", (20,), (40,)), ("relu", (40,), (40,)), ("linear", (40,), (5,))} <= found
    assert mpdiag.analyze(run).verdict.level != "cannot"
