"""The English that ships with Python: the documents, and they as characters."""

import pytest
import torch

from mpdiag.workloads import english


def test_there_is_much_english_and_one_document_in_ten_is_held_out():
    train, test = english.documents("train"), english.documents("test")
    assert len(train) > 3000
    assert len(test) == (len(train) + len(test)) // 10
    assert sum(map(len, train)) > 1_000_000
    assert any('The "with" statement is used to wrap' in text for text in (*train, *test))


@pytest.fixture
def few_documents(monkeypatch):
    """Eleven documents of our own, the tenth of them held out."""
    found = [f"The {w} Sees 42 cats.\n" * n for n, w in enumerate("abcdefghijk", start=1)]
    parts = {"test": tuple(found[9:10]), "train": (*found[:9], found[10])}
    english.characters.cache_clear()
    monkeypatch.setattr(english, "documents", parts.__getitem__)
    yield
    english.characters.cache_clear()


@pytest.mark.usefixtures("few_documents")
def test_characters():
    shown = english.characters("test")[:23].tolist()
    assert "".join("\n" if c == 96 else chr(c + 31) for c in shown) == "The j Sees 42 cats.\nThe"


def test_windows_are_pieces_of_the_text():
    text = torch.arange(100)
    pieces = english.windows(text, 50, 5, torch.Generator().manual_seed(0))
    assert pieces.shape == (50, 5)
    assert (pieces.diff(dim=1) == 1).all()
    assert pieces.max() <= 99
