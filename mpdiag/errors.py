"""What can go wrong in an expected way, and the exit code of each.

::

    MpdiagError
    ├── UsageError          exit 2   the call itself makes no sense
    │   ├── RunExists                a recording would replace an earlier one
    │   └── StateMismatch            a checkpoint belongs to another plan or level
    ├── TrainingDiverged    exit 1   too many steps in a row were not finite
    └── InputError          exit 3   an input is missing, damaged or from the future
        ├── RunNotFound
        ├── DamagedRun
        ├── DamagedPlan
        │   └── PlanNotFound
        ├── DamagedCapsule
        ├── DamagedTrace
        ├── DamagedSearch
        ├── LayerNotFound
        └── NewerSchema

Each carries one sentence for a person: what is wrong and what to do about it.
"""

from enum import IntEnum

_LONGEST, _HEAD = 1_000, 700
"""Characters of a sentence, and of its beginning where it is cut."""


class ExitCode(IntEnum):
    """Exit codes of the ``mpdiag`` command; frozen, scripts rely on them."""

    OK = 0
    FINDINGS = 1
    USAGE = 2
    INPUT = 3


class MpdiagError(Exception):
    """Base of all expected failures."""

    exit_code = ExitCode.USAGE

    def __str__(self) -> str:
        """The sentence on one line; what it quotes of a file may be long, and is cut in the middle."""
        text = " ".join(super().__str__().splitlines())
        return text if len(text) <= _LONGEST else f"{text[:_HEAD]} … {text[_HEAD - _LONGEST :]}"


class UsageError(MpdiagError):
    """The call itself makes no sense."""

    exit_code = ExitCode.USAGE


class RunExists(UsageError):
    """A recording would replace an earlier one."""


class StateMismatch(UsageError):
    """A trainer's state belongs to another plan or level."""


class TrainingDiverged(MpdiagError):
    """Training cannot go on: too many steps in a row were not finite, or a weight left the format."""

    exit_code = ExitCode.FINDINGS


class InputError(MpdiagError):
    """An input is missing, damaged or of a newer schema."""

    exit_code = ExitCode.INPUT


class RunNotFound(InputError):
    """There is no run folder at the path given."""


class DamagedRun(InputError):
    """A run folder holds something that cannot be read, or nothing at all."""


class DamagedPlan(InputError):
    """A plan cannot be read."""


class PlanNotFound(DamagedPlan):
    """There is no plan at the path given."""


class DamagedCapsule(InputError):
    """A skip capsule cannot be read, or belongs to another model."""


class DamagedTrace(InputError):
    """A GPU trace cannot be read, or is none."""


class DamagedSearch(InputError):
    """A search's state file cannot be read."""


class LayerNotFound(InputError):
    """The run has no such layer."""


class NewerSchema(InputError):
    """The input was written by a newer mpdiag."""
