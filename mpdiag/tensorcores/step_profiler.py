"""Profiles a few warmed-up steps of a running program with torch.profiler, then judges them.

::

    with mpdiag.profile(model) as p:
        for x, y in loader:
            train_step(x, y)
            p.step()          # optional if an optimizer steps
            if p.done:
                break
    print(p.result.verdict)

On a GPU the trace is read like any other, and ``result`` is its ``Profile``. On a CPU oneDNN's log is
captured as well, and ``result`` is a ``CpuProfile``; both have ``to_json``. The steps before the window
are not profiled, so that the measured ones are warm.
"""

import json
import os
import re
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from mpdiag.display.wording import counted
from mpdiag.errors import UsageError
from mpdiag.profiler import STEPS, WARMUP
from mpdiag.tensorcores.cpu import matrix_unit
from mpdiag.tensorcores.cpu.onednn import StdoutCapture, read_log
from mpdiag.tensorcores.cpu.operators import MODULE, operator_times
from mpdiag.tensorcores.inductor_code import LOG_FOLDER, read_fused
from mpdiag.tensorcores.trace_analysis import profile_trace
from mpdiag.tracing.dispatch import is_traced
from mpdiag.tracing.names import type_name
from mpdiag.tracing.source_lines import is_inner_step
from mpdiag.tracing.uncompiled import watch_calls


class StepProfiler:
    """Counts the steps of a training and profiles some of them.

    Attributes:
        steps, warmup: Number of steps to measure, and of steps before them.
        seen: Number of steps so far.
        measured: How many whole steps were measured.

    Args:
        model: The model whose modules are named in the result; if None, each outermost module that
            runs names its own.
        steps: How many to measure.
        warmup: How many steps to skip first.
        folder: The folder for the trace and the log; default: a temporary folder.
        on_done: Called after the last step.
    """

    def __init__(
        self,
        model: nn.Module | None = None,
        *,
        steps: int = STEPS,
        warmup: int = WARMUP,
        folder: Path | None = None,
        on_done: Callable[[], None] | None = None,
    ) -> None:
        _check(steps, 1, "steps")
        _check(warmup, 0, "warmup")
        self.steps = steps
        self.warmup = warmup
        self.seen = 0
        self._names = _Names(model)
        self._folder = folder
        self._on_done = on_done
        self._temporary: tempfile.TemporaryDirectory[str] | None = None
        self._window: _Window | None = None
        self.measured = 0
        self._counts_itself = True
        self._optimizer: int | None = None
        self._hook: Any = None
        self._result: Any = None

    # -- steps -------------------------------------------------------------------------------------

    def step(self) -> None:
        """Mark the end of a step; after the first call, optimizer steps are no longer counted."""
        if self._counts_itself:
            self._counts_itself = False
            if self.seen:  # the optimizer's hook has counted this step already
                return
        self._advance()

    @property
    def done(self) -> bool:
        """Whether all requested steps have been measured."""
        return self.measured >= self.steps

    def _after_optimizer(self, optimizer: Any, *_: Any) -> None:
        if not self._counts_itself or is_inner_step(optimizer):
            return
        self._optimizer = self._optimizer or id(optimizer)
        # Of several optimizers, only the first one's steps count.
        if id(optimizer) == self._optimizer:
            self._advance()

    def _advance(self) -> None:
        self.seen += 1
        if self._window is not None:
            self.measured += 1
            if self.done:
                self._close()
                if self._on_done is not None:
                    self._on_done()
            else:
                self._window.mark()
        elif self.seen >= self.warmup and not self.done:
            self._open()

    # -- the window --------------------------------------------------------------------------------

    def _open(self) -> None:
        if self._folder is None:
            self._temporary = tempfile.TemporaryDirectory(prefix="mpdiag-")
            self._folder = Path(self._temporary.name)
        self._window = _Window(self._folder, self._names)
        self._window.open()

    def _close(self) -> None:
        window, self._window = self._window, None
        if window is not None:
            window.close()

    def __enter__(self) -> "StepProfiler":  # noqa: PYI034 - typing.Self is Python 3.11's
        """Start counting steps."""
        self._hook = register_optimizer_step_post_hook(self._after_optimizer)
        self._names.attach()
        if self.warmup == 0:
            self._open()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Stop and read the capture; an exception in the block propagates."""
        self._hook.remove()
        self._names.detach()
        try:
            self._close()
            if self._temporary is not None and kind is None and self.measured:
                self._result = read_capture(self._folder or Path(), self.measured)
        finally:
            if self._temporary is not None:
                self._temporary.cleanup()

    @property
    def result(self) -> Any:
        """The verdict: a ``Profile``, on a CPU a ``CpuProfile``.

        Raises:
            UsageError: If no step was measured, or the block has not ended.
        """
        if self._result is None:
            raise UsageError(nothing_measured(self.seen, self.warmup))
        return self._result


def nothing_measured(seen: int, warmup: int) -> str:
    """Why there is no result, in one sentence."""
    if not seen:
        return (
            "no step was seen, and no optimizer stepped; call p.step() after each step inside "
            "`with mpdiag.profile(model) as p:`"
        )
    return (
        f"only {counted(seen, 'step')} ran, and the first {warmup} are for warming up: run more "
        "steps, or lower warmup"
    )


def _check(value: Any, least: int, name: str) -> None:
    if type(value) is not int or value < least:
        raise UsageError(f"{name} must be a whole number of at least {least}, not {value!r}")


class _Window:
    """The profiled steps: writes trace.json, and on a CPU also onednn.log."""

    def __init__(self, folder: Path, names: "_Names") -> None:
        self.folder = folder
        self._names = names
        self._gpu = names.on_gpu
        self._stdout = None if self._gpu else StdoutCapture()
        activities = [torch.profiler.ProfilerActivity.CPU]
        if self._gpu:
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        else:  # else kineto writes two lines of its own (USDT) to stderr
            os.environ.setdefault("KINETO_LOG_LEVEL", "6")
        self._profiler = torch.profiler.profile(activities=activities, record_shapes=True)
        self._step: Any = None
        self._number = 0

    def open(self) -> None:
        """Start; the profiler is started last so that it does not see the set-up."""
        if self._gpu:
            torch.cuda.synchronize()
        else:
            torch._C._verbose.mkldnn_set_verbose(1)
        if self._stdout is not None:
            self._stdout.open()
        self._names.recorded = True
        try:
            self._profiler.start()
        except RuntimeError as error:
            self._restore()
            message = f"torch.profiler does not start ({error}): is another profiler running?"
            raise UsageError(message) from error
        self.mark()

    def mark(self) -> None:
        """End a step and begin the next, in the words of torch.profiler's own marks."""
        self._end_step()
        self._step = torch.profiler.record_function(f"ProfilerStep#{self._number}")
        self._step.__enter__()
        self._number += 1

    def _end_step(self) -> None:
        step, self._step = self._step, None
        if step is not None:
            step.__exit__(None, None, None)

    def close(self) -> None:
        """Stop, and write the files."""
        try:
            self._end_step()
            if self._gpu:
                torch.cuda.synchronize()
            self._profiler.stop()
        finally:
            log = self._restore()
        raw = self.folder / "raw.json"
        self._profiler.export_chrome_trace(str(raw))
        _name_modules(raw, self.folder / "trace.json")
        raw.unlink()
        if not self._gpu:
            (self.folder / "onednn.log").write_text("".join(log), encoding="utf-8")

    def _restore(self) -> list[str]:
        self._names.stop()
        if self._stdout is None:
            return []
        torch._C._verbose.mkldnn_set_verbose(0)
        return self._stdout.close()


