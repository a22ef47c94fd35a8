"""The one judgement of gradients: what it says, and what it leaves in them."""

import math

import pytest
import torch

from mpdiag.errors import UsageError
from mpdiag.training.judgement import (
    Clip,
    ForwardPass,
    Ranks,
    divided,
    judge_gradients,
    multiply,
    unscale,
)

ALONE = Ranks(torch.device("cpu"))


def judge(gradients, **options):
    return judge_gradients(gradients, **{"scale": 1.0, "ranks": ALONE, **options})


@pytest.mark.parametrize(
    ("gradients", "clip", "norm", "absmax", "clipped"),
    [
        ([[3.0, 0.0], [4.0]], Clip(norm=2.5), 5.0, 4.0, [pytest.approx(g) for g in ([1.5, 0], [2])]),
        ([[1.0, -8.0]], Clip(value=2.0), pytest.approx(65**0.5, rel=1e-7), 8.0, [[1.0, -2.0]]),
        (
            [[3.0 - 0.25j, -1.0 - 9.0j]], Clip(value=0.5), pytest.approx(91.0625**0.5, rel=1e-7), None,
            [[0.5 - 0.25j, -0.5 - 0.5j]],
        ),
    ],
)  # fmt: skip
def test_finite_gradients_are_measured_shown_and_clipped(gradients, clip, norm, absmax, clipped):
    held, shown = [torch.tensor(g) for g in gradients], []
    inspect = lambda seen: shown.extend(g.tolist() for g in seen)  # noqa: E731
    judged = judge(held, absmax=absmax is not None, clip=clip, inspect=inspect)
    assert (judged.finite, judged.bad_ranks, shown) == (True, (), gradients)
    assert judged.norm == norm
    assert judged.absmax == absmax or (absmax is None and math.isnan(judged.absmax))
    assert [g.tolist() for g in held] == clipped


def test_a_buffer_or_an_earlier_overflow_is_enough():
    spoiled = ForwardPass(sizes=[torch.tensor(math.nan)])
    judged = judge([torch.ones(2)], forward=spoiled)
    assert (judged.finite, judged.forward_failed) == (False, True)
    was_so_before = ForwardPass(sizes=[torch.tensor(math.nan)], spoiled=lambda: False)
    assert judge([torch.ones(2)], forward=was_so_before).finite
    judged = judge([torch.ones(2)], known_bad=True)
    assert (judged.finite, judged.forward_failed) == (False, False)


def test_a_loss_that_is_not_finite_is_enough_and_losses_keep_their_digits():
    seen = []
    losses = [torch.tensor(1.0, dtype=torch.float16), torch.tensor(0.1, dtype=torch.float64)]
    assert judge([torch.ones(2)], forward=ForwardPass(losses, note_losses=seen.extend)).finite
    assert seen == [1.0, 0.1]
    judged = judge([torch.ones(2)], forward=ForwardPass([*losses, torch.tensor(-math.inf)]))
    assert (judged.finite, judged.forward_failed) == (False, True)


@pytest.mark.parametrize("scale", [8.0, 3.0, 2.0**-40, 2.0**-140])
def test_gradients_are_divided_by_any_scale(scale):
    gradients = [torch.tensor([24.0, 0.0]), torch.full((2, 2), 3.0)]
    expected = [(g.double() / scale).float() for g in gradients]
    copies = [divided(g, scale) for g in gradients]
    unscale(gradients, scale)
    for found in (gradients, copies):
        torch.testing.assert_close(found, expected, rtol=2e-7, atol=0)


@pytest.mark.parametrize("limits", [{"norm": 0.0}, {"value": -1.0}, {"norm": math.nan}])
def test_limits_that_make_no_sense_are_refused(limits):
    with pytest.raises(UsageError, match="above 0"):
        Clip(**limits)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_gradients_are_multiplied_by_a_factor_that_is_not_rounded(dtype):
    values = torch.randn(4096, generator=torch.Generator().manual_seed(0)).to(dtype)
    expected = [(values.double() * factor).float().to(dtype) for factor in (0.7, 0.337891234)]
    for factor, right in zip((0.7, 0.337891234), expected, strict=True):
        found = [values.clone(), values.clone().view(64, 64)]
        multiply(found, factor)
        for gradient in found:
            exact = (gradient.flatten() == right).float().mean()
            assert exact > 0.999  # FP32 arithmetic, rounded once more
