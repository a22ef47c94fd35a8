"""Attention's work: equal to PyTorch's own formulas, and a range where the arguments leave it open."""

from hypothesis import given
from hypothesis import strategies as st
from torch.utils.flop_counter import sdpa_backward_flop_count, sdpa_flop_count

from mpdiag.tensorcores.work.traced_operation import matrix_work

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


def test_a_sliding_window_leaves_less():
    shapes = [(1, 100, 1, 4)] * 3
    name = "flash_attn::_flash_attn_forward"
    work = call(name, shapes, _5=False, _6=9, _7=10)
    assert (work.least_flops, work.flops) == (16 * 100, 16 * 100 * 20)
    inside = brute(100, 100, lambda i, j: -9 <= j - i <= 10)
    assert work.least_flops <= 16 * inside <= work.flops
