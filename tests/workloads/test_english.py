"""The English that ships with Python, as words and as characters."""

from __future__ import annotations

import pytest
import torch

from mpdiag.workloads import english


@pytest.fixture(autouse=True, scope="module")
def _few_documents():
    """Eleven documents of our own, the tenth of them held out."""
    found = [f"The {w} Sees 42 cats.\n" * n for n, w in enumerate("abcdefghijk", start=1)]
    caches = (english._split, english.vocabulary, english.words, english.characters)
    original = english.documents
    english.documents = lambda part: tuple(
        t for i, t in enumerate(found) if (i == 9) == (part == "test")
    )
    for cache in caches:
        cache.cache_clear()
    yield
    english.documents = original
    for cache in caches:
        cache.cache_clear()


def test_words_are_lower_case_and_digits_stand_alone():
    assert english._split("test")[:7] == ("the", "j", "sees", "4", "2", "cats", ".")


def test_the_most_frequent_words_come_first_and_ties_by_the_alphabet():
    known = english.vocabulary(10)
    assert [*known] == [".", "2", "4", "cats", "sees", "the", "k", "i", "h"]
    assert list(known.values()) == list(range(1, 10))
    assert english.UNKNOWN not in known.values()


def test_words_outside_the_vocabulary_are_unknown():
    assert english.words("test", 10)[:7].tolist() == [6, english.UNKNOWN, 5, 3, 2, 4, 1]


def test_characters_come_back_as_they_were():
    text = english.characters("test")
    shown = "".join("\n" if c == 96 else chr(c + 31) for c in text[:23].tolist())
    assert shown == "The j Sees 42 cats.\nThe"


def test_windows_are_pieces_of_the_text():
    text = torch.arange(100)
    pieces = english.windows(text, 50, 5, torch.Generator().manual_seed(0))
    assert pieces.shape == (50, 5)
    assert (pieces.diff(dim=1) == 1).all()
    assert pieces.max() <= 99
