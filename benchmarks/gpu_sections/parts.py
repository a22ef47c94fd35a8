"""The parts of a pass, the most important first: one child process each, with a time limit."""

from __future__ import annotations

from dataclasses import dataclass

_BASE = ("torch", "numpy", "numba")
_RUNS = (*_BASE, "pyarrow", "pandas")
_COMMANDS = (*_RUNS, "typer", "rich")


@dataclass(frozen=True)
class Part:
    """One child process of a pass.

    Attributes:
        key: The letter of its section, and its name.
        module: The module of ``gpu_sections`` it runs.
        function: What it runs there; takes a ``child.Context``.
        seconds: Time limit of a full pass.
        quick: Time limit with ``--quick``; 0: left out.
        needs: Packages without which it cannot run.
        wants: Packages without which some of its promises are not testable.
        deterministic: Whether cuBLAS is told to be (``CUBLAS_WORKSPACE_CONFIG``).
    """

    key: str
    module: str
    function: str
    seconds: float
    quick: float
    needs: tuple[str, ...] = _BASE
    wants: tuple[str, ...] = ()
    deterministic: bool = False

    @property
    def section(self) -> str:
        """The letter of its section."""
        return self.key.partition("-")[0]


PARTS: tuple[Part, ...] = (
    Part("a-counting", "counting", "count", 75, 30, wants=("triton",)),
    Part("b-identity", "recording", "compare_bits", 45, 18, _RUNS, deterministic=True),
    Part("d-equality", "equality", "compare_bits", 50, 20, _RUNS, deterministic=True),
    Part("e-verdicts", "tensor_cores", "judge", 55, 20, _BASE),
    Part("b-steps", "recording", "time_steps", 75, 22, _RUNS, wants=("tensorboard",)),
    Part("d-steps", "training", "time_steps", 60, 20, _BASE),
    Part("h-fp8", "fp8", "compare", 25, 15, _BASE, wants=("triton",)),
    Part("f-device", "device", "examine", 30, 15, _COMMANDS, wants=("pynvml",)),
    Part("e-command", "tensor_cores", "run_command", 45, 20, _COMMANDS),
    Part("c-language_model", "native", "language_model", 50, 0, _RUNS),
    Part("g-memory", "memory", "compare", 45, 0, _RUNS),
    Part("b-large", "recording", "time_large", 60, 0, _RUNS),
    Part("c-ssd", "native", "ssd", 60, 0, (*_RUNS, "sklearn")),
    Part("d-compile", "compiled", "train", 75, 0, _BASE, wants=("triton",)),
    Part("e-counters", "counters", "compare", 45, 0, _BASE),
    Part("i-families", "families", "train", 100, 0, _COMMANDS, wants=("sklearn",)),
)

FULL_SECONDS, QUICK_SECONDS = 480.0, 120.0
"""What a whole pass may take; the limits of its parts are longer, for most parts end earlier."""
LEAST_SECONDS = 8.0
"""Less than this is not worth starting a part for."""


def chosen(words: list[str] | None) -> tuple[Part, ...]:
    """The parts named by letters, sections or keys; all without any.

    Raises:
        ValueError: Naming the word that is none of these.
    """
    if not words:
        return PARTS
    for word in words:
        if not any(word in (p.key, p.section) for p in PARTS):
            known = ", ".join([*dict.fromkeys(p.section for p in PARTS), *(p.key for p in PARTS)])
            message = f"there is no section {word!r}: choose among {known}"
            raise ValueError(message)
    return tuple(p for p in PARTS if p.key in words or p.section in words)
