"""Compiles what sections use, before any of them is timed: ``python -m gpu_sections.warm DEVICE``.

On a bare machine Numba's and Triton's kernels take a minute or two, more than a section may take.
"""

from __future__ import annotations

import sys
import time

import torch

from mpdiag.recording.counting import host
from mpdiag.recording.counting.device import PARTS, why_not_triton
from mpdiag.recording.counting.tensors import KINDS


def main(device: str) -> None:
    """Compile all; says on one line how long it took, and what of Triton does not work."""
    began = time.monotonic()
    host.prepare()
    said = f"Numba {time.monotonic() - began:.0f} s"
    if device == "cuda":
        began = time.monotonic()
        tried = [why_not_triton(torch.device(device), p, dtype) for p in PARTS for dtype in KINDS]
        failed = ", ".join(sorted({reason for reason in tried if reason}))
        said += f", Triton {time.monotonic() - began:.0f} s" + (f": {failed}" if failed else "")
    print(said)


if __name__ == "__main__":
    main(sys.argv[1])
