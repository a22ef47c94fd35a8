"""What the callbacks that record share, whatever framework calls them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mpdiag.recording.recorder import record

if TYPE_CHECKING:
    import os

    from mpdiag.recording.recorder import Optimizers, Recorder
    from mpdiag.tracing.names import Models


class Recording:
    """Records a training; the framework's callback says when it begins and ends.

    Attributes:
        recorder: The recording, once training has begun.

    Args:
        run: The run folder, a path or a URL.
        options: As for ``mpdiag.record``: ``every``, ``include``, ``exclude``, ``max_steps``,
            ``overwrite``.
    """

    def __init__(self, run: str | os.PathLike[str], **options: Any) -> None:
        self.run = run
        self.options = options
        self.recorder: Recorder | None = None

    def begin(self, model: Models, optimizers: Optimizers) -> Recorder:
        """Begin to record a model and its optimizers."""
        self.recorder = record(model, optimizers, self.run, **self.options).start()
        return self.recorder

    def end(self, state: str = "complete") -> None:
        """Finish the run folder, if recording began."""
        if self.recorder is not None:
            self.recorder.close(state)
