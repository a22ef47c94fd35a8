"""Products in block formats while training: against arithmetic by hand, and torchao's own products.

By hand, operands are rounded by ``mpdiag.fake_quantize`` and multiplied in float64.
"""

import copy
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from support import one_thread, planned, wrapped
from torch import nn

import mpdiag
from mpdiag.emulation.block_errors import rotate
from mpdiag.errors import UsageError
from mpdiag.numerics.block_recipes import OPERANDS

__all__ = ["one_thread"]
ENDS = [32, 32, 96, 128]
RANDOM = 0.99
"""How many BF16 values are equal, at least, where FP32 sums are added in another order."""


def low(x):
    return x.bfloat16().float()


class Product(nn.Module):
    """Of an input and a weight, in one of the ways that people write it."""

    def __init__(self, way, *shape):
        super().__init__()
        self.way, self.w = way, nn.Parameter(torch.randn(shape))

    def forward(self, x):
        if self.way == "grouped":
            ends = torch.tensor(ENDS, dtype=torch.int32)
            return torch._grouped_mm(x.bfloat16(), self.w.bfloat16().mT, offs=ends)
        if self.way == "loop":
            parts = enumerate(pairwise([0, *ENDS]))
            return torch.cat([x[a:b] @ self.w[e].T for e, (a, b) in parts])
        return {"left": lambda: self.w @ x, "bmm": lambda: torch.bmm(x, self.w.mT)}[self.way]()


def by_line(x, w):
    return [x.flatten(0, -2)], [w], lambda outs: outs[0].unflatten(0, x.shape[:-1])


def by_window(x, w):
    lines = F.unfold(x, (3, 2), dilation=(1, 2), padding=1, stride=2).mT  # images, places, features
    groups = x.shape[1] // w.shape[1]
    xs = [part.flatten(0, 1) for part in lines.chunk(groups, 2)]

    def join(outs):
        return torch.cat(outs, 1).unflatten(0, lines.shape[:2]).mT.reshape(len(x), -1, 4, 3)

    return xs, [part.flatten(1) for part in w.chunk(groups)], join


def by_expert(x, w):
    return [x[a:b] for a, b in pairwise([0, *ENDS])], list(w), torch.cat


def convolution(groups):
    sizes = {"stride": 2, "padding": 1, "dilation": (1, 2)}
    return nn.Conv2d(8, 12, (3, 2), **sizes, groups=groups)


CASES = {
    "linear": (nn.Linear(40, 24), "linear", (3, 7, 40), by_line),
    "left": (
        Product("left", 24, 40), "linear", (40, 9),
        lambda x, w: ([x.T], [w], lambda outs: outs[0].T),
    ),
    "convolution": (convolution(1), "convolution", (3, 8, 7, 6), by_window),
    "groups": (convolution(2), "convolution", (3, 8, 7, 6), by_window),
    "grouped": (Product("grouped", 4, 40, 24), "grouped", (128, 24), by_expert),
    "loop": (Product("loop", 4, 40, 24), "grouped", (128, 24), by_expert),
    "bmm": (
        Product("bmm", 4, 40, 24), "grouped", (4, 9, 24),
        lambda x, w: (list(x), list(w), torch.stack),
    ),
}  # fmt: skip


def rounded(x, words, generator):
    """A matrix with lines as rows; ``words`` as a plan has them."""
    name, *rest = words.split()
    x = rotate(F.pad(x, (0, -x.shape[1] % 16))) if "rotated" in rest else x
    block = next((word for word in rest if "x" in word), None)
    if "stochastic" not in rest:
        return mpdiag.fake_quantize(x, name, block=block).double()
    return mpdiag.fake_quantize(x, name, rounding="stochastic", generator=generator).double()


