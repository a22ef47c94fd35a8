"""Notice when a script calls ``torch.compile``.

Operations are recorded by a dispatch mode, and under one ``torch.compile`` runs code eagerly: the
results of those steps would be the eager ones, which differ in their last bits.
"""

from __future__ import annotations

import functools
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable


class CompileWatch:
    """Sees calls of ``torch.compile`` that torch does not make itself.

    Args:
        on_first: Called at the first one.

    Attributes:
        place: Where the first call stands, ``file:line``; empty before it.
    """

    def __init__(self, on_first: Callable[[], None]) -> None:
        self._on_first = on_first
        self._plain: Any = None
        self.place = ""

    @property
    def seen(self) -> bool:
        """Whether the script has compiled something."""
        return bool(self.place)

    @property
    def reason(self) -> str:
        """Why no operations are recorded, as a sentence."""
        return (
            f"the script compiles ({self.place}), and compiled code shows no operations: record it "
            "without torch.compile"
        )

    def attach(self) -> None:
        """Wrap ``torch.compile``; torch has been imported."""
        import torch

        plain = self._plain = torch.compile

        @functools.wraps(plain)
        def compile_(*args: Any, **kwargs: Any) -> Any:
            self._called(sys._getframe(1))
            return plain(*args, **kwargs)

        torch.compile = compile_

    def detach(self) -> None:
        """Put the original ``torch.compile`` back; a second call does nothing."""
        if self._plain is not None:
            import torch

            torch.compile, self._plain = self._plain, None

    def _called(self, frame: Any) -> None:
        if frame.f_globals.get("__name__") == "torch.nn.modules.module":  # model.compile()
            frame = frame.f_back
        elif str(frame.f_globals.get("__name__", "")).partition(".")[0] == "torch":
            return
        if not self.place:
            self.place = f"{frame.f_code.co_filename}:{frame.f_lineno}"
            self._on_first()
