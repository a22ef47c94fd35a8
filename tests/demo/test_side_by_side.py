"""Trainings at the same time: each in its own process, their progress in this one."""

from __future__ import annotations

import os
import time
from typing import Any

import pytest

from mpdiag.demo.workflow import Bars, train_at_once


class _Noted:
    """Bars that only remember."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def add_task(self, description: str, *, total: float | None, loss: float) -> str:
        self.calls.append(("add", description, total, loss))
        return description

    def update(self, task_id: str, *, completed: float, loss: float) -> None:
        self.calls.append(("update", task_id, completed, loss))


def _training(name: str, fails: bool, bars: Bars) -> tuple[str, int, int]:
    """Stands for a training: two steps, each of which is shown."""
    import torch

    task = bars.add_task(name, total=2, loss=0.0)
    for step in range(2):
        bars.update(task, completed=step + 1, loss=0.5)
        time.sleep(0.05)
    if fails:
        message = f"{name} failed"
        raise ValueError(message)
    return name, os.getpid(), torch.get_num_threads()


def test_each_training_has_a_process_and_one_thread_and_its_progress_is_shown() -> None:
    bars = _Noted()

    found = train_at_once(_training, [("a", False), ("b", False)], bars)

    assert [name for name, _, _ in found] == ["a", "b"]
    assert len({os.getpid(), *(process for _, process, _ in found)}) == 3
    assert [threads for _, _, threads in found] == [1, 1]
    for name in "ab":
        assert [call for call in bars.calls if call[1] == name] == [
            ("add", name, 2, 0.0),
            ("update", name, 1, 0.5),
            ("update", name, 2, 0.5),
        ]


def test_a_training_that_fails_says_so_here() -> None:
    with pytest.raises(ValueError, match="b failed"):
        train_at_once(_training, [("b", True)], _Noted())
