"""The denoiser's data and its metric."""

from __future__ import annotations

import math

import pytest
import torch

from studies.workloads.denoiser import TEST_COLUMNS, TRAIN_COLUMNS, Denoiser, photographs, psnr


def test_psnr_is_20_db_where_every_pixel_is_a_tenth_off() -> None:
    reference = torch.full((2, 3, 4, 4), 0.5)
    assert psnr(reference + 0.1, reference) == pytest.approx(20, abs=1e-4)


def test_psnr_against_its_formula() -> None:
    generator = torch.Generator().manual_seed(0)
    image, reference = torch.rand(2, 3, 8, 8, generator=generator).unbind(0)
    mse = float(((image - reference) ** 2).mean())
    assert psnr(image, reference) == pytest.approx(10 * math.log10(1 / mse), rel=1e-5)


def test_held_out_columns_are_apart_from_those_trained_on() -> None:
    assert TRAIN_COLUMNS.stop < TEST_COLUMNS.start
    assert photographs("train").shape == (2, 3, 427, 480)
    assert photographs("test").shape == (2, 3, 427, 144)


@pytest.mark.parametrize(
    ("size", "shape"), [("small", (64, 3, 48, 48)), ("large", (192, 3, 64, 64))]
)
def test_sizes(size: str, shape: tuple[int, ...]) -> None:
    noisy, clean = next(Denoiser(size=size).batches(1, seed=0))  # type: ignore[arg-type]
    assert noisy.shape == clean.shape == shape
    assert float((noisy - clean).std()) == pytest.approx(0.1, rel=0.01)
    assert 0 <= clean.min() <= clean.max() <= 1


def test_crops_are_pieces_of_the_photographs() -> None:
    _, clean = next(Denoiser().batches(1, seed=0))
    windows = (
        photographs("train").unfold(2, 48, 1).unfold(3, 48, 1)
    )  # a view: [2, 3, tops, lefts, 48, 48]
    first = clean[0]
    here = (windows[..., 0, 0] == first[:, 0, 0, None, None]).all(1).nonzero()
    assert any(torch.equal(windows[p, :, top, left], first) for p, top, left in here.tolist())


def test_doing_nothing_scores_the_noise() -> None:
    model = Denoiser().model()
    for parameter in model.parameters():
        torch.nn.init.zeros_(parameter)
    assert Denoiser().evaluate(model) == pytest.approx(20, abs=0.05)
