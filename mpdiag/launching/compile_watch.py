"""Notice that a script compiles.

Operations are recorded by a dispatch mode, and ``torch.compile`` runs eagerly what it meets under
one: the results of those steps would be the eager ones, other bits than the script gets alone.
"""

from __future__ import annotations

import functools
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable


class CompileWatch:
    """Sees calls of ``torch.compile`` that are not torch's own.

    Args:
        told: Called at the first one.

    Attributes:
        place: Where that was, ``file:line``; empty before.
    """

    def __init__(self, told: Callable[[], None]) -> None:
        self._told = told
        self._plain: Any = None
        self.place = ""

    @property
    def seen(self) -> bool:
        """Whether the script compiles."""
        return bool(self.place)

    @property
    def reason(self) -> str:
        """Why no operations are recorded, a sentence."""
        return (
            f"the script compiles ({self.place}), and compiled code shows no operations: record it "
            "without torch.compile"
        )

    def attach(self) -> None:
        """Begin to look; torch is there."""
        import torch

        plain = self._plain = torch.compile

        @functools.wraps(plain)
        def compile_(*args: Any, **kwargs: Any) -> Any:
            self._called(sys._getframe(1))
            return plain(*args, **kwargs)

        torch.compile = compile_

    def detach(self) -> None:
        """Give ``torch.compile`` back; twice does no harm."""
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
            self._told()
