"""Text, and a measure of two classes; what most of these cases share is ``tuning_3``'s."""

from __future__ import annotations

import torch
from torch import Tensor

from cases.tuning_3.shared import digits, fit, shuffled, standardized

__all__ = ["area_under_curve", "digits", "fit", "manual", "shuffled", "standardized"]


def manual(length: int) -> tuple[Tensor, ...]:
    """Parts of the Python manual as codes from 0 to 95, (n, length + 1)."""
    from pydoc_data import topics

    text = "\n".join(topics.topics[name] for name in sorted(topics.topics))
    codes = torch.tensor([min(max(ord(c) - 31, 0), 95) for c in text[:120_000]])
    rows = codes[: len(codes) // (length + 1) * (length + 1)].reshape(-1, length + 1)
    return shuffled(rows)


def area_under_curve(score: Tensor, y: Tensor) -> float:
    """The probability that a positive example has a higher score than a negative one."""
    positive, negative = score[y > 0.5], score[y <= 0.5]
    over = positive[:, None] - negative
    return float((over > 0).float().mean() + 0.5 * (over == 0).float().mean())
