"""Arrow columns as NumPy arrays and back, by their buffers.

Arrow's own conversions (``to_numpy``, ``array``, ``scalar``, ``fill_null``) ask whether a value is one
of pandas', and import pandas to find out: a quarter of what a short command takes. Its computations
(``cast``, ``take``, ``dictionary_encode`` and all of ``pyarrow.compute``) make some 300 functions when
the first of them is called, which takes 60 ms. The layout of a buffer is Arrow's published columnar
format: values, little-endian, and one bit each for validity.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import DTypeLike, NDArray


def numbers(column: Any, dtype: DTypeLike, missing: float = 0) -> NDArray[Any]:
    """The numbers or booleans of an Arrow array or chunked column.

    Args:
        column: Of a primitive type, n values.
        dtype: What to return them as; the values are converted as ``astype`` does.
        missing: What stands for a null.

    Returns:
        Shape (n,), a copy where the type differs or a value is missing; else read-only.

    Raises:
        ValueError: If the column's values are not numbers.
    """
    arrays = [_chunk(chunk, np.dtype(dtype), missing) for chunk in chunks_of(column)]
    if not arrays:
        return np.zeros(0, dtype)
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)


def _chunk(array: Any, dtype: np.dtype[Any], missing: float) -> NDArray[Any]:
    import pyarrow as pa

    if not pa.types.is_primitive(array.type):
        message = f"a column holds {array.type}, not numbers"
        raise ValueError(message)
    first, length = array.offset, len(array)
    validity, values = array.buffers()
    if pa.types.is_boolean(array.type):
        found = _bits(values, first, length)
    else:
        found = np.frombuffer(values, array.type.to_pandas_dtype(), first + length)[first:]
    found = found.astype(dtype, copy=False)
    if array.null_count:
        found = np.where(_bits(validity, first, length), found, dtype.type(missing))
    return found


def present(array: Any) -> NDArray[np.bool_]:
    """Which values of an Arrow array are not null: shape (n,)."""
    if not array.null_count:
        return np.ones(len(array), bool)
    return _bits(array.buffers()[0], array.offset, len(array))


def lists(column: Any) -> tuple[NDArray[np.int64], NDArray[Any]]:
    """The lists of numbers of an Arrow array or chunked column, one after another.

    Args:
        column: Of lists of a primitive type, n rows; a null is an empty list.

    Returns:
        How long each is, shape (n,), and the values of all, in the column's own type.
    """
    lengths, values = [np.zeros(0, np.int64)], []
    for chunk in chunks_of(column):
        first, last, own = _extents(chunk, chunk.buffers()[1])
        lengths.append(own)
        inner = chunk.values.slice(first, last - first)
        found = numbers(inner, inner.type.to_pandas_dtype())
        if chunk.null_count:  # what lies under a null is not its
            edges = _edges(chunk, chunk.buffers()[1])
            found = found[np.repeat(present(chunk), np.diff(edges))]
        values.append(found)
    return np.concatenate(lengths), _joined_arrays(values, column.type.value_type)


def octets(column: Any) -> tuple[NDArray[np.int64], NDArray[np.uint8]]:
    """As ``lists``, of a binary or text column: lengths, and all rows' bytes."""
    lengths, values = [np.zeros(0, np.int64)], [np.zeros(0, np.uint8)]
    for chunk in chunks_of(column):
        _, ends, data = chunk.buffers()
        first, last, own = _extents(chunk, ends)
        lengths.append(own)
        if data is None:
            continue
        found = np.frombuffer(data, np.uint8)[first:last]
        if chunk.null_count:
            found = found[np.repeat(present(chunk), np.diff(_edges(chunk, ends)))]
        values.append(found)
    return np.concatenate(lengths), np.concatenate(values)


def chunks_of(column: Any) -> list[Any]:
    """The arrays of a chunked column that have rows; of an array itself."""
    chunks = column.chunks if hasattr(column, "chunks") else [column]
    return [chunk for chunk in chunks if len(chunk)]


def _edges(array: Any, buffer: Any) -> NDArray[np.int32]:
    """Where each row of a list or a text begins among the values, and where the last one ends."""
    return np.frombuffer(buffer, np.int32)[array.offset : array.offset + len(array) + 1]


def _extents(array: Any, buffer: Any) -> tuple[int, int, NDArray[np.int64]]:
    """Where the values of some lists begin and end, and how long each is: 0 where it is null."""
    edges = _edges(array, buffer)
    lengths = np.diff(edges).astype(np.int64)
    if array.null_count:
        lengths[~present(array)] = 0
    return int(edges[0]), int(edges[-1]), lengths


def _joined_arrays(arrays: list[NDArray[Any]], kind: Any) -> NDArray[Any]:
    if not arrays:
        return np.zeros(0, kind.to_pandas_dtype())
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)


def places_of(texts: Any, word: str) -> NDArray[np.int64]:
    """Where a word stands in an Arrow array of strings: positions, ascending."""
    lengths, data = octets(texts)
    sought = word.encode()
    found = np.flatnonzero(lengths == len(sought))
    if not found.size or not sought:
        return found
    starts = (np.cumsum(lengths) - lengths)[found]
    # Every stretch of that many bytes, without copying one: those that begin a text are compared.
    stretches = np.ndarray((data.size - len(sought) + 1,), f"V{len(sought)}", data, 0, (1,))
    same: NDArray[np.int64] = found[stretches[starts] == np.void(sought)]
    return same


