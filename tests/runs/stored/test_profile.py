"""A stored profile: what cannot be read is one sentence."""

from __future__ import annotations

import pytest

from mpdiag.errors import DamagedRun, NewerSchema, RunNotFound
from mpdiag.runs.stored.profile import read_profile


@pytest.mark.parametrize(
    ("text", "error", "words"),
    [
        (None, RunNotFound, "has no profile.json"),
        ("{", DamagedRun, "is damaged"),
        ("[]", DamagedRun, "is not a profile"),
        ('{"kernels": [1]}', DamagedRun, "is not a profile"),
        ('{"schema_version": 2}', NewerSchema, "newer mpdiag"),
    ],
)
def test_what_cannot_be_read(tmp_path, text, error, words):
    if text is not None:
        (tmp_path / "profile.json").write_text(text)
    with pytest.raises(error, match=words):
        read_profile(tmp_path)
