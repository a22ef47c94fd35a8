"""Updates: the numbers are the analysis's, and each receipt gives the same without mpdiag."""

from __future__ import annotations

import pytest
from receipt_checks import same_numbers

from mpdiag.reports.views import updates


def test_updates_and_their_receipts(analysis):
    records, run = analysis.run.records, str(analysis.run.folder)
    table = updates.swallowed(run, records)
    same_numbers(table, needed=["parameter", "changed", "fp16_share", "beyond_2048"])
    share = table.frame["swallowed_fp16"].sum() / table.frame["changed"].sum()
    assert share == pytest.approx(analysis.plan.master_weights.swallowed_fraction)
    worst = str(table.frame["parameter"].iloc[0])
    for parameter in (None, worst):
        same_numbers(updates.ratios(run, records, parameter), needed=["exponent", "count"])
        over_time = updates.swallowed_over_time(run, records, parameter)
        same_numbers(over_time, needed=["step", "changed", "fp16_share", "bf16_share"])
    ratios = updates.ratio_frame(records)
    beyond = ratios.loc[ratios["exponent"] >= 11, "count"].sum()
    expected = (table.frame["beyond_2048"] * table.frame["changed"]).sum()
    assert beyond == pytest.approx(expected)
