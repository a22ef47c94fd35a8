"""The detector's geometry, against cases worked out by hand."""

from __future__ import annotations

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
    assert areas.tolist() == pytest.approx([0.04] * 5)  # a ratio changes the shape, not the area


def test_the_detector_has_1920_anchors() -> None:
    assert ssd.anchors().shape == (1920, 4)


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


def test_encode_of_an_empty_slot_is_finite() -> None:
    assert boxes.encode(torch.zeros(1, 4), torch.tensor([[0.5, 0.5, 0.2, 0.2]])).isfinite().all()


class TestMatch:
    anchors = torch.tensor([[0.25, 0.25, 0.5, 0.5], [0.75, 0.25, 0.5, 0.5], [0.25, 0.75, 0.5, 0.5]])

    def test_a_box_takes_every_anchor_it_overlaps_enough(self) -> None:
        both = torch.tensor([[0.25, 0.25, 0.5, 0.5], [0.3, 0.25, 0.5, 0.5], [0.75, 0.75, 0.5, 0.5]])
        truth = corners((0, 0, 0.5, 0.5)).unsqueeze(0)
        assert boxes.match(truth, torch.tensor([[True]]), both).tolist() == [[0, 0, -1]]

    def test_a_small_box_still_gets_its_best_anchor(self) -> None:
        truth = corners((0.6, 0.1, 0.7, 0.2)).unsqueeze(0)
        assert boxes.match(truth, torch.tensor([[True]]), self.anchors).tolist() == [[-1, 0, -1]]

    def test_two_boxes_that_want_one_anchor_get_one_each_best_pair_first(self) -> None:
        # Both lie in the first anchor; the larger overlaps it more, the smaller takes its second.
        truth = corners((0.3, 0.0, 0.55, 0.2), (0.0, 0.0, 0.5, 0.4)).unsqueeze(0)
        assert boxes.match(truth, torch.tensor([[True, True]]), self.anchors).tolist() == [
            [1, 0, -1]
        ]

    def test_empty_slots_match_nothing(self) -> None:
        truth = torch.zeros(2, 3, 4)
        matched = boxes.match(truth, torch.zeros(2, 3, dtype=torch.bool), self.anchors)
        assert (matched == -1).all()


class TestNms:
    def test_keeps_the_best_of_a_cluster_and_whatever_stands_apart(self) -> None:
        candidates = corners((0, 0, 10, 10), (1, 0, 11, 10), (20, 20, 30, 30), (0, 0, 10, 4))
        scores = torch.tensor([0.8, 0.9, 0.3, 0.7])
        # 1 suppresses 0 (overlap 9/11); 3 overlaps 1 by 36/104 only, and 2 nothing.
        assert boxes.nms(candidates, scores).tolist() == [1, 3, 2]

    def test_what_was_suppressed_suppresses_nothing(self) -> None:
        chain = corners(
            (0, 0, 10, 10), (3, 0, 13, 10), (6, 0, 16, 10)
        )  # neighbours overlap by 7/13
        assert boxes.nms(chain, torch.tensor([0.9, 0.8, 0.7])).tolist() == [0, 2]

    def test_of_nothing_is_nothing(self) -> None:
        assert boxes.nms(torch.zeros(0, 4), torch.zeros(0)).tolist() == []


class TestAveragePrecision:
    truth = corners((0, 0, 10, 10), (20, 20, 30, 30))
    in_images = torch.tensor([0, 1])

    def ap(self, found: list[tuple[float, torch.Tensor, int]]) -> float:
        scores, candidates, images = zip(*found, strict=True) if found else ((), (), ())
        stacked = torch.stack(candidates) if candidates else torch.zeros(0, 4)
        return boxes.average_precision(
            torch.tensor(scores),
            stacked,
            torch.tensor(images, dtype=torch.int64),
            self.truth,
            self.in_images,
        )

    def test_everything_found_and_nothing_else(self) -> None:
        assert self.ap([(0.6, self.truth[0], 0), (0.9, self.truth[1], 1)]) == pytest.approx(1)

    def test_nothing_detected(self) -> None:
        assert self.ap([]) == 0

    def test_the_right_place_in_the_wrong_image_is_wrong(self) -> None:
        assert self.ap([(0.9, self.truth[0], 1)]) == 0

    def test_a_second_detection_of_one_object_is_wrong(self) -> None:
        # right, wrong (claimed), right: precision 1 at recall 1/2, then 2/3 at recall 1
        found = [(0.9, self.truth[0], 0), (0.8, self.truth[0], 0), (0.7, self.truth[1], 1)]
        assert self.ap(found) == pytest.approx((1 + 2 / 3) / 2)

    def test_the_envelope_lifts_a_dip(self) -> None:
        # wrong, right, right: precisions 0, 1/2, 2/3; at recall 1/2 the best still to come is 2/3
        found = [
            (0.9, corners((50, 50, 60, 60))[0], 0),
            (0.8, self.truth[0], 0),
            (0.7, self.truth[1], 1),
        ]
        assert self.ap(found) == pytest.approx(2 / 3)

    def test_half_an_overlap_is_enough_and_less_is_not(self) -> None:
        assert self.ap([(0.9, corners((0, 0, 10, 5))[0], 0)]) == pytest.approx(1 / 2)
        assert self.ap([(0.9, corners((0, 0, 10, 4.9))[0], 0)]) == 0

    def test_no_objects_no_number(self) -> None:
        empty = boxes.average_precision(
            torch.ones(1), self.truth[:1], torch.zeros(1, dtype=torch.int64),
            torch.zeros(0, 4), torch.zeros(0, dtype=torch.int64),
        )  # fmt: skip
        assert math.isnan(empty)
