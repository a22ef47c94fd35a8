"""The comparing kernel against the tables, which count one value at a time."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from mpdiag.recording.counting import host, layout, numba_kernels
from mpdiag.recording.counting.host import COMPARING, PLAIN, HostRows, Packed, Scratch

DTYPES = {
    torch.float32: layout.FLOAT32,
    torch.bfloat16: layout.BFLOAT16,
    torch.float16: layout.FLOAT16,
    torch.float64: layout.FLOAT64,
}
# Around 64 (few values), the 32 that are read together, a group of 256, a block of 4,096.
LENGTHS = [0, 1, 31, 32, 33, 63, 64, 65, 95, 96, 255, 256, 257, 511, 513, 4095, 4096, 4097, 8193]
SPECIAL = torch.cat(
    [
        torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 1e-40, -1e-45, 65520.0]),
        torch.tensor([65519.996, 2.0**-25, 2.0**-126, 2.0**-127, 3.4028234e38, -1.0, 2.0**-24]),
        torch.tensor([0x7FFFFFFF, 0x7F800001, 0x7FE00001, 0x7FE00000, -1], dtype=torch.int32).view(
            torch.float32
        ),
    ]
)


def shuffled(values: torch.Tensor, n: int) -> torch.Tensor:
    return values[torch.randint(0, len(values), (n,))]


DATA = {
    "normal": lambda n: torch.randn(n) * 1e-3,
    "relu": lambda n: torch.randn(n).relu(),
    "50 octaves": lambda n: torch.randn(n) * torch.exp2(torch.rand(n) * 50 - 25),
    "200 octaves": lambda n: torch.exp2(torch.rand(n) * 200 - 100),
    "one far below": lambda n: torch.cat([torch.randn(n), torch.tensor([1e-36])])[1:],
    "ties": lambda n: (
        torch.exp2(torch.randint(-30, 20, (n,)).float()) * (1 + torch.randint(0, 5, (n,)) / 4)
    ),
    "zeros": torch.zeros,
    "one value": lambda n: torch.full((n,), 0.3),
    "beyond FP16": lambda n: torch.randn(n) * 1e5,
    "subnormals": lambda n: torch.randn(n) * 1e-38,
    "special": lambda n: shuffled(torch.cat([SPECIAL, torch.randn(200)]), n),
    "largest": lambda n: torch.full((n,), 3.4028234e38),
}


def counted(kernels: host.Kernels, values: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    scratch = Scratch()
    kernels.count_values(
        values.data_ptr(),
        values.numel(),
        DTYPES[values.dtype],
        scratch.row,
        scratch.edges,
        scratch.work,
    )
    tables = scratch.work[numba_kernels.TABLES_AT : numba_kernels.WORK]
    assert not tables.any(), "scratch memory is left as it was"
    return scratch.row, scratch.edges


def assert_same(values: torch.Tensor) -> None:
    (new, new_edges), (old, old_edges) = counted(COMPARING, values), counted(PLAIN, values)
    assert np.array_equal(new, old), np.nonzero(new != old)
    assert np.array_equal(new_edges, old_edges)
    assert old[: layout.SUBNORMALS].sum() + old[layout.INFS] + old[layout.NANS] == values.numel()


@pytest.mark.parametrize("name", DATA)
def test_rows_equal_those_of_the_tables(name):
    torch.manual_seed(0)
    for n in LENGTHS:
        values = DATA[name](n)
        for dtype in DTYPES:
            assert_same(values.to(dtype))


@settings(max_examples=60, deadline=None)
@given(
    arrays.arrays(
        np.uint32, st.integers(0, 700), elements=st.integers(0, 2**32 - 1), fill=st.nothing()
    ),
    st.integers(0, 255),
    st.integers(0, 30),
)
def test_any_bits_count_alike(bits, exponent, spread):
    assert_same(torch.from_numpy(bits.view(np.float32).copy()))
    narrow = (bits & np.uint32(0x807FFFFF)) | (
        np.clip(exponent + bits % (spread + 1), 0, 255).astype(np.uint32) << np.uint32(23)
    )
    assert_same(torch.from_numpy(narrow.view(np.float32).copy()))


def test_every_half_counts_alike():
    """All 65,536 patterns of both halves, against torch's own conversion."""
    patterns = torch.arange(65536, dtype=torch.int32).to(torch.int16)
    for dtype in (torch.float16, torch.bfloat16):
        values = patterns.view(dtype)
        assert_same(values)
        for new, wide in zip(
            counted(COMPARING, values), counted(PLAIN, values.float()), strict=True
        ):
            assert np.array_equal(new, wide)


def test_values_may_lie_anywhere():
    """Vectors are read from addresses that are no multiple of their size, and no value beyond."""
    torch.manual_seed(0)
    memory = torch.full((5000,), torch.nan)
    for offset in (0, 1, 3, 7):
        for n in (64, 300, 4096):
            memory[:] = torch.nan
            memory[offset : offset + n] = torch.randn(n)
            assert_same(memory[offset : offset + n])


def updated(kernels: host.Kernels, before: torch.Tensor, after: torch.Tensor) -> list[np.ndarray]:
    weights, updates = Scratch(), Scratch()
    facts = np.zeros(numba_kernels.UPDATE_ROW, np.int64)
    kernels.count_update(
        before.data_ptr(),
        after.data_ptr(),
        before.numel(),
        weights.row,
        weights.edges,
        updates.row,
        updates.edges,
        facts,
        weights.work,
        updates.work,
    )
    return [weights.row, weights.edges, updates.row, updates.edges, facts]


