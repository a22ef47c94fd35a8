"""Every counter, every entry, every type: raw rows as numpy's and torch's own arithmetic has them."""

import importlib.util
import os
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from recording.counting import reference
from script_processes import scripts

from mpdiag.recording.counting.device import DeviceRows
from mpdiag.recording.counting.host import HostRows

CPU = torch.device("cpu")
IMPLEMENTATIONS = {"host": HostRows, "torch": lambda: DeviceRows(CPU, capacity=1)}
every_implementation = pytest.mark.parametrize("name", IMPLEMENTATIONS)


@every_implementation
def test_values_count_as_numpy_says(name):
    reference.check_values(IMPLEMENTATIONS[name]())


@every_implementation
def test_updates_count_as_torchs_casts_say(name):
    reference.check_updates(IMPLEMENTATIONS[name]())


def assert_counted(*tensors: torch.Tensor) -> None:
    for make in IMPLEMENTATIONS.values():
        rows = make()
        for values in tensors:
            row = rows.count(values)
            found = reference.row_of(rows.read(), row)
            assert not reference.differing(found, reference.expected_row(values)), values


@settings(max_examples=60, deadline=None)
@given(
    arrays.arrays(
        np.uint32, st.integers(0, 700), elements=st.integers(0, 2**32 - 1), fill=st.nothing()
    ),
    st.integers(0, 255),
    st.integers(0, 30),
)
def test_any_bits_count_as_numpy_says(bits, exponent, spread):
    narrow = (bits & np.uint32(0x807FFFFF)) | (
        np.clip(exponent + bits % (spread + 1), 0, 255).astype(np.uint32) << np.uint32(23)
    )
    assert_counted(*(torch.from_numpy(b.view(np.float32).copy()) for b in (bits, narrow)))


@settings(max_examples=60, deadline=None)
@given(arrays.arrays(np.int64, st.integers(0, 300), elements=st.integers(-(2**63), 2**63 - 1)))
def test_any_bits_of_doubles_count_as_numpy_says(bits):
    assert_counted(torch.from_numpy(bits.view(np.float64).copy()))


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 700), st.integers(-149, 127), st.integers(-149, 127), st.integers(0, 2**31))
def test_updates_of_any_size_count_as_torchs_casts_say(n, of_weights, of_updates, seed):
    """Zeros among weights, updates and both; powers of two, and their halfway points."""
    random = torch.Generator().manual_seed(seed)
    before, step = (
        torch.ldexp(torch.randn(n, generator=random), torch.tensor(exponent))
        * (torch.rand(n, generator=random) > torch.rand(1, generator=random) - 0.5)
        for exponent in (of_weights, of_updates)
    )
    mantissas = torch.rand(n, generator=random) < 0.3
    before[mantissas] = 2.0**of_weights
    step[mantissas] = 2.0**of_updates
    for make in IMPLEMENTATIONS.values():
        rows = make()
        (places,) = rows.count_many_updates([(before, before + step)])
        found = reference.update_of(rows.read(), *places)
        assert not reference.differing(found, reference.expected_update(before, before + step))


def test_values_may_lie_anywhere():
    """None beyond a tensor is read, and none needs an address that is a multiple of its size."""
    memory = torch.full((5000,), torch.nan)
    for offset in (0, 1, 3, 7):
        for n in (64, 300, 4096):
            memory[:] = torch.nan
            memory[offset : offset + n] = torch.randn(n)
            assert_counted(memory[offset : offset + n])


@pytest.mark.long
def test_the_triton_kernels_count_alike_in_tritons_interpreter(real, root):
    if importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed")
    # The interpreter is chosen when Triton is imported, so the comparison runs in a child.
    # benchmarks/recording.py, which other tests import, would hide the folder tests/recording.
    others = [place for place in sys.path if Path(place).name != "benchmarks"]
    path = os.pathsep.join([str(root), str(root / "tests"), *others])
    environment = {"TRITON_INTERPRET": "1", "PYTHONPATH": path}
    child = real("-c", scripts(__file__)["child"], cwd=root, env=environment, timeout=240)
    assert child.out == "equal\n", child.err
