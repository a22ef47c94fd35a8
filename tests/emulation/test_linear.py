"""The emulated linear layer in one piece against the same taken apart, operation by operation."""

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from mpdiag.emulation import linear, policy
from mpdiag.emulation.mode import Emulation

HALF = policy.Policy(torch.float16)


def network(x, w, b=None, *, strided=False):
    """A weight that is used twice, and layers of two and of three dimensions."""
    first = functional.linear(x.transpose(0, 1) if strided else x, w, b)
    return functional.linear(first.relu(), w, b)


def tensors(shape, *, half=False, frozen=(), bias=True):
    torch.manual_seed(0)
    made = {"x": torch.randn(shape), "w": torch.randn(shape[-1], shape[-1])}
    if bias:
        made["b"] = torch.randn(shape[-1])
    kind = torch.float16 if half else torch.float32
    return {name: t.to(kind).requires_grad_(name not in frozen) for name, t in made.items()}


def emulated(given, *, autocast, turned=False, strided=False):
    """Output, gradients, and the backward function's name."""
    with Emulation():
        with torch.autocast("cpu", HALF.dtype, enabled=autocast), policy.in_force(HALF):
            out = network(**given, strided=strided)
        pull = torch.linspace(-1, 1, out.numel()).half()
        pull = (
            pull.view(out.shape[::-1]).permute(*range(out.dim())[::-1])
            if turned
            else pull.view_as(out)
        )
        out.backward(pull)
    return out.grad_fn.name(), [out, *(t.grad for t in given.values() if t.requires_grad)]


@pytest.mark.parametrize("autocast", [True, False], ids=["autocast", "an FP16 model"])
@pytest.mark.parametrize("turned", [False, True], ids=["", "a transposed gradient"])
@pytest.mark.parametrize("frozen", ["", "x", "wb", "b"])
@pytest.mark.parametrize(
    ("shape", "strided"), [((5, 40), False), ((3, 4, 12), False), ((3, 4, 12), True)], ids=str
)
@pytest.mark.parametrize("bias", [True, False], ids=["", "no bias"])
def test_in_one_piece_it_is_bit_for_bit_what_it_is_taken_apart(
    shape, strided, bias, frozen, turned, autocast
):
    policy.install("cpu")
    made = {"half": not autocast, "frozen": frozen, "bias": bias}
    how = {"autocast": autocast, "turned": turned, "strided": strided}
    if not bias and frozen == "wb":
        made["frozen"] = "w"
    name, apart = emulated(tensors(shape, **made), **how)
    assert "Linear" not in name
    held = linear.in_one_piece()
    name, whole = emulated(tensors(shape, **made), **how)
    del held
    assert "Linear" in name
    assert all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(whole, apart, strict=True))


def test_its_gradient_has_a_gradient():
    def penalty():
        given = tensors((5, 40), half=True)
        with Emulation():
            out = network(**given)
            (slope,) = torch.autograd.grad(out.float().sum(), given["x"], create_graph=True)
            slope.float().square().sum().backward()
        return out.grad_fn.name(), [slope, given["w"].grad]

    apart = penalty()[1]
    held = linear.in_one_piece()
    name, whole = penalty()
    del held
    assert "Linear" in name
    assert all(map(torch.equal, whole, apart))


class OfItsOwn(Emulation):
    pass


def names_of(x, w, b):
    with OfItsOwn():
        yield functional.linear(x, w, b)
    with Emulation(), FlopCounterMode(display=False):
        yield functional.linear(x, w, b)
    with Emulation():
        yield functional.linear(x[:1], w, b)
        # Without gradients of its own, a weight is repeated over what is not one matrix.
        yield functional.linear(
            x.view(5, 4, 10).transpose(0, 1), w.detach()[:, :10].contiguous(), b
        )
        yield functional.linear(x.t().contiguous().t(), w, b)
        yield functional.linear(x.float(), w.float(), b.float())
        yield functional.linear(x.bfloat16(), w.bfloat16(), b.bfloat16())
        yield checkpoint(functional.linear, x, w, b, use_reentrant=False)
    yield functional.linear(x, w, b)


def test_what_it_cannot_do_and_what_others_see_is_taken_apart():
    given = tensors((5, 40), half=True)
    alone = list(names_of(**given))
    held = linear.in_one_piece()
    for ours, plain in zip(names_of(**given), alone, strict=True):
        assert ours.grad_fn.name() == plain.grad_fn.name()
        assert torch.equal(ours, plain)
    jacobian = torch.func.jacrev(lambda x: functional.linear(x, given["w"], given["b"]))
    with Emulation():
        assert jacobian(given["x"].detach()).shape == (5, 40, 5, 40)
    del held


def test_its_kernel_is_in_force_as_long_as_it_is_held():
    held = [linear.in_one_piece(), linear.in_one_piece()]
    layer = nn.Linear(4, 4).half()
    x = torch.randn(3, 4).half()
    with Emulation():
        expected = layer(x)
        assert "Linear" in expected.grad_fn.name()
        with torch.no_grad():
            assert torch.equal(layer(x), expected)
    held.clear()
    with Emulation():
        assert "Linear" not in layer(x).grad_fn.name()
