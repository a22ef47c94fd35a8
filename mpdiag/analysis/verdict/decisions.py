"""Which plan a training followed: a fingerprint of what a plan decides, without its reasons."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mpdiag.plan import PrecisionPlan


def decisions_of(plan: PrecisionPlan) -> str:
    """A fingerprint of ``plan.decisions()``; 16 hexadecimal digits.

    Two plans that differ only in reasons, evidence, limits and advice have the same.
    """
    text = json.dumps(plan.decisions(), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
