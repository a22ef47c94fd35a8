"""What raw rows must hold, by numpy's and torch's own arithmetic, and values to try it on."""

from collections.abc import Collection
from typing import Any

import numpy as np
import torch

from mpdiag.recording.counting import layout

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def _keys(values: np.ndarray) -> np.ndarray:
    """The quarter of finite float64 magnitudes that are not zero, as FP32 has quarters."""
    mantissas, exponents = np.frexp(values)  # in [0.5, 1)
    quarters = np.ceil(mantissas * 8).astype(int) - 5  # closed at the top: -1 is a power of two
    keys = 4 * (exponents.astype(int) - 1 + 127) + quarters
    return np.where(exponents > 128, layout.QUARTERS - 1, np.maximum(keys, 0))


def expected_row(values: torch.Tensor, repeat: int = 1, zeros: int = 0) -> list[np.ndarray]:
    """A raw row and its extremes. What FP32 calls subnormal stands in the first entry."""
    x = np.abs(values.detach().double().numpy())
    finite = x[np.isfinite(x) & (x != 0)]
    row = np.zeros(layout.RAW, np.int64)
    row[: layout.QUARTERS] = np.bincount(_keys(finite), minlength=layout.QUARTERS)
    row[layout.ZEROS] = (x == 0).sum()
    row[layout.SUBNORMALS] = (finite < 2.0**-126).sum()
    row[layout.INFS], row[layout.NANS] = np.isinf(x).sum(), np.isnan(x).sum()
    row[layout.FP16_OVERFLOW] = (finite >= 65520.0).sum()
    row *= repeat
    row[layout.ZEROS] += zeros
    edges = np.array([finite.max(), finite.min()] if len(finite) else [0.0, np.inf])
    return [_with_one_bin_of_subnormals(row), edges]


def expected_update(before: torch.Tensor, after: torch.Tensor) -> list[np.ndarray]:
    """The rows and extremes of weights and updates, and the facts and ratios of the updates."""
    before, after = before.float(), after.float()
    delta = after - before
    changed = delta != 0
    half, change = before.half(), delta.half()
    brain, change_b = before.bfloat16(), delta.bfloat16()
    facts = [
        changed,
        changed & (half + change == half),
        changed & (brain + change_b == brain),
        changed & (change == 0),
        changed & (before == 0),
    ]
    w, d = before.double().abs().numpy(), delta.double().abs().numpy()
    counted = (w > 0) & (d > 0) & np.isfinite(w) & np.isfinite(d)
    mantissas, exponents = np.frexp(w[counted] / d[counted])
    octaves = exponents - np.where(mantissas == 0.5, 2, 1) - layout.RATIO_FIRST
    ratios = np.bincount(octaves, minlength=layout.RATIO_BINS)
    return [
        *expected_row(before),
        *expected_row(delta),
        np.array([int(mask.sum()) for mask in facts]),
        ratios,
    ]


def _with_one_bin_of_subnormals(row: np.ndarray) -> np.ndarray:
    row = row.copy()
    row[0], row[1:4] = row[:4].sum(), 0
    return row


def row_of(raw: Any, i: int) -> list[np.ndarray]:
    """A counted row, as ``expected_row`` has it."""
    return [_with_one_bin_of_subnormals(raw.counts[[i]][0]), raw.extremes[i]]


def update_of(raw: Any, weight: int, change: int, fact: int) -> list[np.ndarray]:
    """A counted update, as ``expected_update`` has it."""
    rows = [*row_of(raw, weight), *row_of(raw, change)]
    return [*rows, raw.facts[fact], raw.ratios[[fact]][0]]


def differing(found: list[np.ndarray], expected: list[np.ndarray]) -> list[Any]:
    """Where two lists of arrays differ; empty if they are equal."""
    return [
        (i, np.argwhere(a != b)[:9].tolist())
        for i, (a, b) in enumerate(zip(found, expected, strict=True))
        if not np.array_equal(a, b)
    ]


def _random(n: int) -> torch.Tensor:
    return torch.randn(n, generator=_GENERATOR)


