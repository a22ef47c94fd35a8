"""The CUDA kernel without CUDA: through Triton's interpreter, in a process of its own, exactly."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest

# The interpreter is chosen when Triton is imported, so the comparison runs in a child.
CHILD = """
import warnings
warnings.simplefilter("ignore")  # of Triton's interpreter, about itself
import torch
from mpdiag.recording.counting import layout
from mpdiag.recording.counting.device import DeviceRows, torch_tally
from mpdiag.recording.counting.triton_kernel import triton_tally

torch.manual_seed(0)
special = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 1e-45, 2.0**-126, 2.0**-127,
                        65519.996, 65520.0, 2.0**-25, 2.0**-24, 3.4028234663852886e38, 1.0, 2.0])
wild = torch.randint(-2**31, 2**31 - 1, (30_000,)).to(torch.int32).view(torch.float32)
powers = torch.ldexp(torch.ones(250), torch.arange(-140, 110))
CASES = {
    "special": special,
    "one value": torch.tensor([3.0]),
    "one zero": torch.zeros(1),
    "only zeros": torch.zeros(5000),
    "only nan": torch.full((70,), torch.nan),
    "only infinities": torch.full((4097,), -torch.inf),
    "powers and neighbours": torch.cat([powers, powers.nextafter(torch.tensor(0.0)),
                                        powers.nextafter(torch.tensor(torch.inf))]),
    "a block exactly": torch.randn(4096),
    "a block and one": torch.randn(4097),
    "all bit patterns": wild,
}
for name, values in CASES.items():
    results = []
    for tally in (torch_tally, triton_tally):
        counts = torch.zeros(layout.RAW, dtype=torch.int64)
        counts[5] = 7  # added to, not replaced
        extremes = torch.tensor([0.0, torch.inf], dtype=torch.float64)
        tally(values, counts, extremes)
        tally(values[:3], counts, extremes)
        results.append((counts, extremes))
    (a, x), (b, y) = results
    assert torch.equal(a, b), (name, (a != b).nonzero().ravel().tolist())
    assert torch.equal(x, y), (name, x, y)

before = torch.randn(3000)
after = torch.where(torch.rand(3000) < 0.3, before, before + torch.randn(3000) * 1e-5)
drained = []
for tally in (torch_tally, triton_tally):
    rows = DeviceRows(torch.device("cpu"), tally=tally)
    rows.count(wild.double() * 1e-30, 3, 5)
    rows.count(wild.bfloat16())
    rows.count_update(before, after)
    drained.append(rows.read())
for field in ("counts", "extremes", "facts", "ratios"):
    a, b = (getattr(raw, field) for raw in drained)
    assert a.shape == b.shape and (a == b).all(), field
print("equal", len(CASES))
"""


def test_the_triton_kernel_counts_as_torch_does():
    if importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed")
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    child = subprocess.run(
        [sys.executable, "-c", CHILD],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
        timeout=240,
    )
    if "InterpreterError" in child.stderr and "0-dimensional arrays" in child.stderr:
        pytest.skip("Triton's interpreter (3.6) does not run with this NumPy (2.4)")
    assert child.returncode == 0, child.stderr
    assert child.stdout == "equal 10\n"
