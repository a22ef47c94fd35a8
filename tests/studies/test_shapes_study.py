"""Shape advice applied mechanically: the padded models train, and nothing contradicts anything."""

from __future__ import annotations

import pytest

from studies.shapes.first_half import FIRST_HALF
from studies.shapes.second_half import SECOND_HALF
from studies.shapes.trial import try_model


@pytest.mark.parametrize("model", FIRST_HALF + SECOND_HALF, ids=lambda m: m.__name__)
def test_advised_sizes_train(model, tmp_path):
    for outcome in try_model(model, tmp_path):
        print(outcome)
        assert not outcome.problems, outcome
