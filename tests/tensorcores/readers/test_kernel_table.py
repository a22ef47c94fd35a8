"""Tables of kernels in CSV, as their programs document them."""

from __future__ import annotations

import gzip

import pytest

from mpdiag.errors import DamagedTrace
from mpdiag.tensorcores.readers.recognition import read

MFMA = "Cijk_Alik_Bljk_BBS_BH_MT128x128x32_MI32x32x8x1_SN_1LDSB0_ISA942"

# "Kernel trace" of
# https://rocm.docs.amd.com/projects/rocprofiler-sdk/en/latest/how-to/using-rocprofv3.html
ROCPROFV3_TRACE = f'''"Kind","Agent_Id","Queue_Id","Stream_Id","Thread_Id","Dispatch_Id","Kernel_Id",\
"Kernel_Name","Correlation_Id","Start_Timestamp","End_Timestamp","LDS_Block_Size","Scratch_Size",\
"VGPR_Count","Accum_VGPR_Count","SGPR_Count","Workgroup_Size_X","Workgroup_Size_Y","Workgroup_Size_Z",\
"Grid_Size_X","Grid_Size_Y","Grid_Size_Z"
"KERNEL_DISPATCH","Agent 7",17,26,847809,101,49,"{MFMA}.kd",101,1551401624448000,1551401624459500,0,0,8,\
0,16,64,1,1,1024,1024,1
"KERNEL_DISPATCH","Agent 7",17,26,847809,102,50,"void add<float>(float*, float const*)",102,\
1551401624460000,1551401624460500,0,0,8,0,16,64,1,1,1024,1024,1
'''
# The same page, "Kernel counter collection": one counter a row.
COUNTERS_HEAD = """"Correlation_Id","Dispatch_Id","Agent_Id","Queue_Id","Process_Id","Thread_Id",\
"Grid_Size","Kernel_Id","Kernel_Name","Workgroup_Size","LDS_Block_Size","Scratch_Size","VGPR_Count",\
"Accum_VGPR_Count","SGPR_Count","Counter_Name","Counter_Value","Start_Timestamp","End_Timestamp"
"""
COUNTED = '{d},{d},4,1,225049,225049,1048576,10,"{k}",64,0,0,8,0,16,"{c}",{v},{b},{e}\n'
ROCPROFV3_COUNTERS = COUNTERS_HEAD + "".join(
    COUNTED.format(d=d, k="mine", c=c, v=v, b=1000 * d, e=1000 * d + 500)
    for d, c, v in [
        (1, "SQ_WAVES", "16384.000000"), (1, "SQ_INSTS_VALU_MFMA_MOPS_BF16", "7.0"),
        (2, "SQ_WAVES", "16384.000000"), (2, "SQ_INSTS_VALU_MFMA_MOPS_BF16", "4.0"),
        (2, "SQ_INSTS_VALU_MFMA_MOPS_BF16", "5.0"),  # another instance of the counter, same run
    ]
)  # fmt: skip
# rocpd2csv, https://rocm.docs.amd.com/projects/rocprofiler-sdk/en/latest/how-to/using-rocpd-output-format.html
ROCPD_CSV = f'''"Guid","Kind","Agent_Id","Queue_Id","Stream_Id","Thread_Id","Dispatch_Id","Kernel_Id",\
"Kernel_Name","Correlation_Id","Start_Timestamp","End_Timestamp","Lds_Block_Size"
"00006409-00d1","KERNEL_DISPATCH","Agent 4",1,0,714789,1,3,"{MFMA}",1,1678314002982000,\
1678314003082000,8456
'''
ROCPROFV3_STATS = f'''"Name","Calls","TotalDurationNs","AverageNs","Percentage","MinNs","MaxNs","StdDev"
"{MFMA}",24,10650240,443760.0,88.70,441120,449280,2048.5
"scale(double*, int)",24,1357824,56576.0,11.30,56320,57344,301.2
'''
PLAIN = f"Device;Kernel_Name;Duration (us)\n0;{MFMA};1,5\n"
# https://docs.nvidia.com/nsight-systems/UserGuide/ ("Stats reports"): --format csv
NSYS_SUM = """Generating SQLite file report.sqlite from report.nsys-rep
Processing [report.sqlite] with [cuda_gpu_kern_sum.py]...
Time (%),Total Time (ns),Instances,Avg (ns),Med (ns),Min (ns),Max (ns),StdDev (ns),Name
97.5,97500,50,1950.0,1950.0,1900,2000,10.0,ampere_sgemm_128x64_nn
2.5,2500,5,500.0,500.0,490,510,1.0,"void add<float>(float*, int)"
"""
NSYS_TRACE = """Start (ns),Duration (ns),CorrId,GrdX,GrdY,GrdZ,BlkX,BlkY,BlkZ,Reg/Trd,StcSMem (MB),\
DymSMem (MB),Bytes (MB),Throughput (MB/s),SrcMemKd,DstMemKd,Device,Ctx,GreenCtx,Strm,Name
9693095,265888,65,1,1,2304,128,1,1,137,0.000,0.007,,,,,NVIDIA H100 (0),1,,7,ampere_sgemm_128x64_nn
9961685,2707,67,,,,,,,,,,0.008,1.2,Pageable,Device,NVIDIA H100 (0),1,,7,[CUDA memcpy Host-to-Device]
"""
NSYS_GPU_SUM = """Time (%),Total Time (ns),Instances,Avg (ns),Med (ns),Min (ns),Max (ns),StdDev (ns),\
Category,Operation
60.0,6000,3,2000.0,2000.0,1900,2100,10.0,CUDA_KERNEL,ampere_sgemm_128x64_nn
40.0,4000,2,2000.0,2000.0,1900,2100,10.0,MEMORY_OPER,[CUDA memcpy Host-to-Device]
"""
WRAPS = (
    str.encode,
    lambda text: gzip.compress(text.encode()),
    lambda text: text.encode("utf-16"),  # as PowerShell redirects
)
SUMS = ("ampere_sgemm_128x64_nn", 97.5, 50)


