"""The rule of the corpus, and the translator's parts."""

from __future__ import annotations

import pytest
import torch

from studies.workloads import translation
from studies.workloads.translation import Translation, Translator, english_number, german_number


@pytest.mark.parametrize(
    ("number", "english", "german"),
    [
        (0, "zero", "null"),
        (1, "one", "eins"),
        (17, "seventeen", "siebzehn"),
        (21, "twenty one", "ein und zwanzig"),
        (40, "forty", "vierzig"),
        (100, "one hundred", "ein hundert"),
        (101, "one hundred one", "ein hundert eins"),
        (1_000, "one thousand", "ein tausend"),
        (1_001, "one thousand one", "ein tausend eins"),
        (21_000, "twenty one thousand", "ein und zwanzig tausend"),
        (101_301, "one hundred one thousand three hundred one",
         "ein hundert ein tausend drei hundert eins"),
        (342_521, "three hundred forty two thousand five hundred twenty one",
         "drei hundert zwei und vierzig tausend fünf hundert ein und zwanzig"),
    ],
)  # fmt: skip
def test_numbers_in_both_languages(number, english, german):
    assert " ".join(english_number(number)) == english
    assert " ".join(german_number(number)) == german


def test_pairs_are_padded_after_their_end_and_fit_every_number():
    source, target = translation.pairs([7, 777_777])
    words = [translation.GERMAN_WORDS[i] for i in target[0].tolist()]
    assert words == ["sieben", "</s>"] + [""] * (target.shape[1] - 2)
    assert (source[1] != translation.PAD).all()
    longest = [max(len(say(n)) for n in range(1000)) for say in (english_number, german_number)]
    assert [2 * n + 2 for n in longest] == [source.shape[1], target.shape[1]]  # "thousand", the end


def test_no_number_of_the_training_is_held_out():
    ends = [{"nine", "nineteen"}]
    for source, _ in Translation().batches(3, seed=0):
        last = source.gather(1, (source != translation.PAD).sum(1, keepdim=True) - 2)
        words = {translation.ENGLISH_WORDS[i] for i in last.flatten().tolist()}
        assert not words & ends[0]


def test_padding_is_not_attended_to():
    torch.manual_seed(0)
    model = Translator(8, 3)
    source, target = translation.pairs([21])
    with torch.no_grad():
        short = int((source != translation.PAD).sum())
        memory, states = model.read(source[:, :short])
        bare = model.write(target, memory, source[:, :short] == translation.PAD, states)[0]
        longer = torch.cat([memory, torch.full((1, 4, 8), 9.0)], dim=1)
        hidden = torch.arange(short + 4)[None] >= short
        padded = model.write(target, longer, hidden, states)[0]
    torch.testing.assert_close(bare, padded)


@pytest.mark.parametrize("layers", [3, 5])
def test_layers_by_option_and_greedy_words_are_the_likeliest(layers):
    model = Translation(layers=layers).model().eval()
    assert len(model.reader.layers) == len(model.writer.layers) == layers
    source, _ = translation.pairs([4, 58])
    with torch.no_grad():
        written = model.translate(source, 5)
        begun = torch.cat([torch.full((2, 1), translation.BEGIN), written[:, :-1]], dim=1)
        assert torch.equal(model(source, begun).argmax(2), written)
