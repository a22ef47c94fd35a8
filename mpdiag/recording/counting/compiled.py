"""Functions compiled by Numba, and kept on the disk for the next process."""

from __future__ import annotations

from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from numba import njit

if TYPE_CHECKING:
    from collections.abc import Callable


def compiled(**options: Any) -> Callable[[Callable[..., Any]], Any]:
    """Decorator: compiled by Numba at the first call, and kept on the disk for the next process."""

    def wrap(function: Callable[..., Any]) -> Any:
        try:
            made = njit(nogil=True, cache=True, **options)(function)
        except RuntimeError:  # an install and a home that may not be written, as in containers
            return njit(nogil=True, **options)(function)
        # Numba keeps what it compiled by the date of the function's own file; kernels here are made
        # of several. Where a release of Numba has no such attribute, only its own check is left.
        with suppress(AttributeError):
            made._cache._cache_file._source_stamp = _stamp(function.__code__.co_filename)
        return made

    return wrap


@cache
def _stamp(own: str) -> tuple[tuple[str, float, int], ...]:
    """Date and size of every file that a kernel of a file may be made of."""
    files = sorted({Path(own).absolute(), *Path(__file__).parent.glob("*.py")})
    stats = [(file.name, file.stat()) for file in files]
    return tuple((name, stat.st_mtime, stat.st_size) for name, stat in stats)
