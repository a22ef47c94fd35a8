"""What Triton's compiler makes of the counting kernels for cards that are not here."""

import importlib.util
import os
import re
import sys

import pytest
from script_processes import scripts

from mpdiag.recording.counting import layout

VARIANTS = 11 + 1
MOST_REGISTERS = {"one": 168, "many": 168, "many_updates": 255}


@pytest.mark.long
@pytest.mark.parametrize("capability", [80, 90, 100])
def test_every_kernel_compiles_without_spilling(capability, real, root, tmp_path):
    """Each variant: no register in memory, loads of 16 bytes, single loads for what is not aligned."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed")
    path = os.pathsep.join([str(root), *sys.path])
    environment = {"TRITON_INTERPRET": "0", "PYTHONPATH": path}
    environment["TRITON_CACHE_DIR"] = str(tmp_path / "cache")
    # Triton compiles for a target without a device, but not in the interpreter, which is chosen when
    # it is imported: so in a child, which prints a line for each kernel.
    words = ("-c", scripts(__file__)["child"], tmp_path, capability)
    child = real(*words, cwd=tmp_path, env=environment, timeout=290)
    assert child.code == 0, child.err[-3000:]
    lines = child.out.splitlines()
    assert len(lines) == VARIANTS
    for line in lines:
        name, kind, aligned, said = line.split(maxsplit=3)
        used = {key: int(n) for key, n in re.findall(r"(REG|STACK|LOCAL):(\d+)", said)}
        print(f"sm_{capability} {name} of type {kind}: {used['REG']} registers")
        assert (used["STACK"], used["LOCAL"]) == (0, 0), line
        assert used["REG"] <= MOST_REGISTERS[name], line
        code = (tmp_path / f"{name}-{kind}-{aligned}.ptx").read_text()
        assert_loads(name, int(kind), re.findall(r"ld\.global\.\S+", code))


def assert_loads(name: str, kind: int, loads: list[str]) -> None:
    """A block of whole 16 bytes, and the same one value by value: no more loads, and none wider."""
    size = {layout.FLOAT32: 4, layout.FLOAT64: 8}.get(kind, 2)
    values = 8 if name == "many_updates" or kind == layout.FLOAT64 else 32
    blocks = 2 if name == "many_updates" else 1
    wide = [load for load in loads if ".v" in load]
    assert len(wide) == blocks * values * size // 16, loads
    assert {load.split(".v")[1] for load in wide} <= {"4.b32", "2.b64"}
    single = [load for load in loads if load.endswith(f".b{8 * size}") and ".v" not in load]
    assert len(single) >= blocks * values, loads
