"""The generated utterances, and what reads them."""

from __future__ import annotations

import pytest
import torch

from studies.workloads import speech
from studies.workloads.speech import RowConvolution, Speech, edit_distance, utterances


def test_utterances_have_their_sizes_and_end_in_time():
    sound, said, length = utterances(200, torch.Generator().manual_seed(0))
    assert sound.shape == (200, 1, speech.BANDS, speech.FRAMES)
    assert set(length.tolist()) == {2, 3, 4, 5}
    assert torch.equal((said > 0).sum(1), length)
    assert said.max() == speech.SYLLABLES
    # All that is said is heard: the last frames hold noise alone.
    assert sound[..., -2:].abs().mean() < 0.3


def test_each_syllable_sounds_its_own_way():
    tracks = speech._resonances()
    assert tracks.shape == (speech.SYLLABLES, 2, 2)
    assert len({tuple(t.flatten().tolist()) for t in tracks}) == speech.SYLLABLES


def test_a_syllable_is_loud_where_its_resonances_are():
    generator = torch.Generator().manual_seed(3)
    sound, said, _ = utterances(400, generator)
    flat = speech._resonances()[said[:, 0] - 1]
    steady = (flat[:, :, 0] == flat[:, :, 1]).all(1)  # no glide: both bands stay
    assert steady.sum() > 20
    first = sound[steady, 0, :, 5:8].mean(2)
    for row, centre in zip(first, flat[steady, :, 0], strict=True):
        bands = centre.round().long()
        near = torch.stack([row[(b - 2).clamp(min=0) : b + 3].max() for b in bands])
        assert (near > row.median() + 0.15).all()


def test_a_row_convolution_looks_ahead_and_never_back():
    row = RowConvolution(2, ahead=2)
    x = torch.zeros(1, 6, 2)
    x[0, 3] = 1.0
    reached = row(x).abs().sum(2).flatten().nonzero().flatten().tolist()
    assert reached == [1, 2, 3]


@pytest.mark.parametrize(
    ("a", "b", "edits"), [([1, 2, 3], [1, 2, 3], 0), ([], [1, 2], 2), ([1, 2, 3], [2, 3, 4], 2),
                          ([1, 1, 2], [1, 2, 2], 1)],
)  # fmt: skip
def test_edit_distance(a, b, edits):
    assert edit_distance(a, b) == edit_distance(b, a) == edits


class Oracle(torch.nn.Module):
    """Writes for the held-out utterances what was said, a blank after each, or one edit less."""

    def __init__(self, drop: int) -> None:
        super().__init__()
        self.drop = torch.nn.Parameter(torch.tensor(float(drop)))

    def forward(self, sound):
        said = utterances(len(sound), torch.Generator().manual_seed(10**6)).said.clone()
        said[:, 0] *= 1 - int(self.drop)
        frames = torch.zeros(len(sound), 2 * said.shape[1], dtype=torch.int64)
        frames[:, ::2] = said
        return torch.nn.functional.one_hot(frames, speech.SYLLABLES + 1).float()


def test_the_score_of_one_who_knows_and_of_one_who_misses_each_first_syllable():
    assert Speech().evaluate(Oracle(0)) == 0
    length = utterances(200, torch.Generator().manual_seed(10**6)).length
    assert Speech().evaluate(Oracle(1)) == pytest.approx(200 / int(length.sum()))
