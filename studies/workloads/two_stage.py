"""Detection in two stages: a small Faster R-CNN on generated scenes of real digits.

The scenes are those of the single-shot detector (`scenes.py`). A trunk of convolutions makes one
16×16 map. The first stage, the region proposal network (Ren et al., 2015), says for each of six
anchors at each cell whether something is there, and moves it onto the thing. The best proposals that
do not overlap go to the second stage, which looks at each through a 4×4 grid of samples (RoIAlign, He
et al., 2017), names it and moves it once more. No batch norm; each of the four losses is a mean over
the anchors or proposals sampled for it, as in the original.

Which proposals are looked at is decided without gradients, and in FP32 whatever the precision.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, ClassVar, Literal, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Adam, Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, LRScheduler

from mpdiag.workloads.boxes import average_precision, decode, encode, grid_anchors, iou, match, nms
from mpdiag.workloads.protocol import Batch, Workload
from mpdiag.workloads.scenes import SLOTS, Scenes, draw_scenes

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["Proposals", "TwoStage", "TwoStageDetector", "region_align", "truth_of"]

CLASSES = 11  # the background, then the digits 0 to 9
TEST_SCENES = 150
CANDIDATES, PROPOSALS = 60, 12  # the best anchors of an image, and what suppression leaves of them
NEGATIVES = 3  # background anchors that are learned from, to each that answers for a digit
GRID = 4

# size -> scenes in a batch, width
SIZES = {"small": (16, 16), "large": (64, 128)}


@lru_cache(maxsize=1)
def anchors() -> Tensor:
    """The 1,536 centre boxes: six at each cell of a 16×16 map."""
    return grid_anchors(grids=(16,), scales=(0.25, 0.4))


@lru_cache(maxsize=1)
def _test_scenes() -> Scenes:
    return draw_scenes(TEST_SCENES, torch.Generator().manual_seed(0), part="test")


class Proposals(NamedTuple):
    """R regions of several images that the second stage looks at."""

    boxes: Tensor
    """[R, 4], corner boxes."""
    images: Tensor
    """[R]: the image of each."""


def region_align(maps: Tensor, proposals: Proposals) -> Tensor:
    """The map under each box, read at the centres of a 4×4 grid: [R, channels, 4, 4].

    Args:
        maps: [B, channels, H, W].
        proposals: Whose `images` number the maps.
    """
    low, high = proposals.boxes.split(2, dim=1)
    cells = (torch.arange(GRID, device=maps.device) + 0.5) / GRID
    x, y = (low[:, None] + (high - low)[:, None] * cells[:, None]).unbind(2)  # [R, 4] each
    grid = torch.stack([x[:, None].expand(-1, GRID, -1), y[:, :, None].expand(-1, -1, GRID)], dim=3)
    # Every region of an image in one reading of its map: regions stand below each other.
    count = torch.bincount(proposals.images, minlength=len(maps))
    rank = torch.arange(len(grid), device=maps.device) - (count.cumsum(0) - count)[proposals.images]
    places = maps.new_zeros(len(maps), int(count.max()), GRID, GRID, 2, dtype=torch.float32)
    places[proposals.images, rank] = 2 * grid - 1
    read = F.grid_sample(maps.float(), places.flatten(1, 2), align_corners=False)
    read = read.unflatten(2, (-1, GRID)).transpose(1, 2)  # [B, regions, channels, 4, 4]
    found: Tensor = read[proposals.images, rank]
    return found


def truth_of(proposals: Proposals, boxes: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """What each proposal shows: its class [R], 0 for the background, and its true box [R, 4].

    Args:
        proposals: Of the images below.
        boxes: [B, G, 4], corner boxes.
        labels: [B, G]: their classes, 0 in an empty slot.
    """
    mine = boxes[proposals.images]
    overlap = iou(proposals.boxes[:, None], mine).squeeze(1)
    overlap = overlap.masked_fill(labels[proposals.images] == 0, -1)
    best, slot = overlap.max(dim=1)
    rows = torch.arange(len(slot), device=slot.device)
    return labels[proposals.images, slot] * (best >= 0.5), mine[rows, slot]


class TwoStageDetector(nn.Module):
    """Five convolutions down to a 16×16 map, the proposal network, the second stage."""

    def __init__(self, width: int) -> None:
        super().__init__()
        wide = 2 * width
        self.trunk = nn.Sequential(
            *(nn.Conv2d(1, width, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(width, width, 3, padding=1), nn.ReLU()),
            *(nn.Conv2d(width, wide, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(wide, wide, 3, padding=1), nn.ReLU()),
        )
        self.propose = nn.Sequential(
            nn.Conv2d(wide, wide, 3, padding=1), nn.ReLU(), nn.Conv2d(wide, 6 * 5, 1)
        )
        self.look = nn.Sequential(nn.Flatten(), nn.Linear(GRID * GRID * wide, 64), nn.ReLU())
        self.name_it = nn.Linear(64, CLASSES)
        self.move_it = nn.Linear(64, 4)
        for module in self.modules():
            if isinstance(module, (nn.Conv2d, nn.Linear)):
                nn.init.kaiming_uniform_(module.weight, nonlinearity="relu")
                nn.init.zeros_(cast("Tensor", module.bias))

    def first(self, images: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The map [B, C, 16, 16], each anchor's logit [B, 1536] and offsets [B, 1536, 4]."""
        maps = self.trunk(images)
        rows = self.propose(maps).permute(0, 2, 3, 1).reshape(len(images), -1, 5)
        return maps, rows[..., 0], rows[..., 1:]

    def second(self, maps: Tensor, proposals: Proposals) -> tuple[Tensor, Tensor]:
        """Class logits [R, 11] and offsets [R, 4] from the proposals."""
        seen = self.look(region_align(maps, proposals))
        return self.name_it(seen), self.move_it(seen)

    @torch.no_grad()
    def proposals(self, logits: Tensor, offsets: Tensor) -> Proposals:
        """The best boxes of the first stage that do not overlap, at most 12 an image."""
        boxes, images = [], []
        scores, rows = logits.float().topk(CANDIDATES, dim=1)
        for image, (score, row) in enumerate(zip(scores, rows, strict=True)):
            moved = offsets[image, row].float().clamp(-10, 10).cpu()
            found = decode(moved, anchors()[row.cpu()]).clamp(0, 1)
            kept = nms(found, score.cpu(), threshold=0.6)[:PROPOSALS]
            boxes.append(found[kept])
            images.append(torch.full((len(kept),), image))
        return Proposals(torch.cat(boxes).to(logits.device), torch.cat(images).to(logits.device))

    def forward(self, images: Tensor) -> tuple[Proposals, Tensor, Tensor]:
        """Proposals, their class logits [R, 11] and offsets [R, 4]."""
        maps, logits, offsets = self.first(images)
        proposals = self.proposals(logits, offsets)
        return (proposals, *self.second(maps, proposals))


