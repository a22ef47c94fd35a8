"""Writes a trace of a GPU training that never ran: generated, not measured.

    python studies/gpu_sample.py [--folder sample_runs/gpu-sample]

The sample lets profile, report and dashboard show a GPU on a machine without one. Its kernels have
names that cuBLAS, cuDNN, PyTorch and Triton document or that public traces hold
(``tests/tensorcores/kernels/names.txt``); their times follow from the work model, a published peak rate
and the shares of it below, so they show what the views say and prove nothing of a GPU. The
training is of an image encoder and a language model on an A100: most of it is good, some is not
(TF32 off, an odd vocabulary, an older generation's kernel, layout conversions), and one kernel's
name does not say what ran. It waits for data, and for ``item()``.
"""

from __future__ import annotations

import argparse
import gzip
import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from mpdiag.files.atomic import write_json
from mpdiag.hardware.peaks import peaks_of
from mpdiag.tensorcores.trace_analysis import profile_trace
from mpdiag.tensorcores.work.traced_operation import matrix_work

FOLDER = Path(__file__).parents[1] / "sample_runs" / "gpu-sample"
NOTE = "generated, not measured: written by studies/gpu_sample.py from documented kernels"
DEVICE = {
    "id": 0,
    "name": "NVIDIA A100-SXM4-80GB",
    "totalGlobalMem": 85_899_345_920,
    "computeMajor": 8,
    "computeMinor": 0,
    "numSms": 108,
}
STEPS = range(10, 14)
BATCH, LENGTH, WIDTH, HEADS, LAYERS, WORDS = 8, 1024, 1024, 16, 12, 33278
TOKENS = BATCH * LENGTH
BF16, FP32 = "c10::BFloat16", "float"
HOST_US, LATENCY_US = 9.0, 3.0
"""Of an operation on the host, and from a launch to its kernel."""

GEMM = "ampere_bf16_s16816gemm_bf16_128x64_ldg8_f2f_stages_64x3_nt"
GEMM_TN = "ampere_bf16_s16816gemm_bf16_64x64_sliced1x2_ldg8_f2f_stages_64x5_tn"
ODD = (
    "void cutlass::Kernel2<cutlass_75_tensorop_bf16_s1688gemm_bf16_128x128_tn_align1>"
    "(cutlass_75_tensorop_bf16_s1688gemm_bf16_128x128_tn_align1::Params)"
)
SGEMM = "ampere_sgemm_128x128_tn"
FPROP = (
    "sm80_xmma_fprop_implicit_gemm_indexed_tf32f32_tf32f32_f32_nhwckrsc_nchw_tilesize128x128x16_"
    "stage4_warpsize2x2x1_g1_tensor16x8x8_alignc4_execute_kernel_cudnn"
)
WGRAD = (
    "sm80_xmma_wgrad_implicit_gemm_indexed_tf32f32_tf32f32_f32_nhwckrsc_nhwc_tilesize128x128x16_"
    "stage4_warpsize2x2x1_g1_tensor16x8x8_alignc4_execute_kernel__5x_cudnn"
)
TO_NHWC = (
    "void cudnn::ops::nchwToNhwcKernel<float, float, float, false, true, (cudnnKernelDataType_t)2>"
    "(cudnn::ops::nchw2nhwc_params_t<float>, float const*, float*)"
)
FLASH = (
    "void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64, 128, 128, 4, false, false, "
    "cutlass::bfloat16_t, Flash_kernel_traits<64, 128, 128, 4, cutlass::bfloat16_t> >, false, true, "
    "false, false, true, true, false>(pytorch_flash::Flash_fwd_params)"
)
FLASH_BACK = (
    "void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<pytorch_flash::"
    "Flash_bwd_kernel_traits<64, 128, 128, 8, 4, 4, 4, false, false, cutlass::bfloat16_t>, false, "
    "false, false>(pytorch_flash::Flash_bwd_params)"
)
FLASH_DQ = (
    "void pytorch_flash::flash_bwd_convert_dq_kernel<pytorch_flash::Flash_bwd_kernel_traits<64, 128, "
    "128, 8, 4, 4, 4> >(pytorch_flash::Flash_bwd_params, int)"
)
NORM = (
    "void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<c10::BFloat16, float>(int, "
    "float, c10::BFloat16 const*, c10::BFloat16 const*, c10::BFloat16 const*, float*, float*, "
    "c10::BFloat16*)"
)
ADD = (
    "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<c10::BFloat16>, "
    "at::detail::Array<char*, 3> >(int, at::native::CUDAFunctor_add<c10::BFloat16>, "
    "at::detail::Array<char*, 3>)"
)
ADAM = (
    "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<at::native::(anonymous "
    "namespace)::FusedOptimizerTensorListMetadata<4>, at::native::(anonymous namespace)::"
    "FusedAdamMathFunctor<float, 4, (at::native::ADAM_MODE)0, false>, float const*, double, double, "
    "double>(at::native::Metadata)"
)
TRITON = "matmul_kernel"