def _bits(n: int, bits: int) -> torch.Tensor:
    kind = {16: torch.int16, 32: torch.int32, 64: torch.int64}[bits]
    return torch.randint(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1, (n,), generator=_GENERATOR).to(
        kind
    )


_GENERATOR = torch.Generator().manual_seed(0)
_POWERS = torch.ldexp(torch.ones(277), torch.arange(-149, 128))
_ONE = 1023 << 52
SPECIAL = torch.cat(
    [
        torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 1e-40, -1e-45, 65520.0]),
        torch.tensor([65519.996, 2.0**-25, 2.0**-126, 2.0**-127, 3.4028234e38, -1.0, 2.0**-24]),
        torch.tensor([0x7FFFFFFF, 0x7F800001, 0x7FE00001, 0x7FE00000, -1], dtype=torch.int32).view(
            torch.float32
        ),
    ]
)
_DOUBLES = torch.tensor(
    [
        *(0, 1, (1 << 52) - 1, 1 << 52, (897 << 52) - 1, 897 << 52, (897 << 52) + 1),
        *((1151 << 52) - 1, 1151 << 52, (0x7FF << 52) - 1, 0x7FF << 52, (0x7FF << 52) + 1),
        *(_ONE - 1, _ONE + 1, _ONE + (1 << 50), _ONE + (1 << 50) + 1),
        *((1 << 63) - 1, -1, -(1 << 63), -(1 << 52)),
    ],
    dtype=torch.int64,
).view(torch.float64)
FLOATS = {
    "special": SPECIAL,
    "one value": torch.tensor([3.0]),
    "one zero": torch.zeros(1),
    "none": torch.zeros(0),
    "only zeros": torch.zeros(5000),
    "only nan": torch.full((70,), torch.nan),
    "only infinities": torch.full((4097,), -torch.inf),
    "powers and neighbours": torch.cat(
        [_POWERS, *(_POWERS.nextafter(torch.tensor(to)) for to in (0.0, torch.inf))]
    ),
    "constant": torch.full((4096,), 0.25),
    "largest": torch.full((4097,), 3.4028234e38),
    "smallest": torch.full((9,), 1e-45),
    "subnormals": _random(3000) * 1e-38,
    "ReLU": _random(4096).relu(),
    "beyond FP16": _random(5000) * 1e5,
    "not on 16 bytes": _random(8300)[1:],
    "special among others": torch.cat([SPECIAL.repeat(300), _random(300)])[
        torch.randperm(300 + 300 * len(SPECIAL), generator=_GENERATOR)
    ],
    "all bit patterns": _bits(9000, 32).view(torch.float32),
    "far apart": torch.cat([_random(5000), torch.tensor([1e-36])]),
    # What a counter chooses by its first values holds for few or none of the others.
    "small, then large": torch.cat([_random(4096) * 1e-20, _random(4096), torch.zeros(4096)]),
    "zeros, then few far below": torch.cat(
        [torch.zeros(5000), _random(60_000), _random(40) * 1e-9]
    ),
    "many far below": torch.cat([_random(5000), _random(5000) * 1e-12, _random(5000) * 1e-24]),
    **{
        f"{span} quarters": torch.ldexp(
            torch.ones(300), torch.randint(-span // 4, 1, (300,), generator=_GENERATOR)
        )
        for span in (60, 64, 66, 124, 128, 132, 254, 258, 400)
    },
    **{f"{n} values": _random(n) for n in (2, 31, 63, 64, 65, 4095, 4097, 5 * 4096 + 17)},
}
VALUES = {
    **FLOATS,
    **{
        f"{dtype} {name}": FLOATS[name].to(dtype)
        for dtype in DTYPES[1:]
        for name in ("none", "special", "powers and neighbours", "4095 values", "all bit patterns")
    },
    "every bfloat16": torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.bfloat16),
    "every float16": torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.float16),
    "bfloat16 not on 16 bytes": _random(4100).bfloat16()[1:],
    "edges of float64": _DOUBLES,
    "edges of float64 in blocks": _DOUBLES.repeat(300),
    "cut": FLOATS["all bit patterns"].double() * (1e-30 / 3),
    "all float64 patterns": _bits(5000, 64).view(torch.float64),
    "FP8": _random(500).to(torch.float8_e4m3fn),
}
"""Tensors by name."""


