"""A detector's geometry: anchors, matching, encoding, suppression, average precision.

Boxes are rows of four floats in fractions of the image's side, x to the right and y down. A
*corner* box is (left, top, right, bottom); a *centre* box is (centre x, centre y, width, height).
Anchors are centre boxes, everything else is corner boxes. The rules are those of "SSD: Single Shot
MultiBox Detector" (Liu et al., 2016), and the average precision is that of PASCAL VOC since 2010
(the whole area under the curve).
"""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

# Offsets are divided by these, so that the regression's targets have a spread of about 1. SSD
# calls them variances.
CENTRE_VARIANCE, SIZE_VARIANCE = 0.1, 0.2


def to_corners(centre_boxes: Tensor) -> Tensor:
    """Centre boxes [..., 4] as corner boxes."""
    centre, size = centre_boxes.split(2, dim=-1)
    return torch.cat([centre - size / 2, centre + size / 2], dim=-1)


def grid_anchors(grids: Sequence[int], scales: Sequence[float]) -> Tensor:
    """The anchors of square feature maps, [sum of 6 · grid², 4]: by map, by row, six a cell.

    `grids` gives the cells along each map's side, `scales` the side of each map's anchors and,
    last, the scale of a map that would follow. A cell has anchors of aspect ratio 1, 2, 1/2, 3 and
    1/3 of its scale, and a sixth, square, half way (geometrically) to the next scale.
    """
    anchors = []
    for grid, (scale, next_scale) in zip(grids, pairwise(scales), strict=True):
        sizes = [(scale * ratio**0.5, scale / ratio**0.5) for ratio in (1, 2, 1 / 2, 3, 1 / 3)]
        sizes.insert(1, ((scale * next_scale) ** 0.5,) * 2)
        for row in range(grid):
            for column in range(grid):
                centre = ((column + 0.5) / grid, (row + 0.5) / grid)
                anchors += [(*centre, width, height) for width, height in sizes]
    return torch.tensor(anchors)


def iou(a: Tensor, b: Tensor) -> Tensor:
    """Intersection over union of corner boxes: [..., N, 4] and [..., M, 4] give [..., N, M]."""
    a, b = a.unsqueeze(-2), b.unsqueeze(-3)
    overlap = (torch.minimum(a[..., 2:], b[..., 2:]) - torch.maximum(a[..., :2], b[..., :2])).clamp(
        min=0
    )
    intersection = overlap.prod(-1)
    union = (a[..., 2:] - a[..., :2]).prod(-1) + (b[..., 2:] - b[..., :2]).prod(-1) - intersection
    return intersection / union.clamp(min=1e-12)


def encode(boxes: Tensor, anchors: Tensor) -> Tensor:
    """Corner boxes [..., A, 4] as offsets from the anchors [A, 4], which the network learns."""
    centre, size = anchors.split(2, dim=-1)
    low, high = boxes.split(2, dim=-1)
    shift = ((low + high) / 2 - centre) / size / CENTRE_VARIANCE
    # An empty slot of a batch has a box of no size: its logarithm must not become an infinity.
    stretch = ((high - low).clamp(min=1e-6) / size).log() / SIZE_VARIANCE
    return torch.cat([shift, stretch], dim=-1)


def decode(offsets: Tensor, anchors: Tensor) -> Tensor:
    """The inverse of `encode`: offsets [..., A, 4] as corner boxes."""
    centre, size = anchors.split(2, dim=-1)
    shift, stretch = offsets.split(2, dim=-1)
    return to_corners(
        torch.cat(
            [centre + shift * CENTRE_VARIANCE * size, size * (stretch * SIZE_VARIANCE).exp()],
            dim=-1,
        )
    )


def match(boxes: Tensor, present: Tensor, anchors: Tensor, threshold: float = 0.5) -> Tensor:
    """Which box each anchor answers for: [B, A] indices into the boxes, or -1 for the background.

    `boxes` is [B, G, 4]; `present` [B, G] says which of its slots hold a box. As in SSD, every box
    first gets one anchor of its own, best pairs first, however small their overlap; then every
    anchor left over takes the box it overlaps most, if that overlap reaches the threshold.
    """
    overlap = iou(boxes, to_corners(anchors)).masked_fill(~present.unsqueeze(-1), -1)  # [B, G, A]
    best_overlap, best_box = overlap.max(dim=1)
    matched = best_box.masked_fill(best_overlap < threshold, -1)
    images = torch.arange(len(boxes))
    for _ in range(boxes.shape[1]):
        best, pair = overlap.flatten(1).max(dim=1)
        box, anchor = pair // len(anchors), pair % len(anchors)
        found = best >= 0  # images without boxes, or whose boxes all have an anchor, are left out
        matched[images[found], anchor[found]] = box[found]
        overlap[images, box, :] = -1
        overlap[images, :, anchor] = -1
    return matched


def nms(boxes: Tensor, scores: Tensor, threshold: float = 0.45) -> Tensor:
    """The indices to keep, best score first; none overlaps a better one beyond `threshold`."""
    order = scores.argsort(descending=True, stable=True)
    clash = (iou(boxes[order], boxes[order]) > threshold).tolist()
    kept: list[int] = []
    for candidate in range(len(order)):
        if not any(clash[candidate][other] for other in kept):
            kept.append(candidate)
    return order[kept]


def average_precision(
    scores: Tensor,
    boxes: Tensor,
    images: Tensor,
    truth_boxes: Tensor,
    truth_images: Tensor,
    threshold: float = 0.5,
) -> float:
    """The area under one class's precision-recall curve, 0 to 1; NaN if there is nothing to find.

    Detections (scores [D], boxes [D, 4], the image of each [D]) are taken best first. One is right
    if the true box of its image that it overlaps most (truth_boxes [T, 4], truth_images [T])
    overlaps it by at least `threshold` and has not been claimed before: a second detection of one
    object is wrong. The precision at a recall is the best one reached at that recall or beyond.
    """
    if len(truth_boxes) == 0:
        return float("nan")
    overlap = iou(boxes, truth_boxes).masked_fill(images.unsqueeze(1) != truth_images, -1)
    best_overlap, best_truth = overlap.max(dim=1)
    claimed: set[int] = set()
    right = torch.zeros(len(scores))
    for detection in scores.argsort(descending=True, stable=True).tolist():
        truth = int(best_truth[detection])
        if best_overlap[detection] >= threshold and truth not in claimed:
            claimed.add(truth)
            right[detection] = 1
    right = right[scores.argsort(descending=True, stable=True)]
    precision = right.cumsum(0) / torch.arange(1, len(right) + 1)
    envelope = precision.flip(0).cummax(0).values.flip(0) if len(right) else precision
    # Recall rises by 1 / T at each right one.
    return float((envelope * right).sum() / len(truth_boxes))
