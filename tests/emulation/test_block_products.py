"""Products in block formats while training: against arithmetic by hand, and torchao's own products.

By hand, operands are rounded by ``mpdiag.fake_quantize`` and multiplied in float64.
"""

import copy
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from support import one_thread
from torch import nn

import mpdiag
from mpdiag.emulation.block_errors import rotate
from mpdiag.errors import UsageError
from mpdiag.numerics.block_recipes import BLOCK_RECIPES, OPERANDS
from mpdiag.plan import BlockLayer, BlockPlan, PrecisionPlan

__all__ = ["one_thread"]
ENDS = [5, 5, 20, 32]


def planned(recipe, *layers, wide=()) -> PrecisionPlan:
    """A plan in which some layers, (module, parameter, kind), are quantised but for some products."""
    each = ["bf16" if gemm in wide else recipe.target for gemm in OPERANDS]
    rows = tuple(BlockLayer(*layer, *each) for layer in layers)
    return PrecisionPlan(
        target="bf16", blocks=BlockPlan(recipe.target, recipe.formats(), layers=rows)
    )


def low(x):
    return x.bfloat16().float()


class Experts(nn.Module):
    def __init__(self, way):
        super().__init__()
        self.way, self.w = way, nn.Parameter(torch.randn(4, 24, 40))

    def forward(self, x):
        if self.way == "grouped":
            ends = torch.tensor(ENDS, dtype=torch.int32)
            return torch._grouped_mm(x.bfloat16(), self.w.bfloat16(), offs=ends)
        if self.way == "loop":
            return torch.cat([x[a:b] @ self.w[e] for e, (a, b) in enumerate(pairwise([0, *ENDS]))])
        return torch.bmm(x, self.w)


class Scores(nn.Module):
    def forward(self, x):
        return x[0] @ x[1].mT


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
    bounds = pairwise([0, *ENDS])
    return [x[a:b] for a, b in bounds], [part.mT for part in w], torch.cat


def convolution(groups):
    sizes = {"stride": 2, "padding": 1, "dilation": (1, 2)}
    return nn.Conv2d(8, 12, (3, 2), **sizes, groups=groups, bias=False)


CASES = {
    "linear": (nn.Linear(40, 24, bias=False), "linear", (3, 7, 40), by_line),
    "convolution": (convolution(1), "convolution", (3, 8, 7, 6), by_window),
    "groups": (convolution(2), "convolution", (3, 8, 7, 6), by_window),
    "grouped": (Experts("grouped"), "grouped", (32, 24), by_expert),
    "loop": (Experts("loop"), "grouped", (32, 24), by_expert),
    "bmm": (
        Experts("bmm"), "grouped", (4, 9, 24),
        lambda x, w: (list(x), list(w.mT), torch.stack),
    ),
}  # fmt: skip


def rounded(x, words, generator=None):
    """A matrix whose lines are its rows; ``words`` as a plan has them."""
    name, *rest = words.split()
    if "rotated" in rest:
        x = rotate(F.pad(x, (0, -x.shape[1] % 16)))
    block = next((word for word in rest if "x" in word), None)
    if "stochastic" not in rest:
        return mpdiag.fake_quantize(x, name, block=block).double()
    return mpdiag.fake_quantize(x, name, rounding="stochastic", generator=generator).double()


def by_hand(plan, name, lay_out, x, w, gradient):
    """Output, gradient of x and of w."""
    formats = plan.blocks.formats
    quantised = plan.blocks.layers[0].quantised
    xs, ws, join = lay_out(x, w)

    def multiply(gemm, left, right, bits=None):
        if gemm in quantised and left.numel():
            words = [formats[gemm][operand] for operand in OPERANDS[gemm]]
            left, right = rounded(left, words[0], bits), rounded(right, words[1])
        return (left.double() @ right.double().T).float()

    outs = [multiply("fprop", a, b).detach().requires_grad_() for a, b in zip(xs, ws, strict=True)]
    out = join(outs)
    dys = torch.autograd.grad(out, outs, low(gradient))
    dxs, dws, drawn = [], [], 0
    for a, b, dy in reversed(list(zip(xs, ws, dys, strict=True))):
        for found, gemm, pair in (
            (dxs, "dgrad", (dy, b.T)),
            (dws, "wgrad", (dy.T, a.T)),
        ):
            if gemm in quantised and pair[0].numel():
                drawn += 1
            bits = mpdiag.CounterGenerator(0, 0, repr((name, drawn, 0)))
            found.insert(0, multiply(gemm, *pair, bits))
    return low(out), *map(low, torch.autograd.grad([*xs, *ws], [x, w], [*dxs, *dws]))


