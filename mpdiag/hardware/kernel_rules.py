r"""The table of kernel names: ordered, the first rule that matches decides.

To add a kernel, add one line here at the right place, and its name with the expected verdict to
``tests/hardware/kernel_names.txt``. A rule's pattern is searched in the name without
its argument list. Order matters: names that only *sound* like matrix math come first, then matrix math
on CUDA cores, then Tensor Cores, then names that do not say what they run, then all others.

Sources: names in public traces of torch.profiler, nsys and ncu; NVIDIA's PyProf, kineto's and
xprof's lists, except where real traces prove them wrong; the sources of PyTorch, CUTLASS,
FlashAttention, Triton, MIOpen, Tensile and NCCL.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

TABLE_VERSION = 2
"""Incremented whenever a rule changes a verdict."""


@dataclass(frozen=True)
class KernelRule:
    """One line of the table; empty fields are read from the name itself."""

    name: str
    pattern: re.Pattern[str]
    verdict: Literal["tensor_core", "cuda_core", "helper", "layout", "other", "unknown"]
    library: str = ""
    instruction: str = ""
    dtype: str = ""
    generation: str = ""
    accumulator: str = ""


def _helper(name: str, pattern: str, library: str = "") -> KernelRule:
    return KernelRule(name, re.compile(pattern), "helper", library)


def _layout(name: str, pattern: str, library: str = "") -> KernelRule:
    return KernelRule(name, re.compile(pattern), "layout", library)


def _cuda(
    name: str, pattern: str, library: str = "", dtype: str = "", instruction: str = "FFMA"
) -> KernelRule:
    return KernelRule(name, re.compile(pattern), "cuda_core", library, instruction, dtype)


def _tensor(
    name: str, pattern: str, library: str, instr: str = "HMMA", dtype: str = "", sm: str = ""
) -> KernelRule:
    return KernelRule(name, re.compile(pattern), "tensor_core", library, instr, dtype, sm)


def _other(name: str, pattern: str, library: str = "") -> KernelRule:
    return KernelRule(name, re.compile(pattern), "other", library)


def _opaque(name: str, pattern: str, library: str = "") -> KernelRule:
    return KernelRule(name, re.compile(pattern), "unknown", library)


# Helpers of matrix kernels, and data movement: the words gemm, conv and flash mislead.
_HELPERS = (
    _helper("split-k reduction", r"split_?[kK]_?[rR]educe|ReduceSplitK|splitk_reduce", "cuBLAS"),
    _helper("cuDNN reduction", r"reduce_1Block_kernel|reduce_wgrad_nchw_helper", "cuDNN"),
    _helper("Winograd transform", r"winograd(?:_nonfused)?::|generateWinogradTiles", "cuDNN"),
    _helper(
        "MIOpen Winograd transform", r"^gcnAsm.*Winograd.*[xX]form|Winograd.*[xX]form", "MIOpen"
    ),
    _helper("FFT transform", r"\bfft[12]d_[rc]2[rc]|\bfft2d_|flip_filter", "cuDNN"),
    _helper("im2col", r"[iI]m2(?:d_)?[cC]ol|[cC]ol2[iI]m|vol2col|col2vol"),
    _helper("offsets", r"compute(?:Wgrad)?(?:SplitK|B)?OffsetsKernel", "cuDNN"),
    _helper("cuBLASLt epilogue", r"epilogue::impl::globalKernel", "cuBLASLt"),
    _helper(
        "tensor maps",
        r"fill_tensormaps?_kernel|prepare_grouped_gemm|get_grouped_mm_|get_group_gemm_starts",
    ),
    _helper("packed tensor scale", r"ops::scalePackedTensor_kernel", "cuDNN"),
    _helper(
        "flash backward dot",
        r"flash_bwd_dot_do_o|flash_bwd_convert_d(?:q|kv)|flash_bwd_clear_dkvaccum",
        "FlashAttention 2",
    ),
    _helper(
        "flash combine",
        r"flash_fwd_splitkv_combine|FlashAttnFwdCombine|flash_fwd_combine",
        "FlashAttention",
    ),
    _helper(
        "flash pre/post",
        r"FlashAttnBwd(?:Pre|Post)process|FlashAttentionBackward(?:Pre|Post)process",
        "FlashAttention 3",
    ),
    _helper(
        "flash bookkeeping",
        r"prepare_varlen_num_blocks|(?:::|^)reshape_and_cache(?:_flash)?_kernel",
    ),
    _helper(
        "cuDNN attention helper",
        r"cudnn_generated_.*sdpa.*(?:reduce|convert|dot_do_o)|^compute_dot_do_o",
        "cuDNN",
    ),
    _helper(
        "attention segments",
        r"^reduce_segments|paged_attention_.*reduce_kernel|merge_attn_states|_fwd_kernel_stage2",
    ),
    _helper(
        "MIOpen cast", r"SubTensorOpWith(?:Scalar|CastTensor|SubTensor|Transform)\d?d?", "MIOpen"
    ),
    _helper("Tensile helper", r"^Cijk_.*(?:PostGSU|GSUAMBBeta|BiasS_.*PostGSU|_Beta)", "Tensile"),
    _helper(
        "MoE scatter",
        r"^_finalize_matmul_scatter|^_reduce_grouped|moe_align_block_size|moe_sum_kernel",
    ),
    _helper("CUTLASS reduction", r"cutlass::reduction::|cutlass_reduce|ReduceSplitK", "CUTLASS"),
    _layout(
        "nchw/nhwc",
        r"nchwToNhwc|nhwcToNchw|NchwToNhwc|NhwcToNchw|nhwcAddPadding|nchwAddPadding|nhwcToFoldedNhwc|foldedNhwcToNhwc",
        "cuDNN",
    ),
    _layout(
        "cuDNN tensor transform",
        r"op_tensor_(?:layout|transform)|tensorTransformGeneric|transformTensor|cudnn::ops::transform",
        "cuDNN",
    ),
    _layout(
        "MIOpen transpose",
        r"^batched_transpose_\d+x\d+|^transpose_(?:NCHW|NHWC)|^general_2d_perm|^Tensor_reorder",
        "MIOpen",
    ),
)

# Matrix math on CUDA cores (AMD: on vector units).
_CUDA_CORE = (
    _cuda("xmma FFMA", r"xmma_.*(?:_ffma_|_ffma$|_dfma_|_hfma2?_)", "cuBLAS"),
    _cuda("xmma SIMT", r"xmma_.*simt", "cuBLAS"),
    _cuda("CUTLASS SIMT", r"cutlass.*_simt_|OpClassSimt|MmaSimt\b|cutlass_simt_", "CUTLASS"),
    _cuda("half storage sgemm", r"(?:volta|turing|ampere|maxwell|pascal)_(?:fp16|bf16)_[sh]gemm_", "cuBLAS"),
    _cuda("arch gemm", r"(?:maxwell|pascal|volta|turing|ampere|hopper)_[sdczh]gemm_", "cuBLAS"),
    _cuda("arch complex gemm", r"(?:maxwell|pascal|volta|turing|ampere|hopper)_g?[cz]gemm", "cuBLAS"),
    _cuda("scudnn", r"_scudnn_(?!.*(?:884|1688|16816))", "cuDNN"),
    _cuda("hcudnn", r"_hcudnn_(?!.*(?:884|1688|16816))", "cuDNN", "fp16", "HFMA2"),
    _cuda("cuDNN convolve", r"(?:im|ex)plicit_convolve_[sdh]?gemm|implicit_convolveNd_[sdh]gemm", "cuDNN"),
    _cuda("cuDNN engines", r"(?:wgrad|dgrad)_alg\d_engine|(?:^|::)dgrad2?d?_engine|wgrad2?d?_engine|(?:d|w)grad2d_alg\d_\d", "cuDNN"),
    _cuda("grouped direct", r"grouped_direct|direct_group", "cuDNN"),
    _cuda("c1_k1", r"(?:conv2d|dgrad2d|wgrad2d)_c1_k1", "cuDNN"),
    _cuda("depthwise", r"conv_depthwise[23]d|[sS]patialDepthwiseConvolution|DepthwiseConv|dwconv|depthwise_conv|depthwise_fprop|causal_conv1d_"),
    _cuda("gemv", r"gemv2[TN]|gemvNSP|gemvx::kernel|(?:^|::)gemv_|gemmk1_kernel|gemv_kernel|GEMV", "cuBLAS"),
    _cuda("dot", r"(?:^|::)dot_kernel|reduce_1Block_dot", "cuBLAS"),
    _cuda("CUDA-core gemm", r"cudaCoreGemm|cuda_core_gemm|simt_gemm|wvSplitK|LLGemm1|LLMM1"),
    _cuda("paged attention", r"paged_attention_(?:v[12]_)?kernel", "vLLM"),
    _cuda("gemmSN", r"gemmSN_[TN]{2}_kernel", "cuBLAS"),
    _cuda("MAGMA", r"magma_[sdcz]gemm|magmablas_[sdcz]gemm|\bgemm_template_device_n[nt]", "MAGMA"),
    _cuda("cuBLAS old gemm", r"^(?:sgemm|dgemm|cgemm|zgemm)_(?:32|64|128|largek|sm)|gemm_kernel[12]x\d_core|(?:^|::)s?gemm_kernel1x1|^sgemm_sm\d+", "cuBLAS"),
    _cuda("trsm", r"(?:^|::)(?:trsm|trsv|batch_trsm)_\w*kernel|trsm_(?:left|right|lt|ln)_kernel", "cuBLAS"),
    _cuda("fmha float before sm80", r"fmha_cutlass[FB]_f32_\w*_sm(?:50|70|75)", "PyTorch", "fp32"),
    _cuda("fmha half on sm50", r"fmha_cutlass[FB]_(?:f16|bf16)_\w*_sm50", "PyTorch"),
    _cuda("MIOpen naive", r"naive_conv_", "MIOpen", instruction="V_FMA"),
    _cuda("MIOpen direct", r"^MIOpenConv|^gcnAsmConv|gridwise_convolution_\w*_dlops", "MIOpen", instruction="V_FMA"),
    _cuda("MIOpen Winograd", r"^miopenSp3AsmConv|^miopenGcnAsmWino", "MIOpen", instruction="V_FMA"),
    _cuda("CK without matrix cores", r"ck::\S*(?:_dl_|Dl<|_dlops|Dlops)", "Composable Kernel", instruction="V_DOT"),
    _cuda("RNN persist FP32", r"RNN_blockPersist\w*(?:LSTM|GRU|RNN)(?!\w*HMMA)", "cuDNN"),
)  # fmt: skip

# Tensor Cores.
_TENSOR_CORE = (
    _tensor("RNN persist HMMA", r"RNN_blockPersist\w*_HMMA|PersistRNN.*(?:HMMA|hmma)", "cuDNN", dtype="fp16"),
    KernelRule("nvjet FP16 accumulator", re.compile(r"nvjet_(?:sm90_)?hhh_"), "tensor_core", "cuBLASLt", "HGMMA", "fp16", "sm90", "fp16"),
    _tensor("nvjet sm100 BF16", r"nvjet_sm10\d_t\w{2}_", "cuBLASLt", "UTCHMMA", "bf16"),
    _tensor("nvjet sm100 FP16", r"nvjet_sm10\d_h\w{2}_", "cuBLASLt", "UTCHMMA", "fp16"),
    _tensor("nvjet sm100 TF32", r"nvjet_sm10\d_\w*tf32", "cuBLASLt", "UTCHMMA", "tf32"),
    _tensor("nvjet sm100 FP8", r"nvjet_sm10\d_[qr]", "cuBLASLt", "UTCQMMA", "fp8_e4m3"),
    _tensor("nvjet sm100 FP4", r"nvjet_sm10\d_o", "cuBLASLt", "UTCOMMA", "fp4"),
    _tensor("nvjet sm100 INT8", r"nvjet_sm10\d_b", "cuBLASLt", "UTCIMMA", "int8"),
    _tensor("nvjet sm120 BF16", r"nvjet_sm12\d_t\w{2}_", "cuBLASLt", "HMMA", "bf16"),
    _tensor("nvjet sm120 FP16", r"nvjet_sm12\d_h\w{2}_", "cuBLASLt", "HMMA", "fp16"),
    _tensor("nvjet sm120 FP8", r"nvjet_sm12\d_[qr]", "cuBLASLt", "QMMA", "fp8_e4m3"),
    _tensor("nvjet sm120 FP4", r"nvjet_sm12\d_o", "cuBLASLt", "OMMA", "fp4"),
    _tensor("nvjet TF32", r"nvjet_(?:sm90_)?\w*tf32", "cuBLASLt", "HGMMA", "tf32", "sm90"),
    _tensor("nvjet BF16", r"nvjet_(?:sm90_)?t\w{2}_", "cuBLASLt", "HGMMA", "bf16", "sm90"),
    _tensor("nvjet FP16", r"nvjet_(?:sm90_)?h\w{2}_", "cuBLASLt", "HGMMA", "fp16", "sm90"),
    _tensor("nvjet FP8", r"nvjet_(?:sm90_)?[qr]\w{2,4}_", "cuBLASLt", "QGMMA", "fp8_e4m3", "sm90"),
    _tensor("nvjet INT8", r"nvjet_(?:sm90_)?b\w{1,4}_", "cuBLASLt", "IGMMA", "int8", "sm90"),
    _tensor("CUTLASS sm100 block scaled FP4", r"cutlass3x_sm1\d\d_bstensorop_\w*(?:xf4|f4_|e2m1)", "cuBLASLt", "UTCOMMA", "fp4"),
    _tensor("CUTLASS sm100 block scaled", r"cutlass3x_sm1\d\d_bstensorop", "cuBLASLt", "UTCQMMA"),
    _tensor("CUTLASS sm100 FP8", r"cutlass3x_sm1\d\d_tensorop_\w*(?:gemm_f8|e4m3|e5m2)", "cuBLASLt", "UTCQMMA"),
    _tensor("CUTLASS sm100 INT8", r"cutlass3x_sm1\d\d_tensorop_i\w*gemm", "cuBLASLt", "UTCIMMA", "int8"),
    _tensor("CUTLASS sm100", r"cutlass3x_sm1\d\d_tensorop", "cuBLASLt", "UTCHMMA"),
    _tensor("CUTLASS sm90", r"cutlass3x_sm90_(?:sp)?tensorop", "CUTLASS", "HGMMA"),
    _tensor("CUTLASS wmma", r"cutlass_\w*wmma_tensorop", "cuBLAS"),
    _tensor("CUTLASS tensorop", r"cutlass_(?:\d\d_)?(?:sp)?tensorop", "cuBLAS"),
    _tensor("xmma warpgroup", r"xmma_\w*_warpgroupsize", "cuBLAS", "HGMMA"),
    _tensor("xmma tensor tile", r"xmma_\w*_tensor\d+x\d+x\d+", "cuBLAS"),
    _tensor("xmma traits", r"xmma(?:_new)?::.*(?:hmma|imma|hgmma|gmma|qmma)\w*_traits", "cuDNN"),
    _tensor("arch integer", r"(?:turing|ampere|hopper)_\w*_i(?:8816|16832)(?:gemm|cudnn)", "cuBLAS", "", "int8"),
    _tensor("arch 16816", r"(?:volta|turing|ampere|hopper)_\w*16816(?:gemm|cudnn)", "cuBLAS"),
    _tensor("arch 1688", r"(?:volta|turing|ampere|hopper)_\w*1688(?:gemm|cudnn)", "cuBLAS"),
    _tensor("arch 884", r"(?:volta|turing|ampere|hopper)_\w*884(?:gemm|cudnn)", "cuBLAS"),
    _tensor("Volta implicit hmma", r"[vV]olta_hmma_implicit_gemm", "cuDNN", "HMMA.884", "fp16", "sm70"),
    _tensor("hmma implicit", r"(?:turing|ampere)?_?h(?:mma|884|1688)_implicit_gemm", "cuDNN", dtype="fp16"),
    _tensor("bare 884", r"(?:^|_)[hsd](?:884|1688|16816)(?:gemm|cudnn)", "cuBLAS"),
    _tensor("bare integer", r"(?:^|_)i(?:8816|16832|16864)(?:gemm|cudnn|_)", "cuBLAS", "", "int8"),
    _tensor("FlashAttention 4", r"FlashAttention(?:Forward|Backward)Sm1\d\d", "FlashAttention 4", "UTCHMMA"),
    _tensor("FlashAttention 3", r"FlashAttn(?:Fwd|Bwd)\w*[\s<].*Sm90|FlashAttn(?:Fwd|Bwd)Sm90|flash::compute_attn_ws", "FlashAttention 3", "HGMMA", sm="sm90"),
    _tensor("FlashAttention 3 sm80", r"FlashAttn(?:Fwd|Bwd)\w*[\s<].*Sm80|FlashAttn(?:Fwd|Bwd)Sm80", "FlashAttention 3", "HMMA.16816", sm="sm80"),
    _tensor("FlashMLA", r"flash_fwd_(?:splitkv_)?mla_kernel|flash_mla", "FlashMLA", "HGMMA", sm="sm90"),
    _tensor("FlashAttention 2", r"flash_fwd_(?:splitkv_)?kernel|flash_bwd_(?:dq_dk_dv_loop|kernel|dq_dk_dv)", "FlashAttention 2", "HMMA.16816", sm="sm80"),
    _tensor("FlashAttention 1", r"fmha_(?:fprop|dgrad|bprop)_fp16_\w*sm(?:70|75|80)|fmha_(?:f|d)prop.*_kernel<.*Kernel_traits", "FlashAttention 1", sm="sm80"),
    _tensor("trtllm-gen attention FP8", r"fmhaSm1\d\d\w*_QkvE4m3", "TensorRT-LLM", "UTCQMMA", "fp8_e4m3"),
    _tensor("trtllm-gen attention", r"fmhaSm1\d\d\w*Kernel", "TensorRT-LLM", "UTCHMMA"),
    _tensor("TensorRT fused attention", r"fmha_v2_\w*_sm(?:75|80|86|89|90)|fused_multihead_attention_v2|mha_v2_", "TensorRT-LLM"),
    _tensor("memory-efficient attention FP32", r"fmha_cutlass[FB]_f32_\w*_sm80", "PyTorch", "HMMA.1688.TF32", "tf32", "sm80"),
    _tensor("memory-efficient attention sm70", r"fmha_cutlass[FB]_f16_\w*_sm70", "PyTorch", "HMMA.884", "fp16", "sm70"),
    _tensor("memory-efficient attention sm75", r"fmha_cutlass[FB]_f16_\w*_sm75", "PyTorch", "HMMA.1688", "fp16", "sm75"),
    _tensor("memory-efficient attention", r"fmha_cutlass[FB]_b?f16_\w*_sm80", "PyTorch", "HMMA.16816", "", "sm80"),
    _tensor("CUTLASS attention", r"cutlass::fmha::|Sm100Fmha|Sm90Fmha|sm100_fmha", "CUTLASS", "HGMMA"),
    _tensor("cuDNN attention sm100", r"cudnn_generated_\w*sdpa_sm1\d\d\w*_[fb]prop", "cuDNN", "UTCHMMA"),
    _tensor("cuDNN attention sm90", r"cudnn_generated_\w*sdpa_sm90\w*_[fb]prop", "cuDNN", "HGMMA"),
    _tensor("cuDNN attention sm80", r"cudnn_generated_\w*sdpa_sm8\d\w*_[fb]prop", "cuDNN", "HMMA.16816"),
    _tensor("trtllm-gen FP4", r"bmm_\w*E2m1\w*_Fp32|gemm_\w*E2m1\w*_Fp32", "TensorRT-LLM", "UTCQMMA", "fp4", "sm100"),
    _tensor("trtllm-gen FP8", r"bmm_\w*E4m3\w*_Fp32|gemm_\w*E4m3\w*_Fp32", "TensorRT-LLM", "UTCQMMA", "fp8_e4m3", "sm100"),
    _tensor("trtllm-gen BF16", r"bmm_Bfloat16_\w*_Fp32", "TensorRT-LLM", "UTCHMMA", "bf16", "sm100"),
    _tensor("DeepGEMM sm100", r"deep_gemm::sm100_|sm100_(?:fp8|bf16)_gemm", "DeepGEMM", "UTCQMMA", sm="sm100"),
    _tensor("DeepGEMM", r"deep_gemm::(?:sm90_)?fp8_gemm|deep_gemm::sm90_", "DeepGEMM", "QGMMA", sm="sm90"),
    _tensor("DeepSeek grouped gemm", r"grouped_gemm::cuda::.*fp8.*GemmKernel", "DeepGEMM", "QGMMA", sm="sm90"),
    _tensor("Marlin", r"marlin(?:_moe_wna16|_24)?::Marlin|(?:^|::)Marlin(?:_24)?<|gptq_marlin", "Marlin", "HMMA.16816", sm="sm80"),
    _tensor("tinygemm", r"tinygemm_m16n8k16|tinygemm_kernel", "PyTorch", "HMMA.16816", "bf16", "sm80"),
    _tensor("PyTorch sparse", r"sparse_semi_structured|xmma_sparse_(?:gemm|conv)|spmma", "cuSPARSELt"),
    _tensor("CuTe sm100 atom", r"SM100_MMA_|SM100_\w*_(?:SS|TS)\b|MainloopSm100\w*Umma|tcgen05", "CUTLASS", "UTCHMMA", sm="sm100"),
    _tensor("CuTe sm120 atom", r"SM120_16x8x|MainloopSm120", "CUTLASS", "QMMA", sm="sm120"),
    _tensor("CuTe sm90 atom", r"SM90_\d+x\d+x\d+_|MainloopSm90\w*Gmma|\bGMMA::|WGMMA", "CUTLASS", "HGMMA", sm="sm90"),
    _tensor("CuTe sm80 atom", r"SM80_16x8x\d+_|SM89_16x8x\d+_", "CUTLASS", "HMMA.16816", sm="sm80"),
    _tensor("CuTe sm75 atom", r"SM75_16x8x8_|SM75_8x8x16_", "CUTLASS", "HMMA.1688", sm="sm75"),
    _tensor("CuTe sm70 atom", r"SM70_8x8x4_", "CUTLASS", "HMMA.884", "fp16", "sm70"),
    _tensor("CUTLASS class", r"OpClassTensorOp|OpClassWmmaTensorOp|\bMmaTensorOp|DefaultMmaTensorOp", "CUTLASS"),
    _tensor("PyProf warp specialised", r"xmma_warp_specialized_implicit_gemm", "cuDNN"),
    _tensor("PyProf first layer", r"first_layer_(?:wgrad|fwd)_kernel|dgrad_1x1_stride_2x2", "cuDNN", dtype="fp16"),
    # AMD's matrix cores.
    _tensor("Tensile MFMA", r"^Cijk_\w*_MI\d+x\d+x\d+", "Tensile", "MFMA"),
    _tensor("custom Tensile MFMA", r"^Custom_Cijk_\w*", "Tensile", "MFMA"),
    _tensor("MIOpen implicit gemm", r"igemm_(?:fwd|bwd|wrw)_gtcx(?P<gfx>2)_", "MIOpen", "MFMA", sm="gfx90a"),
    _tensor("MIOpen implicit gemm MI300", r"igemm_(?:fwd|bwd|wrw)_gtcx3_", "MIOpen", "MFMA", sm="gfx942"),
    _tensor("MIOpen implicit gemm MI100", r"igemm_(?:fwd|bwd|wrw)_gtcx_", "MIOpen", "MFMA", sm="gfx908"),
    _tensor("CK XDL", r"[xX]dl(?:ops|Ops|CShuffle|_)|_xdl_|Xdlops|kernel_gemm_xdl|GridwiseGemm\w*_xdl", "Composable Kernel", "MFMA"),
    _tensor("paged attention MFMA", r"paged_attention_\w*mfma\w*_kernel", "vLLM", "MFMA"),
    _tensor("CK tile attention", r"ck_tile\S*Fmha(?:Fwd|Bwd)(?!\w*(?:Combine|OGradDotO|ConvertDQ))|FmhaFwdKernel|FmhaBwdDQDKDV", "Composable Kernel", "MFMA"),
    _tensor("CK tile gemm", r"ck_tile\S*(?:FlatmmKernel|GemmKernel|MoeFlatmm)", "Composable Kernel", "MFMA"),
    _tensor("AITER assembly", r"aiter::(?:f4gemm|bf16gemm|f8|i8|fmoe|fmha)\w*|_ZN5aiter\d+(?:fmha|f4gemm|bf16gemm|fmoe|f8_)", "AITER", "MFMA"),
)  # fmt: skip

# Names that do not say what they run: counters or rates are needed.
_OPAQUE = (
    _opaque("Triton matrix template", r"triton_(?:tem|mm|bmm|flex|convolution)_", "Inductor"),
    _opaque("old Inductor", r"^triton__?0d", "Inductor"),
    _opaque("CUTLASS template", r"cutlass::(?:device_kernel|Kernel2?)\b|^Kernel2?$|^device_kernel\b", "CUTLASS"),
    _opaque("xmma without a mark", r"xmma", "cuBLAS"),
    _opaque("nvjet of another type", r"nvjet", "cuBLASLt"),
    _opaque("Tensile without a mark", r"^Cijk_", "Tensile"),
    _opaque("TensorRT Myelin", r"__myl_|^myl_", "TensorRT"),
    _opaque("Triton attention", r"^_?attn_(?:fwd|bwd)|^_attn|unified_attention|^_fwd_(?:grouped_)?kernel|^_bwd_kernel|^_fwd_kernel_stage1", "Triton"),
    _opaque("says matrix math, not how", r"^[^<]*(?:gemm|GEMM|Gemm|matmul|Matmul|MatMul|_mm_|_bmm|fused_moe_kernel|attention|Attention|fmha|mha_|(?:^|_|::)conv(?!ert)|[cC]onvolution|(?:^|_)flash_)"),
)  # fmt: skip

# Known, but not matrix math.
_OTHERS = (
    _other("collective", r"^(?:nccl|rccl)|ncclKernel|ncclDevKernel|ncclKern|nvshmem|mscclKernel|cross_device_reduce|allreduce_(?:one|two)|(?:one|two)_shot_all_reduce|multimem_|deep_ep::|userbuffers|twoshot|symmetric_memory", "NCCL"),
    _other("Inductor pointwise or reduction", r"triton_(?:poi|red|per|for|split_scan|spl)_", "Inductor"),
    _other("PyTorch elementwise", r"at::native::.*?(?:elementwise|vectorized_gather|gpu_index|index_\w*kernel|indexSelect|indexFunc|indexing_)", "PyTorch"),
    _other("fbgemm", r"fbgemm_gpu::|split_embedding|permute_(?:2D|1D|pooled|multi)|bounds_check_indices|linearize_index|block_bucketize|jagged_|lengths_range|dense_to_jagged|asynchronous_complete_cumsum|histogram_binning", "FBGEMM"),
    _other("PyTorch foreach", r"multi_tensor_apply|FusedAdam|FusedSgd", "PyTorch"),
    _other("PyTorch reduction", r"at::native::.*?(?:reduce_kernel|[sS]oft[mM]ax|[nN]orm|[sS]catter|[gG]ather|cat|Cat|[sS]ort|[tT]opk|cumsum|scan|[eE]mbedding|embedding|[dD]ropout|[pP]ool|[uU]psample|[nN]llLoss|nll_loss|[lL]oss|[rR]oll|[fF]lip|tri[ul]_|[uU]nique|histogram|[dD]istribution|[rR]andom|[sS]um|[mM]ean|[wW]elford|fill|copy|where|mask|range|linspace|pad|Pad|compute_\w*|krn_partial|write_|split_|chunk_|segment|glu|lstm_cell|gru_cell|amp_|FunctionTraits)", "PyTorch"),
    _other("warp softmax", r"(?:^|::)(?:masked_)?soft_?max|softmax_warp_(?:forward|backward)|cunn_[sS]oft[mM]ax|cunn_SpatialSoftMax|softmax_", "PyTorch"),
    _other("criterion", r"cunn_\w*Criterion|nll_loss|cross_entropy|CrossEntropy|liger_"),
    _other("batch norm", r"\bbn_(?:fw|bw)|batch_norm|batchnorm|BatchNorm|bnFw|bnBw", "cuDNN"),
    _other("layer norm", r"(?:layer|rms|group|instance)_?[nN]orm|LayerNorm|RMSNorm|RmsNorm|GroupNorm|Rmsnorm2d|Layernorm2d|ln_(?:fwd|bwd|parallel)|rms_norm|cuComputeGradInput|cuApplyLayerNorm|cuComputePartGradGammaBeta", ""),
    _other("pooling", r"pooling_(?:fw|bw)|max_?pool|avg_?pool|average_pool|adaptive_\w*pool|MaxPool|AvgPool"),
    _other("cuDNN elementwise", r"(?:^|::)op_(?:generic_)?tensor|OpTensor|add_tensor|scale_tensor|activation_(?:fw|bw)|elementWise|setTensor|LSTM_elementWise|GRU_elementWise|RNN_elementWise|dropout_(?:fp|bp|fw|bw)|cudnn::reduction|softmax_(?:fw|bw)|scalePackedTensor|kern_precompute|elemWiseRNNcell", "cuDNN"),
    _other("CUB and Thrust", r"^(?:at_cuda_detail::)?cub::|thrust::|at_cuda_detail|hipcub::|rocprim::|DeviceScan|DeviceReduce|DeviceRadixSort|CUDAFunctor", "CUB"),
    _other("vLLM elementwise", r"vllm::(?:rotary_embedding|rms_norm|fused_add_rms|act_and_mul|silu|gelu|moe::topk|moe::moe_|scaled_fp8|dynamic_|static_|per_token|convert_|copy_|concat_and_cache|batched_rotary|topk|apply_repetition)", "vLLM"),
    _other("MoE routing", r"^_(?:combined_routing|topk_forward|topk_backward|sum_bitmatrix|routing_|compute_(?:writeback|expt)|expt_data|masked_compaction)|moe_topk|topkGating|moe_softmax|sampling|TopK|topk_"),
    _other("rotary, activation", r"rotary|rope_|_rope|swiglu|SwiGLU|geglu|silu_|gelu_|relu_kernel|act_and_mul|bias_(?:gelu|act|add)|add_bias|quantize|dequant|cast_transpose|cast_\w*kernel|fp8_quant|scaled_quant|amax"),
    _other("transformer engine", r"transformer_engine::(?!.*[gG]emm)", "Transformer Engine"),
    _other("optimizer", r"[aA]dam|adagrad|lamb_|multi_tensor_|l2norm_|LAMB|sgd_|_sgd|adafactor|kOptimizer", ""),
    _other("memory", r"(?:^|::)(?:memcpy|memset|Memcpy|Memset|copy_kernel|fill_kernel|transpose|permute|CopyBuffer|FillBuffer|copyBuffer|fillBuffer)|__amd_rocclr_|vectorized_copy|TransposeKernel|transpose_\w*kernel|tensor_kernel_scan"),
    _other("random and masks", r"[pP]hilox|curand|bernoulli|generate_seed_pseudo|dropout|Dropout"),
    _other("scan and state space", r"selective_scan|mamba_|cumsum|_scan_"),
    _other("loss scaling", r"amp_(?:foreach|update)|non_finite_check|unscale"),
    _other("cuFFT", r"(?:regular|vector|multi_bluestein|spRealComplex|dpRealComplex)_fft|regular_fft|vector_fft|spRadix|composite_2way_fft|cufft", "cuFFT"),
    _other("cuSOLVER", r"(?:^|::)(?:getrf|potrf|geqrf|larft|syevj|gesvdj|gesvd|laswp|ormqr|sytrd)\w*", "cuSOLVER"),
    _other("cuBLAS vector", r"(?:^|::)(?:axpy|scal|copy|nrm2|asum|swap|iamax)_kernel|scal_(?:64addr_)?kernel|axpy_kernel_val|scale_kernel", "cuBLAS"),
    _other("cuSPARSE", r"cusparse::|csrmm|csrmv", "cuSPARSE"),
    _other("CK elementwise", r"ck_tile\S*(?:Rmsnorm|Layernorm|Topk|MoeSorting|MoeSmoothquant|Elementwise|Permute)|elementwise", ""),
    _other("PyTorch rest", r"^at::native::(?!.*(?:gemm|conv|matmul|attention|fmha|flash|mma))", "PyTorch"),
    _other("apex", r"apex::|xentropy|distopt", "Apex"),
    _other("spin", r"spin_kernel|cuda_sleep|nanosleep|delay_kernel|busy_wait"),
    _other("reduction", r"(?:^|::|_)reduce(?:_\w*)?kernel|^reduce_kernel|column_reduce|row_reduce|sum_kernel|argmax|argmin"),
)  # fmt: skip

# Elementwise kernels of PyTorch and collectives precede the opaque names, whose patterns are wide.
RULES: tuple[KernelRule, ...] = (
    _HELPERS + _CUDA_CORE + _TENSOR_CORE + _OTHERS[:5] + _OPAQUE + _OTHERS[5:]
)
"""The whole table, in the order in which it is tried."""
