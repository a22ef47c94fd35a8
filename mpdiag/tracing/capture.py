"""CUDA graphs: what runs while one is captured runs on the host once, and never again."""

from collections.abc import Iterable

import torch

from mpdiag.errors import UsageError

_STEP = (
    "a training step cannot be captured in a CUDA graph: the host reads whether gradients are finite, "
    "and a replay would repeat the captured loss scale; capture parts of the model with "
    "torch.cuda.make_graphed_callables, or compile it with mode='reduce-overhead'"
)


def is_captured() -> bool:
    """Whether the current stream is captured in a CUDA graph."""
    # Asked on a machine without a driver, torch with CUDA raises, and torch without CUDA does.
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def refuse_capture() -> None:
    """Refuse to go on while the current stream is captured in a CUDA graph.

    Raises:
        UsageError: If it is.
    """
    if is_captured():
        raise UsageError(_STEP)


def refuse_captured(names: Iterable[tuple[str, torch.nn.Module]]) -> None:
    """Refuse modules whose forward pass is a CUDA graph, where their weights are to be cast.

    Raises:
        UsageError: Naming the first of them.
    """
    for name, module in names:
        forward = vars(module).get("forward")
        if getattr(forward, "__module__", None) == "torch.cuda.graphs":
            raise UsageError(
                f"module {name or type(module).__name__!r} was captured in a CUDA graph, which "
                "reads the FP32 weights, and this level replaces them: wrap the model before you "
                "capture it, or choose level O1"
            )
