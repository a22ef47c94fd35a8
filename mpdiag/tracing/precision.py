"""What a training computes in: autocast that is on, and tensors in half precision.

A recording is of FP32 training only if neither is there. ``torch.autocast`` can be switched off for a
script that uses it: its regions are entered with ``enabled=False``, so that they compute as if they
were not there. Its ``GradScaler`` may stay, for it multiplies and divides by powers of two.
"""

import functools
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

import torch

HALF = frozenset({torch.float16, torch.bfloat16})
_DEVICE_TYPES = ("cpu", "cuda", "xpu", "mps", "hpu", "xla", "mtia", "privateuseone")


class PrecisionWatch:
    """Notes what is not FP32 in recorded forward passes.

    Args:
        off: Whether to switch the training's autocast off.
        say: Told, once for each dtype, that autocast is on in it.
        tell: Told in one line which precision the training has, after its first step.
        only: Says what ``--fp32`` switched off beside autocast, for ``meta.json``.

    Attributes:
        off: See above.
        say: See above.
        tell: See above.
        autocast: Dtypes in which autocast was on.
        modules: Names of modules that returned, or received a gradient of, half precision.
    """

    def __init__(
        self,
        *,
        off: bool = False,
        say: Callable[[str], None] | None = None,
        tell: Callable[[str], None] | None = None,
        only: Callable[[], dict[str, Any]] = dict,
    ) -> None:
        self._only = only
        self.off = off
        self.say = say
        self.tell = tell
        self.autocast: set[str] = set()
        self.modules: set[str] = set()
        self._inside: Callable[[], bool] = lambda: False

    def attach(self, inside: Callable[[], bool] | None = None) -> None:
        """Watch regions of autocast from now on.

        Args:
            inside: Whether a recorded forward pass is under way; unchanged if None.
        """
        self._inside = inside or self._inside
        if self not in _live:
            _live.append(self)
        region = torch.amp.autocast_mode.autocast
        if not hasattr(region.__enter__, "_mpdiag"):
            region.__enter__ = _watched(region.__enter__)  # type: ignore[method-assign]

    def detach(self) -> None:
        """Watch no more; torch's function is put back, unless it has been wrapped again since."""
        if self in _live:
            _live.remove(self)
        region = torch.amp.autocast_mode.autocast
        plain = getattr(region.__enter__, "_mpdiag", None)
        if plain is not None and not _live:
            region.__enter__ = plain  # type: ignore[method-assign]

    def look(self) -> None:
        """A module is called in a recorded forward pass: note the autocast that is on."""
        if _any_enabled():
            for dtype in _enabled():
                self._note(dtype)

    def entered(self, dtype: torch.dtype) -> None:
        """A region of autocast was entered."""
        if self._inside():
            self._note(dtype)

    def _note(self, dtype: torch.dtype) -> None:
        name = str(dtype).removeprefix("torch.")
        if dtype in HALF and name not in self.autocast:
            self.autocast.add(name)
            if self.say is not None:
                self.say(name)

    def to_json(self, models: Iterable[torch.nn.Module]) -> dict[str, Any]:
        """For ``meta.json``.

        Args:
            models: Of which the parameters are counted, in elements.
        """
        parameters = {id(p): p for model in models for p in model.parameters()}.values()
        return {
            "autocast": sorted(self.autocast),
            "half_parameters": sum(p.numel() for p in parameters if p.dtype in HALF),
            "half_parameter_count_total": sum(p.numel() for p in parameters),
            "half_modules": len(self.modules),
            "autocast_off": self.off,
            **self._only(),
        }


_live: list[PrecisionWatch] = []
_any_enabled: Callable[[], bool] = getattr(torch._C, "_is_any_autocast_enabled", lambda: True)


def _enabled() -> list[torch.dtype]:
    """The dtypes of autocast, of each type of device for which it is on."""
    found = []
    for device_type in _DEVICE_TYPES:
        with suppress(RuntimeError):  # this build of torch knows no autocast there
            if torch.is_autocast_enabled(device_type):
                found.append(torch.get_autocast_dtype(device_type))
    return found


def _watched(plain: Any) -> Any:
    @functools.wraps(plain)
    def enter(region: Any) -> Any:
        if not _live or not region._enabled:
            return plain(region)
        if any(watch.off for watch in _live):
            region._enabled = False
            try:
                return plain(region)
            finally:
                region._enabled = True
        entered = plain(region)
        for watch in _live.copy():
            watch.entered(region.fast_dtype)
        return entered

    enter._mpdiag = plain  # type: ignore[attr-defined]
    return enter
