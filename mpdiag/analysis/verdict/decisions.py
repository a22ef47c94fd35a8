"""Which plan a training followed: a fingerprint of what a plan decides, without its reasons."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mpdiag.plan import PrecisionPlan


_SCALE = (
    *("method", "init_scale", "growth_factor", "backoff_factor", "growth_interval", "hysteresis"),
)


def decisions_of(plan: PrecisionPlan) -> str:
    """A fingerprint of what a training by the plan would do; 16 hexadecimal digits.

    Reasons, evidence, admissible limits and advice that no trainer follows are left out: two plans
    that differ in those alone train alike.
    """
    scale = plan.loss_scale
    decided = {
        "target": plan.target,
        "level": plan.level,
        "keep_batch_norm_fp32": plan.keep_batch_norm_fp32,
        "scale": {name: getattr(scale, name) for name in _SCALE},
        "settings": {name: repr(value) for name, value in scale.settings.items()},
        "fp32": sorted(
            [choice.op, choice.module, repr(choice.evidence.get("line"))]
            for choice in (*plan.fp32_operations, *plan.fp32_modules)
        ),
    }
    text = json.dumps(decided, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
