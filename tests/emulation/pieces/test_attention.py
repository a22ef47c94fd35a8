"""Emulated attention in one piece against the same taken apart, operation by operation."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from mpdiag.emulation import policy
from mpdiag.emulation.mode import Emulation
from mpdiag.emulation.pieces import attention

HALF = policy.Policy(torch.float16)


def fused(q, k, v):
    return functional.scaled_dot_product_attention(q, k, v)


def causal(q, k, v):
    return functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.3)


def by_hand(q, k, v):
    return (q @ k.transpose(-2, -1)).softmax(-1) @ v


def in_three_dimensions(q, k, v):
    return by_hand(*(t.flatten(0, 1) for t in (q, k, v)))


WAYS = {"fused": fused, "causal": causal, "by hand": by_hand, "3-D": in_three_dimensions}


def tensors(*, half, frozen="", strided=False, words=7):
    torch.manual_seed(0)
    kind = torch.float16 if half else torch.float32
    shape = (2, words, 3, 8) if strided else (2, 3, words, 8)
    made = {name: torch.randn(shape).to(kind) for name in "qkv"}
    return {name: t.requires_grad_(name not in frozen) for name, t in made.items()}


def emulated(way, given, *, autocast=False, strided=False):
    """Output, gradients, and the names of the graph's functions."""
    with Emulation():
        with torch.autocast("cpu", HALF.dtype, enabled=autocast), policy.in_force(HALF):
            seen = {n: t.transpose(1, 2) if strided else t for n, t in given.items()}
            out = way(**seen)
        out.backward(torch.linspace(-1, 1, out.numel()).half().view_as(out))
    return names_in(out.grad_fn), [out, *(t.grad for t in given.values() if t.requires_grad)]


def names_in(node):
    below = [names_in(to) for to, _ in node.next_functions if to is not None]
    return {type(node).__name__}.union(*below)


OURS = {"AttentionBackward", "BatchedBackward"}


@pytest.mark.parametrize("autocast", [True, False], ids=["autocast", "an FP16 model"])
@pytest.mark.parametrize("strided", [False, True], ids=["", "heads behind words"])
@pytest.mark.parametrize("frozen", ["", "q", "kv"])
@pytest.mark.parametrize("words", [1, 7, 40])
@pytest.mark.parametrize("way", WAYS)
def test_in_one_piece_it_is_bit_for_bit_what_it_is_taken_apart(
    way, words, frozen, strided, autocast
):
    policy.install("cpu")
    made = {"half": not autocast, "frozen": frozen, "strided": strided, "words": words}
    how = {"autocast": autocast, "strided": strided}
    names, apart = emulated(WAYS[way], tensors(**made), **how)
    assert OURS.isdisjoint(names)
    held = attention.in_one_piece()
    names, whole = emulated(WAYS[way], tensors(**made), **how)
    del held
    assert not OURS.isdisjoint(names)
    for ours, theirs in zip(whole, apart, strict=True):
        assert ours.dtype == theirs.dtype
        assert ours.stride() == theirs.stride()
        assert torch.equal(ours, theirs)


def test_it_is_fp32_attention_of_fp16_values_rounded_once():
    given = tensors(half=True)
    held = attention.in_one_piece()
    with Emulation():
        out = fused(**given)
        out.sum(dtype=torch.float32).backward()
    del held
    wide = {n: t.detach().float().requires_grad_() for n, t in given.items()}
    expected = fused(**wide)
    assert torch.equal(out, expected.half())
    expected.sum().backward()
    # The softmax of the backward pass is made anew, its output is the rounded one.
    assert torch.equal(given["v"].grad, wide["v"].grad.half())


def test_products_by_hand_have_a_second_derivative():
    def penalty():
        given = tensors(half=True)
        with Emulation():
            out = by_hand(**given)
            (slope,) = torch.autograd.grad(out.float().sum(), given["q"], create_graph=True)
            slope.float().square().sum().backward()
        return [slope, given["k"].grad]

    apart = penalty()
    held = attention.in_one_piece()
    whole = penalty()
    del held
    assert all(map(torch.equal, whole, apart))


def outcomes(q, k, v):
    with Emulation(low_sums=True):
        yield by_hand(q, k, v)
    with Emulation(), FlopCounterMode(display=False):
        yield fused(q, k, v)
    with Emulation():
        yield functional.scaled_dot_product_attention(q, k, v, q.new_zeros(7, 7))
        yield fused(q, k[:, :, :0], v[:, :, :0])
        yield fused(q[0], k[0], v[0])
        yield fused(q.float(), k.float(), v.float())
        yield torch.matmul(q, k[0, 0].t())
        yield torch.matmul(q, k[:1].transpose(-2, -1))
        yield checkpoint(fused, q, k, v, use_reentrant=False)
    yield by_hand(q, k, v)


def test_what_it_cannot_do_and_what_others_see_is_taken_apart():
    given = tensors(half=True)
    alone = list(outcomes(**given))
    held = attention.in_one_piece()
    for ours, plain in zip(outcomes(**given), alone, strict=True):
        assert names_in(ours.grad_fn) == names_in(plain.grad_fn)
        assert torch.equal(ours, plain)
    with Emulation() as emulation, torch.no_grad():
        before = emulation.roundings
        assert fused(**given).grad_fn is None
        assert emulation.roundings == before + 1
    del held
