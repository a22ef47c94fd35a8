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


def in_quarters(values: torch.Tensor) -> np.ndarray:
    """Counts of finite float32 values by numpy alone: quarters, zeros last."""
    bits = values.numpy().view(np.uint32)
    return np.bincount(((bits << np.uint32(1)) - np.uint32(1)) >> np.uint32(22), minlength=1024)


def assert_in_quarters(values: torch.Tensor) -> None:
    assert_same(values)
    row, expected = counted(COMPARING, values)[0], in_quarters(values)
    assert np.array_equal(row[: layout.QUARTERS], expected[: layout.QUARTERS])
    assert row[layout.ZEROS] == expected[-1]


@pytest.mark.parametrize("crowd", [1, 2, 3, 4, 5, 63, 64, 200])
def test_values_far_below_are_found_wherever_they_crowd(crowd):
    """Of each 64 values two are written down at once, more one by one."""
    torch.manual_seed(0)
    for n in (64, 300, 4096, 4100):
        for start in (0, 61, 64, n - crowd):
            values = 1 + torch.rand(n)
            values[max(start, 0) : start + crowd] = 1e-20 * torch.rand(1).item()
            assert_in_quarters(values)
            values[::3] = 0
            assert_in_quarters(values)
    for distance in range(1, 140, 3):  # all of a block but one value
        values = torch.full((4096,), 2.0**-distance)
        values[distance] = 1.5
        assert_in_quarters(values)


@pytest.mark.parametrize("sampled", [True, False], ids=["far seen", "far not seen"])
def test_a_sample_that_misleads_changes_no_count(sampled):
    """Whether tables count is guessed by one value in 64 of a block of 4,096."""
    torch.manual_seed(0)
    for n in (4096, 4097, 64, 127, 128, 191, 8192 + 640):
        step = max(min(n, 4096) // 64, 1)
        for near, far in ((1.0, -60.0), (100.0, -100.0), (0.0, -27.0), (0.0, -28.0)):
            seen = torch.arange(n) % step == 0
            values = torch.exp2(torch.where(seen == sampled, far, near) + torch.rand(n) * 3)
            assert_in_quarters(values)
            assert_in_quarters(-values * (torch.rand(n) > 0.3))


_ONE = 1023 << 52
DOUBLES = torch.tensor(
    [
        *(0, 1, (1 << 52) - 1, 1 << 52, (897 << 52) - 1, 897 << 52, (897 << 52) + 1),
        *((1151 << 52) - 1, 1151 << 52, (0x7FF << 52) - 1, 0x7FF << 52, (0x7FF << 52) + 1),
        *(_ONE - 1, _ONE + 1, _ONE + (1 << 50), _ONE + (1 << 50) + 1),
        *((1 << 63) - 1, -1, -(1 << 63), -(1 << 52)),
    ],
    dtype=torch.int64,
)


def assert_doubles(bits: torch.Tensor) -> None:
    """Counts of float64 against numpy's own arithmetic."""
    values = bits.view(torch.float64)
    row, edges = counted(COMPARING, values)
    x = np.abs(values.numpy())
    finite = x[np.isfinite(x) & (x != 0)]
    assert row[layout.NANS] == np.isnan(x).sum()
    assert row[layout.INFS] == np.isinf(x).sum()
    assert row[layout.ZEROS] == (x == 0).sum()
    assert row[layout.SUBNORMALS] == (finite < 2.0**-126).sum()
    assert row[layout.FP16_OVERFLOW] == (finite >= 65520.0).sum()
    mantissas, exponents = np.frexp(finite)  # in [0.5, 1)
    quarters = np.ceil(mantissas * 8).astype(int) - 5  # closed at the top: -1 is a power of two
    keys = 4 * (exponents.astype(int) - 1 + 127) + quarters
    keys = np.where(exponents > 128, layout.QUARTERS - 1, keys)
    usual = keys >= 4  # subnormals of FP32 and 2^-126 share the lowest bin
    expected = np.bincount(keys[usual], minlength=layout.QUARTERS)[: layout.QUARTERS]
    assert np.array_equal(row[4 : layout.QUARTERS], expected[4:])
    assert row[:4].sum() == (~usual).sum()
    assert edges[0] == (finite.max() if len(finite) else 0)
    assert edges[1] == (finite.min() if len(finite) else np.inf)


def test_doubles_of_every_kind_count_as_numpy_says():
    torch.manual_seed(0)
    for n in (1, 20, 63, 64, 100, 4095, 4097):
        assert_doubles(shuffled(DOUBLES, n))
        assert_doubles((torch.randn(n).double() * 1e-3).view(torch.int64))
    for one in DOUBLES:
        assert_doubles(one.repeat(65))


@settings(max_examples=60, deadline=None)
@given(arrays.arrays(np.int64, st.integers(0, 300), elements=st.integers(-(2**63), 2**63 - 1)))
def test_any_bits_of_doubles_count_as_numpy_says(bits):
    assert_doubles(torch.from_numpy(bits.copy()))


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


@settings(max_examples=60, deadline=None)
@given(st.integers(64, 700), st.integers(-100, 13), st.integers(-100, 13), st.integers(0, 2**31))
def test_updates_of_any_ratio_equal_those_of_the_tables(n, of_weights, of_updates, seed):
    """Zeros among weights, updates and both; values far from overflow and from subnormals."""
    random = torch.Generator().manual_seed(seed)
    before, step = (
        torch.randn(n, generator=random)
        * 2.0**exponent
        * (torch.rand(n, generator=random) > torch.rand(1, generator=random) - 0.5)
        for exponent in (of_weights, of_updates)
    )
    mantissas = torch.rand(n, generator=random) < 0.3  # powers of two and their halfway points
    before[mantissas] = 2.0**of_weights
    step[mantissas] = 2.0**of_updates
    after = before + step
    for new, old in zip(
        updated(COMPARING, before, after), updated(PLAIN, before, after), strict=True
    ):
        assert np.array_equal(new, old), np.nonzero(new != old)


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
