"""Matrix math on AMD's matrix cores (MFMA, from CDNA on; WMMA of RDNA 3)."""

from mpdiag.hardware.kernel_names.rule import tensor

AMD = (
    tensor("Tensile WMMA", r"^Cij\w*_MI\d+x\d+x\d+\w*_ISA11\d\d", "Tensile", "WMMA"),
    tensor("Tensile MFMA", r"^\w*_MI\d+x\d+x\d+|^Cij[a-z]*_\w+_MT\d+x\d+x\d+_MI\d*(?:x[\dx]*)?$", "Tensile", "MFMA"),
    tensor("custom Tensile MFMA", r"^Custom_Cij\w*", "Tensile", "MFMA"),
    tensor("MIOpen implicit gemm", r"igemm_(?:fwd|bwd|wrw)_gtcx2_", "MIOpen", "MFMA", sm="gfx90a"),
    tensor("MIOpen implicit gemm MI300", r"igemm_(?:fwd|bwd|wrw)_gtcx3_", "MIOpen", "MFMA", sm="gfx942"),
    tensor("MIOpen implicit gemm MI100", r"igemm_(?:fwd|bwd|wrw)_gtcx_", "MIOpen", "MFMA", sm="gfx908"),
    tensor("MIOpen Winograd WMMA", r"^miopenSp3AsmConvFury", "MIOpen", "WMMA"),
    tensor("MIOpen Winograd of CDNA 3", r"^miopenSp3AsmConvRage\w*_gfx9", "MIOpen", "MFMA"),
    tensor("MIOpen Winograd of RDNA 4", r"^miopenSp3AsmConvRage", "MIOpen", "WMMA"),
    tensor("MIOpen Winograd MFMA", r"^miopenSp3AsmConv\w*mfma|Winograd\w*MFMA|_mfma_", "MIOpen", "MFMA"),
    tensor("CK XDL", r"[xX]dl(?:ops|Ops|CShuffle|_)|_xdl_|Xdlops|kernel_\w*gemm_xdl|GridwiseGemm\w*_[xX]dl|Xdl[A-Z<]|\wXdl\b|_xdlops_|blockwise_gemm_xdl|kernel_moe_gemm|kernel_gemm_mx|GridwiseMoeGemm|kernel_contraction\w*_xdl|kernel_grouped_conv\w*xdl|conv_multiple_d_xdl", "Composable Kernel", "MFMA"),
    tensor("CK WMMA", r"GridwiseGemm\w*[wW]mma|kernel_\w*wmma\w*", "Composable Kernel", "WMMA"),
    tensor("skinny product on MFMA", r"wvSplitK(?:_hf\w*|rc_?\w*)?<\s*(?:__hip_bfloat16|hip_bfloat16|c10::BFloat16|at::BFloat16|__bf16)", "vLLM", "MFMA", "bf16"),
    tensor("skinny FP8 product on MFMA", r"wvSplitKQ", "vLLM", "MFMA", "fp8_e4m3"),
    tensor("paged attention MFMA", r"paged_attention_\w*mfma\w*_kernel|paged_attention_ll4mi_QKV(?:_mfma\w*)?_kernel", "vLLM", "MFMA"),
    tensor("CK tile attention", r"ck_tile\S*Fmha(?:Fwd|Bwd|Batch)(?!\w*(?:Combine|OGradDotO|ConvertDQ|AppendKV))|Fmha(?:Fwd|BatchPrefill)(?!\w*(?:Combine|AppendKV))\w*Kernel|FmhaBwdDQDKDV", "Composable Kernel", "MFMA"),
    tensor("CK tile gemm", r"ck_tile\S{0,300}?(?:FlatmmKernel|[gG]emm\w*Kernel|MoeFlatmm|FusedMoeGemm|GemmPipeline|GroupedGemm|Quant\w*Gemm)", "Composable Kernel", "MFMA"),
    tensor("AITER assembly", r"aiter::(?:f4gemm|bf16gemm|f8gemm|fp8gemm|i8gemm|f8|i8|fmoe|I8gemm|fmha|mla_|pa_|flatmm)\w*|_ZN5aiter\d+(?:fmha|I8gemm|f4gemm|bf16gemm|fmoe|f8_|mla|pa_)|(?:^|::)(?:fmha_(?:fwd|bwd)_h?d\d+|mla_(?:a8w8|a16w16|dec|pfl|prefill|stage1)\w*|pa_(?:bf16|fp16|fp8|a16w8|ps)\w*|fmoe_(?:bf16|fp8|int8|stage|f8|f16|i8|g1u1|2stage)\w*|flatmm_\w*|f4gemm_\w*|bf16gemm_\w*|i8gemm_\w*|fp8gemm_\w*)", "AITER", "MFMA"),
    tensor("FlyDSL GEMM", r"^hgemm_(?:bf16|f16)_\d+x\d+x\d+x\d+_SPK\d", "AITER", "MFMA"),
    tensor("AITER HIP", r"(?:^|::)(?:gemm_a8w8_(?!\w*(?:reduce|quant_))\w*|kn_mi3\w+_mla_\w*|pa_prefill_16mx\w*|opus_moe_stage\d\w*|mhc_\w*gemm\w*)", "AITER", "MFMA"),
    tensor("CK MoE of AITER", r"ck_moe_(?:stage|gemm)|moe_ck2stages|(?:^|::)gemm\d*_(?:\w+_)?ck_|kernel_moe_(?:mx)?gemm", "AITER", "MFMA"),
)  # fmt: skip
