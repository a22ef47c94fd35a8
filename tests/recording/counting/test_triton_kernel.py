"""The CUDA kernels without CUDA: through Triton's interpreter, in a process of its own, exactly."""

from __future__ import annotations

import ast
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from mpdiag.recording.counting import layout

# The interpreter is chosen when Triton is imported, so the comparison runs in a child.
CHILD = """
import warnings
warnings.simplefilter("ignore")  # of Triton's interpreter, about itself
import numpy as np
import torch
from triton.runtime import interpreter

# Triton 3.6 makes an index of an array of one entry, which NumPy 2.4 refuses.
patch = interpreter._patch_lang_tensor
def patched(tensor, scope):
    patch(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))
interpreter._patch_lang_tensor = patched

from mpdiag.recording.counting import torch_operations, triton_launches
from mpdiag.recording.counting.device import DeviceRows
from mpdiag.recording.counting.host import HostRows

CPU = torch.device("cpu")
torch.manual_seed(0)
special = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 1e-45, 2.0**-126, 2.0**-127,
                        65519.996, 65520.0, 2.0**-25, 2.0**-24, 3.4028234663852886e38, 1.0, 2.0])
wild = torch.randint(-2**31, 2**31 - 1, (9_000,)).to(torch.int32).view(torch.float32)
powers = torch.ldexp(torch.ones(250), torch.arange(-140, 110))
ties = torch.cat([powers, powers.nextafter(torch.tensor(0.0)),
                  powers.nextafter(torch.tensor(torch.inf))])
beyond = torch.tensor([1e-320, 5e-324, 1e-46, 1e39, 1e300, 1.7976931348623157e308, torch.inf,
                       -torch.inf, torch.nan, 2.0**-1022, 2.0**-149 * 1.5], dtype=torch.float64)


def rows_of(rows):
    raw = rows.read()
    counts, ratios = range(len(raw.extremes)), range(len(raw.facts))
    return (np.asarray(raw.counts[list(counts)]), raw.extremes, raw.facts,
            np.asarray(raw.ratios[list(ratios)]))


def compare(name, fill, *further):
    found = []
    for rows in (DeviceRows(CPU, 1, torch_operations.COUNTER),
                 DeviceRows(CPU, 1, triton_launches.COUNTER), *[make() for make in further]):
        fill(rows)
        found.append(rows_of(rows))
    for other in found[1:]:
        for field, a, b in zip(("counts", "extremes", "facts", "ratios"), found[0], other):
            assert a.shape == b.shape and (a == b).all(), (name, field, np.argwhere(a != b)[:9])


def count(values):
    def fill(rows):
        rows.count(values, 3, 5)
        rows.count(values[:3])
    return fill


VALUES = {
    "special": special, "one value": torch.tensor([3.0]), "one zero": torch.zeros(1),
    "only zeros": torch.zeros(5000), "only nan": torch.full((70,), torch.nan),
    "only infinities": torch.full((4097,), -torch.inf), "powers and neighbours": ties,
    "constant": torch.full((4096,), 0.25), "smallest": torch.full((9,), 1e-45),
    "ReLU": torch.randn(4096).relu(), "more blocks than programs": torch.randn(5 * 4096 + 17),
    "not on 16 bytes": torch.randn(8300)[1:], "all bit patterns": wild,
    **{f"{span} quarters": torch.ldexp(torch.ones(300), torch.randint(-span // 4, 1, (300,)))
       for span in (60, 64, 66, 124, 128, 132, 254, 258, 400)},
    **{f"{n} values": torch.randn(n) for n in (2, 4095, 4096, 4097, 8191, 8193)},
}
for name, values in VALUES.items():
    compare(name, count(values), HostRows)
TYPES = {
    **{f"{dtype} {name}": VALUES[name].to(dtype)
       for dtype in (torch.bfloat16, torch.float16, torch.float64)
       for name in ("special", "powers and neighbours", "4096 values", "all bit patterns")},
    "every bfloat16": torch.arange(-2**15, 2**15).to(torch.int16).view(torch.bfloat16),
    "every float16": torch.arange(-2**15, 2**15).to(torch.int16).view(torch.float16),
    "bfloat16 not on 16 bytes": torch.randn(4100).bfloat16()[1:],
    "beyond FP32": beyond, "cut": wild.double() * (1e-30 / 3),
    "all float64 patterns": torch.randint(-2**63, 2**63 - 1, (5000,)).view(torch.float64),
    "FP8": torch.randn(500).to(torch.float8_e4m3fn),
}
for name, values in TYPES.items():
    compare(name, count(values), HostRows)

generator = torch.Generator().manual_seed(1)
UPDATES = {}
for scale in (0.0, 1e-45, 1e-9, 1e-6, 1e-3, 1.0, 1e9):
    before = torch.randn(2500, generator=generator)
    before[:10] = 0
    octaves = torch.randint(-6, 6, before.shape, generator=generator)
    after = before + torch.randn(before.shape, generator=generator) * scale * torch.exp2(octaves)
    after[5:50] = before[5:50]
    UPDATES[f"by {scale:g}"] = before, after
large = UPDATES["by 1e+09"]
halves = torch.randn(4000), torch.randn(4000)
UPDATES["ties"] = ties[:-3], ties[:-3].roll(1)
UPDATES["subnormal"] = ties[:60] * 1.5, ties[:60]
UPDATES["bfloat16"] = halves[0].bfloat16(), halves[1].bfloat16()
UPDATES["float16"] = halves[0].half(), (halves[0] + halves[1] * 1e-3).half()
UPDATES["float64"] = halves[0].double(), halves[1].double()
UPDATES["not on 16 bytes"] = halves[0][1:], halves[1][:-1]
for name, pair in UPDATES.items():
    compare(name, lambda rows: rows.count_update(*pair), HostRows)
mixed = wild[torch.randperm(len(wild), generator=generator)]
for name, pair in (("wild", (wild, mixed)), ("wild bfloat16", (wild.bfloat16(), mixed.bfloat16())),
                   ("wild float16", (wild.half(), mixed.half()))):
    compare(name, lambda rows: rows.count_update(*pair))

many = [*VALUES.values(), torch.zeros(0), *TYPES.values(), torch.randn(70_000)]
pairs = [*UPDATES.values(), (torch.zeros(0), torch.zeros(0)), (wild, mixed)]


def fill_many(rows):
    if isinstance(rows, HostRows):
        for values in many[:40]:
            rows.count(values, 2, 1)
        return
    assert rows.count_many([(values, 2, 1) for values in many]) == list(range(len(many)))
    assert rows.count_many([]) == []
    updates = rows.count_many_updates(pairs)
    assert updates[1] == (len(many) + 2, len(many) + 3, 1)


def fill_singly(rows):
    for values in many:
        rows.count(values, 2, 1)
    for pair in pairs:
        rows.count_update(*pair)


together = DeviceRows(CPU, 1, triton_launches.COUNTER)
fill_many(together)
singly = DeviceRows(CPU, 1, torch_operations.COUNTER)
fill_singly(singly)
for a, b in zip(rows_of(together), rows_of(singly), strict=True):
    assert (a == b).all(), np.argwhere(a != b)[:9]
together.clear()
together.count(torch.ones(2))
assert rows_of(together)[0].sum() == 2 and rows_of(together)[1].tolist() == [[1.0, 1.0]]
print("equal", len(VALUES), len(TYPES), len(UPDATES))
"""


def test_the_triton_kernels_count_as_torch_and_the_host_do():
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
    assert child.returncode == 0, child.stderr
    assert child.stdout == "equal 28 19 13\n"


KERNEL = Path(layout.__file__).with_name("triton_kernel.py")


def test_a_kernel_is_compiled_once_for_a_type():
    """What is specialised is compiled apart, for seconds, in the middle of a training.

    The types of values are four, and no number, address or row of a launch is looked at.
    """
    kernels = {}
    for function in ast.parse(KERNEL.read_text()).body:
        if not isinstance(function, ast.FunctionDef):
            continue
        for decorator in function.decorator_list:
            if isinstance(decorator, ast.Call):
                free = {k.arg: ast.literal_eval(k.value) for k in decorator.keywords}
                constant = {a.arg for a in function.args.args if a.annotation is not None}
                every = {a.arg for a in function.args.args} - constant
                kernels[function.name] = every - {n for names in free.values() for n in names}
    whole = {"counts", "extremes", "facts", "ratios"}  # tensors of their own, always on 16 bytes
    assert {name: left - whole for name, left in kernels.items()} == {
        "one": set(),
        "update": set(),
        "many": set(),
        "many_updates": set(),
    }
    assert not kernels["one"]
    assert not kernels["update"]
