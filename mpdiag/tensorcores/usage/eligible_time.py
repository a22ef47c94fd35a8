"""Kernel time by whether its operation could use Tensor Cores, and did."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable

    from mpdiag.tensorcores.causes import JudgedOperation
    from mpdiag.tensorcores.work.traced_operation import OperationTime


@dataclass(frozen=True)
class Eligibility:
    """Kernel time by whether its operation could use Tensor Cores, and did.

    Attributes:
        total_us: Of all kernels.
        used_us, missed_us, unclear_us: Time of eligible operations that used them, that did not,
            and of which the trace does not say.
        maybe_us: Time of operations of which the trace does not say whether they are eligible.
        used, missed, unclear, maybe: The number of those operations.
    """

    total_us: float
    used_us: float
    missed_us: float
    unclear_us: float
    maybe_us: float
    used: int
    missed: int
    unclear: int
    maybe: int

    @property
    def eligible_us(self) -> float:
        """Time of operations known to be eligible."""
        return self.used_us + self.missed_us + self.unclear_us

    @property
    def used_range(self) -> tuple[float, float] | None:
        """The least and the most of the eligible time that used them; None where none is eligible.

        The least counts everything unknown as not used, the most as used.
        """
        open_us = self.unclear_us + self.maybe_us
        whole = self.used_us + self.missed_us
        if not whole + open_us:
            return None
        return self.used_us / (whole + open_us), (self.used_us + open_us) / (whole + open_us)

    def to_json(self) -> dict[str, Any]:
        """The ``eligibility`` of ``mpdiag profile --json``; fractions are of all kernels' time."""
        whole = self.total_us or 1.0
        limits = self.used_range
        return {
            "eligible_fraction": self.eligible_us / whole,
            "used_fraction": self.used_us / whole,
            "not_used_fraction": self.missed_us / whole,
            "use_unknown_fraction": self.unclear_us / whole,
            "eligibility_unknown_fraction": self.maybe_us / whole,
            "operations": {
                "used": self.used,
                "not_used": self.missed,
                "use_unknown": self.unclear,
                "eligibility_unknown": self.maybe,
            },
            "used_of_eligible_least": limits[0] if limits else None,
            "used_of_eligible_most": limits[1] if limits else None,
        }


def sum_eligibility(judged: Iterable[JudgedOperation], total_us: float) -> Eligibility:
    """Add operations up.

    Args:
        judged: With ``eligible`` and ``used``. Where an operation's calls ran on both kinds of
            cores, its time is shared out as its matrix kernels' time is.
        total_us: Time of all kernels.
    """
    times = dict.fromkeys(("used", "missed", "unclear", "maybe"), 0.0)
    counts = dict.fromkeys(times, 0)
    for j in judged:
        if j.eligible is False:
            continue
        name = "maybe" if j.eligible is None else _NAMES[j.used]
        counts[name] += 1
        for part, spent in _shared_out(j.operation, name).items():
            times[part] += spent
    return Eligibility(
        total_us,
        used_us=times["used"],
        missed_us=times["missed"],
        unclear_us=times["unclear"],
        maybe_us=times["maybe"],
        **counts,
    )


_NAMES = {True: "used", False: "missed", None: "unclear"}


def _shared_out(o: OperationTime, name: str) -> dict[str, float]:
    matrix = o.tensor_core_us + o.cuda_core_us + o.unknown_us
    proved = name == "used" and o.verdict != "tensor_core"  # by its rate
    if name == "maybe" or proved or not matrix:
        return {name: o.time_us}
    parts = {"used": o.tensor_core_us, "missed": o.cuda_core_us, "unclear": o.unknown_us}
    return {part: o.time_us * spent / matrix for part, spent in parts.items()}
