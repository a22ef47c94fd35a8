"""Detection: a single-shot detector (Multibox SSD) in small, where FP16 without a loss scale fails.

The paper's one network that diverged without a scale was an SSD on a VGG without batch norm. This
is that design at the size of a CPU: eight 3×3 convolutions, no batch norm, L2Norm before the heads,
1,920 anchors on a 16×16 and an 8×8 map, smooth L1 and softmax with 3:1 hard-negative mining, on
generated 64×64 scenes of real handwritten digits (`scenes.py`).

Two options decide how small its gradients are, and their defaults are chosen to show the effect:

- `mean_over="boxes"` divides the loss by all anchors of the batch (32 · 1,920 = 61,440),
  `"matched"` by those that answer for a digit. The standard SSD does the latter.
- `inputs="0-255"` feeds pixels less their mean, as the Caffe models of the VGG's time did, `"0-1"`
  feeds pixels divided by 255, as is usual today. L2Norm hides the size of the activations from the
  heads, but divides gradients by it: large inputs give small gradients.

With both defaults half of the activations' gradients fall below FP16's range; with either option
changed, three in a hundred, and FP16 trains as FP32 does. So this is not the paper's exact loss,
but the sum of two ordinary habits.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar, Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Adam, Optimizer

from mpdiag.workloads.boxes import average_precision, decode, encode, grid_anchors, match, nms
from mpdiag.workloads.protocol import Batch, Workload
from mpdiag.workloads.scenes import SLOTS, Scenes, draw_scenes

CLASSES = 11  # the background, then the digits 0 to 9
TEST_SCENES = 200
SIZES = {"small": 8, "large": 64}  # width; that of the VGG is 64
CANDIDATES = 200  # detections of an image that reach the suppression


@lru_cache(maxsize=1)
def anchors() -> Tensor:
    """The 1,920 centre boxes: six at each cell of a 16×16 map, then of an 8×8 map."""
    return grid_anchors(grids=(16, 8), scales=(0.2, 0.35, 0.5))


@lru_cache(maxsize=1)
def mean_pixel() -> float:
    """The mean of the training scenes' pixels, on the scale from 0 to 255."""
    return float(draw_scenes(256, torch.Generator().manual_seed(0)).images.mean())


@lru_cache(maxsize=1)
def _test_scenes() -> Scenes:
    return draw_scenes(TEST_SCENES, torch.Generator().manual_seed(0), part="test")


class L2Norm(nn.Module):
    """Scale each pixel's features to length 1, then each channel by a learned factor (ParseNet)."""

    def __init__(self, channels: int, initial: float = 20.0) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((channels,), initial))

    def forward(self, x: Tensor) -> Tensor:
        """Map [B, channels, H, W] to the same shape."""
        # The guard against features that are all zero must not itself be zero in FP16, as torch's
        # default 1e-12 would be.
        return F.normalize(x, dim=1, eps=1e-4) * self.scale[:, None, None]


class Detector(nn.Module):
    """Eight convolutions, the map halved after every second, and a head on the last two maps.

    With a width w: w-w channels at 64×64, 2w-2w at 32×32, 4w-4w at 16×16 and 4w-4w at 8×8.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        w, deep = width, 4 * width
        self.trunk = nn.Sequential(*_stage(1, w), *_stage(w, 2 * w), *_stage(2 * w, deep)[:-1])
        self.deeper = nn.Sequential(nn.MaxPool2d(2), *_stage(deep, deep)[:-1])
        self.norms = nn.ModuleList([L2Norm(deep), L2Norm(deep)])
        self.heads = nn.ModuleList(
            [nn.Conv2d(deep, 6 * (4 + CLASSES), 3, padding=1) for _ in range(2)]
        )
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.xavier_uniform_(module.weight)  # as the Caffe model does
                nn.init.zeros_(cast("Tensor", module.bias))

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Offsets [B, 1920, 4] and class logits [B, 1920, 11] of the images [B, 1, 64, 64]."""
        fine = self.trunk(images)
        coarse = self.deeper(fine)
        maps = [
            head(norm(x))
            for head, norm, x in zip(self.heads, self.norms, (fine, coarse), strict=True)
        ]
        # [B, 6 · 15, H, W] -> [B, H · W · 6, 15], in the order of the anchors
        rows = [x.permute(0, 2, 3, 1).reshape(len(images), -1, 4 + CLASSES) for x in maps]
        offsets, logits = torch.cat(rows, dim=1).split([4, CLASSES], dim=2)
        return offsets, logits


def _stage(channels_in: int, channels: int) -> list[nn.Module]:
    """Two 3×3 convolutions with their ReLU, and a pooling that halves the map."""
    first, second = (nn.Conv2d(c, channels, 3, padding=1) for c in (channels_in, channels))
    return [first, nn.ReLU(), second, nn.ReLU(), nn.MaxPool2d(2)]


def hard_negatives(losses: Tensor, positive: Tensor, ratio: int = 3) -> Tensor:
    """Each image's background anchors of largest loss, `ratio` to a positive one: a mask [B, A]."""
    wanted = ratio * positive.sum(dim=1, keepdim=True)
    # Losses are never negative, so the positive anchors come last.
    by_loss = losses.detach().masked_fill(positive, -1).argsort(dim=1, descending=True)
    rank = by_loss.argsort(dim=1)
    return (rank < wanted) & ~positive


