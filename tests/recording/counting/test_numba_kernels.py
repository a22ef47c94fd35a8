"""Kernels kept on the disk: loaded without what only a compiler needs, compiled anew when changed."""

import os

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


def test_a_kept_kernel_is_loaded_without_the_rest_of_numba_and_a_changed_one_compiled(
    real, root, tmp_path
):
    """A kernel is called in a fresh process: its result, whether it was kept, if all was imported."""
    folders = {
        "PYTHONPATH": f"{root}{os.pathsep}{tmp_path}",
        "NUMBA_CACHE_DIR": str(tmp_path / "kept"),
    }

    def total():
        child = real("-c", CALL, cwd=tmp_path, env=folders)
        assert child.code == 0, child.err
        return tuple(child.out.split())

    (tmp_path / "kernel.py").write_text(KERNEL.format(change=""), encoding="utf-8")
    assert total() == ("10", "0", "True")
    assert total() == ("10", "1", "False")
    (tmp_path / "kernel.py").write_text(KERNEL.format(change="+ 1"), encoding="utf-8")
    assert total() == ("15", "0", "True")
