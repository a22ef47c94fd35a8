"""Rows on the host: many together, more than there is room for, and bins that hold nothing."""

import numpy as np
import torch
from recording.counting.reference import DTYPES, differing, expected_row, row_of

from mpdiag.numerics.histograms import ExponentHistogram
from mpdiag.recording.counting import layout
from mpdiag.recording.counting.host import HostRows


def far_apart(n: int) -> torch.Tensor:
    return torch.exp2(torch.rand(n) * 200 - 100)


def test_many_tensors_count_as_each_does():
    """More than there is room for, so that the kernel stops and goes on."""
    torch.manual_seed(0)
    tensors = [(far_apart(200 + i).to(DTYPES[i % 4]), 1 + i % 3, i % 2) for i in range(150)]
    tensors.append((torch.zeros(0), 1, 0))
    pairs = [(v.float(), v.float() * (1 + 2.0 ** -(i % 20))) for i, (v, _, _) in enumerate(tensors)]
    together, singly = HostRows(), HostRows()
    numbers = together.count_many(tensors)
    assert numbers == [singly.count(*t) for t in tensors]
    updates = together.count_many_updates(pairs)
    assert updates == [singly.count_many_updates([pair])[0] for pair in pairs]
    a, b = together.read(), singly.read()
    everything = list(range(len(numbers) + 2 * len(pairs)))
    assert np.array_equal(a.counts[everything], b.counts[everything])
    assert np.array_equal(a.extremes, b.extremes)
    assert np.array_equal(a.facts, b.facts)
    facts = [fact for _, _, fact in updates]
    assert np.array_equal(a.ratios[facts], b.ratios[facts])


def test_bins_that_hold_nothing_are_left_out():
    torch.manual_seed(0)
    rows = HostRows()
    tensors = [torch.randn(300), torch.randn(300) * 1e-38, torch.zeros(3), torch.ones(5)]
    for tensor in tensors:
        rows.count(tensor)
    for groups in ([[0], [3]], [[2]], [[0, 3], [2]], [[0], [1, 0]]):
        found = rows.read().merged(groups)
        for i, group in enumerate(groups):
            whole = ExponentHistogram.of(torch.cat([tensors[j] for j in group]).numpy())
            at = found.first - whole.first
            inside = slice(at, at + found.counts.shape[1])
            assert found.counts.shape[1] < whole.counts.size
            assert np.array_equal(whole.counts[inside], found.counts[i])
            assert whole.counts.sum() == found.counts[i].sum()
            assert whole.numel == found.numel[i]
            assert whole.subnormals == found.subnormals[i]


def test_rows_outgrow_their_memory_and_keep_what_they_hold():
    """Rows of 240 entries: with the 68th the first 16,320 cells are used up, with the 64th the rows."""
    torch.manual_seed(0)
    quarters = torch.cat([torch.exp2(torch.arange(60.0)) * q for q in (1.1, 1.3, 1.6, 1.9)])
    tensors = [quarters * 2.0 ** (i % 40 - 50) for i in range(200)]
    tensors += [torch.randn(100) * 2.0 ** (i % 60) for i in range(100)]
    tensors += [far_apart(3000) for _ in range(100)]
    rows = HostRows()
    assert [rows.count(t) for t in tensors] == list(range(400))
    raw = rows.read()
    for i, tensor in enumerate(tensors):
        assert not differing(row_of(raw, i), expected_row(tensor)), i
    assert np.count_nonzero(raw.counts[[0]][0][: layout.QUARTERS]) == 240
    rows.clear()
    assert rows.count(torch.ones(70)) == 0
    assert rows.read().merged([[0]])[0].numel == 70