def by_hand(blocks, lay_out, x, w, bias, gradient):
    """Output, gradients of x and of w."""
    xs, ws, join = lay_out(x, w)

    def multiply(gemm, left, right, bits=None):
        if gemm in blocks.layers[0].quantised and left.numel():
            words = [blocks.formats[gemm][operand] for operand in OPERANDS[gemm]]
            left, right = (rounded(*pair, bits) for pair in zip((left, right), words, strict=True))
        return (left.double() @ right.double().T).float()

    outs = [multiply("fprop", a, b).detach().requires_grad_() for a, b in zip(xs, ws, strict=True)]
    out, dxs, dws, drawn = join(outs), [], [], 0
    dys = torch.autograd.grad(out, outs, low(gradient))
    for a, b, dy in reversed(list(zip(xs, ws, dys, strict=True))):
        drawn += dy.numel() > 0
        for found, gemm, pair in ((dxs, "dgrad", (dy, b.T)), (dws, "wgrad", (dy.T, a.T))):
            bits = mpdiag.CounterGenerator(0, 0, repr((blocks.layers[0].name, gemm, drawn, 0)))
            found.insert(0, multiply(gemm, *pair, bits))
    return low(out + bias), *map(low, torch.autograd.grad([*xs, *ws], [x, w], [*dxs, *dws]))


@pytest.mark.parametrize("target", ["mxfp8", "nvfp4", "fp8-block", "fp8-row"])
@pytest.mark.parametrize("case", CASES)
def test_products_are_those_by_hand(case, target):
    module, kind, shape, lay_out = CASES[case]
    if case == "groups" and target == "nvfp4":
        return  # they share a scale of the tensor, and are not rounded one by one
    (parameter, weight), *biases = module.named_parameters()
    bias = low(biases[0][1]) if biases else 0
    bias = bias[:, None, None] if kind == "convolution" else bias
    torch.manual_seed(5)
    x = (torch.randn(shape) * torch.rand(shape[:-1]).exp2()[..., None]).requires_grad_()
    for wide in ((), ("wgrad",), ("fprop", "dgrad")):
        plan = planned(target, ("", parameter, kind), wide=wide)
        with wrapped(module, plan) as mp:
            with mp.autocast():
                out = module(x)
            assert out.dtype == torch.bfloat16
            gradient = torch.randn(out.shape)
            found = out.float(), *torch.autograd.grad(out.float(), [x, weight], gradient)
            with mp.autocast(), torch.no_grad():
                assert torch.equal(module(x), out)
        held = (low(t.detach()).requires_grad_() for t in (x, weight))
        expected = by_hand(plan.blocks, lay_out, *held, bias, gradient)
        for a, b in zip(found, expected, strict=True):
            assert (low(a) == b).float().mean() > RANDOM
            assert torch.allclose(a, b, rtol=2**-7, atol=1e-4)


def test_factors_without_a_parameter_and_what_stays_in_bf16():
    class Scores(nn.Module):
        def __init__(self, inner=None):
            super().__init__()
            self.inner, self.w = inner, nn.Parameter(torch.randn(40, 40))

        def forward(self, x):
            return [x[0] @ x[1].mT, x[0] @ self.w, *(self.inner(x) if self.inner else ())]

    x, model, outs = torch.randn(2, 3, 8, 40), Scores(Scores()), []
    for layers in ((), [("", "", "matmul")]):
        with wrapped(model, planned("mxfp8", *layers)) as mp, mp.autocast():
            outs.append(model(x))
    q = mpdiag.fake_quantize(low(x), "mxfp8_e4m3").double()
    assert (outs[1][0] == low((q[0] @ q[1].mT).float())).float().mean() > RANDOM
    assert [torch.equal(a, b) for a, b in zip(*outs, strict=True)] == [False, True, True, True]


@pytest.mark.parametrize("formats", [{"grad_output": "nvfp4 rotated", "input": "nvfp4"}, {}])
def test_formats_that_say_nothing_sensible_are_refused(formats):
    plan = planned("nvfp4", ("", "weight", "linear"))
    formats = {**plan.blocks.formats, "wgrad": formats}
    plan = replace(plan, blocks=replace(plan.blocks, formats=formats))
    with pytest.raises(UsageError, match=r"no wgrad that can be read \((one of|'grad)"):
        wrapped(nn.Linear(16, 16), plan)