@pytest.mark.parametrize("target", ["mxfp8", "nvfp4", "fp8-block", "fp8-row"])
@pytest.mark.parametrize("case", CASES)
def test_products_are_those_by_hand(case, target):
    module, kind, shape, lay_out = CASES[case]
    if case == "groups" and target == "nvfp4":
        return  # they share a scale of the tensor, and are not rounded one by one
    ((parameter, weight),) = module.named_parameters()
    torch.manual_seed(5)
    x = (torch.randn(shape) * torch.rand(shape[:-1]).exp2()[..., None]).requires_grad_()
    for wide in ((), ("wgrad",), ("fprop", "dgrad")):
        plan = planned(BLOCK_RECIPES[target], ("", parameter, kind), wide=wide)
        module.zero_grad()
        with mpdiag.MixedPrecision(module, torch.optim.SGD(module.parameters()), plan) as mp:
            with mp.autocast():
                out = module(x)
            assert out.dtype == torch.bfloat16
            gradient = torch.randn(out.shape)
            found = out.float(), *torch.autograd.grad(out.float(), [x, weight], gradient)
            with mp.autocast(), torch.no_grad():
                assert torch.equal(module(x), out)
        held = (low(t.detach()).requires_grad_() for t in (x, weight))
        expected = by_hand(plan, plan.blocks.layers[0].name, lay_out, *held, gradient)
        for a, b in zip(found, expected, strict=True):
            assert (low(a) == b).float().mean() > 0.98  # FP32 sums in another order
            assert torch.allclose(a, b, rtol=2**-7, atol=1e-5)


def test_factors_without_a_parameter_and_what_stays_in_bf16():
    module, x = Scores(), torch.randn(2, 3, 8, 40)
    model = nn.ModuleDict({"scores": module, "other": nn.Linear(40, 40)})
    outs = []
    for layers in ((), [("scores", "", "matmul")]):
        plan = planned(BLOCK_RECIPES["mxfp8"], *layers)
        mp = mpdiag.MixedPrecision(model, torch.optim.SGD(model.parameters()), plan)
        with mp, mp.autocast():
            outs.append([model["scores"](x).float(), model["other"](x[0]).float()])
    q = mpdiag.fake_quantize(low(x), "mxfp8_e4m3").double()
    expected = low((q[0] @ q[1].mT).float())
    assert (outs[1][0] == expected).float().mean() > 0.98
    assert not torch.equal(*(scores for scores, _ in outs))
    assert torch.equal(*(other for _, other in outs))


@pytest.mark.parametrize("change", [{"wgrad": {"grad_output": "nvfp4 rotated"}}, {"fprop": {}}])
def test_formats_that_say_nothing_sensible_are_refused(change):
    plan, model = planned(BLOCK_RECIPES["nvfp4"], ("", "weight", "linear")), nn.Linear(16, 16)
    formats = {
        g: {**f, **change[g]} if change.get(g) else f for g, f in plan.blocks.formats.items()
    }
    formats = {g: change[g] if change.get(g) == {} else f for g, f in formats.items()}
    formats["wgrad"]["input"] = "nvfp4"
    plan = replace(plan, blocks=replace(plan.blocks, formats=formats))
    with pytest.raises(UsageError, match=r"operands is rotated|no fprop"):
        mpdiag.MixedPrecision(model, torch.optim.SGD(model.parameters()), plan)


