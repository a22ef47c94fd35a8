"""Recording changes nothing: losses, weights, buffers and random state, bit for bit.

On one thread: on two, plain FP32 training itself now and then differs by a bit between runs.
"""

import importlib
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from recorded import Output, Wrapped, around_linear  # noqa: F401 - the table calls it
from support import one_thread
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import mpdiag
from mpdiag.recording.counting.tensors import tensors_in

__all__ = ["one_thread"]

STEPS = 3


def tied() -> nn.Module:
    body = nn.ModuleDict({"embedding": nn.Embedding(20, 8), "head": nn.Linear(8, 20, bias=False)})
    body["head"].weight = body["embedding"].weight
    return Wrapped(body, lambda b, x: b["head"](b["embedding"](x)))


def checkpointed(reentrant: bool) -> nn.Module:
    inner = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 8))
    return Wrapped(
        nn.ModuleDict({"first": nn.Linear(8, 8), "inner": inner}),
        lambda b, x: checkpoint(b["inner"], b["first"](x), use_reentrant=reentrant),
    )


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return 3 * x**2 * grad


def residual(body: nn.ModuleDict, x: torch.Tensor) -> torch.Tensor:
    y = body["relu"](body["a"](x))
    z = body["b"](y)
    z += y
    return body["relu"](z)


def penalty(body: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Double backward: the gradient of a gradient's norm."""
    x = x.clone().requires_grad_()
    y = body(x)
    (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    return y + slope.norm(dim=1, keepdim=True)


def frozen() -> nn.Module:
    body = nn.ModuleDict({"backbone": nn.Linear(8, 8), "head": nn.Linear(8, 4)})
    body["backbone"].requires_grad_(False)

    def forward(body: nn.ModuleDict, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            x = body["backbone"](x)
        return body["head"](x)

    return Wrapped(body, forward)


def autocast(body: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return body(x)


TABLE = Path(__file__).with_name("architectures.tsv").read_text().splitlines()
ARCHITECTURES = {name: (model, batch) for name, model, batch in (r.split("\t") for r in TABLE[1:])}
SMALL = {"num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 16}


def calculated(text: str) -> Any:
    """What an expression of the table gives; ``hf`` is transformers, imported where it is needed."""
    names = {"hf": importlib.import_module("transformers")} if "hf." in text else {}
    return eval(text, globals() | names)


def train(name: str, folder: Any = None) -> tuple[list[Any], nn.Module, mpdiag.Recorder | None]:
    """Losses and what else must not differ."""
    made, batch = ARCHITECTURES[name]
    torch.manual_seed(0)
    model = calculated(made)
    trainable = [p for p in model.parameters() if p.requires_grad]
    if name.startswith("sparse"):
        optimizer: torch.optim.Optimizer = torch.optim.SparseAdam(trainable, 1e-2)
    else:
        optimizer = torch.optim.Adam(trainable, 1e-2, weight_decay=1e-4)
    losses, recording = [], nullcontext()
    if folder is not None:
        recording = mpdiag.record(model, optimizer, folder, every=1, trace=[1], blocks=True)
    with recording as recorder:
        for _ in range(STEPS):
            optimizer.zero_grad()
            outputs = list(tensors_in(model(calculated(batch))))
            loss = sum(F.softplus(o.abs()).mean() for o in outputs if o.requires_grad)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return [losses, torch.get_rng_state()], model, recorder


def sizes_called(name: str) -> dict[str, int]:
    """Values each called module returns in a step, by a way of its own."""
    sizes: dict[nn.Module, int] = {}

    def add(module: nn.Module, _: Any, output: Any) -> None:
        if torch._C._current_graph_task_id() != -1:
            return  # checkpointing computes again what was counted in the forward pass
        for tensor in tensors_in(output):
            if tensor.is_floating_point() or tensor.is_complex():
                size = tensor.numel() * (2 if tensor.is_complex() else 1)
                sizes[module] = sizes.get(module, 0) + size

    handle = nn.modules.module.register_module_forward_hook(add)
    try:
        _, model, _ = train(name)
    finally:
        handle.remove()
    return {n: sizes[m] // STEPS for n, m in model.named_modules() if m in sizes}


@pytest.mark.filterwarnings("ignore:LSTM with projections:UserWarning")
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.long) if "hf." in made else name
        for name, (made, _) in ARCHITECTURES.items()
    ],
)
def test_recording_changes_no_bit_and_records_everything(name, tmp_path):
    called = sizes_called(name)
    plain, plain_model, _ = train(name)
    recorded, model, recorder = train(name, tmp_path / "run")

    assert recorded[0] == plain[0]
    assert torch.equal(recorded[1], plain[1])
    for tensors in (nn.Module.named_parameters, nn.Module.named_buffers):
        pairs = zip(tensors(plain_model), tensors(model), strict=True)
        assert all(a == b and torch.equal(s, t) for (a, s), (b, t) in pairs)
    gradients = zip(plain_model.parameters(), model.parameters(), strict=True)
    assert all(
        p.grad is q.grad is None or torch.equal(p.grad.to_dense(), q.grad.to_dense())
        for p, q in gradients
    )

    assert recorder.failures == []
    run = mpdiag.open_run(tmp_path / "run")
    frame = run.frame()
    assert run.meta["state"] == "complete"
    assert run.meta["steps_recorded"] == STEPS
    parts = frame[["zeros", "subnormals", "infs", "nans"]].sum(axis=1)
    counted = parts + frame["counts"].map(lambda c: int(np.sum(c)))
    assert (counted == frame["numel"]).all()

    for name_, parameter in model.named_parameters():
        if parameter.grad is None:
            continue
        kinds = {"weight", "weight_grad", "update"}
        rows = frame[(frame["name"] == name_) & frame["kind"].isin(kinds)]
        assert sorted(rows["step"]) == sorted(list(range(STEPS)) * 3), name_
        size = parameter.numel() * (2 if parameter.is_complex() else 1)
        assert (rows["numel"] == size).all()
    unrecorded = {r["name"] for r in run.modules() if r["reason"]}
    for module_name, _ in model.named_modules():
        rows = frame[(frame["name"] == module_name) & (frame["kind"] == "activation")]
        if len(rows) == 0:
            assert module_name not in called, f"{module_name} was called and has no row"
            assert module_name in unrecorded, f"{module_name} has neither a row nor a reason"
            continue
        per_step = rows.groupby("step")["numel"].sum()
        assert per_step.to_dict() == dict.fromkeys(range(STEPS), called[module_name]), module_name
