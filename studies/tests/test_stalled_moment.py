"""The study's two optimizers differ in one state's dtype alone, and its trainings in nothing else."""

import pytest
import torch

from studies import stalled_moment as study


@pytest.mark.parametrize("name", study.TRAININGS)
def test_both_sides_train_on_the_same(name):
    first, second = (study.TRAININGS[name](1, steps=3) for _ in range(2))
    for a, b in zip(first[1], second[1], strict=True):
        assert torch.equal(a, b)


def test_the_bf16_moment_is_adams_rounded(tmp_path):
    net, losses = study.jump(0, steps=4)
    optimizer = study.adamw(net, torch.bfloat16)
    p = net[0].weight
    expected = torch.zeros_like(p, dtype=torch.bfloat16)
    for loss in losses:
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        expected = (expected * 0.999).float() + 0.001 * p.grad * p.grad
        expected = expected.bfloat16()
    moment = optimizer.state[p]["exp_avg_sq"]
    assert moment.dtype == torch.bfloat16
    assert torch.allclose(moment.float(), expected.float(), rtol=2**-7)


def test_the_audit_speaks_of_the_bf16_side(tmp_path):
    row = study.train("jump", 0, torch.bfloat16, tmp_path / "run", steps=110)
    (said,) = row["audit"]
    assert said.startswith("AdamW's exp_avg_sq in BF16 cannot fall by its factor 0.999")
    assert len(row["state over FP32's"]) == 1
    assert "audit" not in study.train("digits", 0, torch.float32, steps=3)
