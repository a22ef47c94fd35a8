"""What may be set beside a plan."""

from __future__ import annotations

import pytest
from support import backoff, network
from torch import optim

import mpdiag
from mpdiag.errors import UsageError


@pytest.mark.parametrize("limit", [0, -1, 2.0, True])
def test_a_limit_of_skips_is_a_count(limit):
    with pytest.raises(UsageError, match="max_skips"):
        mpdiag.TrainerOptions(max_skips=limit)


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        ({"overrides": {"dtype": "bf16"}}, "overrides must be a PrecisionOverrides"),
        ({"options": {"max_skips": 3}}, "options must be a TrainerOptions"),
    ],
)
def test_groups_of_another_type_are_refused_by_name(arguments, word):
    model = network()
    with pytest.raises(UsageError, match=word):
        mpdiag.MixedPrecision(model, optim.SGD(model.parameters(), 0.1), backoff(), **arguments)
