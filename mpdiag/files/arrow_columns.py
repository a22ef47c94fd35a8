"""Arrow columns as NumPy arrays and back, without pandas.

Arrow's ``to_numpy``, ``array`` and ``scalar`` ask whether a value is one of pandas', and import pandas
to find out, which takes 0.2 s. So numbers are read from Arrow's buffers and written into them, as its
published columnar format has them: values, little-endian, and one bit each for validity.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
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
    import pyarrow as pa

    array = one_array(column)
    if not pa.types.is_primitive(array.type):
        raise ValueError(f"a column holds {array.type}, not numbers")
    first, length = array.offset, len(array)
    if array.null_count == length:
        return np.full(length, np.array(missing).astype(dtype))
    values = array.buffers()[1]
    if pa.types.is_boolean(array.type):
        found = _bits(values, array)
    else:
        found = np.frombuffer(values, array.type.to_pandas_dtype(), first + length)[first:]
    found = found.astype(dtype, copy=False)
    if array.null_count:
        found = np.where(present(array), found, np.array(missing).astype(dtype))
    return found


def present(array: Any) -> NDArray[np.bool_]:
    """Which values of an Arrow array are not null: shape (n,)."""
    if not array.null_count:
        return np.ones(len(array), bool)
    return _bits(array.buffers()[0], array)


def _bits(buffer: Any, array: Any) -> NDArray[np.bool_]:
    """The bits of an array's buffer; Arrow stores the lowest bit of a byte first."""
    bits = np.unpackbits(np.frombuffer(buffer, np.uint8), bitorder="little")
    return bits[array.offset : array.offset + len(array)].astype(bool)


def lists(column: Any) -> tuple[NDArray[np.int64], NDArray[Any]]:
    """The lists of numbers of an Arrow array or chunked column, one after another.

    Args:
        column: Of lists of a primitive type, n rows; a null is an empty list.

    Returns:
        How long each is, shape (n,), and the values of all, in the column's own type.
    """
    array = one_array(column)
    values = array.flatten()  # without what lies under a null
    return numbers(array.value_lengths(), np.int64), numbers(values, values.type.to_pandas_dtype())


def octets(column: Any) -> tuple[NDArray[np.int64], NDArray[np.uint8]]:
    """As ``lists``, of a binary column: lengths, and all rows' bytes."""
    import pyarrow.compute as pc

    array = one_array(column)
    lengths = numbers(pc.binary_length(array), np.int64)
    if not lengths.any():
        return lengths, np.zeros(0, np.uint8)
    array = array.drop_null()
    _, ends, data = array.buffers()
    edges = np.frombuffer(ends, np.int32)[array.offset : array.offset + len(array) + 1]
    return lengths, np.frombuffer(data, np.uint8)[edges[0] : edges[-1]]


def texts(column: Any) -> tuple[NDArray[np.int32], tuple[str, ...]]:
    """A column of words, encoded or plain: each row's code, -1 for a null, and the words."""
    encoded = column if hasattr(column.type, "value_type") else column.dictionary_encode()
    if hasattr(encoded, "unify_dictionaries"):
        encoded = encoded.unify_dictionaries()
    array = one_array(encoded)
    return numbers(array.indices, np.int32, -1), tuple(array.dictionary.to_pylist())


def one_array(column: Any) -> Any:
    """An array, or a chunked column as one, whatever the version of Arrow makes of it."""
    import pyarrow as pa

    merged = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    if not isinstance(merged, pa.ChunkedArray):
        return merged
    return merged.chunk(0) if merged.num_chunks else pa.nulls(0, column.type)


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
        words: dict[str, int] = {}
        codes = [0 if value is None else words.setdefault(value, len(words)) for value in values]
        indices = array_of(_exact(codes, kind.index_type.to_pandas_dtype()), mask)
        return pa.DictionaryArray.from_arrays(indices, array_from(list(words), kind.value_type))
    if types.is_struct(kind):
        rows = [{} if row is None else row for row in values]
        fields = [array_from([row.get(f.name) for row in rows], f.type) for f in kind]
        return pa.Array.from_buffers(kind, n, [_validity(mask)], children=fields)
    if types.is_list(kind):
        inner = array_from([x for row in values for x in row or ()], kind.value_type)
        buffers = [_validity(mask), _ends(len(row or ()) for row in values)]
        return pa.Array.from_buffers(kind, n, buffers, children=[inner])
    if types.is_string(kind) or types.is_binary(kind):
        as_bytes: Any = str.encode if types.is_string(kind) else bytes
        data = [b"" if value is None else as_bytes(value) for value in values]
        buffers = [_validity(mask), _ends(map(len, data)), pa.py_buffer(b"".join(data))]
        return pa.Array.from_buffers(kind, n, buffers)
    return array_of(_exact(values, kind.to_pandas_dtype()), mask)


def _exact(values: Sequence[Any], dtype: Any) -> NDArray[Any]:
    """Python's numbers as NumPy's, 0 for a null; nothing is rounded or wrapped."""
    zero = np.dtype(dtype).type(0).item()
    numbers = np.array([zero if value is None else value for value in values])
    if numbers.size and not np.can_cast(numbers.dtype, dtype, "same_kind"):
        raise TypeError(f"{numbers.dtype} values where the column holds {np.dtype(dtype)}")
    if np.issubdtype(dtype, np.integer) and numbers.size:
        limits = np.iinfo(dtype)
        if numbers.min() < limits.min or numbers.max() > limits.max:
            raise OverflowError(f"{numbers.min()} to {numbers.max()} do not fit {np.dtype(dtype)}")
    return numbers.astype(dtype)


def _ends(lengths: Iterable[int]) -> Any:
    """Where each row of a list or a text begins, and where the last one ends."""
    import pyarrow as pa

    return pa.py_buffer(np.cumsum(np.array([0, *lengths], np.int64)).astype(np.int32))


def _validity(mask: NDArray[np.bool_] | None) -> Any:
    import pyarrow as pa

    return None if mask is None or not mask.any() else pa.py_buffer(_packed(~mask))


def _packed(bits: NDArray[np.bool_]) -> NDArray[np.uint8]:
    return np.packbits(bits, bitorder="little")
