"""Torch's random state: saved before a step, so that the step can be repeated exactly."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch import Tensor


def capture_random() -> dict[str, Tensor]:
    """Torch's random state, uint8 by generator (``cpu``, ``cuda.0`` …); some kilobytes."""
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states |= {f"cuda.{i}": s for i, s in enumerate(torch.cuda.get_rng_state_all())}
    return states


@contextmanager
def random_as_before(states: Mapping[str, Tensor]) -> Iterator[None]:
    """Within, random numbers are drawn from a saved state; outside, the generators are as before.

    Args:
        states: As ``capture_random`` gave them; generators that are not here are left out.

    Raises:
        RuntimeError: If one is not the state of a generator.
    """
    with torch.random.fork_rng():
        if "cpu" in states:
            torch.set_rng_state(states["cpu"])
        for i in range(torch.cuda.device_count()):
            if f"cuda.{i}" in states:
                torch.cuda.set_rng_state(states[f"cuda.{i}"], i)
        yield
