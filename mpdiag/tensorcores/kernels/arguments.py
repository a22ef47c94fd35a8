"""What the arguments of a demangled name rule out.

Two arrays are no two factors and a product. And a kernel of a program's own that multiplies arrays of
``float`` runs on Tensor Cores only if it rounds them to a shorter type, which its name then says.
"""

import re

_NUMBER = (
    r"(?:const )?(?:(?:unsigned |signed )?(?:char|short|int|long long|long)|unsigned|bool|float|double"
    r"|size_t|u?int\d+_t|__half2?|half2?|(?:__nv_|__hip_)?bfloat16|(?:float|double|int|uint|char|uchar)[234]"
    r"|_Float16|c10::(?:Half|BFloat16))(?: const)?"
)
_SCALAR = re.compile(rf"{_NUMBER}&?")
_ARRAY = re.compile(rf"{_NUMBER} ?\*(?: ?(?:const|__restrict__))*")
_INDICES = re.compile(
    r"(?:const )?(?:unsigned )?(?:int|long)(?: const)? ?\*(?: ?(?:const|__restrict__))*"
)
_EXACT = re.compile(
    r"(?:const )?(?P<type>float|double)(?: const)? ?\*(?: ?(?:const|__restrict__))*"
)
_SHORTER = re.compile(
    r"tf32|tensor|mma|mfma|xdl|half|[bfh]p?f?16|hgemm|(?<![a-z])tc(?![a-z])", re.IGNORECASE
)
FACTORS_AND_PRODUCT = 3
"""Arrays that a product of two matrices takes: its factors and its result."""


def takes_no_two_matrices(arguments: str) -> bool:
    """Whether all arguments are numbers and at most two arrays of numbers.

    One that could hold further arrays (a structure, a pointer to pointers, a type of the program)
    rules nothing out, nor does a list that was cut off.

    Args:
        arguments: From the opening parenthesis on.
    """
    arrays = _arrays(arguments)
    return arrays is not None and 0 < len(arrays) < FACTORS_AND_PRODUCT


def multiplies_only(name: str, arguments: str) -> str:
    """``fp32`` or ``fp64`` if a product of these arrays is on CUDA cores, else "".

    Args:
        name: The whole name; it says nothing of a shorter type or of Tensor Cores.
        arguments: From the opening parenthesis on: numbers, and arrays of ``float`` or ``double``,
            three at least, and of indices.
    """
    arrays = _arrays(arguments)
    if arrays is None or _SHORTER.search(name):
        return ""
    exact = [_EXACT.fullmatch(array) for array in arrays if not _INDICES.fullmatch(array)]
    types = {found["type"] if found else "" for found in exact}
    if len(exact) < FACTORS_AND_PRODUCT or len(types) != 1:
        return ""
    return {"float": "fp32", "double": "fp64"}.get(types.pop(), "")


def _arrays(arguments: str) -> list[str] | None:
    """The arguments that are arrays, or None if others could be as well."""
    inside, closed, rest = arguments[1:].rpartition(")")
    if not closed or rest.strip():
        return None
    arrays = []
    for argument in inside.split(","):
        text = argument.strip()
        if _ARRAY.fullmatch(text):
            arrays.append(text)
        elif not _SCALAR.fullmatch(text):
            return None
    return arrays