@pytest.mark.parametrize("name", [*DATA, "swallowed", "unchanged"])
def test_updates_equal_those_of_the_tables(name):
    torch.manual_seed(0)
    for n in (0, 1, 63, 64, 257, 2048, 2049, 5000):
        before = torch.randn(n)
        before[:7] = 0
        if name in DATA:
            before, step = DATA[name](n), DATA[name](n)[torch.randperm(n)]
        else:
            step = before * (0.0 if name == "unchanged" else 2.0**-11)
        after = before + step
        for new, old in zip(
            updated(COMPARING, before, after), updated(PLAIN, before, after), strict=True
        ):
            assert np.array_equal(new, old), np.nonzero(new != old)
        whole = updated(COMPARING, before, after)
        for row, values in ((whole[0], before), (whole[2], after - before)):
            assert np.array_equal(row, counted(PLAIN, values)[0])


def test_where_vectors_are_refused_tables_count(monkeypatch):
    def refused(*_args):
        message = "LLVM cannot do this"
        raise RuntimeError(message)

    values, changed = DATA["special"](3000), DATA["normal"](3000)
    rows = HostRows()
    usual = rows.count(values), *rows.count_update(values, changed)
    monkeypatch.setattr(host, "COMPARING", COMPARING._replace(count_values=refused))
    host.kernels.cache_clear()
    try:
        assert host.kernels() == PLAIN
        plain = rows.count(values), *rows.count_update(values, changed)
    finally:
        host.kernels.cache_clear()
    raw = rows.read()
    assert np.array_equal(raw.counts[usual[:3]], raw.counts[plain[:3]])
    assert np.array_equal(raw.extremes[list(usual[:3])], raw.extremes[list(plain[:3])])
    assert np.array_equal(raw.facts[usual[3]], raw.facts[plain[3]])
    assert np.array_equal(raw.ratios[[usual[3]]], raw.ratios[[plain[3]]])


@pytest.mark.parametrize("kernels", [COMPARING, PLAIN], ids=["comparing", "tables"])
def test_many_tensors_count_as_each_does(kernels, monkeypatch):
    """More than there is room for, so that the kernel stops and goes on."""
    monkeypatch.setattr(host, "kernels", lambda: kernels)
    torch.manual_seed(0)
    tensors = [
        (DATA["200 octaves"](200 + i).to(list(DTYPES)[i % 4]), 1 + i % 3, i % 2) for i in range(150)
    ]
    tensors.append((torch.zeros(0), 1, 0))
    pairs = [(v.float(), v.float() * (1 + 2.0 ** -(i % 20))) for i, (v, _, _) in enumerate(tensors)]
    together, singly = HostRows(), HostRows()
    numbers = together.count_many(tensors)
    assert numbers == [singly.count(*t) for t in tensors]
    updates = together.count_many_updates(pairs)
    assert updates == [singly.count_update(*pair) for pair in pairs]
    assert together.count_many([]) == together.count_many_updates([]) == []
    a, b = together.read(), singly.read()
    everything = list(range(len(numbers) + 2 * len(pairs)))
    assert np.array_equal(a.counts[everything], b.counts[everything])
    assert np.array_equal(a.extremes, b.extremes)
    assert np.array_equal(a.facts, b.facts)
    facts = [fact for _, _, fact in updates]
    assert np.array_equal(a.ratios[facts], b.ratios[facts])


def test_bins_that_hold_nothing_may_be_left_out():
    torch.manual_seed(0)
    rows = HostRows()
    for tensor in (torch.randn(300), torch.randn(300) * 1e-38, torch.zeros(3), torch.ones(5)):
        rows.count(tensor)
    for groups in ([[0], [3]], [[2]], [[0, 3], [2]], [[0], [1, 0]]):
        whole, some = (rows.read().merged(groups, occupied=o) for o in (False, True))
        at = some.first - whole.first
        inside = slice(at, at + some.counts.shape[1])
        assert some.counts.shape[1] < whole.counts.shape[1]
        for name in ("counts", "sums"):
            assert np.array_equal(getattr(whole, name)[:, inside], getattr(some, name))
            assert getattr(whole, name).sum() == getattr(some, name).sum()
        assert np.array_equal(whole.numel, some.numel)
        assert np.array_equal(whole.subnormals, some.subnormals)


def test_rows_outgrow_their_memory_and_keep_what_they_hold():
    rows = HostRows()
    torch.manual_seed(0)
    tensors = [torch.randn(100) * 2.0 ** (i % 60) for i in range(300)]
    tensors += [DATA["200 octaves"](3000) for _ in range(100)]
    numbers = [rows.count(t) for t in tensors]
    assert numbers == list(range(400))
    raw = rows.read()
    for i in (0, 63, 64, 299, 300, 399):
        assert np.array_equal(raw.counts[[i]][0], counted(PLAIN, tensors[i])[0][: layout.RAW])
        assert raw.extremes[i, 0] == tensors[i].abs().max()
    rows.clear()
    assert rows.count(torch.ones(70)) == 0
    assert rows.read().merged([[0]])[0].numel == 70


def test_rows_and_cells_run_out_at_the_same_time():
    """Rows of 240 entries: with the 64th the first 64 rows and the first 16,320 cells are used up."""
    rows = Packed(layout.QUARTERS, layout.RAW - layout.QUARTERS)
    scratch = np.zeros(numba_kernels.SCRATCH, np.int64)
    for i in range(200):
        scratch[300:540] = i + 1
        scratch[layout.ZEROS] = i
        rows.append(scratch)
        places, cells, tails = rows.room()
        assert len(places) > rows.rows
        assert len(tails) > rows.rows
        assert len(rows.edges) > rows.rows
        assert len(cells) >= rows.rows * 240 + layout.QUARTERS
    for i in (0, 63, 64, 127, 199):
        row = rows[[i]][0]
        assert (row[300:540] == i + 1).all()
        assert row.sum() == 240 * (i + 1) + i
