"""Arrow columns as NumPy arrays and back: equal to Arrow's own conversions, without pandas."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpdiag.files.arrow_columns import (
    array_from,
    array_of,
    lists,
    lists_of,
    numbers,
    octets,
    places_of,
    repeated,
)

_TYPES = {
    "int16": st.integers(-(2**15), 2**15 - 1),
    "int32": st.integers(-(2**31), 2**31 - 1),
    "int64": st.integers(-(2**63), 2**63 - 1),
    "float64": st.floats(allow_nan=False),
    "bool": st.booleans(),
}


@st.composite
def _chunked(draw: st.DrawFn) -> tuple[pa.ChunkedArray, str]:
    """A column in slices of several chunks, with nulls, so that offsets lie within a byte."""
    kind = draw(st.sampled_from(sorted(_TYPES)))
    values = st.lists(st.none() | _TYPES[kind], max_size=40)
    arrow = pa.bool_() if kind == "bool" else pa.type_for_alias(kind)
    chunks = []
    for chunk in draw(st.lists(values, max_size=3)):
        array = pa.array(chunk, arrow)
        first = draw(st.integers(0, len(array)))
        chunks.append(array.slice(first, draw(st.integers(0, len(array) - first))))
    return pa.chunked_array(chunks, arrow), kind


@given(_chunked())
def test_numbers_are_those_of_arrow(made: tuple[pa.ChunkedArray, str]) -> None:
    column, kind = made
    wanted = [0 if value is None else value for value in column.to_pylist()]

    found = numbers(column, kind)

    assert found.dtype == np.dtype(kind)
    assert found.tolist() == wanted


@given(_chunked())
def test_a_missing_value_has_the_stand_in_that_was_asked_for(
    made: tuple[pa.ChunkedArray, str],
) -> None:
    column, kind = made
    if kind == "bool":
        return
    wanted = [-1 if value is None else value for value in column.to_pylist()]
    assert numbers(column, kind, -1).tolist() == wanted


def test_a_missing_float_can_be_nan() -> None:
    found = numbers(pa.array([1.5, None]), np.float64, np.nan)
    assert found[0] == 1.5
    assert np.isnan(found[1])


def test_text_is_refused() -> None:
    with pytest.raises(ValueError, match="a column holds string, not numbers"):
        numbers(pa.array(["a"]), np.int64)


@given(st.lists(st.tuples(st.integers(-(2**63), 2**63 - 1), st.booleans()), max_size=40))
def test_an_array_is_what_arrow_makes_of_it(rows: list[tuple[int, bool]]) -> None:
    values = np.array([value for value, _ in rows], np.int64)
    mask = np.array([null for _, null in rows], bool)

    made = array_of(values, mask)

    made.validate(full=True)
    assert made.equals(pa.array(values, pa.int64(), mask=mask))
    assert array_of(values).equals(pa.array(values, pa.int64()))


_KINDS = st.recursive(
    st.sampled_from(
        [
            (pa.int16(), st.integers(-(2**15), 2**15 - 1)),
            (pa.int64(), st.integers(-(2**63), 2**63 - 1)),
            (pa.float64(), st.floats(allow_nan=False)),
            (pa.bool_(), st.booleans()),
            (pa.string(), st.text(max_size=4)),
            (pa.binary(), st.binary(max_size=4)),
        ]
    ),
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
def test_python_values_become_what_arrow_makes_of_them(data: st.DataObject) -> None:
    kind, values = data.draw(_KINDS)
    rows = data.draw(st.lists(st.none() | values, max_size=6))

    made = array_from(rows, kind)

    made.validate(full=True)
    assert made.equals(pa.array(rows, kind))


@given(st.lists(st.none() | st.sampled_from(["a", "bé", ""]), max_size=9))
def test_words_are_stored_once(rows: list[str | None]) -> None:
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
    ],
)
def test_nothing_is_rounded_or_wrapped(value: object, kind: pa.DataType, error: type) -> None:
    with pytest.raises(error):
        array_from([value], kind)


def test_reading_a_run_does_not_import_pandas(root: Path) -> None:
    script = (
        "import sys; from mpdiag.runs.run import open_run; run = open_run(sys.argv[1]);"
        "assert len(run.records.step); assert 'pandas' not in sys.modules"
    )
    run = root / "sample_runs" / "ssd"
    subprocess.run([sys.executable, "-c", script, str(run)], check=True, cwd=root)


# -- lists and texts -----------------------------------------------------------------------------


def _sliced(draw: st.DrawFn, rows: st.SearchStrategy, kind: pa.DataType) -> pa.ChunkedArray:
    chunks = []
    for chunk in draw(st.lists(st.lists(st.none() | rows, max_size=12), max_size=3)):
        array = pa.array(chunk, kind)
        first = draw(st.integers(0, len(array)))
        chunks.append(array.slice(first, draw(st.integers(0, len(array) - first))))
    return pa.chunked_array(chunks, kind)


@given(st.data())
def test_lists_are_those_of_arrow(data: st.DataObject) -> None:
    column = _sliced(data.draw, st.lists(st.integers(0, 9), max_size=4), pa.list_(pa.int64()))
    rows = [row or [] for row in column.to_pylist()]
    lengths, values = lists(column)
    assert lengths.tolist() == [len(row) for row in rows]
    assert values.tolist() == [value for row in rows for value in row]


@given(st.data())
def test_octets_are_those_of_arrow(data: st.DataObject) -> None:
    column = _sliced(data.draw, st.binary(max_size=4), pa.binary())
    rows = [row or b"" for row in column.to_pylist()]
    lengths, values = octets(column)
    assert lengths.tolist() == [len(row) for row in rows]
    assert values.tobytes() == b"".join(rows)


def test_what_lies_under_a_null_is_not_its() -> None:
    data = pa.array([1, 2, 3, 4])
    edges = pa.array([0, 2, 4], pa.int32())
    column = pa.ListArray.from_arrays(edges, data, mask=pa.array([True, False]))
    assert [found.tolist() for found in lists(column)] == [[0, 2], [3, 4]]


@pytest.mark.parametrize("kind", [pa.list_(pa.int64()), pa.binary()])
def test_a_column_that_was_not_read_is_empty_everywhere(kind: pa.DataType) -> None:
    read = octets if kind == pa.binary() else lists
    assert [found.tolist() for found in read(pa.nulls(3, kind))] == [[0, 0, 0], []]


@given(st.data())
def test_places_of_a_word_are_where_it_stands(data: st.DataObject) -> None:
    words = ["", "a", "fp16", "bf16", "fp1", "ö"]
    column = _sliced(data.draw, st.sampled_from(words), pa.string()).combine_chunks()
    word = data.draw(st.sampled_from(words[1:]))
    found = places_of(column, word).tolist()
    assert found == [i for i, text in enumerate(column.to_pylist()) if text == word]


@given(st.lists(st.text(max_size=3), min_size=1, max_size=4, unique=True), st.data())
def test_repeated_words_are_theirs(words: list[str], data: st.DataObject) -> None:
    codes = data.draw(st.lists(st.integers(0, len(words) - 1), max_size=9))
    array = repeated(words, np.array(codes, np.int64))
    array.validate(full=True)
    assert array.to_pylist() == [words[code] for code in codes]


def test_lists_of_numbers_as_arrow_makes_them():
    ends, values = np.array([0, 2, 2, 3]), np.array([5, 6, 7])
    assert lists_of(ends, values).equals(pa.array([[5, 6], [], [7]]))
    masked = lists_of(ends, values, np.array([False, True, False]))
    masked.validate(full=True)
    assert masked.equals(pa.array([[5, 6], None, [7]]))
