"""The emulated LSTM in one piece against the same taken apart, operation by operation."""

import pytest
import torch
from torch import nn

from mpdiag.emulation import policy, recurrent
from mpdiag.emulation.mode import Emulation

HALF = policy.Policy(torch.float16)


def emulated(lstm, x, states=None, *, whole):
    """Outputs and gradients (of x, states and weights)."""
    policy.install("cpu")
    x = x.clone().requires_grad_()
    states = [s.clone().requires_grad_() for s in states] if states else []
    lstm.zero_grad()
    torch.manual_seed(5)  # of dropout
    with torch.backends.cudnn.flags(enabled=whole), Emulation():
        with torch.autocast("cpu", HALF.dtype), policy.in_force(HALF):
            out, (h, c) = lstm(x, tuple(states)) if states else lstm(x)
        pull = torch.linspace(-1, 1, out.numel()).view(out.shape)
        ((out.float() * pull).sum() + h.float().sum() - 2 * c.float().sum()).backward()
    weights = {name: p.grad for name, p in lstm.named_parameters()}
    return (out, h, c), (x.grad, *(s.grad for s in states)), weights


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"bias": False},
        {"num_layers": 2},
        {"bidirectional": True},
        {"num_layers": 3, "bidirectional": True, "dropout": 0.5},
    ],
    ids=str,
)
@pytest.mark.parametrize("given", [False, True], ids=["zero states", "states given"])
def test_in_one_piece_it_is_bit_for_bit_what_it_is_taken_apart(options, given):
    torch.manual_seed(0)
    lstm = nn.LSTM(6, 5, **options)
    count = options.get("num_layers", 1) * (2 if options.get("bidirectional") else 1)
    states = [torch.randn(count, 3, 5) for _ in range(2)] if given else None
    x = torch.randn(7, 3, 6)
    whole = emulated(lstm, x, states, whole=True)
    apart = emulated(lstm, x, states, whole=False)
    for ours, theirs in zip((*whole[0], *whole[1]), (*apart[0], *apart[1]), strict=True):
        assert ours.dtype == theirs.dtype
        assert torch.equal(ours, theirs)
    for name, gradient in whole[2].items():
        if "weight_ih" in name:
            assert torch.equal(gradient, apart[2][name])
        # Taken apart, each time step's share is rounded, and each partial sum.
        torch.testing.assert_close(gradient, apart[2][name], rtol=0.02, atol=0.02)


def in_an_fp16_model(lstm, x):
    """Outputs, gradients and the name of the backward function, without autocast."""
    x = x.clone().requires_grad_()
    lstm.zero_grad()
    with Emulation():
        out, (h, c) = lstm(x)
        name = out.grad_fn.name()
        (out.float().square().sum() + h.float().sum() - 2 * c.float().sum()).backward()
    return name, [out, h, c, x.grad, lstm.weight_ih_l0.grad]


def test_an_fp16_model_has_it_in_one_piece_as_long_as_the_kernel_is_held():
    torch.manual_seed(0)
    lstm, x = nn.LSTM(6, 5).half(), torch.randn(7, 3, 6).half()
    name, apart = in_an_fp16_model(lstm, x)
    assert "_Layer" not in name
    held = [recurrent.in_one_piece(), recurrent.in_one_piece()]
    name, whole = in_an_fp16_model(lstm, x)
    assert "_Layer" in name
    assert all(map(torch.equal, whole, apart))
    others = [nn.LSTM(6, 5), nn.LSTM(6, 5).bfloat16(), nn.LSTM(6, 5, bidirectional=True).double()]
    beside = [other(x.to(other.weight_ih_l0.dtype))[0] for other in others]  # torch's own
    held.clear()
    for other, seen in zip(others, beside, strict=True):
        assert torch.equal(seen, other(x.to(seen.dtype))[0])
    assert "_Layer" not in in_an_fp16_model(lstm, x)[0]


def test_batch_first_is_the_same_turned_round():
    torch.manual_seed(0)
    lstm = nn.LSTM(6, 5, num_layers=2)
    x = torch.randn(7, 3, 6)
    expected = emulated(lstm, x, whole=True)
    lstm.batch_first = True
    (out, h, c), *_ = emulated(lstm, x.transpose(0, 1), whole=True)
    for ours, theirs in zip((out.transpose(0, 1), h, c), expected[0], strict=True):
        assert torch.equal(ours, theirs)


def test_gradients_of_weights_are_summed_over_time_before_they_are_rounded():
    """2^-13 for each of 4096 steps: rounded one by one into a sum near 1, they would be lost."""
    steps = 4096
    gates = torch.zeros(steps, 1, 4).half()
    gates[:, 0, 3] = 1.0  # output gate open
    ctx = type("Context", (), {"biases": True})()
    zeros = torch.zeros(steps + 1, 1, 1).half()
    ctx.saved_tensors = (
        torch.ones(steps, 1, 1).half(), gates, zeros, zeros,
        torch.full((steps, 1, 1), 2.0**-13).half(), torch.zeros(4, 1).half(), torch.zeros(4, 1).half(),
    )  # fmt: skip
    gates[:, 0, 3] = 0.5
    out_grad = torch.full((steps, 1, 1), 4.0).half()
    nothing = torch.zeros(1, 1).half()
    grads = recurrent._Layer.backward(ctx, out_grad, nothing, nothing)
    each = 4.0 * 2.0**-13 * 0.25
    assert grads[3][3].item() == steps * each
    assert grads[5][3].item() == steps * each


def test_what_it_cannot_do_is_taken_apart():
    """Projections, packed sequences and second derivatives work as before."""
    policy.install("cpu")
    torch.manual_seed(0)
    with torch.autocast("cpu", HALF.dtype), policy.in_force(HALF), Emulation():
        out, _ = nn.LSTM(4, 6, proj_size=3)(torch.randn(5, 2, 4))
        assert out.shape == (5, 2, 3)
        packed = nn.utils.rnn.pack_sequence([torch.randn(4, 4), torch.randn(2, 4)])
        out, _ = nn.LSTM(4, 6)(packed)
        assert out.data.dtype == torch.float16
        x = torch.randn(5, 2, 4, requires_grad=True)
        with torch.backends.cudnn.flags(enabled=False):
            out, _ = nn.LSTM(4, 6)(x)
        (gradient,) = torch.autograd.grad(out.float().sum(), x, create_graph=True)
        gradient.square().sum().backward()
    assert x.grad is not None


def test_a_second_derivative_says_that_there_is_none():
    policy.install("cpu")
    x = torch.randn(5, 2, 4, requires_grad=True)
    with torch.autocast("cpu", HALF.dtype), policy.in_force(HALF), Emulation():
        out, _ = nn.LSTM(4, 6)(x)
        (gradient,) = torch.autograd.grad(out.float().square().sum(), x, create_graph=True)
        with pytest.raises(RuntimeError, match="once_differentiable"):
            gradient.square().sum().backward()
