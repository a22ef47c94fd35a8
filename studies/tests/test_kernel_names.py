"""The scores of names that were held back stay as they were: each part was opened once."""

from __future__ import annotations

import json

import pytest


@pytest.mark.parametrize(
    ("part", "expected"),
    [
        ("held_out", (3, 719, 0.8776)),
        ("fresh", (4, 880, 0.9739)),
        ("final", (5, 893, 0.9104)),
        ("recent", (7, 315, 0.9619)),
    ],
)
def test_what_the_rules_scored_before_a_part_was_opened(root, part, expected):
    path = root / "studies" / "results" / "kernel-names.json"
    result = json.loads(path.read_text(encoding="utf-8"))[part]["after"]
    fields = ("table_version", "names", "verdict_accuracy")
    assert tuple(result[field] for field in fields) == expected
