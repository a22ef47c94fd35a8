"""The documents as they are."""

from __future__ import annotations

from mpdiag.workloads import english


def test_there_is_much_english_and_one_document_in_ten_is_held_out():
    train, test = english.documents("train"), english.documents("test")
    assert len(train) > 3000
    assert len(test) == (len(train) + len(test)) // 10
    assert sum(map(len, train)) > 1_000_000
    assert any('The "with" statement is used to wrap' in text for text in (*train, *test))
    known = english.vocabulary(100)
    assert {"the", "of", "is", "a", "to", "if", "in"} <= set(known)
