"""Two models, two losses, two optimizers."""

from __future__ import annotations

import pytest
import torch

from mpdiag.plan import LossScalePlan, PrecisionPlan
from mpdiag.training.options import PrecisionOverrides
from mpdiag.training.trainer import MixedPrecision
from mpdiag.workloads.digits import digit_images
from mpdiag.workloads.protocol import mixed_step, start
from studies.workloads.dcgan import Dcgan, frechet_distance


def test_each_optimizer_holds_one_model_and_each_loss_steps_its_own():
    session = start(Dcgan(), steps=1, seed=0)
    gan, (first, second) = session.model, session.optimizers
    (batch,) = session.workload.batches(1, 0)
    losses = session.workload.losses(gan, batch)
    before = [p.detach().clone() for p in gan.generator.parameters()]
    next(losses).backward()
    assert all(p.grad is None for p in gan.generator.parameters())
    first.step()
    assert all(torch.equal(a, b) for a, b in zip(before, gan.generator.parameters(), strict=True))
    second.zero_grad()
    next(losses).backward()
    second.step()
    assert not any(
        torch.equal(a, b) for a, b in zip(before, gan.generator.parameters(), strict=True)
    )
    assert next(losses, None) is None


def test_the_generators_loss_sees_the_discriminators_new_weights():
    session = start(Dcgan(), steps=1, seed=0)
    (batch,) = session.workload.batches(1, 0)
    late = session.workload.losses(session.model, batch)
    next(late)
    with torch.no_grad():
        for p in session.model.discriminator.parameters():
            p.zero_()
    assert float(next(late).detach()) == pytest.approx(0.6931, abs=1e-3)  # no opinion: ln 2


def test_frechet_distance_of_gaussians_by_hand():
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(200_000, 2, generator=generator)
    b = 3 * torch.randn(200_000, 2, generator=generator) + torch.tensor([1.0, 2.0])
    # |(1, 2)|² + Σ (σ_a − σ_b)² = 5 + 2 · 4
    assert frechet_distance(a, b) == pytest.approx(13, rel=0.02)
    assert frechet_distance(a, a) == pytest.approx(0, abs=1e-9)


def test_real_digits_are_nearer_to_real_digits_than_an_untrained_generator_is():
    from studies.workloads.dcgan import _real

    held_out, directions = _real()
    train = (digit_images("train")[0] * 2 - 1).flatten(1).double()
    near = frechet_distance(train @ directions, held_out.double() @ directions)
    session = start(Dcgan(), steps=1, seed=0)
    assert near < 0.3 < session.evaluate()


def test_a_mixed_step_takes_both_and_is_the_plain_one_where_nothing_is_rounded():
    plain, mixed = (start(Dcgan(), steps=3, seed=1) for _ in range(2))
    losses = plain.run()
    plan = PrecisionPlan(loss_scale=LossScalePlan(method="constant", init_scale=1024.0))
    with MixedPrecision(
        mixed.model,
        mixed.optimizers,
        plan,
        level="O0",
        overrides=PrecisionOverrides(loss_scale=1024.0),
    ) as mp:
        assert mixed.run(take_step=mixed_step(mp)) == losses
        assert mp.steps == 6
    for a, b in zip(plain.model.parameters(), mixed.model.parameters(), strict=True):
        assert torch.equal(a, b)
