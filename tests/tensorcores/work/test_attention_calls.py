"""Attention's work: equal to PyTorch's own formulas, and a range where the arguments leave it open."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.flop_counter import sdpa_backward_flop_count, sdpa_flop_count

from mpdiag.tensorcores.work.attention_calls import AttentionArguments
from mpdiag.tensorcores.work.traced_operation import matrix_work, readers

small = st.integers(1, 9)


def call(name, shapes, **concrete):
    """The work of a call: shapes by position, other arguments by position, too."""
    last = max([len(shapes) - 1, *(int(p[1:]) for p in concrete)])
    dims = [*map(list, shapes), *([[]] * (last + 1 - len(shapes)))]
    words = [str(concrete.get(f"_{i}", "")) for i in range(last + 1)]
    types = ["c10::BFloat16" if d else "" for d in dims]
    return matrix_work(name, dims, types, [], words)


def brute(queries, keys, sees):
    return sum(sees(i, j) for i in range(queries) for j in range(keys))


@given(small, small, small, small, small, small)
def test_dense_attention_is_pytorchs_own_count(batch, heads, queries, keys, width, value):
    q, k, v = (
        (batch, heads, queries, width),
        (batch, heads, keys, width),
        (batch, heads, keys, value),
    )
    forward = call("aten::_scaled_dot_product_flash_attention", [q, k, v], _4=False)
    assert (forward.flops, forward.fewest) == (sdpa_flop_count(q, k, v), None)
    grad = (batch, heads, queries, value)
    for name, causal in (
        ("flash", 11),
        ("efficient", 11),
        ("cudnn", 14),
        ("fused_attention_overrideable", 13),
    ):
        full = name if "fused" in name else f"{name}_attention"
        backward = call(
            f"aten::_scaled_dot_product_{full}_backward",
            [grad, q, k, v],
            **{f"_{causal}": False},
        )
        assert backward.flops == sdpa_backward_flop_count(grad, q, k, v)


@given(small, small, small)
def test_a_causal_mask_from_half_to_whole(queries, keys, width):
    shapes = [(2, 3, queries, width), (2, 3, keys, width), (2, 3, keys, width)]
    name = "aten::_scaled_dot_product_flash_attention"
    whole = call(name, shapes, _4=False)
    masked = call(name, shapes, _4=True)
    unsaid = call(name, shapes)
    pairs = brute(queries, keys, lambda i, j: j <= i)
    assert masked.flops * queries * keys == whole.flops * pairs
    assert (masked.fewest, unsaid.flops, unsaid.fewest) == (
        None,
        whole.flops,
        None if pairs == queries * keys else masked.flops,
    )


@given(small, small)
def test_the_packages_mask_lies_between_both_corners(queries, keys):
    shapes = [(1, queries, 1, 4), (1, keys, 1, 4), (1, keys, 1, 4)]
    work = call("flash_attn::_flash_attn_forward", shapes, _5=True, _6=-1, _7=-1)
    pairs = [
        brute(queries, keys, lambda i, j: j <= i),
        brute(queries, keys, lambda i, j: j <= keys - queries + i),
    ]
    assert (work.least_flops, work.flops) == (16 * min(pairs), 16 * max(pairs))


def test_queries_may_share_keys():
    shared = call(
        "aten::_flash_attention_forward", [(2, 64, 8, 16), *[(2, 64, 2, 16)] * 2], _8=False
    )
    apart = call("aten::_flash_attention_forward", [(2, 64, 8, 16)] * 3, _8=False)
    assert shared.flops == apart.flops
    assert shared.bytes == 2 * 2 * 64 * (8 + 2) * (16 + 16)
    odd = call("aten::_flash_attention_forward", [(2, 64, 8, 16), *[(2, 64, 3, 16)] * 2], _8=False)
    assert odd is None


@given(st.lists(st.integers(1, 12), min_size=1, max_size=5), st.booleans())
def test_packed_sequences_are_a_range_around_the_truth(lengths, causal):
    tokens, longest = sum(lengths), max(lengths)
    shapes = [(tokens, 4, 8)] * 3 + [(len(lengths) + 1,)] * 2
    work = call(
        "flash_attn::_flash_attn_varlen_forward",
        shapes,
        _5=longest, _6=longest, _9=causal, _10=-1, _11=-1,
    )  # fmt: skip
    pairs = sum(n * (n + 1) // 2 if causal else n * n for n in lengths)
    truth = 2 * 4 * pairs * (8 + 8)
    assert work.least_flops <= truth <= work.flops
    if len(set(lengths)) == 1:
        assert (work.least_flops, work.flops) == (truth, truth)


def test_decoding_one_token_of_each_sequence_is_exact():
    shapes = [(3, 8, 64), (700, 2, 64), (700, 2, 64), (4,), (4,)]
    name = "aten::_flash_attention_forward"
    work = call(name, shapes, _5=1, _6=300, _8=False)
    assert (work.flops, work.fewest) == (2 * 8 * 700 * 128, None)


def test_a_sliding_window_leaves_less():
    shapes = [(1, 100, 1, 4)] * 3
    name = "flash_attn::_flash_attn_forward"
    work = call(name, shapes, _5=False, _6=9, _7=10)
    assert (work.least_flops, work.flops) == (16 * 100, 16 * 100 * 20)
    inside = brute(100, 100, lambda i, j: -9 <= j - i <= 10)
    assert work.least_flops <= 16 * inside <= work.flops


@pytest.mark.parametrize(
    "shapes",
    [
        [(2, 4, 64, 16), (900, 16, 4, 16), (900, 16, 4, 16)],  # a paged cache
        [(3, 8, 64), (700, 2, 64), (700, 2, 64)],
        [(2, 8, 64)],
        [],
    ],
)
def test_what_the_shapes_do_not_tell_is_not_known(shapes):
    assert call("flash_attn::_flash_attn_forward", shapes) is None
    assert call("higher_order::flex_attention", shapes) is None


def test_positions_are_those_of_pytorchs_schemas():
    seen = 0
    for name, read in readers().items():
        operator = getattr(torch.ops.aten, name, None)
        if operator is None or not isinstance(read.args[:1] and read.args[0], AttentionArguments):
            continue
        seen += 1
        (at,) = read.args
        names = [argument.name for argument in operator.default._schema.arguments]
        assert names[at.query : at.query + 3] == ["query", "key", "value"], name
        assert names[at.causal] in ("is_causal", "custom_mask_type"), name
        if at.packed:
            begins = [names[at.packed + i][:4] for i in range(2)]
            assert begins in (["cum_", "cum_"], ["cu_s", "cu_s"]), name
            assert [names[at.longest + i][:4] for i in range(2)] == ["max_", "max_"], name
        if at.window:
            assert names[at.window : at.window + 2] == ["window_size_left", "window_size_right"]
    assert seen >= 16
