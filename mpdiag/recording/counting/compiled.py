"""Functions compiled by Numba, and kept on the disk for the next process."""

from __future__ import annotations

from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from numba import njit
from numba.core.runtime.nrt import rtsys

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
            _load_alone(made._cache)
        return made

    return wrap


def _load_alone(kept: Any) -> None:
    """Make a function's cache load what was compiled without all that Numba could compile.

    Before it looks for a kept function, Numba imports what it knows of Python, NumPy and SciPy and
    makes a template of each: 0.8 s, for a function whose machine code is there. That needs only the
    symbols of Numba's allocator. Where nothing was kept, the compiler imports all the same.

    Args:
        kept: The ``_cache`` of a function that Numba compiles.

    Raises:
        AttributeError: If this Numba keeps functions in another way.
    """
    load, look, guard = (
        kept.load_overload,
        kept._load_overload,
        kept._guard_against_spurious_io_errors,
    )

    def load_overload(signature: Any, target: Any) -> Any:
        found = None  # then it is compiled
        try:
            rtsys.initialize(target)
            with guard():
                found = look(signature, target)
        except Exception:  # noqa: BLE001 - Numba's own way says what is wrong
            found = load(signature, target)
        return found

    kept.load_overload = load_overload


@cache
def _stamp(own: str) -> tuple[tuple[str, float, int], ...]:
    """Date and size of every file that a kernel of a file may be made of."""
    files = sorted({Path(own).absolute(), *Path(__file__).parent.glob("*.py")})
    stats = [(file.name, file.stat()) for file in files]
    return tuple((name, stat.st_mtime, stat.st_size) for name, stat in stats)
