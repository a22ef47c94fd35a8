"""Operations: what stays in FP32, each with its line, and the range of each output."""

from __future__ import annotations

from dataclasses import replace

from mpdiag.analysis.operations.rules import OperationFinding
from mpdiag.reports.views import operations


def test_output_ranges(analysis):
    picture = operations.output_ranges("RUN", analysis.layers.of_kind("activation"))
    over = int((picture.frame["overflow"] > 0).sum())
    assert (f"{over} of" in picture.caption) == (over > 0)


def test_operations_with_their_line(analysis):
    found = OperationFinding(
        code="overflow",
        op="exp",
        aten="aten::exp",
        module="",
        where="model.py:12",
        text="x.exp()",
        reason="it reaches 1e5",
        fix="keep it in FP32",
        without="infinite",
    )
    (row,) = operations.proven_frame(replace(analysis, operations=(found,))).to_dict("records")
    assert (row["operation"], row["module"], row["line"]) == ("exp", "(the model)", "model.py:12")
    assert operations.proven_frame(replace(analysis, operations=())).empty
    table = operations.operations_frame(analysis)
    assert len(table) == len(analysis.plan.fp32_operations)
