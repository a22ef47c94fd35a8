"""Kernels kept on the disk: loaded without what only a compiler needs, compiled anew when changed."""

import os

import pytest

KERNEL = """
import numpy as np
from mpdiag.recording.counting.numba_kernels import compiled

@compiled()
def total(values):
    own = np.empty(2, np.int64)  # memory from Numba's allocator
    own[0] = 0
    for value in values:
        own[0] += value {change}
    return own[0]
"""
CALL = """
import sys, numpy as np
from kernel import total
print(total(np.arange(5)), sum(total.stats.cache_hits.values()), "numba.np.arraymath" in sys.modules)
"""


@pytest.fixture
def total(real, root, tmp_path):
    """Call a kernel in a fresh process: its result, whether it was kept, and if all was imported."""
    folders = {
        "PYTHONPATH": f"{root}{os.pathsep}{tmp_path}",
        "NUMBA_CACHE_DIR": str(tmp_path / "kept"),
    }

    def called(change=""):
        file, text = tmp_path / "kernel.py", KERNEL.format(change=change)
        if not file.exists() or file.read_text(encoding="utf-8") != text:  # its date counts
            file.write_text(text, encoding="utf-8")
        child = real("-c", CALL, cwd=tmp_path, env=folders)
        assert child.code == 0, child.err
        return tuple(child.out.split())

    return called


def test_a_kept_kernel_is_loaded_without_the_rest_of_numba(total):
    assert total() == ("10", "0", "True")
    assert total() == ("10", "1", "False")


def test_a_changed_kernel_is_compiled_anew(total):
    assert total()[0] == "10"
    assert total("+ 1") == ("15", "0", "True")
