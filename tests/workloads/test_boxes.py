"""The detector's geometry, against cases worked out by hand."""

import math

import pytest
import torch

from mpdiag.workloads import boxes, ssd


def corners(*rows: tuple[float, float, float, float]) -> torch.Tensor:
    return torch.tensor(rows)


def test_grid_anchors_run_map_by_map_row_by_row_six_to_a_cell() -> None:
    anchors = boxes.grid_anchors(grids=(2, 1), scales=(0.2, 0.8, 0.9))
    assert anchors.shape == (6 * 4 + 6, 4)
    assert anchors[0].tolist() == pytest.approx([0.25, 0.25, 0.2, 0.2])
    assert anchors[1].tolist() == pytest.approx([0.25, 0.25, 0.4, 0.4])  # sqrt(0.2 * 0.8)
    assert anchors[6, :2].tolist() == pytest.approx([0.75, 0.25])  # the next cell lies to the right
    assert anchors[24, :2].tolist() == pytest.approx([0.5, 0.5])
    ratios = anchors[:6, 2] / anchors[:6, 3]
    assert ratios.tolist() == pytest.approx([1, 1, 2, 1 / 2, 3, 1 / 3])
    areas = anchors[[0, 2, 3, 4, 5], 2:].prod(1)
    assert ssd.anchors().shape == (1920, 4)
    assert areas.tolist() == pytest.approx([0.04] * 5)  # a ratio changes the shape, not the area


def test_iou_of_equal_half_overlapping_and_distant_boxes() -> None:
    a = corners((0, 0, 2, 2))
    b = corners((0, 0, 2, 2), (1, 0, 3, 2), (5, 5, 6, 6), (0, 0, 0, 0))
    assert boxes.iou(a, b).tolist() == [pytest.approx([1, 1 / 3, 0, 0])]


def test_decode_undoes_encode() -> None:
    generator = torch.Generator().manual_seed(0)
    anchors = ssd.anchors()
    low = torch.rand(3, len(anchors), 2, generator=generator) * 0.6
    truth = torch.cat([low, low + 0.05 + 0.3 * torch.rand(low.shape, generator=generator)], dim=2)
    torch.testing.assert_close(boxes.decode(boxes.encode(truth, anchors), anchors), truth)


def test_encode_by_hand() -> None:
    anchor = torch.tensor([[0.5, 0.5, 0.2, 0.4]])
    # The centre lies a quarter of the anchor's width to the right; as wide, e^0.2 times as high.
    height = 0.4 * math.exp(0.2)
    box = corners((0.45, 0.5 - height / 2, 0.65, 0.5 + height / 2))
    torch.testing.assert_close(boxes.encode(box, anchor), torch.tensor([[2.5, 0.0, 0.0, 1.0]]))
    assert boxes.encode(torch.zeros(1, 4), anchor).isfinite().all()  # an empty slot


LEFT, RIGHT, BELOW = [0.25, 0.25, 0.5, 0.5], [0.75, 0.25, 0.5, 0.5], [0.25, 0.75, 0.5, 0.5]


@pytest.mark.parametrize(
    ("anchors", "truth", "matched"),
    [
        # A box takes every anchor that it overlaps enough.
        ([LEFT, [0.3, 0.25, 0.5, 0.5], [0.75, 0.75, 0.5, 0.5]], [(0, 0, 0.5, 0.5)], [0, 0, -1]),
        # A small box still gets its best anchor.
        ([LEFT, RIGHT, BELOW], [(0.6, 0.1, 0.7, 0.2)], [-1, 0, -1]),
        # Both lie in the first anchor; the larger overlaps it more, the smaller takes its second.
        ([LEFT, RIGHT, BELOW], [(0.3, 0.0, 0.55, 0.2), (0.0, 0.0, 0.5, 0.4)], [1, 0, -1]),
    ],
)
def test_matching(anchors, truth, matched) -> None:
    present = torch.ones(1, len(truth), dtype=torch.bool)
    found = boxes.match(corners(*truth)[None], present, torch.tensor(anchors))
    assert found.tolist() == [matched]
    empty = boxes.match(
        torch.zeros(2, 3, 4), torch.zeros(2, 3, dtype=torch.bool), torch.tensor([LEFT])
    )
    assert (empty == -1).all()


@pytest.mark.parametrize(
    ("candidates", "scores", "kept"),
    [
        # 1 suppresses 0 (overlap 9/11); 3 overlaps 1 by 36/104 only, and 2 nothing.
        (
            [(0, 0, 10, 10), (1, 0, 11, 10), (20, 20, 30, 30), (0, 0, 10, 4)],
            [0.8, 0.9, 0.3, 0.7],
            [1, 3, 2],
        ),
        # Neighbours overlap by 7/13; what was suppressed suppresses nothing.
        ([(0, 0, 10, 10), (3, 0, 13, 10), (6, 0, 16, 10)], [0.9, 0.8, 0.7], [0, 2]),
        ([], [], []),
    ],
)
def test_suppression(candidates, scores, kept) -> None:
    found = boxes.nms(corners(*candidates).reshape(-1, 4), torch.tensor(scores))
    assert found.tolist() == kept


ONE, TWO = (0, 0, 10, 10), (20, 20, 30, 30)  # in the images 0 and 1


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        ([(0.6, ONE, 0), (0.9, TWO, 1)], 1),
        ([], 0),
        ([(0.9, ONE, 1)], 0),  # the right place in the wrong image
        # right, wrong (claimed), right: precision 1 at recall 1/2, then 2/3 at recall 1
        ([(0.9, ONE, 0), (0.8, ONE, 0), (0.7, TWO, 1)], (1 + 2 / 3) / 2),
        # wrong, right, right: precisions 0, 1/2, 2/3; at recall 1/2 the best still to come is 2/3
        ([(0.9, (50, 50, 60, 60), 0), (0.8, ONE, 0), (0.7, TWO, 1)], 2 / 3),
        ([(0.9, (0, 0, 10, 5), 0)], 1 / 2),  # half an overlap is enough
        ([(0.9, (0, 0, 10, 4.9), 0)], 0),
    ],
)
@pytest.mark.parametrize("objects", [True, False])
def test_average_precision(found, expected, objects) -> None:
    truth, of = (corners(ONE, TWO), [0, 1]) if objects else (torch.zeros(0, 4), [])
    scores, candidates, images = zip(*found, strict=True) if found else ((), (), ())
    precision = boxes.average_precision(
        torch.tensor(scores),
        corners(*candidates).reshape(-1, 4),
        torch.tensor(images, dtype=torch.int64),
        truth,
        torch.tensor(of, dtype=torch.int64),
    )
    assert precision == pytest.approx(expected) if objects else math.isnan(precision)
