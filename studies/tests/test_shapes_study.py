"""Shape advice applied mechanically: the padded models train, and nothing contradicts anything.

The study tries thirty models; these are the kinds of constraint among them.
"""

from __future__ import annotations

import pytest

from studies.shapes import first_half, second_half
from studies.shapes.trial import try_model

KINDS = (
    first_half.GroupedCnn, first_half.PackedAttention, first_half.TiedLanguageModel,
    first_half.UNet, second_half.Graph, second_half.Translator, second_half.RotaryWindows,
    second_half.GatedExperts,
)  # fmt: skip


@pytest.mark.parametrize("model", KINDS, ids=lambda m: m.__name__)
def test_advised_sizes_train(model, tmp_path):
    for outcome in try_model(model, tmp_path):
        assert not outcome.problems, outcome


def test_there_are_thirty():
    assert len({*first_half.FIRST_HALF, *second_half.SECOND_HALF}) == 30
