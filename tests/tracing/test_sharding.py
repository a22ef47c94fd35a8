"""What wrappers do with parameters, on two ranks: their sizes, and who adds their gradients."""

import json

import pytest
from support import NEEDS_GLOO

pytestmark = NEEDS_GLOO

SCRIPT = """
import json, torch, mpdiag
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
mesh = dist.init_device_mesh("cpu", (2, 1), mesh_dim_names=("tp", "dp"))
groups = [dist.new_group([rank]) for rank in range(2)]
narrow = MixedPrecisionPolicy(param_dtype=torch.bfloat16)

def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 2))

def fsdp1():
    return FullyShardedDataParallel(model(), use_orig_params=True, device_id=torch.device("cpu"))

def fsdp2_alone():
    return fully_shard(model(), mesh=mesh["dp"], mp_policy=narrow)

def ddp_alone():
    return DistributedDataParallel(model(), process_group=groups[dist.get_rank()])

def tensor_parallel():
    whole = ColwiseParallel(output_layouts=Replicate())
    return parallelize_module(model(), mesh["tp"], {"0": whole})

found = {}
for make in (fsdp1, fsdp2_alone, ddp_alone, tensor_parallel):
    net = make()
    optimizer = torch.optim.AdamW(net.parameters())
    net(torch.randn(3, 4)).square().mean().backward()
    optimizer.step()
    found[make.__name__] = [
        [p.numel, p.reduced, p.unknown] for p in mpdiag.audit(net, optimizer).parameters
    ]
if dist.get_rank() == 0:
    print(json.dumps(found))
dist.destroy_process_group()
"""
ALONE = "its group has one rank: nothing is reduced"


@pytest.fixture(scope="module")
def found(fork_server, tmp_path_factory):
    folder = tmp_path_factory.mktemp("wrapped")
    (folder / "wrapped.py").write_text(SCRIPT)
    first, other = fork_server.ranks("python", folder / "wrapped.py", cwd=folder)
    assert (first.code, other.code) == (0, 0), first.err
    return json.loads(first.out)


@pytest.mark.parametrize("kind", ["fsdp1", "fsdp2_alone", "ddp_alone", "tensor_parallel"])
def test_sizes_are_those_over_all_ranks(found, kind):
    assert [numel for numel, *_ in found[kind]] == [24, 6, 12, 2]


@pytest.mark.parametrize("kind", ["fsdp2_alone", "ddp_alone"])
def test_a_group_of_one_rank_reduces_nothing(found, kind):
    assert {(reduced, unknown["reduced"]) for _, reduced, unknown in found[kind]} == {(None, ALONE)}


def test_what_lies_on_another_rank_is_said_to(found):
    """FSDP1 gives a rank the first half of all elements."""
    assert {reduced for _, reduced, _ in found["fsdp1"]} == {"float32"}
    for field in ("accumulated", "states"):
        reasons = [unknown.get(field) for *_, unknown in found["fsdp1"]]
        assert reasons == [None, *["this rank holds no element of it"] * 3]


def test_tensor_parallelism_reduces_no_gradient(found):
    split, beside = (found["tensor_parallel"][i][2]["reduced"] for i in (0, 2))
    assert split == "tensor parallelism: each rank keeps the gradient of its part"
    assert beside == "no DDP or FSDP holds it: the script reduces it, or nothing does"
