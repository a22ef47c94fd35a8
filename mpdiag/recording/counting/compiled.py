"""Functions compiled by Numba, and kept on the disk for the next process."""

from __future__ import annotations

from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import llvmlite.binding as llvm
import numba
from numba import njit
from numba.core.runtime import _nrt_python as allocator
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
    load, guard = kept.load_overload, kept._guard_against_spurious_io_errors
    look = _look_lightly if numba.__version__.startswith(_KNOWN) else _look

    def load_overload(signature: Any, target: Any) -> Any:
        found = None  # then it is compiled
        try:
            with guard():
                found = look(kept, signature, target)
        except Exception:  # noqa: BLE001 - Numba's own way says what is wrong
            found = load(signature, target)
        return found

    kept.load_overload = load_overload


_KNOWN = "0.68."
"""The release whose machine code is known to hold all it needs; of another one nothing is left out."""


def _look(kept: Any, signature: Any, target: Any) -> Any:
    """A kept function, in Numba's own way."""
    rtsys.initialize(target)
    return kept._load_overload(signature, target)


def _look_lightly(kept: Any, signature: Any, target: Any) -> Any:
    """A kept function from its machine code alone, in half of the time.

    The bitcode beside it is for linking into what is compiled later, and is read when something is.
    """
    _name_allocator()
    payload = kept._cache_file.load(kept._index_key(signature, target.codegen()))
    if payload is None:
        return None
    (name, kind, (code, bitcode)), described, *rest = payload
    # What the bitcode would tell of the machine code: which functions it has.
    functions = (
        described.llvm_func_name,
        described.llvm_cpython_wrapper_name,
        described.llvm_cfunc_wrapper_name,
    )
    target.codegen()._engine._defined_symbols.update(functions)
    found = kept._impl.rebuild(target, ((name, kind, (code, _nothing())), described, *rest))
    _link_later(found.library, bitcode)
    return found


@cache
def _nothing() -> bytes:
    """The bitcode of an empty module."""
    found: bytes = llvm.parse_assembly("").as_bitcode()
    return found


@cache
def _name_allocator() -> None:
    """Tell LLVM where the functions of Numba's allocator are.

    ``rtsys.initialize`` does so and compiles some more for what is to be compiled; machine code that is
    kept holds its own copy of these.
    """
    for name, address in allocator.c_helpers.items():
        llvm.add_symbol(name if name.startswith("_") else f"NRT_{name}", address)


def _link_later(library: Any, bitcode: bytes) -> None:
    """Read a library's bitcode when something is linked with it."""
    own = library._get_module_for_linking

    def read() -> Any:
        library._shared_module = llvm.parse_bitcode(bitcode)
        library._codegen._engine._load_defined_symbols(library._shared_module)
        del library._get_module_for_linking
        return own()

    library._get_module_for_linking = read


@cache
def _stamp(own: str) -> tuple[tuple[str, float, int], ...]:
    """Date and size of every file that a kernel of a file may be made of."""
    files = sorted({Path(own).absolute(), *Path(__file__).parent.glob("*.py")})
    stats = [(file.name, file.stat()) for file in files]
    return tuple((name, stat.st_mtime, stat.st_size) for name, stat in stats)
