"""Pictures to find digits in: generated scenes of real digits.

The digits are scikit-learn's handwritten ones, stretched, placed and lit at random on a grey, noisy
ground. So the handwriting is real, but its positions are generated. A scene
is 64×64 pixels of 8 bits; each of its four quarters may hold one digit, so digits never overlap.
Scenes for training and for testing are made of different digits.
"""

from functools import lru_cache
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from mpdiag.workloads.digits import digit_images

SIDE = 64
"""Pixels along a scene's side."""
SLOTS = 4
"""The most digits a scene can hold."""

SMALLEST, LARGEST = 14 / SIDE, 30 / SIDE  # side of a digit's tile, as a fraction of the scene's


class Scenes(NamedTuple):
    """N scenes and what is in them."""

    images: Tensor
    """[N, 1, 64, 64], whole numbers from 0 to 255 as floats."""
    boxes: Tensor
    """[N, 4, 4]: each ink's corner box in fractions of the side; zeros in an empty slot."""
    labels: Tensor
    """[N, 4]: the digit plus 1, or 0 in an empty slot."""


def draw_scenes(
    count: int, generator: torch.Generator, part: Literal["train", "test"] = "train"
) -> Scenes:
    """`count` new scenes, decided by the generator alone."""
    tiles, digits = digit_images(part)

    def uniform(low: float, high: float, *shape: int) -> Tensor:
        return low + (high - low) * torch.rand(count, *shape, generator=generator)

    present = uniform(0, 1, SLOTS) < 0.6
    certain = torch.randint(SLOTS, (count,), generator=generator)
    present[torch.arange(count), certain] = True  # no scene is empty
    chosen = torch.randint(len(tiles), (count, SLOTS), generator=generator)

    height = uniform(SMALLEST, LARGEST, SLOTS)
    size = torch.stack([height * uniform(0.8, 1.05, SLOTS), height], dim=-1)  # [N, slots, (x, y)]
    quarter = torch.tensor([[0.0, 0.0], [0.5, 0.0], [0.0, 0.5], [0.5, 0.5]])
    corner = quarter + (0.5 - size) * uniform(0, 1, SLOTS, 2)

    ink = _stretch(tiles[chosen], corner, size) * (
        uniform(0.4, 0.7, SLOTS, 1, 1) * present[..., None, None]
    )
    ground = uniform(0, 0.3, 1, 1) + 0.04 * torch.randn(count, SIDE, SIDE, generator=generator)
    images = ((ground + ink.sum(dim=1)) * 255).round().clamp(0, 255).unsqueeze(1)

    low, high = _ink_bounds(part)[chosen].split(2, dim=-1)
    boxes = torch.cat([corner + low * size, corner + high * size], dim=-1)
    return Scenes(images, boxes * present[..., None], (digits[chosen] + 1) * present)


def _stretch(tiles: Tensor, corner: Tensor, size: Tensor) -> Tensor:
    """Draw the 8×8 tiles [N, S, 1, 8, 8] at their places on scenes of their own: [N, S, 64, 64]."""
    # For each pixel of the scene, the place in the tile (from -1 to 1) whose ink is seen there.
    pixels = (torch.arange(SIDE) + 0.5) / SIDE
    place = 2 * (pixels - corner.unsqueeze(-1)) / size.unsqueeze(-1) - 1  # [N, S, (x, y), 64]
    x, y = place.flatten(0, 1).unbind(dim=1)
    grid = torch.stack(
        [x[:, None, :].expand(-1, SIDE, -1), y[:, :, None].expand(-1, -1, SIDE)], dim=-1
    )
    drawn = F.grid_sample(tiles.flatten(0, 1), grid, align_corners=False)
    return drawn.reshape(*corner.shape[:2], SIDE, SIDE)


@lru_cache(maxsize=2)
def _ink_bounds(part: Literal["train", "test"]) -> Tensor:
    """Where each digit's ink is: corner boxes [N, 4] in fractions of the tile."""
    inked = digit_images(part)[0].squeeze(1) > 0.2

    def first_and_end(line: Tensor) -> tuple[Tensor, Tensor]:
        return line.int().argmax(1), line.shape[1] - line.flip(1).int().argmax(1)

    left, right = first_and_end(inked.any(dim=1))
    top, bottom = first_and_end(inked.any(dim=2))
    return torch.stack([left, top, right, bottom], dim=1) / 8
