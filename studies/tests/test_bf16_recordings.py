"""What BF16 recordings answer, beside FP32: one training now, and those that are stored."""

import json
from pathlib import Path

from studies import bf16_recordings as study

STORED = Path(study.__file__).with_name("results") / "bf16-recordings.json"


def test_bounds_hold_for_a_training_that_is_replayed(tmp_path):
    found = study.replayed("digits", tmp_path)
    assert found["shares"] == 32
    assert found["holds"]
    assert 0 < found["largest_apart"] <= 2.0**-8  # rounding was at work


def test_all_that_is_stored_held():
    document = json.loads(STORED.read_text(encoding="utf-8"))
    assert set(document["trainings"]) == set(study.MODES)
    assert document["held"] == document["of"] == 10
    for one in document["trainings"].values():
        assert one["replayed"]["holds"]
        assert one["twin"]["updates"]["holds"]
        assert set(one["twin"]["octaves_outside"].values()) == {0.0}
