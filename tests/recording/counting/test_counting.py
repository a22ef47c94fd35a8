"""Every counter against plain numpy, on every layout."""

import os
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from mpdiag.numerics.histograms import ExponentHistogram
from mpdiag.recording.counting.device import DeviceRows
from mpdiag.recording.counting.host import HostRows, rows_on
from mpdiag.recording.counting.rows import Rows
from mpdiag.recording.counting.tensors import Countable, countable, flat_values

EXACT = ("counts", "zeros", "subnormals", "infs", "nans", "fp16_overflow", "absmax", "absmin")


def wild(*shape: int) -> torch.Tensor:
    torch.manual_seed(0)
    x = torch.randn(*shape) * torch.exp(torch.randn(*shape) * 15)
    special = torch.tensor(
        [0.0, torch.inf, -torch.inf, torch.nan, 1e-40, 65520.0, 65519.996, 2.0**-25]
    )
    x.view(-1)[: special.numel()] = special
    return x


def assert_counted(tensor: torch.Tensor, ready: Countable, counter: Rows) -> None:
    """A counter finds in a tensor that was made ready what numpy finds in the tensor."""
    row = counter.count(ready.values, ready.repeat, ready.zeros)
    h = ExponentHistogram.empty() + counter.read().merged([[row]])[0]  # with all bins of FP32
    wide = tensor if tensor.dtype == torch.float64 else tensor.float()
    expected = ExponentHistogram.of(wide.resolve_neg().numpy())
    for field in EXACT:
        assert np.array_equal(getattr(h, field), getattr(expected, field)), field
    assert np.allclose(h.sums, expected.sums, rtol=0.126)


BASE = wild(20, 30, 40)
TENSORS = {
    "contiguous": BASE,
    "permuted": BASE.permute(2, 0, 1),
    "sliced": BASE[:, ::2],
    "0-dim": torch.tensor(3.0),
    "empty": BASE[:0],
    "expanded scalar": torch.tensor(3.0).expand(7, 8),
    "expanded": BASE[:1].expand(5, 30, 40),
    "expanded and sliced": BASE[:, :1].expand(20, 9, 40)[:, :, ::2],
    "overlapping": torch.randn(20, 20).as_strided((19, 4), (20, 3)),
    "unfolded": torch.randn(10).unfold(0, 3, 1),
    "one dimension with gaps": wild(1000)[::3],
    "a column": BASE[0][:, 3],
    "a column expanded": BASE[0][:, 3:4].expand(30, 5),
    "double with gaps": wild(1000).double()[::3],
    "bfloat16 with gaps": wild(1000).bfloat16()[::3],
    "double": wild(1000).double() * 1e-30,
    "bfloat16": BASE.bfloat16(),
    "half": BASE.half(),
    "float8": torch.randn(500).to(torch.float8_e4m3fn),
    "large": wild(2_500_000),
    "negative view": torch.randn(10, dtype=torch.complex64).conj().imag,
}


@pytest.mark.parametrize(
    "rows", [HostRows, lambda: DeviceRows(torch.device("cpu"))], ids=["host", "torch"]
)
@pytest.mark.parametrize("name", TENSORS)
def test_counts_equal_plain_numpy(name, rows):
    assert_counted(TENSORS[name], countable(TENSORS[name]), rows())


def test_two_threads_may_count_at_once():
    tensors = [wild(3_000_000) * 2.0**i for i in range(4)]

    def count(tensor):
        rows = HostRows()
        rows.count(*flat_values(tensor))
        return rows.read().merged([[0]])[0].counts

    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(count, tensors))
    for counts, tensor in zip(together, tensors, strict=True):
        assert np.array_equal(counts, count(tensor))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_counts_and_lives():
    large = torch.ones(3_000_000)
    HostRows().count(large)  # the parent has its threads running
    child = os.fork()
    if child == 0:
        rows = HostRows()
        rows.count(large)
        os._exit(0 if rows.read().merged([[0]])[0].numel == 3_000_000 else 1)
    assert os.waitpid(child, 0)[1] == 0


@pytest.mark.gpu
def test_counts_on_cuda_equal_plain_numpy():
    for tensor in TENSORS.values():
        ready = countable(tensor.cuda())
        assert_counted(tensor, ready, rows_on(ready.values.device))


def test_what_was_counted_can_still_be_resized():
    """FSDP frees a gathered weight by resizing its storage to 0; ``Tensor.numpy`` forbids that."""
    for dtype in (torch.float32, torch.bfloat16, torch.float64, torch.float16):
        tensor = torch.ones(4096, dtype=dtype)
        HostRows().count(tensor)
        tensor.untyped_storage().resize_(0)
    weight, changed = torch.ones(4096), torch.full((4096,), 2.0)
    HostRows().count_many_updates([(weight, changed)])
    weight.untyped_storage().resize_(0)
    changed.untyped_storage().resize_(0)


def test_counting_works_where_nothing_can_be_cached(real, tmp_path):
    """An install and a home that may not be written: Numba finds no place for what it compiled."""
    program = """
from numba.core import caching
caching.CacheImpl._locator_classes = []
import torch
from mpdiag.recording.counting import host
rows = host.HostRows()
rows.count(torch.ones(3))
print(rows.read().merged([[0]]).numel.tolist())
"""
    done = real("-c", program, cwd=tmp_path)
    assert done.out.split() == ["[3]"], done.err
