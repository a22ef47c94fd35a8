"""The detector's scenes and its loss."""

import pytest
import torch

from mpdiag.workloads.boxes import encode, match, to_corners
from mpdiag.workloads.digits import digit_images
from mpdiag.workloads.scenes import SIDE, draw_scenes
from mpdiag.workloads.ssd import L2Norm, Ssd, anchors, hard_negatives, multibox_loss


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_scenes_are_8_bit_pictures_with_one_to_four_digits() -> None:
    images, boxes, labels = draw_scenes(64, generator())
    assert images.shape == (64, 1, SIDE, SIDE)
    assert torch.equal(images, images.round())
    assert images.min() >= 0
    assert images.max() <= 255
    assert set((labels > 0).sum(1).tolist()) <= {1, 2, 3, 4}
    assert (boxes[labels == 0] == 0).all()
    assert ((boxes >= 0) & (boxes <= 1)).all()
    for row, present in zip(match(boxes, labels > 0, anchors()), labels > 0, strict=True):
        assert set(row[row >= 0].tolist()) == set(present.nonzero().flatten().tolist())
    # Those for testing are made of other digits.
    train, test = (digit_images(part)[0].flatten(1) for part in ("train", "test"))
    assert not (train[:, None] == test[None]).all(2).any()


def test_boxes_enclose_the_ink() -> None:
    images, boxes, labels = draw_scenes(64, generator())
    for image, scene_boxes, present in zip(images[:, 0], boxes, labels > 0, strict=True):
        outside = torch.ones(SIDE, SIDE, dtype=torch.bool)
        for left, top, right, bottom in (scene_boxes[present] * SIDE).tolist():
            inside = image[round(top) : round(bottom), round(left) : round(right)]
            assert inside.max() > image.median() + 60
            # Interpolation lets the ink bleed over the box by less than half a pixel of the tile.
            outside[
                max(0, int(top) - 3) : int(bottom) + 4, max(0, int(left) - 3) : int(right) + 4
            ] = False
        assert image[outside].max() < image.median() + 60  # noise, at a standard deviation of 10


def test_l2norm_gives_every_pixel_the_same_length_and_survives_zeros() -> None:
    norm = L2Norm(3, initial=20.0)
    x = torch.rand(2, 3, 4, 4, generator=generator()) * 1000
    torch.testing.assert_close(norm(x).norm(dim=1), torch.full((2, 4, 4), 20.0))
    assert (norm(torch.zeros(1, 3, 1, 1)) == 0).all()


def test_three_negatives_for_each_positive_and_the_hardest_ones() -> None:
    losses = torch.rand(4, 100, generator=generator())
    positive = torch.zeros(4, 100, dtype=torch.bool)
    for image, count in enumerate((0, 1, 7, 40)):
        positive[image, :count] = True
    negatives = hard_negatives(losses, positive)
    assert negatives.sum(1).tolist() == [0, 3, 21, 60]  # the last image has no more than 60 to give
    assert not (negatives & positive).any()
    left_out = ~negatives & ~positive
    assert losses[2][negatives[2]].min() >= losses[2][left_out[2]].max()
    # Ties do not change the ratio.
    assert hard_negatives(torch.zeros(1, 50), torch.arange(50)[None] < 5).sum() == 15


def test_multibox_loss_by_hand() -> None:
    classes = torch.tensor([[3, 0, 0, 0, 0, 0, 0, 0]])
    logits = torch.zeros(1, 8, 11)  # every class equally likely: ln 11 an anchor
    targets = torch.zeros(1, 8, 4)
    offsets = torch.full(
        (1, 8, 4), 2.0
    )  # smooth L1 of 2 is 1.5, for four coordinates of one anchor
    total = 6 + 4 * torch.tensor(11.0).log()
    torch.testing.assert_close(multibox_loss(offsets, logits, targets, classes, "matched"), total)
    torch.testing.assert_close(multibox_loss(offsets, logits, targets, classes, "boxes"), total / 8)


def test_inputs_are_centred_or_between_0_and_1() -> None:
    (large, _, _), (small, _, _) = (
        next(Ssd(inputs=kind).batches(1, 0)) for kind in ("0-255", "0-1")
    )
    assert abs(large.mean()) < 10
    assert large.max() > 100
    assert 0 <= small.min() <= small.max() <= 1
    torch.testing.assert_close(large - large.min(), (small - small.min()) * 255, rtol=0, atol=1e-3)


class Oracle(torch.nn.Module):
    """Answers for the held-out scenes as one who knows them, or with the labels one too high."""

    def __init__(self, shift: int) -> None:
        super().__init__()
        self.shift = torch.nn.Parameter(torch.tensor(float(shift)))

    def forward(self, images: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        _, boxes, labels = draw_scenes(len(images), generator(), part="test")
        matched = match(boxes, labels > 0, anchors())
        box = matched.clamp(min=0)
        classes = labels.gather(1, box).masked_fill(matched < 0, 0)
        wrong = torch.where(classes > 0, (classes - 1 + int(self.shift)) % 10 + 1, 0)
        truth = boxes.gather(1, box.unsqueeze(2).expand(-1, -1, 4))
        truth = torch.where((classes > 0)[..., None], truth, to_corners(anchors()))
        return encode(truth, anchors()), 20.0 * torch.nn.functional.one_hot(wrong, 11)


@pytest.mark.parametrize(("shift", "expected"), [(0, 1.0), (1, 0.0)])
def test_the_score_of_one_who_knows_and_of_one_who_misreads(shift: int, expected: float) -> None:
    assert Ssd().evaluate(Oracle(shift)) == pytest.approx(expected, abs=1e-6)
