"""Two ranks on gloo: ours beside torch.amp in one loop under DDP."""

from __future__ import annotations

SCRIPT = """
import os, warnings
warnings.simplefilter("error", RuntimeWarning)
import torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
import mpdiag
from mpdiag import PrecisionOverrides
from mpdiag.numerics.loss_scalers import Backoff
from mpdiag.plan import PrecisionPlan

torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))


def rows(step, part):
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(100 * step + 10 * part + rank))
    if (step, part, rank) == (1, 0, 1):
        x[0, 0] = float("inf")  # on one rank, in the first of two parts
    return x


def peer():
    model = DistributedDataParallel(network())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2)
    scales = []
    for step in range(4):
        for part in range(2):
            model.require_backward_grad_sync = part == 1
            with torch.autocast("cpu", torch.bfloat16):
                output = model(rows(step, part))
            scaler.scale(output.float().square().mean() / 2).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
    return scales, [p.detach().clone() for p in model.parameters()]


def ours():
    model = DistributedDataParallel(network())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    overrides = PrecisionOverrides(loss_scale=Backoff(64.0, growth_interval=2))
    plan = PrecisionPlan(target="bf16")
    scales = []
    with mpdiag.MixedPrecision(model, optimizer, plan, level="O1", overrides=overrides) as mp:
        for step in range(4):
            for part in range(2):
                model.require_backward_grad_sync = part == 1
                with mp.autocast():
                    output = model(rows(step, part))
                mp.backward(output.float().square().mean() / 2)
            mp.step()
            scales.append(mp.loss_scale)
    return scales, [p.detach().clone() for p in model.parameters()]


(theirs, expected), (scales, found) = peer(), ours()
assert scales == theirs == [64.0, 32.0, 32.0, 64.0], (scales, theirs)
assert all(map(torch.equal, found, expected))
for weight in found:
    parts = [torch.empty_like(weight) for _ in range(2)]
    dist.all_gather(parts, weight)
    assert torch.equal(*parts)

dist.barrier()
os._exit(0)
"""


def test_accumulation_and_an_overflow_on_one_rank_as_torch_does_it(fork_server, tmp_path):
    for done in fork_server.ranks("python", "-c", SCRIPT, cwd=tmp_path):
        assert done.code == 0, done.err[-2000:]
