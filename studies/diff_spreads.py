"""How far rounding moves a tensor beside its size: in a first step, and in later ones.

    python studies/diff_spreads.py [MODEL …]

The models of ``diff_faults.py`` train with a twin in each traced step. A recording takes the spreads of
later steps from the first one's, as shares of the tensors' sizes; this prints how many times a later
step's own spread that is, as quantiles over the tensors.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
from diff_faults import MODELS, data

import mpdiag
from mpdiag.recording.trace import TraceWatch

STEPS = (0, 1, 10, 60)
QUANTILES = (0.0, 0.01, 0.1, 0.5, 0.9, 0.99, 1.0)


def shares(name: str, folder: Path) -> dict[int, dict[tuple[object, ...], float]]:
    """Spreads beside sizes of a training, by step and by tensor; those that are 0 are left out."""
    torch.manual_seed(0)
    model = MODELS[name](False)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    with mpdiag.record(model, optimizer, folder, trace=STEPS):
        for step in range(STEPS[-1] + 1):
            x, y = data(name, step, 0)
            loss = torch.nn.functional.cross_entropy(model(x).flatten(0, -2), y.flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    found: dict[int, dict[tuple[object, ...], float]] = {step: {} for step in STEPS}
    for row in mpdiag.open_run(folder).trace():
        size = math.sqrt(np.mean(row.values**2)) if row.values.size else 0.0
        share = (row.spread or 0.0) / size if size else 0.0
        if share:
            found[row.step][row.kind, row.module, row.name, row.phase, row.call] = share
    return found


def main() -> None:
    """Train and print."""
    torch.set_num_threads(1)
    TraceWatch.wants_twin = TraceWatch.wants  # type: ignore[method-assign]
    for name in sys.argv[1:] or MODELS:
        with TemporaryDirectory() as place:
            found = shares(name, Path(place) / "run")
        for step in STEPS[1:]:
            both = found[0].keys() & found[step].keys()
            ratios = np.quantile([found[0][k] / found[step][k] for k in both], QUANTILES)
            print(f"{name:4} step {step:3}, {len(both):3} tensors:", *(f"{r:.2f}" for r in ratios))


if __name__ == "__main__":
    main()