def _centred(boxes: Tensor) -> Tensor:
    """Corner boxes as centre boxes, none without a size."""
    low, high = boxes.split(2, dim=-1)
    return torch.cat([(low + high) / 2, (high - low).clamp(min=0.02)], dim=-1)


@dataclass(frozen=True)
class TwoStage(Workload):
    """The detector: four losses, Adam with cosine decay."""

    name: ClassVar[str] = "two_stage"
    title: ClassVar[str] = "Digits in scenes, a two-stage detector"
    summary: ClassVar[str] = (
        "A small Faster R-CNN learns to propose regions of a scene and to name the digits there."
    )
    family: ClassVar[str] = "object detection (Faster R-CNN)"
    default_steps: ClassVar[int] = 250
    metric: ClassVar[str] = "mAP@0.5"
    margin: ClassVar[float] = 0.03

    size: Literal["small", "large"] = "small"
    """16 scenes a step and width 16, or 64 and width 128."""
    learning_rate: float = 2e-3

    def model(self) -> nn.Module:
        """A `TwoStageDetector` with fresh weights."""
        return TwoStageDetector(SIZES[self.size][1])

    def optimizer(self, model: nn.Module) -> Optimizer:
        """Adam with torch's defaults."""
        return Adam(model.parameters(), self.learning_rate)

    def scheduler(self, optimizer: Optimizer, steps: int) -> LRScheduler:
        """From the full rate to 0 on half a cosine."""
        return CosineAnnealingLR(optimizer, steps)

    def batches(self, steps: int, seed: int) -> Iterator[Batch]:
        """Images [B, 1, 64, 64], boxes [B, 4, 4], labels [B, 4], and what the anchors learn.

        Which is their offsets [B, 1536, 4] and roles [B, 1536]: 1 answers for a digit, 0 for the
        background, and -1 rests.
        """
        generator = torch.Generator().manual_seed(seed)
        for _ in range(steps):
            scenes = draw_scenes(SIZES[self.size][0], generator)
            matched = match(scenes.boxes, scenes.labels > 0, anchors())
            slots = matched.clamp(min=0).unsqueeze(2).expand(-1, -1, 4)
            offsets = encode(scenes.boxes.gather(1, slots), anchors())
            answers = matched >= 0
            chance = NEGATIVES * answers.sum() / (~answers).sum()
            drawn = torch.rand(answers.shape, generator=generator) < chance
            roles = torch.where(answers, 1, torch.where(drawn, 0, -1))
            yield scenes.images / 255, scenes.boxes, scenes.labels, offsets, roles

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Both stages' losses: is it something, where exactly, what is it, where exactly."""
        detector = cast("TwoStageDetector", model)
        images, boxes, labels, targets, roles = batch
        maps, logits, offsets = detector.first(images)
        used, answers = roles >= 0, roles == 1
        something = F.binary_cross_entropy_with_logits(logits[used], answers[used].to(logits.dtype))
        where = F.smooth_l1_loss(offsets[answers].float(), targets[answers])

        found = detector.proposals(logits, offsets)
        # The true boxes are looked at, too, lest the second stage see no digit at the beginning.
        present = labels > 0
        proposals = Proposals(
            torch.cat([found.boxes, boxes[present]]),
            torch.cat([found.images, present.nonzero()[:, 0]]),
        )
        order = proposals.images.argsort(stable=True)
        proposals = Proposals(proposals.boxes[order], proposals.images[order])
        classes, truth = truth_of(proposals, boxes, labels)
        names, moves = detector.second(maps, proposals)
        shown = classes > 0
        wanted = encode(truth[shown], _centred(proposals.boxes[shown]))
        what = F.cross_entropy(names, classes)
        exactly = F.smooth_l1_loss(moves[shown].float(), wanted)
        return something + where + what + exactly

    def score(self, model: nn.Module) -> float:
        """The average precision at an overlap of 0.5, a mean over the ten digits, on 150 scenes."""
        device = next(model.parameters()).device
        scenes = _test_scenes()
        proposals, names, moves = model((scenes.images / 255).to(device))
        regions = proposals.boxes.cpu()
        found = decode(moves.cpu().float(), _centred(regions)).clamp(0, 1)
        scores, classes = names.cpu().float().softmax(1)[:, 1:].max(dim=1)
        kept = nms(found + 2 * proposals.images.cpu().unsqueeze(1), scores)
        found, scores, classes = found[kept], scores[kept], classes[kept] + 1
        images = proposals.images.cpu()[kept]
        truth_images = torch.arange(TEST_SCENES).repeat_interleave(SLOTS)
        truth_boxes, labels = scenes.boxes.flatten(0, 1), scenes.labels.flatten()
        precisions = [
            average_precision(
                scores[classes == c], found[classes == c], images[classes == c],
                truth_boxes[labels == c], truth_images[labels == c],
            )
            for c in range(1, CLASSES)
        ]  # fmt: skip
        return sum(precisions) / len(precisions)