def test_what_is_not_emulated_is_said_once_and_a_module_around_may_use_a_weight(caplog):
    model = nn.Sequential(
        nn.TransformerEncoderLayer(32, 2, 40, 0.0, batch_first=True), nn.ConvTranspose1d(4, 4, 3)
    )
    inside = {"self_attn": "in_proj_weight", "self_attn.out_proj": "weight", "linear1": "weight"}
    layers = [(f"0.{name}", weight, "linear") for name, weight in inside.items()]
    plan = planned("mxfp4", *layers, ("1", "weight", "convolution"))
    with pytest.raises(UsageError, match="level O1"):
        wrapped(model, plan, level="O2")
    flops = []
    for one in (replace(plan, blocks=None), replace(plan, level="O2")):  # the level of all else
        with wrapped(model, one) as mp, caplog.at_level("INFO", "mpdiag"):
            for _ in range(12):
                with mp.autocast():
                    loss = model(torch.randn(2, 4, 32)).float().mean()
                mp.step(loss)
        share = mp.context.monitor.share
        flops.append((share.flops, share.low_flops, share.low_products))
    assert repr(mp).startswith("<MixedPrecision mxfp4 O1 (emulated)")
    assert flops[0] == flops[1]
    first, second = (record.getMessage() for record in caplog.records)
    assert first.startswith("mpdiag found no product of 1 to run in MXFP4, so it stays in BF16.")
    assert second.startswith(
        "products of 0.self_attn.in_proj_weight, 0.self_attn.out_proj, 0.linear1"
    )
    assert copy.deepcopy(model)(torch.ones(2, 4, 32)).dtype == torch.float32


@pytest.mark.parametrize("kind", ["linear", "grouped"])
@pytest.mark.parametrize("exact", [True, False], ids=["integers", "normal values"])
def test_mxfp8_equals_torchaos_products(kind, exact):
    """Integers from 64 to 127 become multiples of 8: FP32 holds their sums, in any order."""
    pytest.importorskip("torchao", reason="torchao is the oracle; pip install torchao")
    from torchao.prototype.moe_training import mxfp8_grouped_mm, mxfp8_linear
    from torchao.prototype.mx_formats import config
    from torchao.quantization.quantize_.common.kernel_preference import KernelPreference

    def draw(*shape):
        signs = torch.randn(shape)
        return torch.randint(64, 128, shape) * signs.sign() if exact else signs

    emulated, rceil = KernelPreference.EMULATED, config.ScaleCalculationMode.RCEIL
    casts = config.MXFP8Dim0CastKernelChoice.TRITON, config.MXFP8Dim1CastKernelChoice.TORCH
    torch.manual_seed(7)
    x, dy = draw(128, 64).requires_grad_(), draw(128, 96).bfloat16()
    module = nn.Linear(64, 96, False) if kind == "linear" else Product("grouped", 4, 96, 64)
    ((name, weight),) = module.named_parameters()
    weight.data = draw(*weight.shape)
    low_x, low_w = (t.detach().bfloat16().requires_grad_() for t in (x, weight))
    if kind == "linear":
        e4m3 = [torch.float8_e4m3fn] * 3
        out = mxfp8_linear.mx_mm.apply(low_x, low_w, *e4m3, 32, emulated, *casts, rceil, False)
    else:
        ends = torch.tensor(ENDS, dtype=torch.int32)
        out = mxfp8_grouped_mm._to_mxfp8_then_scaled_grouped_mm(
            low_x, low_w.mT, ends, kernel_preference=emulated, scale_calculation_mode=rceil
        )
    expected = out, *torch.autograd.grad(out, [low_x, low_w], dy)
    with wrapped(module, planned("mxfp8", ("", name, kind))) as mp:
        with mp.autocast():
            out = module(x)
        found = out, *torch.autograd.grad(out, [x, weight], dy)
    for a, b in zip(found, expected, strict=True):
        assert not exact or torch.equal(a.float(), b.float())
        assert torch.allclose(a.float(), b.float(), rtol=2**-7, atol=1e-3)
        assert (a == b).float().mean() > RANDOM
