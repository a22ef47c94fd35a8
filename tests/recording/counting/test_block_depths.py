"""Depths of values in blocks: what follows from them against quantised tensors, on every edge."""

import math

import numpy as np
import pytest
import torch
from block_measure import mx_exponent

from mpdiag.emulation.block_rounding import fake_quantize
from mpdiag.numerics.block_formats import BLOCK_FORMATS
from mpdiag.numerics.block_statistics import SMALLEST_MAXIMUM
from mpdiag.recording.counting.block_depths import SIZE, count_depths, depths_of

MX = [name for name, fmt in BLOCK_FORMATS.items() if fmt.scale == "e8m0"]
EDGES = (1.0, 1.25, 1.5, 1.75, 1.875, 1.9375)


def planted(dtype):
    """Blocks with each edge, and its neighbours, as largest magnitude, and all edges below it."""
    near = torch.tensor(EDGES, dtype=dtype)
    near = torch.cat([near, near.nextafter(near * 2), near.nextafter(near * 0)]).unique()
    exponents = torch.arange(-36, 1).float()
    below = (near.float()[:, None] * torch.exp2(exponents)).flatten()
    blocks = []
    for largest in near.float():
        some = below[below <= largest]
        some = torch.cat([some, torch.zeros(-len(some) % 31)]).reshape(-1, 31)
        blocks.append(torch.cat([largest.expand(len(some), 1), some], 1))
    x = torch.cat(blocks) * torch.tensor([1.0, -1.0]).repeat(16)
    shift = torch.exp2(torch.arange(len(x)).float() % 40 - 20)[:, None]
    return (x * shift).to(dtype).reshape(-1, 32)


def drawn(dtype):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(200, 96, generator=generator)
    return (x * torch.exp2(8 * torch.randn(200, 96, generator=generator))).to(dtype)


@pytest.mark.parametrize("make", [planted, drawn], ids=["planted", "drawn"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_counts_are_those_of_the_quantised_tensor(make, dtype):
    x = make(dtype)
    depths, _, _ = depths_of(count_depths(x).numpy())
    assert depths.values == x.numel()
    blocks = x.double().abs().reshape(-1, 32)
    largest = blocks.amax(1).tolist()
    loose = set()
    for name in MX:
        element = BLOCK_FORMATS[name].element
        for rule in ("floor", "rceil", "ceil", "even"):
            q = fake_quantize(x, name, scale_rounding=rule)
            zeros = int(((q == 0) & (x != 0)).sum())
            assert depths.zeroed(element, rule) == (zeros, zeros), (name, rule)
            scale = torch.tensor(
                [2.0 ** mx_exponent(m, element, rule) if m else 1.0 for m in largest]
            )
            scaled = blocks / scale[:, None].double()
            clipped = int((scaled > element.max).sum())
            assert depths.clipped(element, rule) == (clipped, clipped), (name, rule)
            below = int(((scaled < element.smallest_normal) & (scaled > 0)).sum())
            low, high = depths.below_normal(element, rule)
            assert low <= below <= high, (name, rule)
            if low < high:
                loose.add(name)
    assert make is drawn or loose == set(MX)  # values lie on the edges there


def test_other_blocks_are_counted_apart():
    x = torch.ones(6, 40)  # blocks of 32 and of 8
    x[0, 3], x[1, 35], x[2] = math.inf, math.nan, 0.0
    x[3, :32] = SMALLEST_MAXIMUM / 2
    x[3, :4], x[3, 4] = 0.0, 2.0**-140
    x[4, :32], x[5, :32] = SMALLEST_MAXIMUM, 0.75
    counts = count_depths(x)
    assert counts.shape == (SIZE,)
    depths, first, maxima = depths_of(counts.numpy())
    assert (depths.nonfinite, depths.zeros, depths.tiny) == (32 + 8, 40 + 4, 28)
    assert depths.values == x.numel()
    assert depths.counts.sum() == 240 - 40 - 44 - 28
    expected = {-94: 1, -93: 1, -1: 1, 0: 5}
    found = {first + i: n for i, n in enumerate(maxima) if n}
    assert found == expected
    element = BLOCK_FORMATS["mxfp8_e4m3"].element
    low, high = depths.zeroed(element, "rceil")
    assert (low, high) == (0, 28)
    assert depths.below_normal(element, "rceil")[1] == 28


def test_halves_add_up():
    x = drawn(torch.float32)
    whole = count_depths(x)
    assert torch.equal(whole, count_depths(x[:77]) + count_depths(x[77:]))
    both, first, maxima = depths_of(whole.numpy())
    parts = [depths_of(count_depths(part).numpy())[0] for part in (x[:77], x[77:])]
    assert np.array_equal((parts[0] + parts[1]).counts, both.counts)
    exponents = np.floor(np.log2(x.abs().reshape(-1, 32).amax(1).double().numpy())).astype(int)
    assert maxima == tuple(np.bincount(exponents - first).tolist())
