"""``mpdiag.record``: what a user asks for, and what is left behind."""

import random

import numpy as np
import pytest
import torch
from recorded import model_and_optimizer, rows, step, steps
from torch import nn

import mpdiag
from mpdiag.errors import RunExists, UsageError
from mpdiag.recording.step_tap import StepTap


def test_cadence_filters_and_limits(tmp_path):
    model, optimizer = model_and_optimizer()
    with mpdiag.record(model, optimizer, tmp_path / "run", every=3, include="0|^$", exclude="bias"):
        steps(7, model, optimizer)
    found = rows(tmp_path / "run")
    assert sorted(set(found["step"])) == [0, 3, 6]
    assert set(found["name"]) == {"", "0", "0.weight"}

    recorder = mpdiag.record(model, optimizer, tmp_path / "few", max_steps=2)
    shown = f"<Recorder of {str(tmp_path / 'few')!r}: "
    assert repr(recorder) == f"{shown}not started, 0 steps, 0 recorded>"
    with recorder:
        steps(1, model, optimizer)
        assert repr(recorder) == f"{shown}recording, 1 step, 1 recorded>"
        steps(6, model, optimizer)
    assert (recorder.steps_recorded, recorder.step) == (2, 7)
    assert repr(recorder) == f"{shown}complete, 7 steps, 2 recorded>"


BAD = {
    "every": [0, 1.5],
    "max_steps": [-1],
    "include": ["("],
    "operations": [-1],
    "budget": [0, -0.1, 1.5, "2%", True, float("nan")],
    "copy_budget": [-1, 0.5, "1 GB", True],
    "trace must be True or numbers of steps": [[-1], ["0"], [0.5], 3],
}


@pytest.mark.parametrize(
    ("words", "value"), [(k, bad) for k, those in BAD.items() for bad in those]
)
def test_an_option_that_makes_no_sense_is_refused(tmp_path, words, value):
    with pytest.raises(UsageError, match=words):
        mpdiag.record(*model_and_optimizer(), tmp_path / "bad", **{words.split()[0]: value})


def test_no_model_and_blocks_without_operations_are_refused(tmp_path):
    model, optimizer = model_and_optimizer()
    with pytest.raises(UsageError, match="Module"):
        mpdiag.record(3, optimizer, tmp_path / "bad")
    with pytest.raises(UsageError, match="leave operations=0 out"):
        mpdiag.record(model, optimizer, tmp_path / "bad", blocks=True, operations=0)


def test_a_run_is_never_overwritten_unasked(tmp_path):
    model, optimizer = model_and_optimizer()
    for _ in range(2):
        with mpdiag.record(model, optimizer, tmp_path / "run", overwrite=True):
            step(model, optimizer)
    with pytest.raises(RunExists, match="overwrite"):
        mpdiag.record(model, optimizer, tmp_path / "run")
    assert set(rows(tmp_path / "run")["step"]) == {0}


@pytest.mark.parametrize(
    ("error", "state"), [(KeyboardInterrupt, "interrupted"), (ZeroDivisionError, "failed")]
)
def test_a_training_that_fails_raises_its_own_error_and_leaves_a_good_run(tmp_path, error, state):
    model, optimizer = model_and_optimizer()
    with pytest.raises(error), mpdiag.record(model, optimizer, tmp_path / "run"):
        steps(2, model, optimizer)
        raise error
    assert mpdiag.open_run(tmp_path / "run").meta["state"] == state
    assert set(rows(tmp_path / "run")["step"]) == {0, 1}
    assert not nn.modules.module._global_forward_hooks


def test_random_state_of_python_and_numpy_is_untouched(tmp_path):
    model, optimizer = model_and_optimizer()
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002
    before = random.getstate(), np.random.get_state()[1].tolist()  # noqa: NPY002
    with mpdiag.record(model, optimizer, tmp_path / "run", every=1):
        step(model, optimizer)
    assert before == (random.getstate(), np.random.get_state()[1].tolist())  # noqa: NPY002


@pytest.mark.parametrize("setting", [{}, {"limit": float("inf"), "bounds": (0.0, float("inf"))}])
def test_a_training_that_becomes_nan_is_recorded_to_its_end(tmp_path, setting):
    """FP16 Adam divides 0 by 0, and what is measured of its weights is NaN; so may be a setting."""
    torch.manual_seed(0)
    model = nn.Linear(8, 4).half()
    optimizer = torch.optim.Adam([{"params": model.parameters(), **setting}], 1e-3)
    with mpdiag.record(model, optimizer, tmp_path / "run", every=1) as recorder:
        for _ in range(8):
            optimizer.zero_grad()
            (model(torch.randn(16, 8).half()).square().mean() * 1e-4).backward()
            optimizer.step()
    assert not model.weight.isfinite().all()
    assert recorder.failures == []
    assert mpdiag.open_run(tmp_path / "run").meta["steps_recorded"] == 8


def test_a_failed_look_at_an_optimizers_step_is_told_and_the_step_is_taken(tmp_path, monkeypatch):
    def fails(*_):
        raise RuntimeError("no look")

    monkeypatch.setattr(StepTap, "_before", fails)
    model, _ = model_and_optimizer()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    recorder = mpdiag.record(model, optimizer, tmp_path / "run")
    with pytest.warns(RuntimeWarning, match="no look"), recorder:
        steps(3, model, optimizer)
    assert [f["where"] for f in recorder.failures] == ["looking at an optimizer's step"]
    assert torch._C._len_torch_dispatch_stack() == 0
    assert mpdiag.open_run(tmp_path / "run").meta["steps_seen"] == 3


def test_a_run_names_the_device_it_was_recorded_on(tmp_path):
    model, optimizer = model_and_optimizer()
    with mpdiag.record(model, optimizer, tmp_path / "run"):
        step(model, optimizer)
    device = mpdiag.open_run(tmp_path / "run").meta["device"]
    assert (device["type"], device["threads"]) == ("cpu", torch.get_num_threads())
    assert device["name"]


def test_a_default_device_is_the_trainings_alone(tmp_path):
    """Scripts set one (``torch.set_default_device``): what a recorder makes must not lie there."""
    x = torch.randn(5, 8)
    weights = []
    for name, default in (("usual", "cpu"), ("other", "meta")):
        model, optimizer = model_and_optimizer()
        options = {"every": 1, "trace": True, "blocks": True}
        with (
            torch.device(default),
            mpdiag.record(model, optimizer, tmp_path / name, **options) as recorder,
        ):
            steps(3, model, optimizer, x)
        assert recorder.failures == []
        weights.append(model[0].weight)
    assert torch.equal(*weights)
    usual, other = (mpdiag.open_run(tmp_path / name) for name in ("usual", "other"))
    assert usual.frame().equals(other.frame())
    assert len(usual.trace()) == len(other.trace()) > 50
    assert usual.meta["trace"] == other.meta["trace"]
