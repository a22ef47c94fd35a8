"""Arrow columns as NumPy arrays and back, by their buffers.

Arrow's own conversions (``to_numpy``, ``array``, ``scalar``, ``fill_null``) ask whether a value is one
of pandas', and import pandas to find out: a quarter of what a short command takes. The layout of a
buffer is Arrow's published columnar format: values, little-endian, and one bit each for validity.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
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
        values: Shape (n,), integers or floats.
        mask: Shape (n,), true where a value is null.
    """
    import pyarrow as pa

    validity = None
    if mask is not None and mask.any():
        validity = pa.py_buffer(np.packbits(~mask, bitorder="little").tobytes())
    data = pa.py_buffer(np.ascontiguousarray(values))
    kind = pa.from_numpy_dtype(values.dtype)
    return pa.Array.from_buffers(kind, len(values), [validity, data])
