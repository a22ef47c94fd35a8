"""What fails while recording is said once, and training goes on."""

from __future__ import annotations

import pytest
import torch
from recorded import model_and_optimizer, step

import mpdiag
from mpdiag.recording.ledger import Ledger


def test_a_failing_hook_is_reported_once_and_training_goes_on(tmp_path, monkeypatch):
    plain, optimizer = model_and_optimizer()
    for _ in range(3):
        step(plain, optimizer)

    def fail(self, tensor):
        raise ZeroDivisionError("broken")

    monkeypatch.setattr(Ledger, "count", fail)
    model, optimizer = model_and_optimizer()
    with pytest.warns(RuntimeWarning, match="training goes on") as warned:  # noqa: SIM117
        with mpdiag.record(model, optimizer, tmp_path / "run", every=1):
            for _ in range(3):
                step(model, optimizer)
    assert len(warned) == 1
    assert all(
        torch.equal(a, b) for a, b in zip(plain.parameters(), model.parameters(), strict=True)
    )