@dataclass
class Trace:
    """A trace while it is written: a clock of the host and one of the GPU.

    Attributes:
        events: As Chrome's JSON has them.
        host, gpu: When each is free again, in microseconds.
    """

    events: list[dict[str, Any]] = field(default_factory=list)
    host: float = 1_000_000.0
    gpu: float = 0.0
    correlation: int = 0
    sequence: int = 0

    def span(
        self, category: str, name: str, start: float, end: float, thread: int = 1, **args: Any
    ) -> None:
        """Add an event of the host."""
        times = {"ts": round(start, 3), "dur": round(end - start, 3)}
        place = {"pid": 1, "tid": thread}
        self.events.append(
            {"ph": "X", "cat": category, "name": name, **place, **times, "args": args}
        )

    def launch(self, kernels: list[tuple[str, float]], at: float, thread: int) -> None:
        """Launch kernels of so many microseconds one after the other."""
        for name, spent in kernels:
            self.correlation += 1
            link = {"correlation": self.correlation}
            self.span("cuda_runtime", "cudaLaunchKernel", at, at + 2, thread, **link)
            start = max(self.gpu, at + LATENCY_US)
            self.gpu = start + spent
            times = {"ts": round(start, 3), "dur": round(spent, 3)}
            args = {"device": 0, "stream": 7, **link}
            self.events.append(
                {
                    "ph": "X",
                    "cat": "kernel",
                    "name": name,
                    "pid": 0,
                    "tid": 7,
                    **times,
                    "args": args,
                }
            )

    def operation(
        self,
        name: str,
        kernels: list[tuple[str, float]],
        shapes: list[list[int]] | None = None,
        dtype: str = BF16,
        *,
        concrete: list[str] | None = None,
        sequence: int | None = None,
    ) -> None:
        """An operation that launches kernels; with a sequence number it is one of a backward pass."""
        thread = 1 if sequence is None else 2
        args: dict[str, Any] = {}
        if shapes is not None:
            args = {"Input Dims": shapes, "Input type": [dtype if s else "" for s in shapes]}
        if concrete is not None:
            args["Concrete Inputs"] = concrete
        if sequence is None:
            self.sequence += 1
            args["Sequence number"] = self.sequence
        else:
            args |= {"Sequence number": sequence, "Fwd thread id": 1}
        start, self.host = self.host, self.host + HOST_US
        self.span("cpu_op", name, start, self.host, thread, **args)
        self.launch(kernels, start + 3, thread)

    def wait(self, name: str) -> None:
        """The host waits for the GPU."""
        start, self.host = self.host, max(self.host, self.gpu) + 4
        self.span("cuda_runtime", name, start, self.host)


def product_us(
    name: str, shapes: list[list[int]], dtype: str, share: float, *concrete: str
) -> float:
    """The time of an operation at a share of the peak of its dtype."""
    types = [dtype if s else "" for s in shapes]
    work = matrix_work(name, shapes, types, [], list(concrete))
    peaks = peaks_of(str(DEVICE["name"]))
    assert work is not None
    assert peaks is not None
    rate = {BF16: peaks.tensor["bf16"], FP32: peaks.cuda["fp32"], "tf32": peaks.tensor["tf32"]}
    return work.flops / (share * rate[dtype] * 1e6)


