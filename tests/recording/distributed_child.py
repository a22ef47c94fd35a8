"""One rank of distributed trainings, each without and with a recorder, compared.

    RANK=… WORLD_SIZE=… MASTER_ADDR=… MASTER_PORT=… python distributed_child.py FOLDER WAY…

A WAY is ddp, inner (DDP, the recorder is given the module inside), outside (DDP, no optimizer steps the
norm), fsdp, fsdp-outside, fsdp-gathered (recording begins while parameters are) or tensor. Writes the
run to FOLDER/WAY, and what this rank knows to be true to FOLDER/WAY-RANK.pt.
"""

import sys
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import mpdiag

STEPS = 3


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 1)  # of which a second rank's part is empty

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(self.norm(x))))


def build(what: str, world: int) -> tuple[nn.Module, nn.Module]:
    """The model to call and the model to record."""
    from torch.distributed.device_mesh import init_device_mesh

    torch.manual_seed(0)
    model = Model()
    if what in ("ddp", "inner", "outside"):
        wrapped = nn.parallel.DistributedDataParallel(model)
        return wrapped, wrapped if what == "ddp" else model
    mesh = init_device_mesh("cpu", (world,))
    if what.startswith("fsdp"):
        from torch.distributed.fsdp import fully_shard

        for layer in (model.norm, model.up, model.down) if what != "fsdp-gathered" else ():
            fully_shard(layer, mesh=mesh)
        return (fully_shard(model, mesh=mesh),) * 2
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    layers = {
        "norm": SequenceParallel(sequence_dim=0, use_local_output=False),
        "up": ColwiseParallel(input_layouts=Shard(0)),
        "down": RowwiseParallel(),
    }
    return (parallelize_module(model, mesh, layers),) * 2


def batch(what: str, rank: int, step: int) -> torch.Tensor:
    # Tensor parallelism works on the same batch everywhere; the others on one of their own.
    own = 0 if what == "tensor" else rank
    return torch.randn(6, 8, generator=torch.Generator().manual_seed(100 * own + step))


def train(what: str, rank: int, world: int, run: Path | None) -> dict[str, list[torch.Tensor]]:
    """Train; the local parts of weights, gradients and updates, by kind and name, for each step."""
    called, recorded = build(what, world)
    stepped = [p for n, p in called.named_parameters() if "outside" not in what or "norm" not in n]
    optimizer = torch.optim.SGD(stepped, 0.1, momentum=0.9)
    seen: dict[str, list[torch.Tensor]] = {}
    if what == "fsdp-gathered":
        with torch.no_grad():
            called(batch(what, rank, 0))

    def note(kind: str, values: dict[str, torch.Tensor]) -> None:
        for name, value in values.items():
            seen.setdefault(f"{kind} {name}", []).append(value)

    def local(tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.detach()
        return (tensor.to_local() if hasattr(tensor, "to_local") else tensor).clone()

    watched = (
        nullcontext()
        if run is None
        else mpdiag.record(recorded, optimizer, run, every=1, trace=[1])
    )
    with watched as recorder:
        for step in range(STEPS):
            called.zero_grad()
            loss = called(batch(what, rank, step)).square().mean()
            loss.backward()
            for parameter in recorded.parameters():
                parameter.grad.mul_(0.5)
            before = {n: local(p) for n, p in recorded.named_parameters()}
            note("weight", before)
            note("weight_grad", {n: local(p.grad) for n, p in recorded.named_parameters()})
            optimizer.step()
            after = {n: local(p) for n, p in recorded.named_parameters()}
            note("update", {n: after[n] - before[n] for n in before})
            note("loss", {"": local(loss)})
    assert recorder is None or recorder.failures == [], recorder.failures
    return seen


def main() -> None:
    folder = Path(sys.argv[1])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    for what in sys.argv[2:]:
        plain = train(what, rank, world, None)
        watched = train(what, rank, world, folder / what)
        same = plain.keys() == watched.keys() and all(
            torch.equal(a, b)
            for name in plain
            for a, b in zip(plain[name], watched[name], strict=True)
        )
        torch.save({"same": same, "seen": watched}, folder / f"{what}-{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
