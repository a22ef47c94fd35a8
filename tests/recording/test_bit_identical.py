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
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import mpdiag
from mpdiag.recording.counting.tensors import tensors_in

STEPS = 3


class Wrapped(nn.Module):
    """A body between two linear layers' worth of glue."""

    def __init__(self, body: nn.Module, forward: Callable[[nn.Module, torch.Tensor], Any]) -> None:
        super().__init__()
        self.body = body
        self._forward = forward

    def forward(self, x: torch.Tensor) -> Any:
        return self._forward(self.body, x)


def areas(body: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Boxes' areas, as detectors multiply them."""
    return body(x).exp().view(-1, 3, 3).prod(2)


def shares(body: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """What is left after each of several cuts, as in volume rendering."""
    return body(x).sigmoid().cumprod(-1)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 8)
        self.head = nn.Linear(8, 20, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.embedding(x))


class Reused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(torch.tanh(self.layer(x)))


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.inner = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 8))
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.inner, self.first(x), use_reentrant=self.reentrant)


@dataclasses.dataclass
class Output:
    logits: torch.Tensor
    hidden: list[torch.Tensor]


class Structured(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.kind = kind

    def forward(self, x: torch.Tensor) -> Any:
        y = self.inner(x)
        if self.kind == "dict":
            return {"logits": y, "deep": {"more": [y * 2]}}
        if self.kind == "dataclass":
            return Output(y, [y * 2])
        return (y, (y * 2, None, 3))


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return 3 * x**2 * grad


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.relu(self.a(x))
        z = self.b(y)
        z += y
        return self.relu(z)


class Penalty(nn.Module):
    """Double backward: the gradient of a gradient's norm."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.clone().requires_grad_()
        y = self.net(x)
        (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        return y + slope.norm(dim=1, keepdim=True)


class Frozen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Linear(8, 8).requires_grad_(False)
        self.head = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            x = self.backbone(x)
        return self.head(x)


class ComplexLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(8, 8, dtype=torch.complex64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lin(x.to(torch.complex64)).abs()


class TwoInputs(nn.Module):
    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: torch.Tensor) -> Any:
        if isinstance(self.body, nn.MultiheadAttention):
            return self.body(x, x, x)
        return self.body(x, x)


class Autocast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return self.net(x)


class Decoder(nn.Module):
    """Calls a sequence-to-sequence model with the same tokens on both sides."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, tokens: torch.Tensor) -> Any:
        return self.body(input_ids=tokens, decoder_input_ids=tokens, use_cache=False)


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
        return Decoder(transformers.T5ForConditionalGeneration(config))
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
    "attention": (lambda: TwoInputs(nn.MultiheadAttention(8, 2)), floats(4, 3, 8)),
    "encoder": (
        lambda: nn.TransformerEncoder(
            nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2, enable_nested_tensor=False
        ),
        floats(4, 3, 8),
    ),
    "bilinear": (lambda: TwoInputs(nn.Bilinear(8, 8, 4)), floats(5, 8)),
    "embedding": (lambda: Sequential(nn.Embedding(20, 8), nn.Linear(8, 4)), ints(20, 3, 5)),
    "sparse embedding": (lambda: nn.Embedding(20, 8, sparse=True), ints(20, 3, 5)),
    "sparse embedding bag": (lambda: nn.EmbeddingBag(20, 8, sparse=True), ints(20, 3, 5)),
    "embedding bag": (lambda: nn.EmbeddingBag(20, 8), ints(20, 3, 5)),
    "dropout": (
        lambda: Sequential(nn.Linear(8, 8), nn.Dropout(0.3), nn.AlphaDropout(0.2), nn.Linear(8, 4)),
        floats(5, 8),
    ),
    "autocast": (Autocast, floats(5, 8)),
    "batch norm 1d": (lambda: Sequential(nn.Linear(8, 6), nn.BatchNorm1d(6)), floats(5, 8)),
    "transposed 1d": (lambda: nn.ConvTranspose1d(3, 4, 3), floats(2, 3, 5)),
    "prelu": (lambda: Sequential(nn.Linear(8, 8), nn.PReLU()), floats(5, 8)),
    "checkpoint, reentrant": (lambda: Checkpointed(True), floats(5, 8)),
    "checkpoint, not reentrant": (lambda: Checkpointed(False), floats(5, 8)),
    "products": (lambda: Wrapped(nn.Linear(9, 9), areas), floats(50, 9)),
    "running products": (lambda: Wrapped(nn.Linear(9, 9), shares), floats(50, 9)),
    "tied": (Tied, ints(20, 3, 5)),
    "reused": (Reused, floats(5, 8)),
    "dict": (lambda: Structured("dict"), floats(5, 8)),
    "dataclass": (lambda: Structured("dataclass"), floats(5, 8)),
    "nested tuple": (lambda: Structured("tuple"), floats(5, 8)),
    "custom function": (
        lambda: Wrapped(nn.Linear(8, 8), lambda body, x: Cube.apply(body(x))),
        floats(5, 8),
    ),
    "residual": (Residual, floats(5, 8)),
    "double backward": (Penalty, floats(5, 8)),
    "frozen": (Frozen, floats(5, 8)),
    "complex": (ComplexLayer, floats(5, 8)),
    "view": (
        lambda: Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(72, 4)),
        floats(2, 1, 8, 8),
    ),
    "chunks": (lambda: Wrapped(nn.Linear(8, 8), lambda b, x: b(x).chunk(2, -1)), floats(5, 8)),
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


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


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
