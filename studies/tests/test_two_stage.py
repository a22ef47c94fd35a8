"""The two-stage detector: regions, what they show, and what is proposed."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import one_hot

from mpdiag.workloads.boxes import encode, iou, to_corners
from studies.workloads import two_stage
from studies.workloads.two_stage import Proposals, TwoStage, region_align, truth_of


def test_a_region_of_a_ramp_reads_the_ramp():
    ramp = (torch.arange(16) + 0.5) / 16  # each cell holds its own place, from 0 to 1
    maps = torch.stack([ramp.expand(16, 16), ramp[:, None].expand(16, 16)])[None].repeat(3, 1, 1, 1)
    maps[1] *= 10
    boxes = torch.tensor([[0.2, 0.3, 0.6, 0.5], [0.1, 0.1, 0.9, 0.9], [0.2, 0.3, 0.6, 0.5]])
    read = region_align(maps, Proposals(boxes, torch.tensor([0, 0, 1])))
    assert read.shape == (3, 2, 4, 4)
    torch.testing.assert_close(read[0, 0, 2], torch.tensor([0.25, 0.35, 0.45, 0.55]))
    torch.testing.assert_close(read[0, 1, :, 1], torch.tensor([0.325, 0.375, 0.425, 0.475]))
    torch.testing.assert_close(read[1, 0, 0], torch.tensor([0.2, 0.4, 0.6, 0.8]))
    torch.testing.assert_close(read[2], 10 * read[0])


def test_what_a_proposal_shows():
    boxes = torch.zeros(2, 2, 4)
    boxes[0, 0] = torch.tensor([0.0, 0.0, 0.4, 0.4])
    boxes[1, 1] = torch.tensor([0.5, 0.5, 1.0, 1.0])
    labels = torch.tensor([[3, 0], [0, 7]])
    found = torch.tensor([[0.0, 0.0, 0.4, 0.3], [0.5, 0.5, 1.0, 1.0], [0.5, 0.5, 1.0, 1.0]])
    classes, truth = truth_of(Proposals(found, torch.tensor([0, 0, 1])), boxes, labels)
    assert classes.tolist() == [3, 0, 7]
    assert torch.equal(truth[0], boxes[0, 0])
    assert torch.equal(truth[2], boxes[1, 1])


def test_proposals_do_not_overlap_much_and_the_likeliest_comes_first():
    model = TwoStage().model()
    logits = torch.randn(2, 1536, generator=torch.Generator().manual_seed(0))
    boxes, images = model.proposals(logits, torch.zeros(2, 1536, 4))
    for image in (0, 1):
        mine = boxes[images == image]
        assert 1 < len(mine) <= two_stage.PROPOSALS
        overlap = iou(mine, mine).fill_diagonal_(0)
        assert overlap.max() <= 0.6
        best = to_corners(two_stage.anchors()[logits[image].argmax()]).clamp(0, 1)
        torch.testing.assert_close(mine[0], best)


def test_anchors_that_rest_are_neither_digits_nor_background():
    *_, roles = next(TwoStage().batches(1, seed=0))
    answers, background = (roles == 1).sum(), (roles == 0).sum()
    assert answers > 16
    assert float(background) == pytest.approx(3 * float(answers), rel=0.2)
    assert (roles == -1).sum() > background


class Oracle(torch.nn.Module):
    """Proposes every true box of the held-out scenes, and names it rightly or one too high."""

    def __init__(self, shift: int) -> None:
        super().__init__()
        self.shift = torch.nn.Parameter(torch.tensor(float(shift)))

    def forward(self, images):
        _, boxes, labels = two_stage._test_scenes()
        present = labels > 0
        proposals = Proposals(boxes[present], present.nonzero()[:, 0])
        named = (labels[present] - 1 + int(self.shift)) % 10 + 1
        moves = encode(proposals.boxes, two_stage._centred(proposals.boxes))
        return proposals, 20.0 * one_hot(named, 11), moves


@pytest.mark.parametrize(("shift", "expected"), [(0, 1.0), (1, 0.0)])
def test_the_score_of_one_who_knows_and_of_one_who_misreads(shift, expected):
    assert TwoStage().evaluate(Oracle(shift)) == pytest.approx(expected, abs=1e-6)
