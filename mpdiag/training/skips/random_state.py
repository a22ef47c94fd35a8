"""Random state: torch's, before a step that may be repeated; everybody's, for checkpoints."""

from __future__ import annotations

import random
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping


def capture_random() -> dict[str, Tensor]:
    """Torch's random state, uint8 by generator (``cpu``, ``cuda.0`` …); some kilobytes."""
    states = {"cpu": torch.default_generator.get_state()}
    if torch.cuda.is_initialized():
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


def dump_random() -> dict[str, Any]:
    """The state of torch's, NumPy's and Python's global generators, as plain values and tensors."""
    version, words, gauss = random.getstate()
    states: dict[str, Any] = {
        "cpu": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        "python": {"version": version, "words": torch.tensor(words), "gauss": gauss},
    }
    # The global generator is what scripts draw from.
    numpy: Any = np.random.get_state(legacy=False)  # noqa: NPY002
    if numpy["bit_generator"] == "MT19937":
        states["numpy"] = {
            "key": torch.tensor(numpy["state"]["key"].astype(np.int64)),
            "pos": int(numpy["state"]["pos"]),
            "has_gauss": int(numpy["has_gauss"]),
            "gauss": float(numpy["gauss"]),
        }
    return states


def load_random(states: Mapping[str, Any]) -> None:
    """Restore what ``dump_random`` gave; a generator that is not there is left alone."""
    torch.set_rng_state(states["cpu"].cpu())
    if states["cuda"] and torch.cuda.is_available():
        torch.cuda.set_rng_state_all([s.cpu() for s in states["cuda"]])
    if "python" in states:
        saved = states["python"]
        random.setstate((saved["version"], tuple(saved["words"].tolist()), saved["gauss"]))
    if "numpy" in states:
        saved = states["numpy"]
        key = np.array(saved["key"].tolist(), dtype=np.uint32)
        state = ("MT19937", key, saved["pos"], saved["has_gauss"], saved["gauss"])
        np.random.set_state(state)  # noqa: NPY002
