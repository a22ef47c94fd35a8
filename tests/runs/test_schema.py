"""Rows to Arrow, to disk, to numpy and into histograms: nothing is lost but what is documented."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from row_buffer import LABELS as SHARED
from row_buffer import RowBuffer, UpdateCounts

import mpdiag
from mpdiag.numerics.histograms import BINS, ExponentHistogram
from mpdiag.runs.records import Records
from mpdiag.runs.schema import KINDS, schema

EXACT = ("counts", "zeros", "subnormals", "infs", "nans", "fp16_overflow", "absmax", "absmin")
BITS = st.one_of(st.integers(0, 2**32 - 1), st.just(0), st.integers(90, 130).map(lambda e: e << 23))
VALUES = hnp.arrays(np.uint32, st.integers(0, 30), elements=BITS).map(lambda b: b.view(np.float32))
SMALL = st.integers(0, 2**40)
UPDATES = st.builds(
    UpdateCounts,
    *[SMALL] * 5,
    st.integers(-140, 100),
    # From the first occupied bin to the last, as a recorder gives it.
    st.lists(SMALL, max_size=6).map(lambda c: (1, *c, 2)),
)
LABELS = st.fixed_dictionaries(
    {
        "step": st.integers(0, 2**31 - 1),
        "micro": st.integers(-1, 100),
        "rank": st.integers(0, 1000),
        "tensors": st.integers(1, 1000),
        "kind": st.sampled_from(KINDS),
        "name": st.text(st.characters(exclude_categories=["Cs"]), max_size=8),
        "dtype": st.sampled_from(["float32", "bfloat16"]),
        "placement": st.sampled_from(["local", "sharded", "replicated"]),
        "stage": st.sampled_from(["local", "reduced"]),
        "scale": st.integers(0, 24).map(lambda k: 2.0**k),
        "skipped": st.booleans(),
    }
)
_PLAIN = {"step": 0, "micro": 0, "kind": "activation_grad", "name": "a"} | SHARED
ROWS = st.lists(st.tuples(VALUES, LABELS, UPDATES), max_size=8)


def table_of(rows):
    buffer = RowBuffer()
    for values, labels, update in rows:
        is_update = labels["kind"] == "update"
        buffer.append(ExponentHistogram.of(values), update if is_update else None, **labels)
    return buffer.to_table()


SIGNALLING = np.array([0x7FA00001], np.uint32).view(np.float32)


@given(rows=ROWS)
@example(rows=[(SIGNALLING, _PLAIN, None)])
def test_encoding_and_decoding_gives_back_every_row(rows):
    table = table_of(rows)
    assert table.schema.equals(schema())
    records = Records.from_table(table)
    assert len(records) == len(rows)
    for i, (values, labels, update) in enumerate(rows):
        for column, value in labels.items():
            text = column in records.words
            assert (records.texts(column) if text else getattr(records, column))[i] == value
        alone = records.select(np.array([i]))
        assert alone.numel[0] == values.size
        h = ExponentHistogram.of(values)
        found = replace(alone, scale=np.ones(1)).histograms()[0]  # its loss scale left in
        for field in EXACT:
            assert np.array_equal(getattr(found, field), getattr(h, field)), field
        # A bin's mean is stored in 255 steps between 2^e and 2^(e+1).
        edges = np.exp2(h.exponents.astype(float))
        assert (np.abs(found.sums - h.sums) <= h.counts * edges * (0.5 / 255 + 1e-9)).all()
        if labels["kind"] == "update":
            for fact, fmt in (("swallowed", "fp16"), ("swallowed", "bf16"), ("vanished", "fp16")):
                assert alone.fact(fact, fmt)[0] == getattr(update, f"{fact}_{fmt}")
            assert alone.changed[0] == update.changed
            assert alone.ratio_zeros[0] == update.ratio_zeros
            assert alone.ratio_bins.first_exponent[0] == update.ratio_first_exponent
            assert tuple(alone.ratio_bins.counts) == update.ratio_counts
        else:
            assert alone.changed[0] == alone.fact("swallowed", "fp16")[0] == 0
            assert alone.ratio_bins.counts.size == 0
            assert table.column("changed")[i].as_py() is None


@given(rows=ROWS, portion=st.integers(1, 9))
def test_merging_is_addition_whatever_the_portions(rows, portion):
    rows = [(v, {**labels, "scale": 1.0}, u) for v, labels, u in rows]
    records = Records.from_table(table_of(rows))
    words, group = np.unique(records.texts("placement"), return_inverse=True)
    groups = len(words)
    merged = records.merged(group, groups, portion)
    whole = records.merged(group, groups)
    backwards = records.select(np.arange(len(records))[::-1]).merged(group[::-1], groups)
    for field in (*EXACT, "sums"):
        assert np.array_equal(getattr(merged, field), getattr(whole, field)), field
        assert np.array_equal(getattr(backwards, field), getattr(whole, field)), field
    for g in range(groups):
        together = np.concatenate([v for (v, _, _), at in zip(rows, group, strict=True) if at == g])
        truth = ExponentHistogram.of(together)
        for field in EXACT:
            assert np.array_equal(getattr(whole[g], field), getattr(truth, field)), field


@given(rows=ROWS, cut=st.integers(0, 8), order=st.randoms(use_true_random=False))
def test_parts_may_come_in_any_number(rows, cut, order):
    whole = Records.from_table(table_of(rows))
    pieces = [Records.from_table(table_of(part)) for part in (rows[:cut], rows[cut:])]
    joined = Records.concatenate(pieces)
    assert pieces == []
    for column in joined.words:
        assert list(joined.texts(column)) == list(whole.texts(column))
    for field in ("step", "scale", "skipped", "numel", "changed"):
        assert np.array_equal(getattr(joined, field), getattr(whole, field)), field
    for mine, own in ((joined.bins, whole.bins), (joined.ratio_bins, whole.ratio_bins)):
        for field in ("first_exponent", "offsets", "counts", "means"):
            assert np.array_equal(getattr(mine, field), getattr(own, field)), field
    for key in {*joined.facts, *whole.facts}:
        assert np.array_equal(joined.fact(*key), whole.fact(*key)), key


@given(values=VALUES, k=st.integers(0, 24))
@example(values=np.float32([2.0**-120, 2.0**-130, 2.0**-149, 2.0**-110, 0.0]), k=16)
def test_a_recorded_loss_scale_is_taken_off_again(values, k):
    """Also of subnormals; those above 2^-127 share their bin with 2^-126, which is none."""
    size = np.abs(values)
    values = values[(size < 2.0**90) & ((size <= 2.0**-127) | (size >= 2.0**-126))]
    labels = {**_PLAIN, "scale": 2.0**k}
    scaled = Records.from_table(table_of([(values * np.float32(2.0**k), labels, None)]))
    found, truth = scaled.histograms()[0], ExponentHistogram.of(values)
    for field in ("counts", "zeros", "subnormals", "absmax", "absmin"):
        assert np.array_equal(getattr(found, field), getattr(truth, field)), field


def test_counts_past_32_bits_are_kept():
    """More values in a bin than fit 32 bits, as a merged embedding has them."""
    h = ExponentHistogram.of(np.ones(1, np.float32))
    h.counts[h.counts > 0] = 2**40
    buffer = RowBuffer()
    buffer.append(h, **_PLAIN)
    records = Records.from_table(buffer.to_table())
    assert records.histograms().counts.sum() == 2**40
    small = Records.from_table(table_of([(np.ones(3, np.float32), _PLAIN, None)]))
    assert small.bins.counts.dtype == np.uint32
    assert Records.concatenate([records, small]).bins.counts.tolist() == [2**40, 3]


def test_rows_left_out_do_not_count():
    rows = [(np.full(n, 2.0, np.float32), _PLAIN, None) for n in (1, 2, 4)]
    records = Records.from_table(table_of(rows))
    merged = records.merged(np.array([0, -1, 1]), 3)
    assert merged.numel.tolist() == [1, 4, 0]
    assert merged.counts.shape == (3, BINS)


def test_ratios_merge():
    update = UpdateCounts(7, 3, 4, 1, 2, -3, (1, 0, 4))
    rows = [(np.ones(2, np.float32), {**_PLAIN, "kind": "update"}, update)] * 2
    ratios = Records.from_table(table_of(rows)).ratios(np.zeros(2, int), 1)
    counts = dict(zip(ratios.exponents.tolist(), ratios.counts[0].tolist(), strict=True))
    assert {e: n for e, n in counts.items() if n} == {-3: 2, -1: 8}
    assert ratios.zeros.tolist() == [4]


def test_an_absent_word_selects_nothing():
    records = Records.from_table(table_of([(np.ones(2, np.float32), _PLAIN, None)]))
    assert not records.of_kind("weight").any()
    assert not (records.placement == records.code("placement", "replicated")).any()


def test_a_recorded_row_takes_about_120_bytes(tmp_path):
    """On a real run, compressed: a convolutional net with normalisation, at the default cadence."""
    torch.manual_seed(0)
    nn = torch.nn
    layers = [
        layer for _ in range(4) for layer in (nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8), nn.ReLU())
    ]
    model = nn.Sequential(nn.Conv2d(3, 8, 3), *layers, nn.Flatten(), nn.LazyLinear(10))
    x = torch.randn(16, 3, 16, 16)
    model(x)
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    with mpdiag.record(model, optimizer, tmp_path / "run"):
        for _ in range(80):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), torch.arange(16) % 10).backward()
            optimizer.step()
    run = mpdiag.open_run(tmp_path / "run")
    size = sum(path.stat().st_size for path in run.parts())
    rows = len(run.records)
    assert rows > 1500
    assert size / rows < 140, f"{size / rows:.0f} bytes a row"


def test_a_missing_column_is_named():
    with pytest.raises(KeyError, match="means"):
        Records.from_table(table_of([]).drop_columns(["means"]))