def memory_us(values: int, size: int = 2, share: float = 0.8) -> float:
    """The time to read and write so many values."""
    return 2 * values * size / (share * 2039e3)


def linear(
    trace: Trace, module: str, n: int, k: int, kernel: str, share: float
) -> tuple[int, int, int]:
    """A linear layer's forward pass; returns what its backward pass needs."""
    begin = trace.host
    shapes = [[n], [TOKENS, k], [k, n]]
    trace.operation("aten::addmm", [(kernel, product_us("addmm", shapes, BF16, share))], shapes)
    trace.span("python_function", f"nn.Module: {module}", begin, trace.host)
    return trace.sequence, n, k


def linear_backward(trace: Trace, layer: tuple[int, int, int], kernel: str, share: float) -> None:
    """Both gradients of a linear layer."""
    sequence, n, k = layer
    for shapes in ([[TOKENS, n], [n, k]], [[n, TOKENS], [TOKENS, k]]):
        spent = product_us("mm", shapes, BF16, share)
        trace.operation("aten::mm", [(kernel, spent)], shapes, sequence=sequence)


def stem(trace: Trace) -> None:
    """Two convolutions in TF32, in a layout that cuDNN converts, and their weight gradient."""
    for images, entering, leaving, size, taps, share in (
        (256, 64, 128, 56, 3, 0.42),
        (256, 128, 256, 28, 3, 0.46),
    ):
        shapes = [[images, entering, size, size], [leaving, entering, taps, taps]]
        concrete = ["", "", "[1, 1]", "[1, 1]", "[1, 1]", "1", "False", "False", "True"]
        work = matrix_work("cudnn_convolution", shapes, [FP32, FP32], [], concrete)
        assert work is not None
        spent = work.flops / (share * 156e6)
        layout = memory_us(images * entering * size * size, 4)
        kernels = [(TO_NHWC, layout), (FPROP, spent), (TO_NHWC, layout)]
        begin = trace.host
        trace.operation("aten::cudnn_convolution", kernels, shapes, FP32, concrete=concrete)
        trace.span("python_function", f"nn.Module: Conv2d_{leaving}", begin, trace.host)
        back = [[images, leaving, size, size], *shapes]
        mask = [""] * 10 + ["[False, True, False]"]
        kernels = [(TO_NHWC, layout), (WGRAD, spent * 1.15)]
        dims = back + [[]] * 8
        trace.operation(
            "aten::convolution_backward",
            kernels,
            dims,
            FP32,
            concrete=mask,
            sequence=trace.sequence,
        )


