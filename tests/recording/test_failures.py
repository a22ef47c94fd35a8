"""What fails while recording is said once, and training goes on."""

from __future__ import annotations

import pytest
import torch
from recorded import model_and_optimizer, steps

import mpdiag
from mpdiag.recording.ledger import Ledger


def test_a_failing_hook_is_reported_once_and_training_goes_on(tmp_path, monkeypatch):
    plain, optimizer = model_and_optimizer()
    steps(3, plain, optimizer)

    def fail(self, tensor):
        raise ZeroDivisionError("broken")

    monkeypatch.setattr(Ledger, "count", fail)
    model, optimizer = model_and_optimizer()
    with pytest.warns(RuntimeWarning, match="training goes on") as warned:  # noqa: SIM117
        with mpdiag.record(model, optimizer, tmp_path / "run", every=1):
            steps(3, model, optimizer)
    assert len(warned) == 1
    assert all(map(torch.equal, plain.parameters(), model.parameters()))
