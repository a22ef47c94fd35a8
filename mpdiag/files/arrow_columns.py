"""Arrow columns as NumPy arrays and back, by their buffers.

Arrow's own conversions (``to_numpy``, ``array``, ``scalar``, ``fill_null``) ask whether a value is one
of pandas', and import pandas to find out: a quarter of what a short command takes. The layout of a
buffer is Arrow's published columnar format: values, little-endian, and one bit each for validity.
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
    chunks = column.chunks if hasattr(column, "chunks") else [column]
    arrays = [_chunk(chunk, np.dtype(dtype), missing) for chunk in chunks if len(chunk)]
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

    return pa.py_buffer(np.cumsum([0, *lengths]).astype(np.int32))


def _validity(mask: NDArray[np.bool_] | None) -> Any:
    import pyarrow as pa

    return None if mask is None or not mask.any() else pa.py_buffer(_packed(~mask))


def _packed(bits: NDArray[np.bool_]) -> NDArray[np.uint8]:
    return np.packbits(bits, bitorder="little")