def repeated(words: Sequence[str], codes: NDArray[np.integer[Any]]) -> Any:
    """An Arrow array of strings: ``words[code]`` for each of ``codes``, shape (n,)."""
    import pyarrow as pa

    data = [word.encode() for word in words]
    lengths = np.array([len(word) for word in data], np.int64)
    inside = np.arange(max(lengths, default=0)) < lengths[:, None]
    table = np.zeros(inside.shape, np.uint8)
    table[inside] = np.frombuffer(b"".join(data), np.uint8)
    text = pa.py_buffer(table[codes][inside[codes]])
    ends = _ends(lengths[codes])
    return pa.Array.from_buffers(pa.string(), len(codes), [None, ends, text])


def _bits(buffer: Any, first: int, length: int) -> NDArray[np.bool_]:
    """Some bits of a buffer; Arrow stores the lowest bit of a byte first."""
    octets = np.frombuffer(buffer, np.uint8)[first // 8 : (first + length + 7) // 8]
    start = first % 8
    return np.unpackbits(octets, bitorder="little")[start : start + length].astype(bool)


def array_of(values: NDArray[Any], mask: NDArray[np.bool_] | None = None) -> Any:
    """An Arrow array of NumPy's numbers.

    Args:
        values: Shape (n,), booleans, integers or floats.
        mask: Shape (n,), true where a value is null.
    """
    import pyarrow as pa

    kind = pa.from_numpy_dtype(values.dtype)
    data = _packed(values) if values.dtype == bool else np.ascontiguousarray(values)
    return pa.Array.from_buffers(kind, len(values), [_validity(mask), pa.py_buffer(data)])


def lists_of(
    ends: NDArray[np.int64], values: NDArray[Any], mask: NDArray[np.bool_] | None = None
) -> Any:
    """An Arrow array of lists of NumPy's numbers; see ``lists``.

    Args:
        ends: Where each list begins among the values, and where the last one ends: shape (n + 1,).
        values: All lists' numbers, one list after another.
        mask: Shape (n,), true where a list is null.
    """
    import pyarrow as pa

    inner = array_of(values)
    buffers = [_validity(mask), pa.py_buffer(ends.astype(np.int32))]
    return pa.Array.from_buffers(pa.list_(inner.type), len(ends) - 1, buffers, children=[inner])


def array_from(values: Sequence[Any], kind: Any) -> Any:
    """An Arrow array of Python values, as ``pyarrow.array`` makes it.

    Args:
        values: None stands for a null; a mapping for a struct, whose absent keys are null; a list or
            a tuple for a list.
        kind: Arrow's type: integer, float, boolean, string or binary; a dictionary of strings; lists
            and structs of these.

    Raises:
        TypeError: If a value is not of that type.
        OverflowError: If an integer is too large for it.
    """
    import pyarrow as pa

    types, n = pa.types, len(values)
    mask = np.array([value is None for value in values], bool)
    if types.is_dictionary(kind):
        return _encoded(values, mask, kind)
    if types.is_struct(kind):
        rows = [{} if row is None else row for row in values]
        fields = [array_from([row.get(f.name) for row in rows], f.type) for f in kind]
        return pa.Array.from_buffers(kind, n, [_validity(mask)], children=fields)
    if types.is_list(kind):
        inner = array_from([x for row in values for x in row or ()], kind.value_type)
        buffers = [_validity(mask), _ends(len(row or ()) for row in values)]
        return pa.Array.from_buffers(kind, n, buffers, children=[inner])
    if types.is_string(kind):
        data = ["" if value is None else value for value in values]
        return _joined(kind, [text.encode() for text in data], mask)
    if types.is_binary(kind):
        return _joined(kind, [value or b"" for value in values], mask)
    return array_of(_plain(values, kind.to_pandas_dtype()), mask)


def _encoded(values: Sequence[Any], mask: NDArray[np.bool_], kind: Any) -> Any:
    import pyarrow as pa

    words: dict[str, int] = {}
    codes = [0 if value is None else words.setdefault(value, len(words)) for value in values]
    indices = array_of(_plain(codes, kind.index_type.to_pandas_dtype()), mask)
    return pa.DictionaryArray.from_arrays(indices, array_from(list(words), kind.value_type))


def _plain(values: Sequence[Any], dtype: Any) -> NDArray[Any]:
    """Python's numbers as NumPy's, 0 for a null; nothing is rounded or wrapped."""
    zero = np.dtype(dtype).type(0).item()
    numbers = np.array([zero if value is None else value for value in values])
    if numbers.size and not np.can_cast(numbers.dtype, dtype, "same_kind"):
        message = f"{numbers.dtype} values where the column holds {np.dtype(dtype)}"
        raise TypeError(message)
    if np.issubdtype(dtype, np.integer) and numbers.size:
        limits = np.iinfo(dtype)
        if numbers.min() < limits.min or numbers.max() > limits.max:
            message = f"{numbers.min()} to {numbers.max()} do not fit {np.dtype(dtype)}"
            raise OverflowError(message)
    return numbers.astype(dtype)


def _joined(kind: Any, data: list[bytes], mask: NDArray[np.bool_]) -> Any:
    import pyarrow as pa

    buffers = [_validity(mask), _ends(map(len, data)), pa.py_buffer(b"".join(data))]
    return pa.Array.from_buffers(kind, len(data), buffers)


def _ends(lengths: Iterable[int]) -> Any:
    """Where each row of a list or a text begins, and where the last one ends."""
    import pyarrow as pa

    return pa.py_buffer(np.cumsum(np.array([0, *lengths], np.int64)).astype(np.int32))


def _validity(mask: NDArray[np.bool_] | None) -> Any:
    import pyarrow as pa

    return None if mask is None or not mask.any() else pa.py_buffer(_packed(~mask))


def _packed(bits: NDArray[np.bool_]) -> NDArray[np.uint8]:
    return np.packbits(bits, bitorder="little")
