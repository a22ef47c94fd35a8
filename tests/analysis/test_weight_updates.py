"""Whether FP32 masters are needed: by how far weights go, not by how many updates are rounded away."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from row_buffer import UpdateCounts, table_of
from torch import nn

import mpdiag
from mpdiag.analysis.run_statistics import RunStatistics
from mpdiag.analysis.weight_updates import NEEDED, analyze_weight_updates
from mpdiag.numerics.formats import FP16
from mpdiag.runs.records import Records

STEPS = 20


def masters_of(updates, size=1000):
    """From (step, name) to an update of all weights by ±Δ, and how many of them FP16 swallows."""
    rows = []
    for step, name, change, swallowed in updates:
        update = UpdateCounts(size, swallowed, swallowed, 0, 0, 10, (size,))
        values = np.asarray(change) * np.ones(size)
        rows.append((step, "update", name, values, {"update": update}))
    statistics = RunStatistics.of(Records.from_table(table_of(rows)))
    return analyze_weight_updates(statistics, FP16)


def test_weights_that_stand_still_need_masters():
    masters = masters_of([(step, "w", 1e-5, 1000) for step in range(STEPS)])
    assert masters.needed
    assert masters.evidence["path_stalled"] == pytest.approx(1.0)


def test_many_tiny_updates_beside_few_that_count_need_none():
    spread = np.where(np.arange(1000) < 600, 1e-7, 1e-3)
    masters = masters_of([(step, "w", spread, 600) for step in range(STEPS)])
    assert masters.swallowed_fraction == 0.6
    assert not masters.needed


@pytest.mark.parametrize(("size", "needed"), [(1e-9, True), (1e-3, False)])
def test_weights_that_vanish_need_masters(size, needed, tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1))
    with torch.no_grad():
        model[0].weight.mul_(size)
    optimizer = torch.optim.SGD(
        [
            {"params": model[0].parameters(), "lr": 0.01 * size**2},
            {"params": model[1].parameters()},
        ],
        lr=0.05,
    )
    with mpdiag.record(model, optimizer, tmp_path / "run"):
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.ones(4, 8) / size).square().mean().backward()
            optimizer.step()
    masters = mpdiag.analyze(tmp_path / "run").plan.master_weights
    assert (masters.evidence["weights_vanished"] > 0.9) == needed
    if needed:
        assert masters.needed
        assert masters.worst_parameter == "0.weight"
        assert masters.reason.startswith("FP16 makes 100 % of the sum of 0.weight 0; ")


def test_a_schedule_that_ends_in_nothing_needs_none():
    rates = [1e-3 * (1 - step / STEPS) ** 2 for step in range(STEPS)]
    masters = masters_of([(s, "w", r, 1000 if r < 5e-5 else 0) for s, r in enumerate(rates)])
    assert masters.swallowed_fraction > 0.1
    assert not masters.needed


def test_weights_that_stop_halfway_need_masters():
    rates = [1e-3 if step < 8 else 4e-4 for step in range(STEPS)]
    masters = masters_of([(s, "w", r, 1000 if r < 5e-4 else 0) for s, r in enumerate(rates)])
    assert masters.needed


def test_one_small_parameter_that_stands_still_needs_none():
    gains = [(step, "norm.weight", 1e-5, 1000) for step in range(STEPS)]
    masters = masters_of([*gains, *((step, "w", 1e-3, 0) for step in range(STEPS))])
    assert masters.evidence["path_stalled"] < NEEDED
    assert not masters.needed


def test_recorded_steps_stand_for_those_up_to_the_next():
    dense = [(step, "w", 1e-3, 0) for step in range(5)]
    sparse = [(step, "w", 2e-4, 1000) for step in range(5, 200, 20)]
    masters = masters_of([*dense, *sparse])
    assert masters.evidence["path_swallowed"] == pytest.approx(0.04 / 0.045, rel=0.1)
    assert masters.needed


def test_the_share_that_decides_and_its_limit_stand_first():
    """The short screen cuts what comes last."""
    reason = masters_of([(step, "w", 1e-5, 1000) for step in range(STEPS)]).reason
    assert reason.startswith(
        "100 % of the way that weights go lies where FP16 weights would stand still (FP32 masters are "
        "needed from 10 % on)"
    )
