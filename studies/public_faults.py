"""Public faults rebuilt small, each before and after its repair, and what ``mpdiag diff`` says.

    python studies/public_faults.py [NAME ...] [--json FILE]
    python studies/public_faults.py --table FILE    # the table of docs/diff-faults.md

Each fault was reported in a public thread. It is rebuilt here in plain torch from what the thread says,
with two gloo ranks where it needs them. The reference is the same training written without the fault, on
one device. ``diff`` compares it with the faulty and with the repaired training of two steps.

The first place of a faulty training is *named* if it is what the thread blames, and *seen* if it is
another tensor that the fault reaches. A repaired training that does not agree is a false alarm.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import os
import sys
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, distributed, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import mpdiag

BATCH, TIME, WIDTH, HEADS, WORDS, EXPERTS = 4, 8, 16, 4, 32, 4


class Training(NamedTuple):
    """A model, its optimizer and what a step does."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    step: Callable[[Tensor, Tensor], None]


@dataclass(frozen=True)
class Fault:
    """A public fault.

    Attributes:
        url: Of the thread.
        says: What the thread says, in a sentence.
        blames: Modules that it blames; "" is what lies outside of the model, "step" the optimizer,
            "gradients" what becomes of parameters' gradients, "code: …" a line.
        ranks: Of the faulty and the repaired training.
        build: Gives a training; told whether it has the fault.
    """

    url: str
    says: str
    blames: tuple[str, ...]
    ranks: int
    build: Callable[[bool], Training]


FAULTS: dict[str, Fault] = {}


def fault(
    url: str, says: str, *blames: str, ranks: int = 1
) -> Callable[[Callable[[str], Training]], None]:
    """Note a fault; its function is told the variant: reference, faulty or repaired."""

    def noted(build: Callable[[Any], Training]) -> None:
        FAULTS[build.__name__] = Fault(f"https://github.com/{url}", says, blames, ranks, build)

    return noted


# -- ranks -----------------------------------------------------------------------------------------


def rank() -> int:
    """This process's rank; 0 on one device."""
    return distributed.get_rank() if distributed.is_initialized() else 0


def ranks() -> int:
    """How many there are."""
    return distributed.get_world_size() if distributed.is_initialized() else 1


def total(x: Tensor) -> Tensor:
    """The sum over ranks, outside of autograd."""
    out = x.detach().clone()
    if ranks() > 1:
        distributed.all_reduce(out)
    return out


def gathered(x: Tensor, dim: int) -> Tensor:
    """All ranks' parts put together, outside of autograd."""
    parts = [torch.empty_like(x) for _ in range(ranks())]
    if ranks() == 1:
        return x
    distributed.all_gather(parts, x.contiguous())
    return torch.cat(parts, dim)


def own(x: Tensor, dim: int = 0) -> Tensor:
    """This rank's part."""
    return x.chunk(ranks(), dim)[rank()]


def through(
    forward: Callable[[Tensor], Tensor], backward: Callable[[Tensor], Tensor]
) -> Callable[[Tensor], Tensor]:
    """A function whose backward pass is given."""

    class Through(torch.autograd.Function):
        @staticmethod
        def forward(_: Any, x: Tensor) -> Tensor:
            return forward(x)

        @staticmethod
        def backward(_: Any, grad: Tensor) -> Tensor:
            return backward(grad)

    return Through.apply  # type: ignore[no-any-return]


copied = through(lambda x: x.view_as(x), total)
"""The same values for all ranks; their gradients are summed."""
summed = through(total, lambda g: g.view_as(g))
"""The sum over ranks; each has the whole gradient."""
joined = through(lambda x: gathered(x, -1), lambda g: own(g, -1))
"""The last dimension put together; each rank takes its part of a gradient that all have."""
collected = through(lambda x: gathered(x, 0), lambda g: own(total(g)))
"""Rows of all ranks; the gradients of a row are summed where it came from."""
returned = through(lambda x: own(total(x)), lambda g: gathered(g, 0))
"""The sum over ranks of this rank's rows."""
split_words = through(lambda x: own(x, 1), lambda g: gathered(g, 1))
"""This rank's positions of what all have."""
whole_words = through(lambda x: gathered(x, 1), lambda g: own(g, 1))
"""All positions, of which all ranks compute the same."""


def sharded(linear: nn.Linear, dim: int) -> nn.Linear:
    """This rank's part of a layer: its outputs (0) or its inputs (1)."""
    linear.weight = nn.Parameter(own(linear.weight.detach(), dim).clone())
    return linear


def averaged(parameters: Iterable[nn.Parameter], by: float | None = None) -> None:
    """Gradients summed over ranks and divided by their number."""
    for p in parameters:
        if p.grad is not None:
            p.grad.copy_(total(p.grad) / (by or ranks()))


# -- models ----------------------------------------------------------------------------------------