def block(trace: Trace, i: int) -> list[tuple[int, int, int]]:
    """A Transformer block's forward pass."""
    small = memory_us(TOKENS * WIDTH)
    trace.operation("aten::native_layer_norm", [(NORM, small)])
    layers = [linear(trace, f"QKV_{i}", 3 * WIDTH, WIDTH, GEMM_TN, 0.64)]
    heads = [BATCH, LENGTH, HEADS, WIDTH // HEADS]
    concrete = [""] * 8 + ["True"]
    name = "aten::_flash_attention_forward"
    spent = product_us(name, [heads] * 3, BF16, 0.38, *concrete)
    trace.operation(name, [(FLASH, spent)], [heads] * 3, concrete=concrete)
    layers.append((trace.sequence, 0, 0))
    layers.append(linear(trace, f"Out_{i}", WIDTH, WIDTH, GEMM_TN, 0.58))
    trace.operation("aten::add", [(ADD, 1.5 * small)])
    trace.operation("aten::native_layer_norm", [(NORM, small)])
    layers.append(linear(trace, f"Up_{i}", 4 * WIDTH, WIDTH, GEMM_TN, 0.68))
    if i == 2:  # a product in a Triton kernel, whose name does not say what ran
        trace.operation("mylibrary::gated_product", [(TRITON, 410.0)])
    layers.append(linear(trace, f"Down_{i}", WIDTH, 4 * WIDTH, GEMM_TN, 0.66))
    trace.operation("aten::add", [(ADD, 1.5 * small)])
    return layers


def block_backward(trace: Trace, layers: list[tuple[int, int, int]]) -> None:
    """A Transformer block's gradients, last operation first."""
    heads = [BATCH, LENGTH, HEADS, WIDTH // HEADS]
    for layer in reversed(layers):
        if layer[1]:
            linear_backward(trace, layer, GEMM, 0.61)
            continue
        name = "aten::_flash_attention_backward"
        concrete = [""] * 11 + ["True"]
        spent = product_us(name, [heads] * 4, BF16, 0.31, *concrete)
        kernels = [(FLASH_BACK, spent), (FLASH_DQ, memory_us(TOKENS * WIDTH))]
        trace.operation(name, kernels, [heads] * 4, concrete=concrete, sequence=layer[0])


def step(trace: Trace, number: int) -> None:
    """A step: data, forward, backward, optimizer, and a look at the loss."""
    begin = trace.host
    loading = 5200.0
    name = "enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__"
    trace.span("user_annotation", name, begin, begin + loading)
    trace.host += loading
    stem(trace)
    trace.host += 21_000.0 if number == STEPS[0] else 0.0  # the first step warms up
    blocks = [block(trace, i) for i in range(LAYERS)]
    head = linear(trace, "Head", WORDS, WIDTH, ODD, 0.31)  # 33278 words: rows of 4 bytes
    probe = [[TOKENS, WIDTH], [WIDTH, 2048]]  # a probe in FP32, with TF32 off
    spent = product_us("mm", probe, FP32, 0.83)
    for _ in range(3):
        trace.operation("aten::mm", [(SGEMM, spent)], probe, FP32)
    linear_backward(trace, head, ODD, 0.29)
    for layers in reversed(blocks):
        block_backward(trace, layers)
    trace.wait("cudaStreamSynchronize")  # the norm of the gradients, asked for as a number
    trace.host += 400.0
    start = trace.host
    for _ in range(4):
        trace.operation("aten::_fused_adamw_", [(ADAM, memory_us(28_000_000, 12))])
    trace.span("user_annotation", "Optimizer.step#AdamW.step", start, trace.host)
    trace.wait("cudaStreamSynchronize")  # loss.item()
    trace.host += 650.0  # the loop's own Python
    trace.span("user_annotation", f"ProfilerStep#{number}", begin, trace.host)


def document() -> dict[str, Any]:
    """The whole trace, the same each time."""
    trace = Trace()
    for number in STEPS:
        step(trace, number)
    return {
        "schemaVersion": 1,
        "generated": NOTE,
        "deviceProperties": [DEVICE],
        "distributedInfo": {"backend": "nccl", "rank": 0, "world_size": 1},
        "traceEvents": trace.events,
    }


def write(folder: Path) -> None:
    """Write the sample run: its trace, what mpdiag says of it, and its description."""
    folder.mkdir(parents=True, exist_ok=True)
    packed = json.dumps(document(), separators=(",", ":")).encode()
    path = folder / "trace.json.gz"
    path.write_bytes(gzip.compress(packed, mtime=0))  # the stored one was packed again by zopfli
    profile = profile_trace(path).to_json() | {"trace": path.name}
    text = json.dumps(profile, separators=(",", ":")) + "\n"  # small: it is in the wheel
    (folder / "profile.json").write_text(text, encoding="utf-8")
    meta = {
        "schema_version": 1,
        "mpdiag": "0.1.0",
        "state": "complete",
        "created": "2026-11-22T15:00:00.000+00:00",
        "argv": ["python", "studies/gpu_sample.py"],
        "device": {"type": "cuda", "name": DEVICE["name"]},
        "generated": NOTE,
        "profile_only": True,
    }
    write_json(folder / "meta.json", meta)


def main() -> None:
    """Write the sample."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=FOLDER)
    folder: Path = parser.parse_args().folder
    write(folder)
    print(folder)


if __name__ == "__main__":
    main()
