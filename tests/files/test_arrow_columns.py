"""Arrow columns as NumPy arrays and back: equal to Arrow's own conversions, without pandas."""

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpdiag.files.arrow_columns import array_from, array_of, lists, lists_of, numbers, octets, texts

_NUMBERS = [
    (pa.int16(), st.integers(-(2**15), 2**15 - 1)),
    (pa.int64(), st.integers(-(2**63), 2**63 - 1)),
    (pa.float64(), st.floats(allow_nan=False)),
    (pa.bool_(), st.booleans()),
]
_OCTETS = (pa.binary(), st.binary(max_size=4))
_TEXT = (pa.string(), st.text(max_size=4))
_LISTS = (pa.list_(pa.int64()), st.lists(st.integers(0, 9), max_size=4))


@st.composite
def _chunked(draw, kind, rows):
    """A column in slices of several chunks, with nulls, so that offsets lie within a byte."""
    chunks = []
    for chunk in draw(st.lists(st.lists(st.none() | rows, max_size=40), max_size=3)):
        array = pa.array(chunk, kind)
        first = draw(st.integers(0, len(array)))
        chunks.append(array.slice(first, draw(st.integers(0, len(array) - first))))
    return pa.chunked_array(chunks, kind)


@pytest.mark.parametrize(("kind", "rows"), _NUMBERS, ids=lambda kind: str(kind)[:7])
@given(data=st.data(), missing=st.sampled_from([0, 1]))
def test_numbers_are_those_of_arrow(kind, rows, data, missing):
    column = data.draw(_chunked(kind, rows))
    found = numbers(column, kind.to_pandas_dtype(), missing)
    assert found.dtype == kind.to_pandas_dtype()
    assert found.tolist() == [missing if row is None else row for row in column.to_pylist()]


def test_a_missing_float_can_be_nan():
    found = numbers(pa.array([1.5, None]), np.float64, np.nan)
    assert found[0] == 1.5
    assert np.isnan(found[1])


def test_text_is_refused():
    with pytest.raises(ValueError, match="a column holds string, not numbers"):
        numbers(pa.array(["a"]), np.int64)


@pytest.mark.parametrize(("read", "of"), [(lists, _LISTS), (octets, _OCTETS)])
@given(data=st.data())
def test_lists_and_octets_are_those_of_arrow(read, of, data):
    column = data.draw(_chunked(*of))
    rows = [row or () for row in column.to_pylist()]
    lengths, values = read(column)
    assert lengths.tolist() == [len(row) for row in rows]
    assert values.tolist() == [value for row in rows for value in row]
    assert [found.tolist() for found in read(pa.nulls(3, of[0]))] == [[0, 0, 0], []]


def test_what_lies_under_a_null_is_not_its():
    data = pa.array([1, 2, 3, 4])
    edges = pa.array([0, 2, 4], pa.int32())
    column = pa.ListArray.from_arrays(edges, data, mask=pa.array([True, False]))
    assert [found.tolist() for found in lists(column)] == [[0, 2], [3, 4]]


@given(data=st.data(), encoded=st.booleans())
def test_texts_are_those_of_arrow(data, encoded):
    column = data.draw(_chunked(*_TEXT))
    codes, words = texts(column.dictionary_encode() if encoded else column)
    assert [None if code < 0 else words[code] for code in codes] == column.to_pylist()


@given(st.lists(st.tuples(st.integers(-(2**63), 2**63 - 1), st.booleans()), max_size=40))
def test_an_array_is_what_arrow_makes_of_it(rows):
    values = np.array([value for value, _ in rows], np.int64)
    mask = np.array([null for _, null in rows], bool)
    made = array_of(values, mask)
    made.validate(full=True)
    assert made.equals(pa.array(values, pa.int64(), mask=mask))
    assert array_of(values).equals(pa.array(values, pa.int64()))


def test_lists_of_numbers_as_arrow_makes_them():
    ends, values = np.array([0, 2, 2, 3]), np.array([5, 6, 7])
    assert lists_of(ends, values).equals(pa.array([[5, 6], [], [7]]))
    masked = lists_of(ends, values, np.array([False, True, False]))
    masked.validate(full=True)
    assert masked.equals(pa.array([[5, 6], None, [7]]))


_KINDS = st.recursive(
    st.sampled_from([*_NUMBERS, _TEXT, _OCTETS]),
    lambda inner: st.one_of(
        inner.map(lambda made: (pa.list_(made[0]), st.lists(st.none() | made[1], max_size=3))),
        st.lists(inner, min_size=1, max_size=3).map(
            lambda fields: (
                pa.struct([(f"f{i}", kind) for i, (kind, _) in enumerate(fields)]),
                st.fixed_dictionaries(
                    {}, optional={f"f{i}": st.none() | v for i, (_, v) in enumerate(fields)}
                ),
            )
        ),
    ),
    max_leaves=5,
)


@given(st.data())
def test_python_values_become_what_arrow_makes_of_them(data):
    kind, values = data.draw(_KINDS)
    rows = data.draw(st.lists(st.none() | values, max_size=6))
    made = array_from(rows, kind)
    made.validate(full=True)
    assert made.equals(pa.array(rows, kind))


@given(st.lists(st.none() | st.sampled_from(["a", "bé", ""]), max_size=9))
def test_words_are_stored_once(rows):
    made = array_from(rows, pa.dictionary(pa.int32(), pa.string()))
    made.validate(full=True)
    assert made.to_pylist() == rows
    assert len(made.dictionary) == len({word for word in rows if word is not None})


@pytest.mark.parametrize(
    ("value", "kind", "error"),
    [
        (1.5, pa.int64(), TypeError),
        ("1", pa.int64(), TypeError),
        (2**64, pa.int64(), TypeError),
        (2**15, pa.int16(), OverflowError),
        (1, pa.bool_(), TypeError),
        (b"a", pa.string(), TypeError),
        ("a", pa.binary(), TypeError),
    ],
)
def test_nothing_is_rounded_or_wrapped(value, kind, error):
    with pytest.raises(error):
        array_from([value], kind)


def test_reading_and_writing_a_run_does_not_import_pandas(real, root, tmp_path):
    script = (
        "import sys; from mpdiag.runs.run import open_run; from mpdiag.runs import schema, writer;"
        "run = open_run(sys.argv[1]); assert len(run.records.step); assert run.operations();"
        "writer.RunWriter(sys.argv[2]).append(run.table());"
        "writer.RunWriter(sys.argv[2]).write_modules(run.modules());"
        "assert 'pandas' not in sys.modules"
    )
    done = real("-c", script, root / "sample_runs" / "translation", tmp_path / "run", cwd=root)
    assert done.code == 0, done.err