@pytest.mark.parametrize(
    ("text", "source", "first", "count"),
    [
        (ROCPROFV3_TRACE, "rocprofv3", (MFMA, 11.5, 1), 2),
        (ROCPROFV3_COUNTERS, "rocprofv3", ("mine", 1.0, 2), 1),
        (ROCPD_CSV, "rocprofv3", (MFMA, 100.0, 1), 1),
        (ROCPROFV3_STATS, "rocprof", (MFMA, 10650.24, 24), 2),
        (PLAIN, "rocprof", (MFMA, 1.5, 1), 1),
        (NSYS_SUM, "nsys stats", SUMS, 2),
        (NSYS_TRACE, "nsys stats", ("ampere_sgemm_128x64_nn", 265.888, 1), 1),
        (NSYS_GPU_SUM, "nsys stats", ("ampere_sgemm_128x64_nn", 6.0, 3), 1),
        (NSYS_SUM.replace(",", "\t"), "nsys stats", SUMS, 2),
        (NSYS_SUM.replace(",", ";").replace("97.5;", "97,5;"), "nsys stats", SUMS, 2),
    ],
    ids=["v3-trace", "v3-counters", "rocpd2csv", "v3-stats", "plain", "nsys-sum",
         "nsys-trace", "nsys-gpu-sum", "tabs", "semicolons"],
)  # fmt: skip
@pytest.mark.parametrize("wrap", WRAPS, ids=["plain", "gz", "utf-16"])
def test_every_program(tmp_path, text, source, first, count, wrap):
    path = tmp_path / "table"
    path.write_bytes(wrap(text))
    trace = read(path)
    found = list(trace)
    assert (trace.source, trace.problems, len(found)) == (source, [], count)
    name, spent, calls = first
    assert (found[0].name, found[0].calls) == (name, calls)
    assert found[0].duration_us == pytest.approx(spent)


def test_counters_are_read_by_row(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text(ROCPROFV3_COUNTERS, encoding="utf-8")
    (only,) = read(path)
    assert only.counters == {"SQ_WAVES": 16384, "SQ_INSTS_VALU_MFMA_MOPS_BF16": 7}


def test_the_device_is_named_and_starts_are_kept(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text(NSYS_TRACE, encoding="utf-8")
    trace = read(path)
    (only,) = trace
    assert (only.device, trace.devices[0].name) == (0, "NVIDIA H100")
    assert only.start_us == pytest.approx(9693.095)
    path.write_text(ROCPROFV3_TRACE, encoding="utf-8")
    assert [k.start_us for k in read(path)] == [1551401624448.0, 1551401624460.0]


def test_a_table_without_times_says_so(tmp_path):
    path = tmp_path / "a.csv"
    table = "Dispatch_Id,Kernel_Name,Counter_Name,Counter_Value\n0,mine,SQ_INSTS_MFMA,5\n"
    path.write_text(table, encoding="utf-8")
    trace = read(path)
    (only,) = trace
    assert (only.duration_us, only.counters) == (0, {"SQ_INSTS_MFMA": 5})
    assert trace.problems == ["the table has no times, so all shares of time are 0"]


def test_unreadable_rows_are_counted_and_a_cut_file_is_read_as_far_as_it_goes(tmp_path):
    path = tmp_path / "a.csv"
    broken = NSYS_SUM.replace("2500,5", "x,5") + "1,2\n"
    path.write_text(broken, encoding="utf-8")
    trace = read(path)
    assert [k.calls for k in trace] == [50]
    assert trace.problems == ["left out 2 unreadable rows of the table"]
    packed = gzip.compress((NSYS_SUM + NSYS_SUM.splitlines()[-1] * 50).encode())
    path.write_bytes(packed[: len(packed) - 20])
    assert next(iter(read(path))).calls == 50


def test_a_table_without_kernels_is_refused(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text(ROCPROFV3_TRACE.splitlines()[0] + "\n", encoding="utf-8")
    with pytest.raises(DamagedTrace, match="but no kernel"):
        list(read(path))
