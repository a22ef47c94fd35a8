"""Which phases of a periodic training a set of recorded steps never met.

A training may do different things in turn: two tasks by odd and even steps, a penalty in every
fourth, a large batch in every seventh. A recording shows a period only if it holds steps of each of
its phases. Steps that are multiples of N miss phases of all periods that share a factor with N.
"""

from collections.abc import Iterable

LARGEST_PERIOD = 16


def covers_periods(steps: Iterable[int], largest: int = LARGEST_PERIOD) -> bool:
    """Whether some steps hold every phase of every period of up to ``largest`` steps."""
    numbers = tuple(steps)
    # A long period is the likeliest to be missed, so it is asked first.
    return all(len({n % p for n in numbers}) == p for p in range(largest, 1, -1))


def sparse_part(recorded: Iterable[int]) -> tuple[int, ...]:
    """Recorded steps after the consecutive ones of the beginning, in order; all, if all are such.

    The beginning of a training says little about what it does later, so a phase that was recorded
    only there counts as unseen.
    """
    numbers = tuple(sorted(set(recorded)))
    dense = 1
    while dense < len(numbers) and numbers[dense] == numbers[dense - 1] + 1:
        dense += 1
    return numbers if dense in (1, len(numbers)) else numbers[dense:]


def unseen_periods(recorded: Iterable[int], steps: int) -> dict[int, tuple[int, ...]]:
    """Phases that a recording never met.

    Args:
        recorded: Numbers of the recorded steps, from 0.
        steps: How many steps the training took.

    Returns:
        By period, in steps, the remainders of which no step was recorded. Of steps that were
        recorded one after the other at the beginning, only the later, sparse ones count. A period
        that the training did not run through twice from there on is left out.
    """
    numbers = sparse_part(recorded)
    if not numbers:
        return {}
    dense = numbers[-1] - numbers[0] + 1 == len(numbers)
    length = (numbers[-1] + 1 if dense else steps) - numbers[0]
    unseen = {}
    for period in range(2, LARGEST_PERIOD + 1):
        missed = set(range(period)) - {n % period for n in numbers}
        if missed and 2 * period <= length:
            unseen[period] = tuple(sorted(missed))
    return unseen
