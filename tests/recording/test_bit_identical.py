"""Recording changes nothing: losses, weights, buffers and random state, bit for bit.

On one thread: on two, plain FP32 training itself now and then differs by a bit between runs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from recorded import Wrapped, around_linear
from support import one_thread
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import mpdiag
from mpdiag.recording.counting.tensors import tensors_in

__all__ = ["one_thread"]

STEPS = 3


def areas(body: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Boxes' areas, as detectors multiply them."""
    return body(x).exp().view(-1, 3, 3).prod(2)


def shares(body: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """What is left after each of several cuts, as in volume rendering."""
    return body(x).sigmoid().cumprod(-1)


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


@dataclasses.dataclass
class Output:
    logits: torch.Tensor
    hidden: list[torch.Tensor]


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


def floats(*shape: int) -> Callable[[], torch.Tensor]:
    return lambda: torch.randn(*shape)


def ints(high: int, *shape: int) -> Callable[[], torch.Tensor]:
    return lambda: torch.randint(0, high, shape)


def transformers_model(kind: str) -> nn.Module:
    import transformers

    small = {"num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 16}
    if kind == "gpt2":
        config = transformers.GPT2Config(
            vocab_size=50, n_positions=16, n_embd=16, n_layer=2, n_head=2
        )
        return transformers.GPT2LMHeadModel(config)
    if kind == "bert":
        config = transformers.BertConfig(vocab_size=50, intermediate_size=32, **small)
        return transformers.BertForMaskedLM(config)
    if kind == "llama":
        config = transformers.LlamaConfig(vocab_size=50, intermediate_size=32, **small)
        return transformers.LlamaForCausalLM(config)
    if kind == "t5":
        config = transformers.T5Config(
            vocab_size=50, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2
        )
        return Wrapped(
            transformers.T5ForConditionalGeneration(config),
            lambda b, x: b(input_ids=x, decoder_input_ids=x, use_cache=False),
        )
    config = transformers.ViTConfig(image_size=8, patch_size=4, intermediate_size=32, **small)
    return transformers.ViTForImageClassification(config)


Sequential = nn.Sequential
ARCHITECTURES: dict[str, tuple[Callable[[], nn.Module], Callable[[], torch.Tensor]]] = {
    "linear": (lambda: nn.Linear(8, 4), floats(5, 8)),
    "conv1d": (lambda: Sequential(nn.Conv1d(3, 4, 3), nn.ReLU()), floats(2, 3, 9)),
    "conv2d": (lambda: Sequential(nn.Conv2d(3, 4, 3), nn.GELU()), floats(2, 3, 8, 8)),
    "conv3d": (lambda: nn.Conv3d(1, 2, 2), floats(2, 1, 4, 4, 4)),
    "transposed": (lambda: nn.ConvTranspose2d(3, 4, 3, stride=2), floats(2, 3, 5, 5)),
    "batch norm, in place": (
        lambda: Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True)),
        floats(4, 3, 8, 8),
    ),
    "in-place chain": (
        lambda: Sequential(
            nn.Linear(8, 8), nn.ReLU(inplace=True), nn.Linear(8, 8), nn.LeakyReLU(inplace=True)
        ),
        floats(5, 8),
    ),
    "group norm": (lambda: Sequential(nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4)), floats(2, 3, 6, 6)),
    "instance norm": (lambda: Sequential(nn.InstanceNorm2d(3, affine=True)), floats(2, 3, 6, 6)),
    "layer norm": (lambda: Sequential(nn.Linear(8, 8), nn.LayerNorm(8)), floats(5, 8)),
    "rms norm": (lambda: Sequential(nn.Linear(8, 8), nn.RMSNorm(8)), floats(5, 8)),
    "rnn": (lambda: nn.RNN(8, 6, 2), floats(4, 3, 8)),
    "lstm": (lambda: nn.LSTM(8, 6, 2, bidirectional=True), floats(4, 3, 8)),
    "lstm, projected": (lambda: nn.LSTM(8, 6, proj_size=4), floats(4, 3, 8)),
    "gru": (lambda: nn.GRU(8, 6, batch_first=True), floats(4, 3, 8)),
    "lstm cell": (lambda: nn.LSTMCell(8, 6), floats(4, 8)),
    "attention": (
        lambda: Wrapped(nn.MultiheadAttention(8, 2), lambda b, x: b(x, x, x)),
        floats(4, 3, 8),
    ),
    "encoder": (
        lambda: nn.TransformerEncoder(
            nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2, enable_nested_tensor=False
        ),
        floats(4, 3, 8),
    ),
    "bilinear": (lambda: Wrapped(nn.Bilinear(8, 8, 4), lambda b, x: b(x, x)), floats(5, 8)),
    "embedding": (lambda: Sequential(nn.Embedding(20, 8), nn.Linear(8, 4)), ints(20, 3, 5)),
    "sparse embedding": (lambda: nn.Embedding(20, 8, sparse=True), ints(20, 3, 5)),
    "sparse embedding bag": (lambda: nn.EmbeddingBag(20, 8, sparse=True), ints(20, 3, 5)),
    "embedding bag": (lambda: nn.EmbeddingBag(20, 8), ints(20, 3, 5)),
    "dropout": (
        lambda: Sequential(nn.Linear(8, 8), nn.Dropout(0.3), nn.AlphaDropout(0.2), nn.Linear(8, 4)),
        floats(5, 8),
    ),
    "autocast": (
        lambda: Wrapped(Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 4)), autocast),
        floats(5, 8),
    ),
    "batch norm 1d": (lambda: Sequential(nn.Linear(8, 6), nn.BatchNorm1d(6)), floats(5, 8)),
    "transposed 1d": (lambda: nn.ConvTranspose1d(3, 4, 3), floats(2, 3, 5)),
    "prelu": (lambda: Sequential(nn.Linear(8, 8), nn.PReLU()), floats(5, 8)),
    "checkpoint, reentrant": (lambda: checkpointed(True), floats(5, 8)),
    "checkpoint, not reentrant": (lambda: checkpointed(False), floats(5, 8)),
    "products": (lambda: Wrapped(nn.Linear(9, 9), areas), floats(50, 9)),
    "running products": (lambda: Wrapped(nn.Linear(9, 9), shares), floats(50, 9)),
    "tied": (tied, ints(20, 3, 5)),
    "reused": (lambda: around_linear(lambda b, x: b(torch.tanh(b(x)))), floats(5, 8)),
    "dict": (
        lambda: around_linear(lambda b, x: {"logits": (y := b(x)), "deep": {"more": [y * 2]}}),
        floats(5, 8),
    ),
    "dataclass": (lambda: around_linear(lambda b, x: Output(y := b(x), [y * 2])), floats(5, 8)),
    "nested tuple": (
        lambda: around_linear(lambda b, x: (y := b(x), (y * 2, None, 3))),
        floats(5, 8),
    ),
    "custom function": (lambda: around_linear(lambda b, x: Cube.apply(b(x))), floats(5, 8)),
    "residual": (
        lambda: Wrapped(
            nn.ModuleDict(
                {"a": nn.Linear(8, 8), "b": nn.Linear(8, 8), "relu": nn.ReLU(inplace=True)}
            ),
            residual,
        ),
        floats(5, 8),
    ),
    "double backward": (
        lambda: Wrapped(Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1)), penalty),
        floats(5, 8),
    ),
    "frozen": (frozen, floats(5, 8)),
    "complex": (
        lambda: Wrapped(
            nn.Linear(8, 8, dtype=torch.complex64), lambda b, x: b(x.to(torch.complex64)).abs()
        ),
        floats(5, 8),
    ),
    "view": (
        lambda: Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(72, 4)),
        floats(2, 1, 8, 8),
    ),
    "chunks": (lambda: around_linear(lambda b, x: b(x).chunk(2, -1)), floats(5, 8)),
    "gpt2": (lambda: transformers_model("gpt2"), ints(50, 2, 6)),
    "bert": (lambda: transformers_model("bert"), ints(50, 2, 6)),
    "llama": (lambda: transformers_model("llama"), ints(50, 2, 6)),
    "t5": (lambda: transformers_model("t5"), ints(50, 2, 6)),
    "vit": (lambda: transformers_model("vit"), floats(2, 3, 8, 8)),
}


def train(name: str, folder: Any = None) -> tuple[list[Any], nn.Module, mpdiag.Recorder | None]:
    """Losses and what else must not differ."""
    make, batch = ARCHITECTURES[name]
    torch.manual_seed(0)
    model = make()
    trainable = [p for p in model.parameters() if p.requires_grad]
    if name.startswith("sparse"):
        optimizer: torch.optim.Optimizer = torch.optim.SparseAdam(trainable, 1e-2)
    else:
        optimizer = torch.optim.Adam(trainable, 1e-2, weight_decay=1e-4)
    losses = []

    def loop() -> None:
        for _ in range(STEPS):
            optimizer.zero_grad()
            outputs = list(tensors_in(model(batch())))
            loss = sum(F.softplus(o.abs()).mean() for o in outputs if o.requires_grad)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())

    recorder = None
    if folder is None:
        loop()
    else:
        with mpdiag.record(model, optimizer, folder, every=1) as recorder:
            loop()
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
@pytest.mark.parametrize("name", ARCHITECTURES)
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