def multibox_loss(
    offsets: Tensor,
    logits: Tensor,
    targets: Tensor,
    classes: Tensor,
    mean_over: Literal["boxes", "matched"],
) -> Tensor:
    """SSD's loss: smooth L1 on the matched anchors, softmax on these and on the hard negatives.

    `targets` [B, A, 4] are encoded boxes, `classes` [B, A] are 0 for the background.
    """
    positive = classes > 0
    class_losses = F.cross_entropy(logits.transpose(1, 2), classes, reduction="none")
    chosen = positive | hard_negatives(class_losses, positive)
    box_loss = F.smooth_l1_loss(offsets[positive], targets[positive], reduction="sum")
    count = classes.numel() if mean_over == "boxes" else positive.sum().clamp(min=1)
    return (box_loss + class_losses[chosen].sum()) / count


@dataclass(frozen=True)
class Ssd(Workload):
    """The digit detector: multibox loss, batches of 32 scenes, Adam."""

    name: ClassVar[str] = "ssd"
    title: ClassVar[str] = "Finding digits, Multibox SSD"
    summary: ClassVar[str] = (
        "A small single-shot detector without batch norm finds digits in generated scenes."
    )
    family: ClassVar[str] = "object detection (Multibox SSD)"
    default_steps: ClassVar[int] = 400
    metric: ClassVar[str] = "mAP@0.5"
    margin: ClassVar[float] = 0.02
    paper_scale: ClassVar[float | None] = 8.0

    mean_over: Literal["boxes", "matched"] = "boxes"
    """What the loss is a mean over; see the head of this module."""
    inputs: Literal["0-255", "0-1"] = "0-255"
    """The range of the pixels that the network sees, less their mean in the first case."""
    learning_rate: float = 5e-4
    batch_size: int = 32
    size: Literal["small", "large"] = "small"

    def model(self) -> nn.Module:
        """A `Detector` with fresh weights."""
        return Detector(SIZES[self.size])

    def optimizer(self, model: nn.Module) -> Optimizer:
        """Adam with torch's defaults."""
        return Adam(model.parameters(), self.learning_rate)

    def batches(self, steps: int, seed: int) -> Iterator[Batch]:
        """Images [B, 1, 64, 64], encoded boxes [B, 1920, 4] and classes [B, 1920] of new scenes."""
        generator = torch.Generator().manual_seed(seed)
        for _ in range(steps):
            scenes = draw_scenes(self.batch_size, generator)
            matched = match(scenes.boxes, scenes.labels > 0, anchors())
            box = matched.clamp(min=0)
            boxes = scenes.boxes.gather(1, box.unsqueeze(2).expand(-1, -1, 4))
            classes = scenes.labels.gather(1, box).masked_fill(matched < 0, 0)
            yield self.prepare(scenes.images), encode(boxes, anchors()), classes

    def prepare(self, images: Tensor) -> Tensor:
        """Pixels from 0 to 255 as the network sees them."""
        return images - mean_pixel() if self.inputs == "0-255" else images / 255

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """The multibox loss, a mean over what `mean_over` says."""
        images, targets, classes = batch
        offsets, logits = model(images)
        return multibox_loss(offsets, logits, targets, classes, self.mean_over)

    def score(self, model: nn.Module) -> float:
        """The average precision at an overlap of 0.5, a mean over the ten digits, on 200 scenes."""
        device = next(model.parameters()).device
        scenes = _test_scenes()
        offsets, logits = model(self.prepare(scenes.images).to(device))
        found = [
            _detections(box, score)
            for box, score in zip(
                decode(offsets.cpu(), anchors()), logits.cpu().softmax(2), strict=True
            )
        ]
        boxes, scores, classes = (torch.cat(parts) for parts in zip(*found, strict=True))
        images = torch.repeat_interleave(torch.tensor([len(one[0]) for one in found]))
        truth_images = torch.arange(TEST_SCENES).repeat_interleave(SLOTS)
        truth_boxes, labels = scenes.boxes.flatten(0, 1), scenes.labels.flatten()
        precisions = [
            average_precision(
                scores[classes == c], boxes[classes == c], images[classes == c],
                truth_boxes[labels == c], truth_images[labels == c],
            )
            for c in range(1, CLASSES)
        ]  # fmt: skip
        return sum(precisions) / len(precisions)


def _detections(boxes: Tensor, probabilities: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """One image's boxes [D, 4], scores [D] and classes [D], after suppression within each class."""
    scores, rows = probabilities[:, 1:].flatten().topk(CANDIDATES)
    boxes, classes = boxes[rows // (CLASSES - 1)], rows % (CLASSES - 1) + 1
    # Boxes of different classes are moved apart, lest one pass let them suppress each other.
    kept = nms(boxes.clamp(0, 1) + 2 * classes.unsqueeze(1), scores)
    return boxes[kept], scores[kept], classes[kept]
