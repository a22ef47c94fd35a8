"""``mpdiag why``: which layer is meant."""

import torch
from calls import run

import mpdiag


def test_one_step_without_a_loss_is_told_as_one(tmp_path):
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with mpdiag.record(model, optimizer, tmp_path / "one"):
        model(torch.ones(2, 4)).square().mean().backward()
        optimizer.step()
    done = run("why", str(tmp_path / "one"))
    assert done.exit_code == 0
    assert "without a loss scale, step 0\n" in done.stdout
    assert "at most" not in done.stdout  # of several steps
    assert "this layer decides the loss scale and loses nothing" in done.stderr