class Attention(nn.Module):
    """Causal attention; heads may lie on ranks."""

    def __init__(self, keys: int = HEADS, sinks: bool = False, scale: float | None = None) -> None:
        super().__init__()
        self.size = WIDTH // HEADS
        self.q = sharded(nn.Linear(WIDTH, WIDTH, bias=False), 0)
        self.k, self.v = (nn.Linear(WIDTH, keys * self.size, bias=False) for _ in range(2))
        self.out = sharded(nn.Linear(WIDTH, WIDTH, bias=False), 1)
        if keys == HEADS:
            sharded(self.k, 0), sharded(self.v, 0)
        self.sinks = nn.Parameter(own(torch.randn(HEADS)).clone()) if sinks else None
        self.scale = scale or self.size**-0.5
        self.out_norm: nn.Module | None = None

    def forward(self, x: Tensor) -> Tensor:
        """(N, T, C) to (N, T, C)."""
        q, k, v = (y.unflatten(-1, (-1, self.size)).transpose(1, 2) for y in self.heads(x))
        scores = q @ k.transpose(2, 3) * self.scale
        hidden = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(hidden, -math.inf)
        if self.sinks is not None:
            sinks = self.sinks[None, :, None, None].expand(*scores.shape[:3], 1)
            scores = torch.cat((scores, sinks), -1)
        y = torch.softmax(scores, -1)[..., : x.shape[1]] @ v
        y = y if self.out_norm is None else self.out_norm(y)
        return summed(self.out(y.transpose(1, 2).flatten(2)))

    def heads(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys, values."""
        x = copied(x)
        return self.q(x), self.k(x), self.v(x)


class Language(nn.Module):
    """Embedding, one layer with a residual, norm, head."""

    def __init__(self, layer: nn.Module, head: nn.Module | None = None) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(WORDS, WIDTH), nn.LayerNorm(WIDTH)
        self.layer, self.last = layer, nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False) if head is None else head

    def forward(self, x: Tensor) -> Tensor:
        """(N, T) to (N, T, words)."""
        x = self.embed(x)
        return self.head(self.last(x + self.layer(self.norm(x))))


def mlp() -> nn.Module:
    """Two layers."""
    return nn.Sequential(nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, WIDTH))


def trained(
    model: nn.Module,
    loss_of: Callable[[Tensor, Tensor], Tensor] | None = None,
    *,
    before_step: Callable[[], None] = lambda: None,
    optimizer: torch.optim.Optimizer | None = None,
    split: bool = False,
) -> Training:
    """A training by plain steps.

    Args:
        model: The model.
        loss_of: The loss of a batch; default: of the next words.
        before_step: After the backward pass.
        optimizer: Default: SGD.
        split: Whether each rank has rows of its own.
    """
    step = optimizer or torch.optim.SGD(model.parameters(), 0.1)
    loss_of = loss_of or (lambda x, y: words_loss(model(x), y))

    def one(x: Tensor, y: Tensor) -> None:
        x, y = (own(x), own(y)) if split else (x, y)
        step.zero_grad()
        loss_of(x, y).backward()
        before_step()
        step.step()

    return Training(model, step, one)


def words_loss(out: Tensor, y: Tensor, reduction: str = "mean") -> Tensor:
    """Cross entropy."""
    return F.cross_entropy(out.flatten(0, -2), y.flatten(), reduction=reduction)


def clipped(parameters: Iterable[nn.Parameter], counted: Callable[[nn.Parameter], bool]) -> None:
    """Clip by the norm over all ranks of the gradients that are counted here."""
    grads = [p for p in parameters if p.grad is not None]
    norm = total(torch.stack([p.grad.square().sum() * counted(p) for p in grads]).sum()).sqrt()
    for p in grads:
        p.grad.mul_(0.1 / torch.clamp(norm, min=0.1))


# -- loss and vocabulary ---------------------------------------------------------------------------


def parallel_loss(
    out: Tensor, y: Tensor, smoothing: float = 0.0, *, local: bool = False, masked: bool = False
) -> Tensor:
    """Cross entropy of logits whose words lie on ranks.

    Args:
        out: The logits of this rank's words.
        y: The words.
        smoothing: The share of other words.
        local: Whether it smooths over one rank's words.
        masked: Whether only the rank of the right word has the normalization in its graph.
    """
    y, size = y.flatten(), out.shape[-1]
    out = out.flatten(0, -2)
    largest = out.detach().max(-1, keepdim=True).values
    out = out - gathered(largest, -1).max(-1, keepdim=True).values
    there = y - rank() * size
    held = (there >= 0) & (there < size)
    mine = out.gather(-1, there.clamp(0, size - 1)[:, None])[:, 0] * held
    log_total = summed(out.exp().sum(-1)).log()
    loss = summed(log_total * held - mine) if masked else log_total - summed(mine)
    if smoothing:
        words = size if local else size * ranks()
        mean = out.mean(-1) if local else summed(out.sum(-1)) / words
        share = smoothing * words / (words - 1)
        loss = (1 - share) * loss - share * (mean - log_total)
    return loss.mean()


class Head(nn.Module):
    """A head with this rank's words."""

    def __init__(self, join: bool = False) -> None:
        super().__init__()
        self.words, self.join = sharded(nn.Linear(WIDTH, WORDS, bias=False), 0), join

    def forward(self, x: Tensor) -> Tensor:
        """(…, C) to (…, words here), or to all words."""
        out = self.words(copied(x))
        return joined(out) if self.join else out


@fault(
    "NVIDIA/Megatron-LM/issues/7452",
    "Finding 1: label smoothing over a split vocabulary averages over one rank's words",
    "code: mean =",
    "code: loss = (1 - share)",  # the share follows from the number of words, too
    ranks=2,
)
def label_smoothing(variant: str) -> Training:
    model = Language(mlp(), Head())
    return trained(model, lambda x, y: parallel_loss(model(x), y, 0.1, local=variant == "faulty"))


@fault(
    "NVIDIA/Megatron-LM/issues/7452",
    "Finding 2: logits that were gathered go into the loss of a split vocabulary, which adds log(TP)",
    "",
    ranks=2,
)
def gathered_logits(variant: str) -> Training:
    model = Language(mlp(), Head(join=True))
    loss = parallel_loss if variant == "faulty" else words_loss
    return trained(model, lambda x, y: loss(model(x), y))


@fault(
    "modelscope/ms-swift/pull/9947",
    "A plain all-reduce of the target's log-probability passes no gradient to the other ranks' words",
    "code: masked",
    ranks=2,
)
def plain_all_reduce(variant: str) -> Training:
    model = Language(mlp(), Head())

    return trained(model, lambda x, y: parallel_loss(model(x), y, masked=variant == "faulty"))


@fault(
    "pytorch/pytorch/issues/190746",
    "Under loss_parallel() the backward of any log_softmax is the identity",
    "code: log_softmax",
    ranks=2,
)
def loss_parallel(variant: str) -> Training:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard, parallel

    model = Language(mlp(), Head())

    def loss(x: Tensor, y: Tensor) -> Tensor:
        out = model(x)
        weights = torch.linspace(0, 1, WORDS)
        if ranks() == 1:
            return (torch.log_softmax(out, -1) * weights).sum(-1).mean()
        out = DTensor.from_local(out, init_device_mesh("cpu", (2,)), [Shard(2)])
        if variant == "repaired":
            full = out.full_tensor()
            return (torch.log_softmax(full, -1) * weights).sum(-1).mean()
        with parallel.loss_parallel():
            logs = torch.log_softmax(out, -1)
            local = (logs.to_local() * own(weights)).sum(-1).mean()
            summed(local).backward()
        return torch.zeros((), requires_grad=True)

    return trained(model, loss)


@fault(
    "NVIDIA/Megatron-LM/issues/906",
    "The loss is multiplied by the context-parallel size, and the gradients are not divided by it",
    "code: * times",
    ranks=2,
)
def context_parallel_loss(variant: str) -> Training:
    model = Language(mlp())
    times = ranks() if variant == "faulty" else 1

    def loss(x: Tensor, y: Tensor) -> Tensor:
        return words_loss(model(own(x, 1)), own(y, 1)) * times

    return trained(model, loss, before_step=lambda: averaged(model.parameters()))


@fault(
    "NVIDIA/Megatron-LM/issues/7452",
    "Finding 3: the loss of multi-token prediction is divided by each rank's own number of tokens",
    "code: tokens",
    "further",
    ranks=2,
)
def further_words(variant: str) -> Training:
    model = Language(mlp())
    model.further = nn.Linear(WIDTH, WORDS, bias=False)

    def loss(x: Tensor, y: Tensor) -> Tensor:
        last: list[Tensor] = []
        hook = model.last.register_forward_hook(lambda _, __, out: last.append(out))
        main = words_loss(model(x), y)
        hook.remove()
        valid = x > WORDS // 3  # words that count
        each = words_loss(model.further(last[0]), y.roll(-1, 1), "none") * valid.flatten()
        count = valid.sum()
        tokens = count if variant == "faulty" else total(count) / ranks()
        return main + each.sum() / tokens

    return trained(model, loss, before_step=lambda: averaged(model.parameters()), split=True)


# -- accumulation ----------------------------------------------------------------------------------

MASKED = -100


def accumulated(
    variant: str,
    loss_of: Callable[[nn.Module, Tensor, Tensor, int], Tensor],
    *,
    sizes: tuple[int, ...] = (2, 2),
    each: Callable[[nn.Module, torch.optim.Optimizer], None] = lambda _, __: None,
    before_step: Callable[[nn.Module], None] = lambda _: None,
) -> Training:
    """Gradients of parts of a batch are accumulated; the reference takes all of it at once."""
    model = Language(mlp())
    step = torch.optim.SGD(model.parameters(), 0.1)

    def one(x: Tensor, y: Tensor) -> None:
        y = torch.where(x < WORDS // 4, MASKED, y)
        step.zero_grad()
        tokens = int((y != MASKED).sum())
        parts = (BATCH,) if variant == "reference" else sizes
        for part, labels in zip(x.split(parts), y.split(parts), strict=True):
            if variant == "reference":
                words_loss(model(part), labels).backward()
                continue
            loss_of(model, part, labels, tokens).backward()
            if variant == "faulty":
                each(model, step)
        before_step(model)
        step.step()

    return Training(model, step, one)


def by_tokens(model: nn.Module, x: Tensor, y: Tensor, tokens: int) -> Tensor:
    """A part's share of the mean over a batch's tokens."""
    return words_loss(model(x), y, "sum") / tokens


@fault(
    "huggingface/transformers/pull/34191",
    "Gradient accumulation averages the means of parts with different numbers of tokens",
    "code: / 2",
)
def mean_of_means(variant: str) -> Training:
    wrong = variant == "faulty"
    return accumulated(
        variant,
        lambda m, x, y, t: words_loss(m(x), y) / 2 if wrong else by_tokens(m, x, y, t),
    )


@fault(
    "verl-project/verl/issues/5625",
    "Token means of micro-batches are weighted by their number of samples, not of tokens",
    "code: share",
)
def sample_weights(variant: str) -> Training:
    def loss(m: nn.Module, x: Tensor, y: Tensor, tokens: int) -> Tensor:
        share = len(x) / BATCH if variant == "faulty" else int((y != MASKED).sum()) / tokens
        return words_loss(m(x), y) * share

    return accumulated(variant, loss, sizes=(3, 1))


@fault(
    "pytorch/torchtitan/pull/3575",
    "zero_grad() before each micro-batch leaves only the last one's gradient",
    "gradients",
)
def zeroed_gradients(variant: str) -> Training:
    def loss(m: nn.Module, x: Tensor, y: Tensor, tokens: int) -> Tensor:
        if variant == "faulty":
            m.zero_grad()
        return by_tokens(m, x, y, tokens)

    return accumulated(variant, loss)


@fault(
    "huggingface/transformers/issues/1563",
    "Gradients are clipped after each backward pass, not once before the step",
    "code: clip",
)
def clipped_parts(variant: str) -> Training:
    def clip(m: nn.Module, _: Any = None) -> None:
        nn.utils.clip_grad_norm_(m.parameters(), 0.1)

    return accumulated(variant, by_tokens, each=clip, before_step=clip)


@fault(
    "karpathy/build-nanogpt/pull/30",
    "DDP does not synchronize if require_backward_grad_sync is set after the forward pass",
    "gradients",
    ranks=2,
)
def unsynchronized(variant: str) -> Training:
    model = Language(mlp())
    step = torch.optim.SGD(model.parameters(), 0.1)
    runs: Any = nn.parallel.DistributedDataParallel(model) if ranks() > 1 else model

    def one(x: Tensor, y: Tensor) -> None:
        step.zero_grad()
        runs.require_backward_grad_sync = variant == "repaired"
        out = runs(own(x))
        runs.require_backward_grad_sync = True
        words_loss(out, own(y)).backward()
        step.step()

    return Training(model, step, one)


# -- experts ---------------------------------------------------------------------------------------


class Experts(nn.Module):
    """Two of four experts for each token; experts may lie on ranks, and so may tokens."""

    def __init__(self, split: bool = False, reduce: bool = True) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, EXPERTS, bias=False)
        every = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(EXPERTS)]
        first = rank() * EXPERTS // ranks()
        self.held = range(first, first + EXPERTS // ranks())
        self.experts = nn.ModuleDict({str(i): every[i] for i in self.held})
        self.split, self.reduce = split, reduce
        self.logits = torch.zeros(0)

    def forward(self, x: Tensor) -> Tensor:
        """(N, T, C) to (N, T, C)."""
        self.logits = self.gate(x)
        share, chosen = torch.softmax(self.logits.float(), -1).topk(2, -1)
        weights = torch.zeros_like(self.logits.float()).scatter(-1, chosen, share)
        return self.mixed(x, weights.to(x.dtype))

    def mixed(self, x: Tensor, weights: Tensor) -> Tensor:
        """The experts' outputs, weighted."""
        if ranks() > 1 and self.split:
            x, weights = collected(x), collected(weights)
        elif self.reduce:
            x, weights = copied(x), copied(weights)
        out = sum(weights[..., i, None] * self.experts[str(i)](x) for i in self.held)
        return returned(out) if ranks() > 1 and self.split else summed(out)


@fault(
    "pytorch/pytorch/issues/160285",
    "Expert parallelism of 2 doubles the experts' gradients",
    "layer.experts",
    ranks=2,
)
def doubled_experts(variant: str) -> Training:
    layer = Experts(split=True)
    model = Language(layer)

    def reduce() -> None:
        held = set(layer.experts.parameters())
        averaged(p for p in model.parameters() if p not in held)
        for p in held if variant == "repaired" else ():
            if p.grad is not None:
                p.grad /= ranks()

    return trained(model, before_step=reduce, split=True)


@fault(
    "NVIDIA/Megatron-LM/pull/5916",
    "The gradient norm omits the experts of other ranks, so clipping applies too little",
    "code: counted",
    ranks=2,
)
def norm_without_experts(variant: str) -> Training:
    layer = Experts()
    model = Language(layer)
    held = set(layer.experts.parameters())

    def counted(p: nn.Parameter) -> bool:
        return rank() == 0 or (p in held and variant != "faulty")

    return trained(model, before_step=lambda: clipped(model.parameters(), counted))


@fault(
    "huggingface/transformers/pull/48205",
    "Each rank's gradient of the router covers only its own experts, and the parts are never summed",
    "layer",
    ranks=2,
)
def partial_router(variant: str) -> Training:
    return trained(Language(Experts(reduce=variant != "faulty")))


@fault(
    "NVIDIA/Megatron-LM/pull/5047",
    "The gradient of the router's z-loss depends on the tensor-parallel size",
    "code: scale",
    "layer.gate",
    ranks=2,
)
def z_loss(variant: str) -> Training:
    """Tokens are split over ranks, as in sequence parallelism, and gradients summed per token."""
    layer = Experts(split=True)
    model = Language(layer)

    def loss(x: Tensor, y: Tensor) -> Tensor:
        out = model(x)
        z = torch.logsumexp(layer.logits, -1).square().mean()
        tokens = y.numel()
        scale = tokens * (1 if variant == "faulty" else ranks())
        return (words_loss(out, y, "sum") + 0.1 * z * scale / ranks()) / (tokens * ranks())

    def reduce() -> None:
        held = set(layer.experts.parameters())
        averaged((p for p in model.parameters() if p not in held), by=1)

    return trained(model, loss, before_step=reduce, split=True)


class Attached(torch.autograd.Function):
    """The same values; a further loss has its gradient in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor) -> Tensor:
        """The values."""
        ctx.save_for_backward(loss)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        """The loss's own gradient is one."""
        return grad, torch.ones_like(ctx.saved_tensors[0])


@fault(
    "NVIDIA-NeMo/Automodel/issues/1408",
    "The result of MoEAuxLossAutoScaler.apply() is discarded, so the balance loss has no gradient",
    "layer.gate",
    "layer",
    "code: share.square()",
)
def discarded_loss(variant: str) -> Training:
    layer = Experts()
    model = Language(layer)
    inner = layer.mixed

    def balance() -> Tensor:
        share = torch.softmax(layer.logits, -1).mean((0, 1))
        return 0.1 * EXPERTS * share.square().sum()

    def mixed(x: Tensor, weights: Tensor) -> Tensor:
        attached = Attached.apply(weights, balance())
        return inner(x, weights if variant == "faulty" else attached)

    if variant == "reference":
        return trained(model, lambda x, y: words_loss(model(x), y) + balance())
    layer.mixed = mixed  # type: ignore[method-assign]
    return trained(model)


# -- attention -------------------------------------------------------------------------------------


@fault(
    "NVIDIA/Megatron-LM/issues/7452",
    "Finding 8: attention sinks on other ranks are left out of the norm by which gradients are clipped",
    "code: counted",
    ranks=2,
)
def norm_without_sinks(variant: str) -> Training:
    layer = Attention(sinks=True)
    model = Language(layer)
    on_ranks = {layer.q.weight, layer.k.weight, layer.v.weight, layer.out.weight}
    if variant != "faulty":
        on_ranks.add(layer.sinks)
    return trained(
        model,
        before_step=lambda: clipped(model.parameters(), lambda p: rank() == 0 or p in on_ranks),
    )


@fault(
    "NVIDIA/Megatron-LM/issues/7452",
    "Finding 11: a norm of each head's output has only its own rank's part of the gradient",
    "layer.out_norm",
    ranks=2,
)
def norm_of_heads(variant: str) -> Training:
    layer = Attention()
    norm = layer.out_norm = nn.LayerNorm(layer.size)
    model = Language(layer)

    def reduce() -> None:
        if variant != "faulty":
            averaged(norm.parameters(), by=1)

    return trained(model, before_step=reduce)


class Shared(Attention):
    """Attention whose keys and values are the same for all heads and ranks."""

    def __init__(self, reduce: bool) -> None:
        super().__init__(keys=1)
        self.reduce = reduce

    def heads(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries of this rank's heads; keys and values of all."""
        k, v = self.k(x), self.v(x)
        if self.reduce:
            k, v = copied(k), copied(v)
        return self.q(copied(x)), k, v


@fault(
    "bigcode-project/Megatron-LM/pull/37",
    "The gradients of keys and values that all heads share are not summed over tensor-parallel ranks",
    "layer.k",
    "layer.v",
    "layer",
    ranks=2,
)
def shared_keys(variant: str) -> Training:
    return trained(Language(Shared(reduce=variant != "faulty")))


@fault(
    "FareedKhan-dev/train-llm-from-scratch/pull/3",
    "Attention scores are divided by the root of the embedding size, not of a head's size",
    "layer",
)
def attention_scale(variant: str) -> Training:
    model = Language(Attention(scale=WIDTH**-0.5 if variant == "faulty" else None))
    if variant != "repaired":
        return trained(model)

    def fused(x: Tensor) -> Tensor:
        layer = model.layer
        q, k, v = (y.unflatten(-1, (HEADS, -1)).transpose(1, 2) for y in layer.heads(x))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return layer.out(y.transpose(1, 2).flatten(2))

    model.layer.forward = fused  # type: ignore[method-assign]
    return trained(model)


class Rotary(nn.Module):
    """Cosines and sines of positions."""

    def __init__(self, base: float, narrow: bool) -> None:
        super().__init__()
        size = WIDTH // HEADS
        self.register_buffer("each", base ** (-torch.arange(0, size, 2) / size), persistent=False)
        self.narrow = narrow

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """(T, C/2) each."""
        dtype = torch.bfloat16 if self.narrow else torch.float32
        at = torch.arange(1000, 1000 + x.shape[1]).to(dtype)
        angle = at[:, None] * self.each.to(dtype)
        return angle.cos(), angle.sin()


class Positions(Attention):
    """Attention with rotary positions."""

    def __init__(self, base: float = 10_000.0, narrow: bool = False) -> None:
        super().__init__()
        self.rotary = Rotary(base, narrow)

    def heads(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries and keys are rotated."""
        cos, sin = (y.repeat(1, HEADS) for y in self.rotary(x))
        rotated = []
        for y in (self.q(x), self.k(x)):
            a, b = y.chunk(2, -1)
            rotated.append(torch.cat((a * cos - b * sin, a * sin + b * cos), -1).to(x.dtype))
        return rotated[0], rotated[1], self.v(x)


def in_bf16(training: Training) -> Training:
    """The same under autocast."""

    def one(x: Tensor, y: Tensor) -> None:
        with torch.autocast("cpu", torch.bfloat16):
            training.step(x, y)

    return training._replace(step=one)


@fault(
    "huggingface/transformers/pull/29285",
    "Rotary positions are computed in BF16, which does not hold positions above 256",
    "layer.rotary",
    "layer",
)
def rotary_in_bf16(variant: str) -> Training:
    found = trained(Language(Positions(narrow=variant == "faulty")))
    return found if variant == "reference" else in_bf16(found)


@fault(
    "Lightning-AI/litgpt/issues/2217",
    "A converted model has a rotary base of 10,000, not of 1,000,000",
    "layer.rotary",
    "layer",
)
def rotary_base(variant: str) -> Training:
    found = trained(Language(Positions(1e4 if variant == "faulty" else 1e6)))
    return found if variant == "reference" else in_bf16(found)


@fault(
    "pytorch/torchtitan/pull/2389",
    "The router is computed in BF16, not in FP32",
    "layer.gate",
    "layer",
)
def router_in_bf16(variant: str) -> Training:
    model = Language(Experts())
    gate = model.layer.gate
    inner = gate.forward

    def wide(x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return inner(x.float())

    if variant != "faulty":
        gate.forward = wide
    found = trained(model)
    return found if variant == "reference" else in_bf16(found)


# -- norms, dropout, embeddings, optimizer ---------------------------------------------------------


class Sequence(nn.Module):
    """A network whose norm sees this rank's positions, as in sequence parallelism."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up = nn.LayerNorm(WIDTH), sharded(nn.Linear(WIDTH, 32, bias=False), 0)
        self.down = sharded(nn.Linear(32, WIDTH, bias=False), 1)
        self.drop: nn.Module = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """(N, T, C) to (N, T, C)."""
        x = self.norm(split_words(x)).transpose(0, 1)
        x = collected(x) if ranks() > 1 else x
        y = self.down(F.gelu(self.up(x)))
        y = returned(y) if ranks() > 1 else y
        return whole_words(self.drop(y.transpose(0, 1)))


@fault(
    "NVIDIA/Megatron-LM/issues/1446",
    "Under sequence parallelism the gradients of a LayerNorm differ between tensor-parallel ranks",
    "layer.norm",
    ranks=2,
)
def norm_not_reduced(variant: str) -> Training:
    model = Language(Sequence())
    norm = model.layer.norm

    def reduce() -> None:
        if variant != "faulty":
            averaged(norm.parameters(), by=1)

    return trained(model, before_step=reduce)


class Dropout(nn.Module):
    """Dropout by a mask of all positions; ranks take their own part, or all the first one."""

    def __init__(self, own_part: bool) -> None:
        super().__init__()
        self.own_part = own_part

    def forward(self, x: Tensor) -> Tensor:
        """(N, T, C) to the same."""
        draw = torch.Generator().manual_seed(7)
        mask = torch.rand(BATCH, TIME, WIDTH, generator=draw) > 0.25
        mask = own(mask, 1) if self.own_part else mask.chunk(ranks(), 1)[0]
        return x * mask / 0.75


@fault(
    "NVIDIA/TransformerEngine/pull/1272",
    "Dropout under sequence parallelism has no random state of its own on each rank",
    "layer.drop",
    ranks=2,
)
def same_dropout(variant: str) -> Training:
    layer = Sequence()
    layer.drop = Dropout(variant != "faulty")
    model = Language(layer)
    return trained(model, before_step=lambda: averaged(layer.norm.parameters(), by=1))


@fault(
    "NVIDIA-NeMo/Megatron-Bridge/pull/5712",
    "The norm after attention has TENorm's epsilon of 1e-5, not the model's 1e-6",
    "layer.1",
)
def default_epsilon(variant: str) -> Training:
    eps = 1e-5 if variant == "faulty" else 1e-6
    layer = nn.Sequential(mlp(), nn.RMSNorm(WIDTH, eps=eps))
    model = Language(layer)
    if variant != "repaired":
        return trained(model)
    norm = layer[1]
    norm.forward = lambda x: x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * norm.weight
    return trained(model)


@fault(
    "uw-syfi/piper/issues/13",
    "Tied embeddings on two pipeline stages are copied, and their gradients are not summed",
    "embed",
    ranks=2,
)
def tied_embeddings(variant: str) -> Training:
    model = Language(mlp())
    if ranks() == 1:
        model.head.weight = model.embed.weight
        return trained(model)
    with torch.no_grad():
        model.head.weight.copy_(model.embed.weight)
    first = rank() == 0
    stage = copy.deepcopy(model)
    for name in ("last", "head") if first else ("embed", "norm", "layer"):
        delattr(stage, name)

    def forward(x: Tensor) -> Tensor:
        if first:
            x = stage.embed(x)
            return x + stage.layer(stage.norm(x))
        return stage.head(stage.last(x))

    stage.forward = forward
    step = torch.optim.SGD(stage.parameters(), 0.1)

    def one(x: Tensor, y: Tensor) -> None:
        step.zero_grad()
        between = torch.zeros(BATCH, TIME, WIDTH)
        if first:
            out = stage(x)
            distributed.send(out.detach(), 1)
            distributed.recv(between, 1)
            out.backward(between)
        else:
            distributed.recv(between, 0)
            words_loss(stage(between.requires_grad_()), y).backward()
            distributed.send(between.grad, 0)
        if variant == "repaired":
            averaged([(stage.embed if first else stage.head).weight], by=1)
        step.step()

    return Training(stage, step, one)


@fault(
    "pytorch/torchtitan/issues/1805",
    "to_local() without grad_placements misses a reduction in the backward pass",
    "layer",
    ranks=2,
)
def local_without_placements(variant: str) -> Training:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial, Replicate

    class Local(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = sharded(nn.Linear(WIDTH, 32, bias=False), 0)
            self.down = sharded(nn.Linear(32, WIDTH, bias=False), 1)

        def forward(self, x: Tensor) -> Tensor:
            if ranks() > 1:
                mesh = init_device_mesh("cpu", (2,))
                whole = DTensor.from_local(x, mesh, [Replicate()])
                x = whole.to_local(grad_placements=[Partial()] if variant != "faulty" else None)
            return summed(self.down(F.gelu(self.up(x))))

    return trained(Language(Local()))


class OwnAdamW(torch.optim.Optimizer):
    """AdamW written out; epsilon may be added before the correction of the second moment."""

    def __init__(self, parameters: Iterable[nn.Parameter], early: bool) -> None:
        super().__init__(parameters, {"lr": 1e-3})
        self.early = early

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        """One update."""
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            count = state["count"] = state.get("count", 0) + 1
            m = state["m"] = 0.9 * state.get("m", 0.0) + 0.1 * p.grad
            v = state["v"] = 0.999 * state.get("v", 0.0) + 0.001 * p.grad.square()
            bias = 1 - 0.999**count
            root = (v.sqrt() + 1e-8) / bias**0.5 if self.early else (v / bias).sqrt() + 1e-8
            p.mul_(1 - 1e-3 * 1e-2).sub_(1e-3 * m / (1 - 0.9**count) / root)


@fault(
    "karpathy/nanochat/issues/304",
    "DistAdamW adds epsilon before the second moment's bias is corrected",
    "step",
)
def early_epsilon(variant: str) -> Training:
    model = Language(mlp())
    if variant == "reference":
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    else:
        optimizer = OwnAdamW(model.parameters(), variant == "faulty")
    small = 1e-4  # gradients that epsilon reaches
    return trained(model, lambda x, y: small * words_loss(model(x), y), optimizer=optimizer)


# -- what diff says --------------------------------------------------------------------------------


def train(name: str, variant: str, folder: Path, seed: int) -> None:
    """Two steps, recorded with a trace."""
    torch.manual_seed(seed)
    model, optimizer, step = FAULTS[name].build(variant)  # type: ignore[arg-type]
    draw = torch.Generator().manual_seed(seed + 1)
    with mpdiag.record(
        model, optimizer, folder, trace=True, max_steps=2, operations=1, overwrite=True
    ) as recorder:
        for _ in range(2):
            words = torch.randint(0, WORDS, (BATCH, TIME + 1), generator=draw)
            step(words[:, :-1], words[:, 1:])
    if recorder.failures:
        raise RuntimeError(recorder.failures)


def work(number: int, names: list[str], place: str, port: int, seed: int) -> None:
    """One rank of all trainings that need ranks."""
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(number))
    os.environ.update(WORLD_SIZE="2", LOCAL_RANK=str(number))
    distributed.init_process_group("gloo", rank=number, world_size=2)
    for name in names:
        for variant in ("faulty", "repaired"):
            train(name, variant, Path(place) / f"{name}-{variant}", seed)
            distributed.barrier()
    distributed.destroy_process_group()


@dataclass(frozen=True)
class Row:
    """A fault, and what diff says of it."""

    name: str
    url: str
    says: str
    ranks: int
    result: str
    module: str | None
    op: str
    phase: str
    rank: int | None
    code: str
    repaired: bool | None
    largest: float
    coarse: str
    alarm: str


def judged(name: str, place: Path) -> Row:
    """Compare the reference with both."""
    one = FAULTS[name]
    reference, faulty, repaired = (place / f"{name}-{v}" for v in VARIANTS)
    wrong = mpdiag.diff(reference, faulty)
    first = wrong.first
    found = mpdiag.diff(reference, repaired)
    result = "missed"
    if first is not None:
        module = "step" if first.phase == "update" else first.module or ""
        module = "gradients" if "gradients" in one.blames and first.name else module
        fits = any(module == b or (b and module.startswith(f"{b}.")) for b in one.blames)
        lines = [b.removeprefix("code: ") for b in one.blames if b.startswith("code: ")]
        result = "named" if fits or any(line in first.code for line in lines) else "seen"
    if wrong.coarse is not None and wrong.coarse.pair.b.module in one.blames:
        result = "named"  # rounding is said to lose what is computed there
    alarm = found.first
    return Row(
        name,
        one.url,
        one.says,
        one.ranks,
        result,
        first.module if first else None,
        first.op if first else "",
        first.phase if first else "",
        first.rank if first else None,
        first.code if first else "",
        found.agree,
        max((j.apart.ratio for j in found.judged if j.pair.certain), default=0.0),
        wrong.coarse.pair.b.module or "" if wrong.coarse else "",
        f"{alarm.module} {alarm.op} {alarm.phase} {alarm.code}" if alarm else "",
    )


def table(rows: Iterable[dict[str, Any]]) -> Iterable[str]:
    """The rows of a results file as Markdown."""
    yield "| thread | what it says | ranks | first place that diff names | result |"
    yield "|---|---|---|---|---|"
    for row in rows:
        owner = "/".join(row["url"].split("/")[4:5])
        thread = f"[{owner}#{row['url'].rpartition('/')[2]}]({row['url']})"
        where = f"`{row['module']}`" if row["module"] else "outside of the model"
        place = (
            f"{row['op']}, {where}, {row['phase']}" if row["op"] else "none: rounding explains it"
        )
        place += "" if row["rank"] is None else f", rank {row['rank']}"
        if row["coarse"]:
            place = f"`{row['coarse']}`: rounding alone may lose its values"
        yield f"| {thread} | {row['says']} | {row['ranks']} | {place} | {row['result']} |"


VARIANTS = ("reference", "faulty", "repaired")


def main() -> None:
    """Train all, compare, and say what was named."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", default=list(FAULTS))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--seed", type=int, default=0, help="of weights and data")
    parser.add_argument("--keep", type=Path, help="where the recordings stay")
    parser.add_argument("--table", type=Path, help="results to print as a table")
    options = parser.parse_args()
    if options.table:
        print("\n".join(table(json.loads(options.table.read_text()))))
        return
    torch.set_num_threads(1)
    rows: list[Row] = []
    with TemporaryDirectory() if options.keep is None else nullcontext(options.keep) as folder:
        place = Path(folder)
        place.mkdir(exist_ok=True)
        for name in options.names:
            for variant in VARIANTS if FAULTS[name].ranks == 1 else ("reference",):
                train(name, variant, place / f"{name}-{variant}", options.seed)
        split = [name for name in options.names if FAULTS[name].ranks > 1]
        if split:
            port = 20_000 + os.getpid() % 20_000
            torch.multiprocessing.spawn(work, (split, str(place), port, options.seed), nprocs=2)
        for name in options.names:
            rows.append(judged(name, place))
            print(rows[-1].result, rows[-1], flush=True)
    print(f"named: {sum(r.result == 'named' for r in rows)} of {len(rows)}")
    print(f"repaired ones that agree: {sum(r.repaired is True for r in rows)} of {len(rows)}")
    if options.json:
        options.json.write_text(json.dumps([asdict(r) for r in rows], indent=1) + "\n")


if __name__ == "__main__":
    main()