def test_what_is_not_emulated_is_said_once_and_a_module_around_may_use_a_weight(caplog):
    model = nn.Sequential(
        nn.TransformerEncoderLayer(32, 2, 40, 0.0, batch_first=True), nn.ConvTranspose1d(4, 4, 3)
    )
    inside = {"self_attn": "in_proj_weight", "self_attn.out_proj": "weight", "linear1": "weight"}
    layers = [(f"0.{name}", weight, "linear") for name, weight in inside.items()]
    plan = planned(BLOCK_RECIPES["mxfp4"], *layers, ("1", "weight", "convolution"))
    with pytest.raises(UsageError, match="level O1"):
        mpdiag.MixedPrecision(model, torch.optim.SGD(model.parameters()), plan, level="O2")
    plan = replace(plan, level="O2")  # as the plan for all else has it
    with mpdiag.MixedPrecision(model, torch.optim.SGD(model.parameters()), plan) as mp:
        assert repr(mp).startswith("<MixedPrecision mxfp4 O1 (emulated)")
        with caplog.at_level("INFO", "mpdiag"):
            for _ in range(20):
                with mp.autocast():
                    loss = model(torch.randn(2, 4, 32)).float().mean()
                mp.step(loss)
        assert mp.context.monitor.share.share == 1.0
    first, second = (record.getMessage() for record in caplog.records)
    assert first.startswith("mpdiag found no product of 1 to run in MXFP4, so it stays in BF16.")
    assert second.startswith(
        "products of 0.self_attn.in_proj_weight, 0.self_attn.out_proj, 0.linear1"
    )
    assert copy.deepcopy(model)(torch.ones(2, 4, 32)).dtype == torch.float32


# -- torchao ---------------------------------------------------------------------------------------


def test_mxfp8_equals_torchaos_products():
    pytest.importorskip("torchao", reason="torchao is the oracle; pip install torchao")
    from torchao.prototype.moe_training import mxfp8_grouped_mm, mxfp8_linear
    from torchao.prototype.mx_formats.config import MXFP8Dim0CastKernelChoice as Dim0
    from torchao.prototype.mx_formats.config import MXFP8Dim1CastKernelChoice as Dim1
    from torchao.prototype.mx_formats.config import ScaleCalculationMode
    from torchao.quantization.quantize_.common.kernel_preference import KernelPreference

    emulated, rceil = KernelPreference.EMULATED, ScaleCalculationMode.RCEIL
    e4m3 = [torch.float8_e4m3fn] * 3
    kinds = emulated, Dim0.TRITON, Dim1.TORCH, rceil, False
    ends = torch.tensor([32, 96, 128], dtype=torch.int32)

    def ours(module, kind, x, dy):
        plan = planned(BLOCK_RECIPES["mxfp8"], ("", "w", kind))
        with mpdiag.MixedPrecision(module, torch.optim.SGD(module.parameters()), plan) as mp:
            with mp.autocast():
                out = module(x)
            return out, *torch.autograd.grad(out, [x, module.w], dy)

    class Plain(nn.Module):
        def __init__(self, w):
            super().__init__()
            self.w = nn.Parameter(w)

        def forward(self, x):
            if self.w.dim() == 3:
                return torch._grouped_mm(x.bfloat16(), self.w.bfloat16().mT, offs=ends)
            return x @ self.w.T

    for exact in (True, False):
        # Integers from 64 to 127 become multiples of 8: FP32 holds their sums in any order.
        draw = (
            (lambda *shape: torch.randint(64, 128, shape) * torch.randn(shape).sign())
            if exact
            else torch.randn
        )
        torch.manual_seed(7)
        x, dy = draw(128, 64).requires_grad_(), draw(128, 96).bfloat16()
        for kind, w in (("linear", draw(96, 64)), ("grouped", draw(3, 96, 64))):
            low_x, low_w = (t.detach().bfloat16().requires_grad_() for t in (x, w))
            if kind == "linear":
                out = mxfp8_linear.mx_mm.apply(low_x, low_w, *e4m3, 32, *kinds)
            else:
                out = mxfp8_grouped_mm._to_mxfp8_then_scaled_grouped_mm(
                    low_x, low_w.mT, ends, kernel_preference=emulated, scale_calculation_mode=rceil
                )
            expected = out, *torch.autograd.grad(out, [low_x, low_w], dy)
            for a, b in zip(ours(Plain(w), kind, x, dy), expected, strict=True):
                if exact:
                    assert torch.equal(a.float(), b.float())
                assert torch.allclose(a.float(), b.float(), rtol=2**-7, atol=1e-3)
                assert (a == b).float().mean() > 0.97
