"""Updates: the numbers are the analysis's, and each receipt gives the same without mpdiag."""

from __future__ import annotations

import pytest
from receipt_checks import same_numbers

from mpdiag.display.wording import percent
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


def test_captions_say_what_is_drawn(analysis):
    records = analysis.run.records
    ratios = updates.ratios("RUN", records, None)
    beyond = [ratios.frame.loc[ratios.frame["exponent"] >= k, "count"].sum() for k in (11, 12)]
    for count in beyond:
        assert percent(count / ratios.frame["count"].sum()) in ratios.caption
    table = updates.swallowed("RUN", records)
    if table.frame["fp16_share"].max() > 0:
        assert percent(table.frame["fp16_share"].max()) in table.caption
    course = updates.swallowed_over_time("RUN", records, None)
    top = course.frame.loc[course.frame["fp16_share"].idxmax()]
    if top["fp16_share"] > 0:
        said = f"{percent(top['fp16_share'])}, at step {int(top['step']):,}"
        assert said in course.caption
    none = updates.ratios("RUN", records, "no such parameter")
    assert none.caption.startswith("Over all recorded steps. ")
