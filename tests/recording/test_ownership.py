"""Two processes that record into one folder: the one that was told to overwrite has it for itself."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

import mpdiag
from mpdiag.recording import ledger
from mpdiag.recording.run_folder import is_replaced
from mpdiag.runs.run import open_run


@pytest.fixture
def training(tmp_path):
    """Begin a recording into the same folder; returns it and a function that takes steps."""

    def begin(width, **options):
        model = nn.Linear(width, width)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        recorder = mpdiag.record(model, optimizer, tmp_path / "run", every=1, **options).start()

        def steps(count):
            for _ in range(count):
                optimizer.zero_grad()
                model(torch.randn(2, width)).square().mean().backward()
                optimizer.step()

        return recorder, steps

    return begin


@pytest.mark.parametrize("flush_rows", [1, 10**6], ids=["while it trains", "at its end"])
def test_who_was_overwritten_writes_nothing_more(training, monkeypatch, flush_rows):
    first, train_first = training(8)
    train_first(2)
    second, train_second = training(16, overwrite=True)
    train_second(1)
    monkeypatch.setattr(ledger, "_FLUSH_ROWS", flush_rows)
    with pytest.warns(RuntimeWarning, match="another process has replaced the run"):
        train_first(3)
        first.close()
    train_second(2)
    second.close()
    run = open_run(first.folder)
    assert run.meta["state"] == "complete"
    assert run.meta["failures"] == []
    assert np.unique(run.records.step).tolist() == [0, 1, 2]
    weights = run.records.select(run.records.of_kind("weight"))
    assert set(weights.numel.tolist()) == {16, 16 * 16}
    assert {row["numel"] for row in run.modules() if row["what"] == "parameter"} == {16, 256}


def test_nobody_looks_where_nothing_is(tmp_path):
    assert not is_replaced(tmp_path, 0, "now")
    (tmp_path / "meta.json").write_text("{}")
    assert not is_replaced(tmp_path, 0, "now")
    (tmp_path / "meta.json").write_text('{\n  "created": "then"\n}')
    assert is_replaced(tmp_path, 0, "now")
    assert not is_replaced(tmp_path, 0, "then")
    assert not is_replaced(tmp_path, 1, "now")
