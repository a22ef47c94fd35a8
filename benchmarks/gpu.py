"""Everything that only a GPU can settle, in one command: each promise held, broken or not testable.

    python3 benchmarks/gpu.py                       # all, within 8 minutes on an H100
    python3 benchmarks/gpu.py --quick               # within 2 minutes
    python3 benchmarks/gpu.py --only a --only e     # some sections
    python3 benchmarks/gpu.py --resume              # what an earlier pass did not finish
    python3 benchmarks/gpu.py --device cpu          # a rehearsal without a GPU, on small sizes

It uses the Python that runs it, installs nothing, needs no network, and reads nothing outside this
folder's checkout. Each section runs in processes of its own, under a time limit of its own. Results
are written after each of them: ``gpu-DEVICE.json`` and ``gpu-DEVICE.md``, a trace and a few recorded
runs, into ``benchmarks/results`` or the folder given with ``--out``.

Exit codes: 0 nothing is broken; 1 a promise is broken, or a section did not run to its end;
2 usage; 3 PyTorch or the device is missing.
"""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent))
    from gpu_sections.command import main

    sys.exit(main())
