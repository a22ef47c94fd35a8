"""What a comparison finds beside its verdict."""

from __future__ import annotations

from support import record_and_train

import mpdiag


def test_trainings_of_unequal_length_are_a_finding(tmp_path):
    record_and_train(tmp_path / "first", tmp_path / "second")
    codes = [f.code for f in mpdiag.compare(tmp_path / "first", tmp_path / "second").findings]
    assert "lengths-differ" in codes
