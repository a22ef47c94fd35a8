"""Parts that half precision harms, and those that look alike, of which nothing is said."""

import re

import pytest
import torch
from audited_trainings import BF16, FP32, Masters
from torch import nn
from torch.nn import functional

import mpdiag
from mpdiag.precision.parts import spacing

FP16 = torch.float16


class Part(nn.Module):
    """A linear layer after a part of choice, which is given the module and the input (32, 16)."""

    def __init__(self, forward, value=None, dtype=FP32):
        super().__init__()
        torch.manual_seed(0)
        self.forward_part = forward
        self.mix = nn.Linear(16, 16)
        if value is not None:
            self.value = nn.Parameter(torch.tensor(value).repeat(16)[:16])
        self.register_buffer("table", 10000.0 ** (-torch.arange(8.0) / 8))
        self.to(dtype)

    def forward(self, x):
        return self.mix(self.forward_part(self, x).to(self.mix.weight.dtype))


def messages(net, folder, loss=lambda out: out.float().square().mean(), x=None):
    """What an audit of two steps says of parts."""
    dtype = next(net.parameters()).dtype
    x = torch.randn(32, 16, generator=torch.Generator().manual_seed(1)) if x is None else x
    optimizer = Masters(net.parameters(), lr=1e-3)
    with mpdiag.record(net, optimizer, folder, every=1) as recorder:
        for _ in range(2):
            loss(net(x.to(dtype))).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert recorder.failures == []
    found = mpdiag.audit(folder).findings
    return [f.message for f in found if f.code == "precision-narrow-part"]


def decays(net, x):
    return x * net.value.exp()


def rotates(positions, dtype=FP32):
    def part(net, x):
        angles = positions(x)[:, None].to(dtype) * net.table.to(dtype)
        return x * torch.cat((angles.cos(), angles.sin()), -1).to(x.dtype)

    return part


def counts(x, size=512):
    return torch.arange(size)[:: size // 32].to(x.dtype)


def counts_exactly(_):
    return torch.arange(512)[::16].float()


def chooses(dtype):
    def part(net, x):
        scores = torch.softmax(net.mix(x).float() / 1000, -1).to(dtype)
        weights, chosen = scores.topk(2, -1)
        return torch.zeros_like(x).scatter(-1, chosen, weights.to(x.dtype))

    return part


def whole(net, x):
    del net
    return x * (torch.arange(1024) % 600).to(x.dtype)[:16]


SAID = {
    "exp of a stored parameter": (Part(decays, [1.0, 2.77], BF16), r"exp reads value.* 0\.78 %"),
    "exp in FP32 of one": (
        Part(lambda net, x: x * net.value.float().exp(), [1.0, 2.77], BF16),
        r"exp reads value.* 0\.78 %",
    ),
    "exp in FP16": (Part(decays, [2.77], FP16), ""),
    "exp of an FP32 parameter": (Part(decays, [2.77]), ""),
    "exp of a small one": (Part(decays, [0.5, 1.9], BF16), ""),
    "softplus of a bias": (
        Part(lambda net, x: functional.softplus(x + net.value), [-7.0, -2.0], BF16),
        r"softplus reads value.* 1\.57 %",
    ),
    "exp of an activation": (
        Part(lambda _, x: (8 * x).exp().clamp_max(9.0), dtype=BF16), r"exp reads BF16 values up to"
    ),
    "exp of what is at most 0": (
        Part(lambda _, x: (x - x.amax(-1, keepdim=True)).exp(), dtype=BF16), ""
    ),
    "angles in BF16": (Part(rotates(counts, BF16), dtype=BF16), r"cos reads angles up to 496"),
    "a table in BF16": (Part(rotates(counts_exactly), dtype=BF16), r"(cos|sin) reads angles up to 496"),
    "angles in FP32": (Part(rotates(counts_exactly)), ""),
    "small angles in BF16": (
        Part(rotates(lambda _: torch.arange(32, dtype=BF16), BF16), dtype=BF16), ""
    ),
    "positions that collide": (
        Part(whole, dtype=BF16), r"a cast makes 407 BF16 numbers of 600 different ones.*above 256"
    ),
    "positions in FP16": (Part(whole, dtype=FP16), ""),
    "arange in BF16": (
        Part(lambda _, x: x + torch.arange(512, dtype=BF16).mean().to(x.dtype)),
        r"arange makes 385 BF16 numbers of 512",
    ),
    "a choice in BF16": (Part(chooses(BF16), dtype=BF16), r"topk chooses by BF16 values.* of 32 rows"),
    "a choice in FP32": (Part(chooses(FP32), dtype=BF16), ""),
}  # fmt: skip


@pytest.mark.parametrize("case", SAID)
def test_parts_that_half_precision_harms_are_named_and_others_are_not(case, tmp_path):
    net, words = SAID[case]
    x = torch.linspace(0.0, 1.0, 16).expand(32, 16) if "activation" in case else None
    found = messages(net, tmp_path / "run", x=x)
    assert [re.search(words, message) is not None for message in found] == [True] * bool(words)


@pytest.mark.parametrize(("wide", "said"), [(False, 1), (True, 0)])
def test_a_loss_in_half_precision_is_named(wide, said, tmp_path):
    def loss(out):
        return functional.cross_entropy(out.float() if wide else out, torch.arange(32) % 16)

    found = messages(Part(lambda _, x: x, dtype=BF16), tmp_path / "run", loss)
    assert len(found) == said
    assert all(re.match("log_softmax computes a loss in BF16", one) for one in found)


@pytest.mark.parametrize(("dtype", "name"), [(BF16, "bfloat16"), (FP16, "float16")])
def test_the_spacing_is_that_of_the_format(dtype, name):
    end = torch.tensor(torch.inf, dtype=dtype).view(torch.int16)
    values = torch.arange(1, int(end), dtype=torch.int16).view(dtype).double()
    assert [spacing(name, v) for v in values[:-1].tolist()] == values.diff().tolist()
