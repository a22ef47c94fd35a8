"""The matrix work of attention, from the arguments that a trace holds.

Where the arguments leave open how many pairs of a query and a key are computed, the work is a range:
``flops`` is the most and ``fewest`` the least. That is so where the trace does not say whether the
attention is causal, for a sliding window, and for packed sequences, of which a trace holds the
number, the longest and the sum, but not each length. Attention over a paged cache, and
flex_attention, whose mask is a program, are not known.
"""

import math
from dataclasses import dataclass, replace

from mpdiag.tensorcores.work.products import MatrixWork, Shape, attention
from mpdiag.tensorcores.work.traced_call import TracedCall, UnclearArguments


@dataclass(frozen=True)
class AttentionArguments:
    """The positions of an attention's arguments; None for what it does not have.

    Attributes:
        query: Of the query; key and value follow it.
        causal: Of ``is_causal``, or of a mask type, 1 and 2 being causal ones.
        backward: Whether it is the gradient.
        heads_last: [batch, length, heads, head] instead of [batch, heads, length, head].
        packed: Of the offsets of packed sequences of queries; those of keys follow.
        longest: Of the longest sequence of queries; that of keys follows.
        window: Of the width of a sliding window, to the left; to the right follows.
        corner: Whether a causal mask ends at the last key instead of beginning at the first.
    """

    query: int = 0
    causal: int | None = None
    backward: bool = False
    heads_last: bool = False
    packed: int | None = None
    longest: int | None = None
    window: int | None = None
    corner: bool = False


def attention_call(a: AttentionArguments, call: TracedCall) -> MatrixWork:
    """The work of a call with these arguments."""
    query, key, value = (call.shape(a.query + i) for i in range(3))
    if a.packed is not None and call.optional(a.packed):
        return _packed(a, call, (query, key, value), call.optional(a.packed))
    if not len(query) == len(key) == len(value) >= 2:
        raise UnclearArguments
    if a.heads_last:
        if len(query) != 4:
            raise UnclearArguments
        query, key, value = (tuple(s[i] for i in (0, 2, 1, 3)) for s in (query, key, value))
    if query[-1] != key[-1] or key[-2] != value[-2] or key[:-2] != value[:-2]:
        raise UnclearArguments
    heads, stored = math.prod(query[:-2]), math.prod(key[:-2])
    if not stored or heads % stored:  # queries share keys in equal groups
        raise UnclearArguments
    work = attention(
        heads,
        (query[-2], key[-2]),
        (query[-1], value[-1]),
        stored_heads=stored,
        dtype=call.dtype(a.query),
        direction="backward" if a.backward else "forward",
    )
    least, most = _pairs(query[-2], key[-2], _causal(a, call), corner=a.corner)
    return _with_pairs(work, *_in_window(a, call, query[-2], least, most))


def _causal(a: AttentionArguments, call: TracedCall) -> bool | None:
    if a.causal is None:
        return False
    value = call.value(a.causal)
    return value in (True, 1, 2) if type(value) in (bool, int) else None


def _pairs(queries: int, keys: int, causal: bool | None, *, corner: bool) -> tuple[int, int]:
    """The least and the most pairs of one head."""
    pairs = queries * keys
    if causal is False:
        return pairs, pairs
    seen = min(queries, keys)  # query i sees keys 0 … i
    first = last = seen * (seen + 1) // 2 + max(0, queries - keys) * keys
    if corner:  # query i sees keys 0 … keys - queries + i; older versions mask as above
        last = pairs - queries * (queries - 1) // 2 if queries <= keys else keys * (keys + 1) // 2
    least = min(first, last)
    return least, pairs if causal is None else max(first, last)


def _in_window(
    a: AttentionArguments, call: TracedCall, queries: int, least: int, most: int
) -> tuple[int, int]:
    """The pairs that a sliding window may leave."""
    if a.window is None:
        return least, most
    widths = [call.value(a.window), call.value(a.window + 1)]
    known = [w for w in widths if type(w) is int and w >= 0]
    if not known:
        return least, most
    if len(known) == 2:
        most = min(most, queries * (sum(known) + 1))
    return min(queries, least), most


def _with_pairs(work: MatrixWork, least: int, most: int) -> MatrixWork:
    """The work of so many pairs a head, where ``work`` is that of all."""
    pairs = work.m * work.n
    if not pairs or least == most == pairs:
        return work
    each = work.flops // pairs  # exact: FLOP are pairs × heads × a whole number
    return replace(work, flops=each * most, fewest=None if least == most else each * least)


def _packed(
    a: AttentionArguments, call: TracedCall, shapes: tuple[Shape, ...], offsets: Shape
) -> MatrixWork:
    """Sequences packed into one: [tokens, heads, head], or the same with a batch of one."""
    query, key, value = (s[1:] if len(s) == 4 and s[0] == 1 else s for s in shapes)
    if not len(query) == len(key) == len(value) == 3 or len(offsets) != 1 or offsets[0] < 2:
        raise UnclearArguments
    if query[2] != key[2] or key[0] != value[0] or not key[1] or query[1] % key[1]:
        raise UnclearArguments
    sequences = offsets[0] - 1
    longest = [call.number(a.longest + i) if a.longest else None for i in range(2)]
    tokens = (query[0], key[0])
    most_q, most_k = (n or t for n, t in zip(longest, tokens, strict=True))
    most = min(tokens[0] * most_k, tokens[1] * most_q)
    alike = tokens[0] == tokens[1] and longest[0] == longest[1]
    if most_q == 1 and tokens[0] == sequences:  # one query a sequence sees all its keys
        least = most = tokens[1]
    elif alike:
        least = -(-(tokens[0] ** 2) // sequences)  # equal lengths make the fewest pairs
        causal = _causal(a, call)
        if causal is not False:
            least = -(-(least + tokens[0]) // 2)
            most = (most + tokens[0]) // 2 if causal else most
    else:
        least = min(tokens)
    work = attention(
        query[1],
        tokens,
        (query[2], value[2]),
        stored_heads=key[1],
        dtype=call.dtype(a.query),
        direction="backward" if a.backward else "forward",
    )
    return _with_pairs(work, *_in_window(a, call, tokens[0], min(least, most), most))
