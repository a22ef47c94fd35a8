"""Several trainings at once, each in a process of its own on one thread.

The demo's models are small: two threads share one of their convolutions worse than two trainings share
two cores. A process starts afresh (``spawn``), since a fork of one that has computed with threads may
hang.
"""

from __future__ import annotations

import os
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from multiprocessing import get_context
from threading import Thread
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from multiprocessing.queues import SimpleQueue


class Bars(Protocol):
    """What of ``rich.progress.Progress`` a training uses."""

    def add_task(self, description: str, *, total: float | None, loss: float) -> Any:
        """A new bar; returns what names it."""

    def update(self, task_id: Any, *, completed: float, loss: float) -> None:
        """Move a bar."""


@dataclass(frozen=True)
class _SentBars:
    """Bars that another process shows."""

    queue: SimpleQueue[Any]
    parent: int

    def add_task(self, description: str, *, total: float | None, loss: float) -> str:
        """See ``Bars``; the bar is named by its description."""
        self.queue.put(("add_task", description, {"total": total, "loss": loss}))
        return description

    def update(self, task_id: str, *, completed: float, loss: float) -> None:
        """See ``Bars``. A training whose parent has gone ends: nobody waits for it."""
        if os.getppid() != self.parent:
            os._exit(1)
        self.queue.put(("update", task_id, {"completed": completed, "loss": loss}))


def train_at_once(
    train: Callable[..., Any], trainings: Sequence[tuple[Any, ...]], bars: Bars
) -> list[Any]:
    """Run several trainings at the same time.

    Args:
        train: A function of a module, called with a training's words and, last, its ``Bars``.
        trainings: The words of each; they travel to its process.
        bars: Where progress is shown.

    Returns:
        What ``train`` returned, in the same order.

    Raises:
        Exception: What the first failing training raised; the others are not waited for.
    """
    context = get_context("spawn")
    queue = context.SimpleQueue()
    with _shown(queue, bars), ExitStack() as pools:
        # A pool for each: in a pool of several, a process that is done early would take a second one.
        futures = [
            pools.enter_context(
                ProcessPoolExecutor(1, context, _begin, (queue, os.getpid()))
            ).submit(_train, train, words)
            for words in trainings
        ]
        return [future.result() for future in futures]


_bars: _SentBars | None = None


def _begin(queue: SimpleQueue[Any], parent: int) -> None:
    """What a new process does first."""
    import torch

    global _bars  # noqa: PLW0603
    _bars = _SentBars(queue, parent)
    torch.set_num_threads(1)


def _train(train: Callable[..., Any], words: tuple[Any, ...]) -> Any:
    return train(*words, _bars)


@contextmanager
def _shown(queue: SimpleQueue[Any], bars: Bars) -> Iterator[None]:
    """Show what arrives in the queue until the end of the context."""

    def show() -> None:
        names: dict[str, Any] = {}
        while (message := queue.get()) is not None:
            what, name, values = message
            if what == "add_task":
                names[name] = bars.add_task(name, **values)
            else:
                bars.update(names[name], **values)

    thread = Thread(target=show, daemon=True)
    thread.start()
    try:
        yield
    finally:
        queue.put(None)
        thread.join()
