"""``mpdiag.record``: what a user asks for, and what is left behind."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from recorded import model_and_optimizer, rows, step, steps
from torch import nn

import mpdiag
from mpdiag.errors import RunExists, UsageError


def test_cadence_filters_and_limits(tmp_path):
    model, optimizer = model_and_optimizer()
    with mpdiag.record(model, optimizer, tmp_path / "run", every=3, include="0|^$", exclude="bias"):
        steps(7, model, optimizer)
    found = rows(tmp_path / "run")
    assert sorted(set(found["step"])) == [0, 3, 6]
    assert set(found["name"]) == {"", "0", "0.weight"}

    with mpdiag.record(model, optimizer, tmp_path / "few", max_steps=2) as recorder:
        steps(7, model, optimizer)
    assert (recorder.steps_recorded, recorder.step) == (2, 7)

    for bad in ({"every": 0}, {"every": 1.5}, {"max_steps": -1}, {"include": "("}):
        with pytest.raises(UsageError, match=next(iter(bad))):
            mpdiag.record(model, optimizer, tmp_path / "bad", **bad)
    with pytest.raises(UsageError, match="Module"):
        mpdiag.record(3, optimizer, tmp_path / "bad")


@pytest.mark.parametrize(
    ("every", "expected"), [(1, range(45)), (7, range(0, 45, 7)), (None, None)]
)
def test_exactly_the_steps_of_the_cadence(tmp_path, every, expected):
    model, optimizer = model_and_optimizer()
    with mpdiag.record(model, optimizer, tmp_path / "run", every=every) as recorder:
        steps(45, model, optimizer)
    # Without every=: the first 20 steps, then one of 20 to 39, and of 40 to 59 the last.
    expected = [*range(20), 30] if expected is None else list(expected)
    for kind in ("activation", "activation_grad", "weight", "weight_grad", "update"):
        assert sorted(set(rows(tmp_path / "run", kind=kind)["step"])) == expected, kind
    assert recorder.steps_recorded == len(expected)


def test_a_run_is_never_overwritten_unasked(tmp_path):
    model, optimizer = model_and_optimizer()
    for _ in range(2):
        with mpdiag.record(model, optimizer, tmp_path / "run", overwrite=True):
            step(model, optimizer)
    with pytest.raises(RunExists, match="overwrite"):
        mpdiag.record(model, optimizer, tmp_path / "run")
    assert set(rows(tmp_path / "run")["step"]) == {0}


def test_an_interrupted_training_leaves_a_good_run(tmp_path):
    model, optimizer = model_and_optimizer()
    with pytest.raises(KeyboardInterrupt), mpdiag.record(model, optimizer, tmp_path / "run"):
        steps(2, model, optimizer)
        raise KeyboardInterrupt
    run = mpdiag.open_run(tmp_path / "run")
    assert run.meta["state"] == "interrupted"
    assert set(run.frame()["step"]) == {0, 1}


def test_a_failing_training_raises_its_own_error_and_leaves_a_good_run(tmp_path):
    model, optimizer = model_and_optimizer()
    with pytest.raises(ZeroDivisionError), mpdiag.record(model, optimizer, tmp_path / "run"):
        step(model, optimizer)
        raise ZeroDivisionError
    assert mpdiag.open_run(tmp_path / "run").meta["state"] == "failed"
    assert set(rows(tmp_path / "run")["step"]) == {0}
    assert not nn.modules.module._global_forward_hooks


@pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore:Using `torch.compile.module.` when"
)
def test_compiled_models_say_so_and_train(tmp_path):
    model, optimizer = model_and_optimizer()
    compiled = torch.compile(model, backend="eager")
    with mpdiag.record(compiled, optimizer, tmp_path / "before") as recorder:
        step(compiled, optimizer)
    assert recorder.failures == []
    reasons = [
        r["reason"] for r in mpdiag.open_run(tmp_path / "before").meta["coverage"]["not_recorded"]
    ]
    assert any("compiled" in reason for reason in reasons)
    assert len(rows(tmp_path / "before", kind="update")) == 4

    model, optimizer = model_and_optimizer()
    with mpdiag.record(model, optimizer, tmp_path / "after") as recorder:
        compiled = torch.compile(model, backend="eager")
        step(compiled, optimizer)
    assert recorder.failures == []
    assert len(rows(tmp_path / "after", kind="update")) == 4


def test_random_state_of_python_and_numpy_is_untouched(tmp_path):
    model, optimizer = model_and_optimizer()
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002
    before = random.getstate(), np.random.get_state()[1].tolist()  # noqa: NPY002
    with mpdiag.record(model, optimizer, tmp_path / "run", every=1):
        step(model, optimizer)
    assert before == (random.getstate(), np.random.get_state()[1].tolist())  # noqa: NPY002