class _Names:
    """Adds module spans to the trace, with the names that ``named_modules`` gives."""

    def __init__(self, model: nn.Module | None) -> None:
        self._names: dict[int, str] = {}
        self._roots: set[int] = set()
        self._threads = threading.local()  # recomputation in backward runs modules in other threads
        self._handles: list[Any] = []
        self.recorded = False
        self._device: str | None = None
        if model is not None:
            self._device = next((p.device.type for p in model.parameters()), None)
            self._learn(model)

    @property
    def on_gpu(self) -> bool:
        """Whether the steps run on a GPU: by the model's device, else by whether CUDA is in use."""
        if self._device is not None:
            return self._device == "cuda"
        return torch.cuda.is_available() and torch.cuda.is_initialized()

    def _learn(self, root: nn.Module) -> None:
        self._roots.add(id(root))
        for name, module in root.named_modules():
            self._names.setdefault(id(module), name or type_name(root))

    def attach(self) -> None:
        """Hook every module's forward: before the warm-up, since compiled code is compiled again."""
        self._handles = watch_calls(self._enter, self._leave)

    def detach(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def stop(self) -> None:
        """Add no more spans, and close open ones."""
        self.recorded = False
        while self._open:
            self._open.pop()[1].__exit__(None, None, None)

    @property
    def _open(self) -> list[tuple[int, Any]]:
        """The spans open on this thread."""
        found: list[tuple[int, Any]] = self._threads.__dict__.setdefault("spans", [])
        return found

    def _enter(self, module: nn.Module, _inputs: Any) -> None:
        if is_traced() or not self.recorded:
            return
        if id(module) not in self._names:
            self._learn(module)
        span = torch.profiler.record_function(MODULE + self._names[id(module)])
        span.__enter__()
        self._open.append((id(module), span))

    def _leave(self, module: nn.Module, _inputs: Any, _output: Any) -> None:
        if not is_traced() and self._open and self._open[-1][0] == id(module):
            self._open.pop()[1].__exit__(None, None, None)


_ANNOTATION = re.compile(r'"cat": "user_annotation"(?=, "name": "nn\.Module: )')


def _name_modules(source: Path, target: Path) -> None:
    """Copy a trace, turning our spans into the events that torch writes for modules."""
    with (
        source.open(encoding="utf-8", errors="replace") as lines,
        target.open("w", encoding="utf-8") as out,
    ):
        out.writelines(_ANNOTATION.sub('"cat": "python_function"', line) for line in lines)


def read_capture(folder: Path, steps: int) -> Any:
    """Judge what was captured into a folder."""
    trace, log = folder / "trace.json", folder / "onednn.log"
    if not log.is_file():
        compiled = folder / LOG_FOLDER
        return profile_trace(trace, triton_code=compiled if read_fused(compiled) else None)
    read = read_log(log.read_text(encoding="utf-8", errors="replace").splitlines())
    events = json.loads(trace.read_text(encoding="utf-8", errors="replace"))["traceEvents"]
    return matrix_unit.join(operator_times(events), read, matrix_unit.cpu_facts(read), steps=steps)
