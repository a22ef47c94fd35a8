"""``sensitivity.json``: the error each operation causes when it alone runs in a narrow format.

::

    {"schema_version": 1, "format": "fp16", "scale": 64.0, "operations": [
      {"module": "head", "op": "softmax", "calls": 1, "output_error": 0.0003, "loss_error": 0.0001,
       "gradient_error": 0.021, "gradient_cosine": 0.9998, "worst_gradient": "head.weight",
       "estimate": 0.004, "finite": true}]}

An error is relative, narrow against FP32. One that is infinite or not known is null, and ``finite``
is false where the loss or a gradient was not finite.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from mpdiag.errors import DamagedRun, NewerSchema
from mpdiag.files.atomic import write_json
from mpdiag.files.documents import converted, read_document

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mpdiag.files.paths import AnyPath

FILE = "sensitivity.json"
SCHEMA_VERSION = 1


@dataclass(frozen=True)
class OperationSensitivity:
    """One operation of one module, all its calls of a step together in the format.

    Attributes:
        module, op: The module, and the operation in it.
        calls: How often it ran in the step.
        output_error, loss_error, gradient_error: Relative error of the model's output, the loss and
            all weight gradients as one vector; None where infinite or not known.
        gradient_cosine: Between those gradients and FP32's.
        worst_gradient: The weight whose gradient has the largest error.
        estimate: What one backward pass predicted (``sensitivity/estimated.py``), a share of the
            loss; None where a value leaves the range.
        finite: Whether loss and gradients were finite.
    """

    module: str
    op: str
    calls: int
    output_error: float | None
    loss_error: float | None
    gradient_error: float | None
    gradient_cosine: float | None
    worst_gradient: str | None
    estimate: float | None
    finite: bool


@dataclass(frozen=True)
class Sensitivities:
    """All operations of a step, in the order of their first calls.

    Attributes:
        format: The format they ran in, one at a time.
        scale: The loss scale of their gradients.
        operations: One entry for each.
    """

    format: str
    scale: float
    operations: tuple[OperationSensitivity, ...]

    def save(self, run: AnyPath) -> None:
        """Write ``sensitivity.json`` into a run folder."""
        rows = [asdict(row) for row in self.operations]
        head = {"schema_version": SCHEMA_VERSION, "format": self.format, "scale": self.scale}
        run.mkdir(parents=True, exist_ok=True)
        write_json(run / FILE, {**head, "operations": rows})


@dataclass(frozen=True)
class _SensitivityDocument:
    schema_version: int
    format: str
    scale: float
    operations: tuple[OperationSensitivity, ...]


def read_sensitivities(run: AnyPath) -> Sensitivities | None:
    """Read a run's ``sensitivity.json``; None if it has none.

    Raises:
        DamagedRun: If it cannot be read.
        NewerSchema: If a newer version wrote it.
    """
    path = run / FILE
    try:
        document = read_document(path)
        version = document["schema_version"]
        if type(version) is int and version > SCHEMA_VERSION:
            message = f"{path} was written by a newer mpdiag (schema {version}): upgrade to read it"
            raise NewerSchema(message)
        json.dumps(document, allow_nan=False)  # 1e999 is JSON, and is infinite once read
        read = converted(document, _SensitivityDocument)
        return Sensitivities(read.format, read.scale, read.operations)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, RecursionError, OverflowError) as error:
        message = f"{path} is damaged ({str(error).splitlines()[0]}): measure again or delete it"
        raise DamagedRun(message) from error


def by_weight(rows: Sequence[OperationSensitivity]) -> list[OperationSensitivity]:
    """Most sensitive first: what was not finite, then by the error of the gradients."""
    return sorted(rows, key=lambda row: (row.finite, -_known(row.gradient_error)))


def _known(value: float | None) -> float:
    return math.inf if value is None else value
