"""Rows of operands: written, read, added, and refused where no recorder writes them."""

import numpy as np
import pyarrow as pa
import pytest
import torch
from block_rows import operand_row

from mpdiag.runs.block_operands import BlockOperand, decode, encode, merged, schema


def row(step=0, **fields):
    generator = torch.Generator().manual_seed(step)
    return operand_row(torch.randn(40, 64, generator=generator), step=step, **fields)


def facts(one: BlockOperand):
    depths = one.depths
    counted = depths.counts.tolist(), depths.zeros, depths.nonfinite, depths.tiny
    return {**vars(one), "depths": counted}


def test_rows_come_back_as_they_were_written():
    rows = [row(), row(3, expert=2, module=None, parameter="")]
    table = encode(rows)
    assert table.schema.equals(schema())
    assert [facts(one) for one in decode(table)] == [facts(one) for one in rows]


def test_steps_and_ranks_of_an_operand_are_added():
    rows = [row(), row(4), row(4, rank=1), row(4, gemm="wgrad")]
    whole, other = merged(rows)
    assert (whole.steps, whole.lines, whole.flops) == ((0, 4), 120, 3 * rows[0].flops)
    assert whole.depths.values == whole.elements == 3 * 40 * 64
    assert np.array_equal(whole.depths.counts, sum(one.depths.counts for one in rows[:3]))
    assert sum(whole.maxima) == 3 * 80
    assert whole.absmax == max(one.absmax for one in rows[:3])
    tiles = [one.errors[0].tiles for one in rows[:3]]
    assert whole.errors[0].tiles == tiles[0] + tiles[1] + tiles[2]
    assert other.gemm == "wgrad"


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("gemm", "gram"),
        ("product", None),
        ("lines", -1),
        ("absmax", float("inf")),
        ("depths", [1] * 9),
        ("depths", [-1] * 8),
        ("depths", None),
        ("maxima", None),
    ],
)
def test_what_no_recorder_writes_is_refused(column, value):
    table = encode([row()])
    at = table.schema.get_field_index(column)
    kind = table.schema.field(at).type
    text = pa.types.is_dictionary(kind)
    array = pa.array([value], kind.value_type if text else kind)
    table = table.set_column(at, column, array.dictionary_encode() if text else array)
    with pytest.raises(ValueError, match="never writes there"):
        decode(table)
