"""What the arguments of a demangled name rule out: two arrays are no two factors and a product."""

import re

_NUMBER = (
    r"(?:const )?(?:(?:unsigned |signed )?(?:char|short|int|long long|long)|unsigned|bool|float|double"
    r"|size_t|u?int\d+_t|__half2?|half2?|(?:__nv_|__hip_)?bfloat16|(?:float|double|int|uint|char|uchar)[234]"
    r"|_Float16|c10::(?:Half|BFloat16))(?: const)?"
)
_SCALAR = re.compile(rf"{_NUMBER}&?")
_ARRAY = re.compile(rf"{_NUMBER} ?\*(?: ?(?:const|__restrict__))*")
FACTORS_AND_PRODUCT = 3
"""Arrays that a product of two matrices takes: its factors and its result."""


def takes_no_two_matrices(arguments: str) -> bool:
    """Whether all arguments are numbers and at most two arrays of numbers.

    One that could hold further arrays (a structure, a pointer to pointers, a type of the program)
    rules nothing out, nor does a list that was cut off.

    Args:
        arguments: From the opening parenthesis on.
    """
    inside, closed, rest = arguments[1:].rpartition(")")
    if not closed or rest.strip():
        return False
    arrays = 0
    for argument in inside.split(","):
        text = argument.strip()
        if _ARRAY.fullmatch(text):
            arrays += 1
        elif not _SCALAR.fullmatch(text):
            return False
    return 0 < arrays < FACTORS_AND_PRODUCT
