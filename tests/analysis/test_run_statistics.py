"""Sums over rows in memory, beside a second way that spreads every row out."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from mpdiag.analysis.run_statistics import PARTS_OF_TRAINING, PATH_FIGURES, sum_paths
from mpdiag.installation.bundled import sample_runs
from mpdiag.numerics.formats import HALVES
from mpdiag.runs.records import Records
from mpdiag.runs.run import open_run


@pytest.fixture(scope="module")
def records() -> Records:
    """A sample run's rows; some updates are sampled, some are empty."""
    found = open_run(sample_runs() / "language_model").records
    sampled = np.where(found.of_kind("update") & (found.step % 3 == 1), 7 * found.numel, 0)
    return replace(found, sampled_from=sampled)


def _spread_out(records: Records, rows: np.ndarray, steps: np.ndarray) -> np.ndarray:
    """What ``sum_paths`` adds, each row as a histogram of all bins."""
    sums = np.zeros((PATH_FIGURES, PARTS_OF_TRAINING, len(records.words["name"])))
    gaps = np.diff(steps, append=2 * steps[-1] - steps[-2])
    updates = records.select(rows)
    h = updates.histograms()
    before = np.cumsum(h.counts, axis=1) - h.counts
    figures = [h.sums.sum(axis=1)]
    for fmt in HALVES:
        many = updates.fact("swallowed", fmt.name)[:, None]
        taken = np.clip(many - before, 0, h.counts)
        figures.append((h.sums * taken / np.maximum(1, h.counts)).sum(axis=1))
    for i, (step, name) in enumerate(zip(updates.step, updates.name, strict=True)):
        part = min(PARTS_OF_TRAINING - 1, step * PARTS_OF_TRAINING // (steps[-1] + gaps[-1]))
        weight = gaps[np.searchsorted(steps, step)] * (
            updates.sampled_from[i] / max(1, updates.numel[i]) if updates.sampled_from[i] else 1.0
        )
        sums[:, part, name] += [weight * figure[i] for figure in figures]
    return sums


@pytest.mark.parametrize("scale", [1.0, 2.0**110])
def test_paths_are_to_the_bit_those_of_rows_that_are_spread_out(
    records: Records, scale: float
) -> None:
    # Without so large a loss scale many bins lie below the smallest one, and fall together.
    scaled = replace(records, scale=np.full(len(records), scale))
    rows, steps = np.flatnonzero(scaled.of_kind("update")), np.unique(scaled.step)
    sums = np.zeros((PATH_FIGURES, PARTS_OF_TRAINING, len(scaled.words["name"])))
    sum_paths(scaled, rows, steps, sums)
    np.testing.assert_array_equal(sums, _spread_out(scaled, rows, steps))
    assert sums.any(axis=(1, 2)).all()
