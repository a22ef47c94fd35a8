"""What ncu prints: tables below a ruler of dashes, of new and old versions."""

from __future__ import annotations

import pytest

from mpdiag.errors import DamagedTrace
from mpdiag.tensorcores.readers.recognition import read

COUNTER = "sm__inst_executed_pipe_tensor.sum"

# https://docs.nvidia.com/nsight-compute/NsightComputeCli/ ("Command Line Output")
NEW = f"""==PROF== Connected to process 1322765 (/tmp/wmma)
==PROF== Profiling "wmma_fp16" - 0: 0%....50%....100% - 1 pass
loss 1.5
==PROF== Disconnected from process 1322765
[1322765] wmma@127.0.0.1
  void mma<16>(const __half *, float *) (1, 1, 1)x(32, 1, 1), Context 1, Stream 7, Device 0, CC 12.0
    Section: Command line profiler metrics
    --------------------------------- ----------- ------------
    Metric Name                       Metric Unit Metric Value
    --------------------------------- ----------- ------------
    gpu__time_duration.sum                     us         3.52
    {COUNTER}        inst        1,024
    sm__ops_path_tensor.sum                          (!) n/a
    SM Frequency                              Ghz         1.50
    --------------------------------- ----------- ------------

  add(float *), Context 1, Stream 7, Device 0, CC 12.0
    Section: Command line profiler metrics
    --------------------------------- ----------- ------------
    Metric Name                       Metric Unit Metric Value
    --------------------------------- ----------- ------------
    {COUNTER}        inst            0
    --------------------------------- ----------- ------------
"""
OLD = f"""[6]
  add(float*), 2024-Aug-28 11:14:50, Context 1, Stream 7
    Section: Command line profiler metrics
    -------------------------------------- --------------- ------------------------------
    {COUNTER}                 inst                              9
    gpu__time_duration.sum                         msecond                            1.5
    -------------------------------------- --------------- ------------------------------
"""


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_new_versions(tmp_path, newline):
    path = tmp_path / "ncu.txt"
    path.write_text(NEW, encoding="utf-8", newline=newline)
    trace = read(path)
    first, second = trace
    assert (first.name, first.duration_us) == (
        "void mma<16>(const __half *, float *)",
        3.52,
    )
    assert first.counters == {COUNTER: 1024, "SM Frequency": 1.5e9}
    assert (second.name, second.counters) == ("add(float *)", {COUNTER: 0})
    assert trace.devices[0].capability == (12, 0)


def test_old_versions(tmp_path):
    path = tmp_path / "ncu.txt"
    path.write_text(OLD, encoding="utf-8")
    (only,) = read(path)
    assert (only.name, only.duration_us, only.counters) == ("add(float*)", 1500, {COUNTER: 9})


def test_no_kernel_is_said(tmp_path):
    path = tmp_path / "ncu.txt"
    path.write_text("==PROF== Connected to process 1\n==WARNING== No kernels were profiled.\n")
    with pytest.raises(DamagedTrace, match="ncu"):
        list(read(path))
