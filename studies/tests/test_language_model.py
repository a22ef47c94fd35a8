"""The language model: English as words, and an LSTM whose states are projected."""

import pytest
import torch

from mpdiag.workloads import english
from studies.workloads import language_model


@pytest.fixture
def few_documents(monkeypatch):
    """Eleven documents of our own, the tenth of them held out."""
    found = [f"The {w} Sees 42 cats.\n" * n for n, w in enumerate("abcdefghijk", start=1)]
    parts = {"test": tuple(found[9:10]), "train": (*found[:9], found[10])}
    caches = (language_model.split, language_model.vocabulary, language_model.words_of)
    for cache in caches:
        cache.cache_clear()
    monkeypatch.setattr(english, "documents", parts.__getitem__)
    yield
    for cache in caches:
        cache.cache_clear()


@pytest.mark.usefixtures("few_documents")
def test_words():
    assert language_model.split("test")[:7] == ("the", "j", "sees", "4", "2", "cats", ".")
    # The most frequent come first, and ties by the alphabet; the others are unknown.
    known = language_model.vocabulary(10)
    assert [*known.items()] == [
        *((".", 1), ("2", 2), ("4", 3), ("cats", 4), ("sees", 5), ("the", 6)),
        *(("k", 7), ("i", 8), ("h", 9)),
    ]
    assert english.UNKNOWN not in known.values()
    found = language_model.words_of("test", 10)[:7].tolist()
    assert found == [6, english.UNKNOWN, 5, 3, 2, 4, 1]


def test_the_states_are_projected():
    model = language_model.ProjectedLstm(vocabulary=50, cells=12, projection=4, layers=2)
    words = torch.randint(50, (3, 7))
    assert model(words).shape == (3, 7, 50)
    assert model.lstm.weight_hr_l0.shape == (4, 12)
