"""After the first steps on a GPU: are Tensor Cores in use, and if not, why not? One line, logged once.

One warmed-up step runs under torch.profiler. An error here never reaches the
training: it becomes the reason why there is no answer.
"""

import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from mpdiag.display.wording import percent
from mpdiag.profiler import is_installed, profile

FIRST = 5
"""Steps to let pass: by then cuDNN has chosen its algorithms and caches are filled."""
HARDLY = 0.05
"""Share of kernel time below which Tensor Cores are called unused."""

logger = logging.getLogger("mpdiag")

Measure = Callable[[], Any]
"""Makes what measures a step: ``__enter__``, ``step``, ``__exit__``, ``measured`` and ``result``."""


@dataclass(frozen=True)
class TensorCoreUse:
    """Whether a training uses Tensor Cores.

    Attributes:
        in_use: None where it could not be found out.
        fraction: Share of kernel time on Tensor Cores.
        message: One line, with the cause and the fix where they are not in use.
        at_step: The step that was measured.
    """

    in_use: bool | None
    fraction: float | None
    message: str
    at_step: int

    def to_json(self) -> dict[str, Any]:
        """A line of ``training.jsonl``."""
        return {"check": "tensor_cores", **asdict(self)}


class TensorCoreCheck:
    """Lets a training's first steps pass and measures one.

    Attributes:
        use: The answer; None before there is one.

    Args:
        measure: What measures a step.
        first: Steps to let pass.
    """

    def __init__(self, measure: Measure, first: int = FIRST) -> None:
        self.use: TensorCoreUse | None = None
        self._measure = measure
        self._first = first
        self._running: Any = None
        self._over = False

    def after_step(self, steps: int) -> TensorCoreUse | None:
        """Count a step; measure the one that is due.

        Returns:
            The answer, in the call that finds it.
        """
        if self._over or steps < self._first:
            return None
        try:
            if self._running is None:
                self._running = self._measure()
                self._running.__enter__()
                return None
            self._over = True
            running, self._running = self._running, None
            running.step()
            running.__exit__(None, None, None)
            self.use = judge_use(running.result.to_json(), steps - 1)
        except Exception as error:  # noqa: BLE001 - a check must never end a training
            self._over = True
            self._running = None
            reason = " ".join(str(error).split()) or type(error).__name__
            self.use = TensorCoreUse(None, None, f"Tensor Cores not checked: {reason}", steps - 1)
        level = logging.WARNING if self.use.in_use is False else logging.INFO
        logger.log(level, "%s", self.use.message)
        return self.use

    def close(self) -> None:
        """Stop measuring, where training ends before the measured step."""
        running, self._running, self._over = self._running, None, True
        if running is not None:
            try:
                running.__exit__(None, None, None)
            except Exception as error:  # noqa: BLE001 - as above
                logger.info("Tensor Cores not checked: %s", error)


def judge_use(document: Mapping[str, Any], step: int) -> TensorCoreUse:
    """The answer from a profile.

    Args:
        document: As ``mpdiag profile --json`` prints it.
        step: The step that was measured.
    """
    fraction = float(document["tensor_core_fraction"])
    share = percent(fraction, 0)
    if fraction >= HARDLY:
        return TensorCoreUse(True, fraction, f"Tensor Cores in use: {share} of kernel time", step)
    message = f"Tensor Cores not in use ({share} of kernel time)"
    unknown = float(document.get("unknown_fraction") or 0.0)
    if unknown > 0.5:
        message = (
            f"Tensor Cores: {percent(unknown, 0)} of kernel time is in kernels of unknown names"
        )
        return TensorCoreUse(None, fraction, message, step)
    cause = next(
        (
            o
            for o in document.get("operations") or []
            if o.get("cause") not in {None, "none", "outside", "unknown"}
        ),
        None,
    )
    if cause is not None:
        where = f" of {cause['module']}" if cause.get("module") else ""
        name = str(cause.get("op")).removeprefix("aten::")
        message += f": {name}{where} ({cause['cause']}): {cause.get('fix') or 'see mpdiag profile'}"
    return TensorCoreUse(False, fraction, message, step)


def check_for(
    model: nn.Module, device: torch.device, *, native: bool, rank: int
) -> TensorCoreCheck | None:
    """The check of a training; None without a GPU or the profiler, or while another profiler runs.

    Args:
        model: The model; its modules are named.
        device: Where it lies.
        native: Whether the arithmetic is the device's own.
        rank: This process; the first alone looks.
    """
    busy = torch._C._autograd._profiler_enabled() or "NSYS_PROFILING_SESSION_ID" in os.environ
    if device.type != "cuda" or not native or rank != 0 or busy or not is_installed():
        return None
    return TensorCoreCheck(lambda: profile(model, steps=1, warmup=0))