def _updates_by(scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    before = _random(2500)
    before[:10] = 0
    octaves = torch.randint(-6, 6, before.shape, generator=_GENERATOR)
    after = before + _random(2500) * scale * torch.exp2(octaves)
    after[5:50] = before[5:50]
    return before, after


_TIES = FLOATS["powers and neighbours"][:-3]
_HALVES = _random(4000), _random(4000)
_WILD = FLOATS["all bit patterns"]
UPDATES = {
    **{f"by {scale:g}": _updates_by(scale) for scale in (0, 1e-45, 1e-9, 1e-6, 1e-3, 1.0, 1e9)},
    "none": (torch.zeros(0), torch.zeros(0)),
    "unchanged": (_HALVES[0], _HALVES[0]),
    "swallowed by FP16": (_HALVES[0], _HALVES[0] * (1 + 2.0**-11)),
    "ties": (_TIES, _TIES.roll(1)),
    "subnormal": (_TIES[:60] * 1.5, _TIES[:60]),
    "ratios beyond FP32": (
        torch.tensor([2.0**-149 * 3, 2.0**-149, 2.0**127]),
        torch.tensor([2.0**-149 * 2, 2.0**100, 2.0**127 - 2.0**104]),
    ),
    "special": (
        FLOATS["special among others"],
        FLOATS["special among others"].roll(1),
    ),
    "bfloat16": (_HALVES[0].bfloat16(), _HALVES[1].bfloat16()),
    "float16": (_HALVES[0].half(), (_HALVES[0] + _HALVES[1] * 1e-3).half()),
    "float64": (_HALVES[0].double(), _HALVES[1].double()),
    "not on 16 bytes": (_HALVES[0][1:], _HALVES[1][:-1]),
    "wild": (_WILD, _WILD.roll(1)),
    "wild bfloat16": (_WILD.bfloat16(), _WILD.roll(1).bfloat16()),
    "wild float16": (_WILD.half(), _WILD.roll(1).half()),
}
"""Weights before and after a step by name."""


def check_values(rows: Any, alone: Collection[str] = VALUES) -> None:
    """Every tensor counted by itself, or some of them, and then all together."""
    for name in alone:
        values = VALUES[name]
        row = rows.count(values, 3, 5)
        wrong = differing(row_of(rows.read(), row), expected_row(values, 3, 5))
        assert not wrong, (name, wrong)
    rows.clear()
    every = [(values, 1 + i % 3, i % 2) for i, values in enumerate(VALUES.values())]
    assert rows.count_many(every) == list(range(len(every)))
    assert rows.count_many([]) == []
    raw = rows.read()
    for row, (name, tensor) in enumerate(zip(VALUES, every, strict=True)):
        wrong = differing(row_of(raw, row), expected_row(*tensor))
        assert not wrong, (name, wrong)
    rows.clear()


def check_updates(rows: Any, alone: Collection[str] = UPDATES) -> None:
    """Every update counted by itself, or some of them, and then all together."""
    for name in alone:
        pair = UPDATES[name]
        places = rows.count_many_updates([pair])
        wrong = differing(update_of(rows.read(), *places[0]), expected_update(*pair))
        assert not wrong, (name, wrong)
    rows.clear()
    together = rows.count_many_updates(list(UPDATES.values()))
    assert rows.count_many_updates([]) == []
    raw = rows.read()
    for places, (name, pair) in zip(together, UPDATES.items(), strict=True):
        wrong = differing(update_of(raw, *places), expected_update(*pair))
        assert not wrong, (name, wrong)
    rows.clear()
    assert rows.count(torch.ones(2), 1, 0) == 0
    assert row_of(rows.read(), 0)[0].sum() == 2
