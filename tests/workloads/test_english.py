"""The English that ships with Python: the documents, and they as words and as characters."""

import pytest
import torch

from mpdiag.workloads import english


def test_there_is_much_english_and_one_document_in_ten_is_held_out():
    train, test = english.documents("train"), english.documents("test")
    assert len(train) > 3000
    assert len(test) == (len(train) + len(test)) // 10
    assert sum(map(len, train)) > 1_000_000
    assert any('The "with" statement is used to wrap' in text for text in (*train, *test))
    known = english.vocabulary(100)
    assert {"the", "of", "is", "a", "to", "if", "in"} <= set(known)


@pytest.fixture
def few_documents(monkeypatch):
    """Eleven documents of our own, the tenth of them held out."""
    found = [f"The {w} Sees 42 cats.\n" * n for n, w in enumerate("abcdefghijk", start=1)]
    parts = {"test": tuple(found[9:10]), "train": (*found[:9], found[10])}
    caches = (english._split, english.vocabulary, english.words, english.characters)
    for cache in caches:
        cache.cache_clear()
    monkeypatch.setattr(english, "documents", parts.__getitem__)
    yield
    for cache in caches:
        cache.cache_clear()


@pytest.mark.usefixtures("few_documents")
def test_words_and_characters():
    assert english._split("test")[:7] == ("the", "j", "sees", "4", "2", "cats", ".")
    # The most frequent come first, and ties by the alphabet; the others are unknown.
    known = english.vocabulary(10)
    assert [*known.items()] == [
        *((".", 1), ("2", 2), ("4", 3), ("cats", 4), ("sees", 5), ("the", 6)),
        *(("k", 7), ("i", 8), ("h", 9)),
    ]
    assert english.UNKNOWN not in known.values()
    assert english.words("test", 10)[:7].tolist() == [6, english.UNKNOWN, 5, 3, 2, 4, 1]
    shown = english.characters("test")[:23].tolist()
    assert "".join("\n" if c == 96 else chr(c + 31) for c in shown) == "The j Sees 42 cats.\nThe"


def test_windows_are_pieces_of_the_text():
    text = torch.arange(100)
    pieces = english.windows(text, 50, 5, torch.Generator().manual_seed(0))
    assert pieces.shape == (50, 5)
    assert (pieces.diff(dim=1) == 1).all()
    assert pieces.max() <= 99
