"""The first operation that produced an infinity or a NaN, where it is known which."""

import pytest
import torch
from support import NEEDS_GLOO, constant, wrapped
from torch import nn
from torch.nn import functional as F

import mpdiag


class Net(nn.Module):
    def __init__(self, function) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Linear(8, 8)
        self.function = function
        self.head = nn.Linear(8, 2)

    def forward(self, x):
        return self.head(self.function(self.body(x)))


def traced(function, backward=True):
    model = Net(function)
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
    with mpdiag.find_nonfinite(model) as trace:
        loss = model(x).sum()
        if backward:
            loss.backward()
    return trace


@pytest.mark.parametrize(
    ("function", "op", "kind"),
    [
        (lambda x: (x * 200).exp().relu(), "exp", "Inf"),
        (lambda x: (x - 10).sqrt(), "sqrt", "NaN"),
        (lambda x: 1 / (x - x), "reciprocal", "Inf"),
        (lambda x: torch.log(x * 0), "log", "Inf"),
        (lambda x: (x * 1e30).mul_(1e30).relu(), "mul_", "Inf"),
    ],
)
def test_the_producer_is_named_and_not_who_passed_it_on(function, op, kind):
    first = traced(function).first
    assert (first.op, first.kind, first.phase, first.module) == (op, kind, "forward", "")
    assert first.where.endswith(f"test_nonfinite.py:{function.__code__.co_firstlineno}")
    assert first.inputs[0].lowest is not None
    assert first.step == 0


def test_a_finite_step_has_none_and_masks_of_infinity_are_none():
    assert traced(torch.relu).first is None
    assert traced(lambda x: F.softmax(x.masked_fill(x > 0.5, -float("inf")), -1)).first is None


def test_a_row_masked_everywhere_is_the_softmax():
    first = traced(lambda x: F.softmax(x.masked_fill(x < 99, -float("inf")), -1)).first
    assert (first.op, first.kind) == ("_softmax", "NaN")


def test_the_backward_pass_names_the_forward_line():
    function = lambda x: (x * 0).abs().sqrt()  # noqa: E731
    first = traced(function).first
    assert (first.op, first.ran, first.phase, first.module) == ("sqrt", "div", "backward", "")
    assert "Inf first in the backward pass of sqrt (div), the model at " in str(first)
    assert first.where.endswith(f":{function.__code__.co_firstlineno}")
    assert traced(function, backward=False).first is None


def test_the_step_is_counted():
    model = Net(torch.relu)
    with mpdiag.find_nonfinite(model) as trace:
        for step in range(3):
            if step == 2:
                model.function = lambda x: x * 1e30 * 1e30
            model(torch.randn(4, 8)).sum().backward()
    assert trace.first.step == 2


@pytest.mark.parametrize(("scale", "phase"), [(1.0, "forward"), (2.0**60, "backward")])
def test_in_emulated_fp16_the_operation_and_not_the_cast(scale, phase):
    function = (lambda x: x * 1e5 * 1e-5) if phase == "forward" else torch.relu
    model = Net(function)
    plan = constant(scale)
    with wrapped(model, plan) as mp, mpdiag.find_nonfinite(model) as trace:
        with mp.autocast():
            loss = model(torch.randn(4, 8) + 5).sum()
        mp.backward(loss)
    first = trace.first
    assert first.phase == phase
    assert first.dtype == "float16"
    if phase == "forward":
        assert first.op == "mul"
        assert first.where.endswith(f"test_nonfinite.py:{function.__code__.co_firstlineno}")


def test_nothing_is_left_behind_and_nothing_changed():
    model = Net(torch.relu)
    x = torch.randn(4, 8)
    model(x).sum().backward()
    plain = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    with pytest.raises(ValueError, match="mine"), mpdiag.find_nonfinite(model):
        raise ValueError("mine")
    with mpdiag.find_nonfinite(model):
        model(x).sum().backward()
    assert torch._C._len_torch_dispatch_stack() == 0
    assert not torch.nn.modules.module._global_forward_hooks
    assert all(torch.equal(a, p.grad) for a, p in zip(plain, model.parameters(), strict=True))


SHARDED = """
import os, sys
import torch, torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
import mpdiag
dist.init_process_group("gloo")
rank = dist.get_rank()

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = (nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 8)) for _ in "ab")

    def forward(self, x):
        return self.b(damaged(self.a(x)))

def damaged(h):
    return h * torch.tensor(3e38 if rank == 1 else 1.0) * 9

def root(h):
    return (h * rank).abs().sqrt()

def checked(model, call):
    with mpdiag.find_nonfinite(model) as trace:
        call()
    found, own = trace.culprit(), trace.first
    kind = "none" if own is None else "received" if own.received else "made"
    print(found.op, found.ran, found.phase, found.module, found.line, found.rank, kind)

def trained(model, wrapper=None):
    return lambda: (wrapper or model)(torch.randn(4, 8)).sum().backward()

x = torch.randn(4, 8)
net = Net()
checked(net, trained(net, nn.parallel.DistributedDataParallel(net)))
net = Net()
for part in (net.a, net.b, net):
    fully_shard(part)
checked(net, trained(net))
damaged, net = (lambda h: h), Net()
split = {"a.0": ColwiseParallel(), "a.1": RowwiseParallel()}
parallelize_module(net, init_device_mesh("cpu", (2,)), split)
if rank == 1:
    net.a[0].weight.data.to_local().fill_(3e38)
checked(net, trained(net))
damaged, net = root, Net()
part = net.a if rank == 0 else nn.Sequential(net.b[0], net.b[1])
if rank == 1:
    part.register_forward_pre_hook(lambda module, args: (root(args[0] * 0),))
stage = PipelineStage(part, rank, 2, torch.device("cpu"))
schedule = ScheduleGPipe(stage, 2, loss_fn=lambda y, t: (y - t).square().sum())
feed = {"target": torch.zeros(4, 8)} if rank else {}
checked(part, lambda: schedule.step(*([] if rank else [x]), **feed))
dist.barrier()
sys.stdout.flush()
os._exit(0)
"""


@NEEDS_GLOO
def test_of_several_ranks_the_one_that_made_it_is_named(fork_server, tmp_path):
    line = {text: i for i, text in enumerate(SHARDED.splitlines(), 1)}
    damaged = line["    return h * torch.tensor(3e38 if rank == 1 else 1.0) * 9"]
    root = line["    return (h * rank).abs().sqrt()"]
    (tmp_path / "sharded.py").write_text(SHARDED)
    ended = fork_server.ranks("python", "sharded.py", cwd=tmp_path)
    assert [done.code for done in ended] == [0, 0], ended[0].err[-2000:]
    outputs = [[row.rsplit(" ", 1) for row in done.out.splitlines()] for done in ended]
    culprits = [row for row, _ in outputs[0]]
    assert culprits == [row for row, _ in outputs[1]]
    assert culprits[:2] == [f"mul mul forward  {damaged} 1"] * 2
    assert culprits[2].startswith("addmm addmm forward a.0 ")
    assert culprits[2].endswith(" 1")
    assert culprits[3] == f"sqrt div backward  {root} 1"
    assert [[kind for _, kind in rows] for rows in outputs] == [
        ["received", "none", "received", "received"],
        ["made"] * 4,
    ]
