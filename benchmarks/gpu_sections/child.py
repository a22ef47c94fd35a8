"""Inside a part's process: the context its function gets, and the function's call.

Every check is written to a file as it is made, so what a part found before it was ended is kept.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpu_sections.parts import PARTS
from gpu_sections.promises import named

if TYPE_CHECKING:
    from collections.abc import Iterator


class Hopeless(Exception):
    """Nothing more can be settled in this process: the device is in a state of error."""


@dataclass
class Context:
    """What a part knows, and where it reports.

    Attributes:
        part: Its key.
        device: ``cpu`` or ``cuda``.
        quick: Whether to do less.
        report: The file that takes its lines.
        keep: The folder whose files outlive the pass.
        ends: When its time is up, on the clock of ``time.monotonic``.
        settled: The promises reported so far.
    """

    part: str
    device: str
    quick: bool
    report: Path
    keep: Path
    ends: float
    settled: set[str] = field(default_factory=set)

    @property
    def cuda(self) -> bool:
        """Whether this is a pass on a GPU, not a rehearsal."""
        return self.device == "cuda"

    @property
    def left(self) -> float:
        """Seconds until its time is up, less some to end in."""
        return self.ends - time.monotonic() - 3

    def sized(self, full: Any, quick: Any, rehearsal: Any) -> Any:
        """One of three sizes: of a full pass, a quick one, and a rehearsal."""
        return rehearsal if not self.cuda else quick if self.quick else full

    def check(
        self,
        promise: str,
        held: bool | None,
        figure: str,
        *,
        reason: str = "",
        raised: bool = False,
        **figures: Any,
    ) -> None:
        """Report a promise.

        Args:
            promise: Its id.
            held: None where it could not be tested, with a reason.
            figure: What was measured, in a few words.
            reason: What goes with it.
            raised: Whether the check ended in an exception.
            figures: What was measured, for the JSON document.
        """
        if named(promise).part != self.part:
            message = f"{promise} is not settled by {self.part}"
            raise ValueError(message)
        self.settled.add(promise)
        line = {"promise": promise, "held": None if held is None else bool(held)}
        line |= {"figure": figure, "reason": reason, "raised": raised, "figures": figures}
        self._write(line)

    def skip(self, reason: str, *promises: str) -> None:
        """Report promises that cannot be tested here."""
        for promise in promises:
            self.check(promise, None, "", reason=reason)

    def note(self, text: str) -> None:
        """Say something that belongs to no promise."""
        self._write({"note": text})

    def _write(self, line: dict[str, Any]) -> None:
        with self.report.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line, default=float) + "\n")
        print(json.dumps(line, default=float), flush=True)

    @contextmanager
    def settling(self, *promises: str) -> Iterator[None]:
        """Around checks: an exception settles those that were not reached, and goes no farther.

        Too little memory, or no C compiler for Triton and torch.compile, breaks no promise.

        Raises:
            Hopeless: After an error of CUDA, from which no later call recovers.
        """
        try:
            yield
        except Exception as error:
            import torch

            traceback.print_exc()
            text = " ".join(str(error).split())[:300]
            reason = f"the check raised {type(error).__name__}: {text}"
            lack = isinstance(error, torch.OutOfMemoryError) or "C compiler" in text
            for promise in promises:
                if promise not in self.settled:
                    self.check(promise, None if lack else False, "", reason=reason, raised=not lack)
            if lack:
                error.__traceback__ = None  # its frames hold the tensors
                error.__context__ = error.__cause__ = None
                gc.collect()
                torch.cuda.empty_cache()
            elif self.cuda and ("CUDA error" in text or "AcceleratorError" in type(error).__name__):
                raise Hopeless(reason) from error

    @contextmanager
    def folder(self) -> Iterator[Path]:
        """A temporary folder."""
        with tempfile.TemporaryDirectory(prefix="mpdiag-gpu-") as name:
            yield Path(name)


def end_with_parent() -> None:
    """End this process, and what it started, once the process that started it is gone."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os.killpg(os.getpgrp(), signal.SIGKILL)

    if os.getpgrp() == os.getpid():  # a group of its own: nobody else is in it
        threading.Thread(target=watch, daemon=True).start()


def main(words: list[str]) -> int:
    """Run a part: its key, the device, ``quick`` or ``full``, its seconds, and two paths."""
    end_with_parent()
    key, device, pace, seconds, report, keep = words
    part = next(p for p in PARTS if p.key == key)
    context = Context(
        key,
        device,
        pace == "quick",
        Path(report),
        Path(keep),
        time.monotonic() + float(seconds),
    )
    getattr(importlib.import_module(f"gpu_sections.{part.module}"), part.function)(context)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
