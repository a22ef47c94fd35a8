"""Matrix math on CUDA cores (AMD: on vector units), by name."""

from mpdiag.hardware.kernel_names.rule import cuda

CUDA_CORES = (
    # fmt: off
    cuda(
        "xmma FFMA", r"xmma_.*(?:_ffma_|_ffma$|_dfma_|_hfma2?_|_imad?_|_dp4a_|_idp4a?_)", "cuBLAS"
    ),
    cuda("xmma SIMT", r"xmma_.*simt", "cuBLAS"),
    cuda(
        "CUTLASS SIMT",
        r"cutlass.*_simt_|OpClassSimt|MmaSimt(?!\w)|cutlass_simt_|DefaultMmaSimt|MainloopSm\d+Simt|MmaUniversalOp|UniversalFMA",
        "CUTLASS",
    ),
    cuda(
        "half storage sgemm",
        r"(?:volta|turing|ampere|maxwell|pascal)_(?:fp16|bf16)_[sh]gemm_",
        "cuBLAS",
    ),
    cuda(
        "integer dot",
        r"(?:maxwell|pascal|volta|turing|ampere|hopper)_(?:int8|s8|fp32_i)\w*_(?:i?gemm|icudnn|igemm|dp4a)|(?:maxwell|pascal|volta|turing|ampere)_(?:fp32_)?(?:int8x4_)?(?:icudnn|igemm)_|_dp4a_|\bigemm_int8",
        "cuBLAS",
        "int8",
        "IDP4A",
    ),
    cuda("arch gemm", r"(?:maxwell|pascal|volta|turing|ampere|hopper)_[sdczh]gemm_", "cuBLAS"),
    cuda(
        "arch complex gemm", r"(?:maxwell|pascal|volta|turing|ampere|hopper)_g?[cz]gemm", "cuBLAS"
    ),
    cuda(
        "arch other level 3",
        r"(?:maxwell|pascal|volta|turing|ampere|hopper)_[sdcz](?:trsm|trmm|syrk|symm|herk|hemm)",
        "cuBLAS",
    ),
    cuda("scudnn", r"(?:^|_)scudnn_(?!.*(?:884|1688|16816))", "cuDNN"),
    cuda("dcudnn", r"_dcudnn_", "cuDNN", "fp64", "DFMA"),
    cuda("hcudnn", r"_hcudnn_(?!.*(?:884|1688|16816))", "cuDNN", "fp16", "HFMA2"),
    cuda(
        "cuDNN convolve",
        r"(?:(?:im|ex)plicit|precomputed)_convolve_[sdh]?gemm|implicit_convolveNd_[sdh]gemm|precomputed_convolve\w*|explicit_convolve|cudnn::detail::\w*convolve",
        "cuDNN",
    ),
    cuda(
        "cuDNN engines",
        r"(?:wgrad|dgrad)_alg\d_(?:nd_)?(?:float_)?engine|(?:^|::)dgrad2?d?_engine|wgrad2?d?_engine|(?:d|w)grad2d_alg\d_\d|(?:d|w)grad_alg\d_nd",
        "cuDNN",
    ),
    cuda("grouped direct", r"grouped_direct|direct_group", "cuDNN"),
    cuda("c1_k1", r"(?:conv2d|dgrad2d|wgrad2d)_c1_k1", "cuDNN"),
    cuda(
        "depthwise",
        r"conv_depthwise[23]d|[sS]patialDepthwiseConvolution|[dD]epthwiseConv|dwconv|depthwise_conv|depthwise_fprop|[dD]epthwise|[cC]ausal_?[cC]onv1d|conv1d_(?:fwd|bwd|update)|ssm_conv_|conv2d_dw_|short_?conv",
    ),
    cuda(
        "gemv",
        r"gemv2[TN]|gemvNSP|gemvx::kernel|(?:^|::|_)gemv[nt]?_|gemmk1_kernel|gemv_kernel|GEMV|[gG]emv(?:Kernel|_)|batched_gemv|gemv[NT]_|(?:^|_)[sdhcz]gemv|gemvStridedBatched|gemv_awq|gemv<|::gemv|MatVec|mat_vec|matvec|mul_mat_vec|mul_mat_p021|mul_mat_vec_nc|dequantize_mul_mat_vec|qmv_|rocblas_gemv\w*",
        "cuBLAS",
    ),
    cuda("outer product", r"(?:^|::)(?:s|d|rocblas_)?ger_kernel|rocblas_ger\w*", "cuBLAS"),
    cuda("dot", r"(?:^|::)dot_kernel|reduce_1Block_dot|rocblas_dot\w*", "cuBLAS"),
    cuda(
        "CUDA-core gemm",
        r"cuda_?[cC]ore_?[gG]emm|simt_gemm|LLGemm1|LLMM1|[sS]imtGemm|smallM_?gemm|fp8_gemm_cuda_core|skinny_gemm",
    ),
    cuda(
        "paged attention",
        r"paged_attention_(?:v[12]_)?kernel|single_query_cached_kv|masked_multihead_attention|mmha(?:_kernel|::)|MaskedMultiheadAttention|masked_mha|DecodeAttentionKernel|paged_attention_v[12]",
        "vLLM",
    ),
    cuda(
        "FlashInfer decode",
        r"(?:Batch|Single)Decode(?:WithPagedKVCache|WithKVCache|WithPaddedKVCache|WithPagedKVCacheMLA|WithPagedKVCacheKernelMLA)?\w*Kernel(?!\w*TensorCore)",
        "FlashInfer",
    ),
    cuda(
        "Triton decode without dots",
        r"^_fwd_kernel_stage1$|^_?(?:fused_)?recurrent_\w*kernel|fused_recurrent_\w*_kernel|_selective_scan_update_kernel|_selective_state_update|selective_state_update",
        "Triton",
    ),
    cuda("gemmSN", r"gemmSN_[TN]{2}_kernel|gemm_?small_?[nN]|gemmNSP", "cuBLAS"),
    cuda(
        "MAGMA",
        r"magma_[sdcz]gemm|magmablas_[sdcz]gemm|\bgemm_template_(?:batched_)?(?:device_)?(?:vbatched_)?n?[nt]|gemm_template_batched|magma_\w*gemm|magmablas_\w*(?:gemm|trsm|symm|syrk)",
        "MAGMA",
    ),
    cuda(
        "cuBLAS old gemm",
        r"^(?:sgemm|dgemm|cgemm|zgemm)_(?:32|64|128|largek|sm)|gemm_kernel[12]x\d_core|(?:^|::)[sdcz]?gemm_kernel1x1|^[sdczh]gemm_sm\d+|^[sd]gemm_\w*_(?:nn|nt|tn|tt)\b|gemm_kernel2x2|sgemm_sm\d+x_\w+|fermiPlus\w*|kepler_[sd]gemm|gemm_batched_\w*core",
        "cuBLAS",
    ),
    cuda(
        "trsm",
        r"(?:^|::|_)(?:trsm|trsv|batch_trsm|trmm)_\w*kernel|trsm_(?:left|right|lt|ln)_kernel|(?:trsm|trsv|trmm)(?:_kernel|Kernel|_l_|_r_)|rocblas_(?:trsm|trsv|trtri)\w*",
        "cuBLAS",
    ),
    cuda(
        "symmetric rank",
        r"(?:^|::)(?:syrkx?|herkx?|symm|hemm|syr2k|symv|hemv|syr|spr)_\w*kernel|rocblas_(?:syrkx?|herkx?|symm|hemm|syr|symv)\w*|herk_kernel|syrk_kernel",
        "cuBLAS",
    ),
    cuda("fmha float before sm80", r"fmha_cutlass[FB]_f32_\w*_sm(?:50|70|75)", "PyTorch", "fp32"),
    cuda("fmha half on sm50", r"fmha_cutlass[FB]_(?:f16|bf16)_\w*_sm50", "PyTorch"),
    cuda("MIOpen naive", r"naive_conv_", "MIOpen", instruction="V_FMA"),
    cuda(
        "MIOpen direct",
        r"^MIOpenConv|^MIOpenCvD3x3|^MIOpenCvBwd|^gcnAsmConv|^conv1x1u|gridwise_convolution_\w*_dlops|^igemm_v4r1_\w*|^MIOpenCDFGen|^gcnAsmConv\w*|miopenGcnAsmConv",
        "MIOpen",
        instruction="V_FMA",
    ),
    cuda(
        "MIOpen Winograd",
        r"^miopenSp3AsmConv(?!.*(?:mfma))|^miopenGcnAsmWino|^sp3AsmConv",
        "MIOpen",
        instruction="V_FMA",
    ),
    cuda(
        "CK without matrix cores",
        r"ck::\S*(?:_dl_|Dl<|_dlops|Dlops|DeviceGemmDl|kernel_gemm_dl|gemm_dl_)|kernel_gemm_dl\w*|GridwiseGemmDl\w*",
        "Composable Kernel",
        instruction="V_DOT",
    ),
    cuda("RNN persist FP32", r"RNN_blockPersist\w*(?:LSTM|GRU|RNN)(?!\w*HMMA)", "cuDNN"),
    cuda(
        "exllama",
        r"q4_matmul(?:_recons)?_kernel|gemm_half_q_half(?:_gptq)?(?:_alt)?(?:_\dbit)?\w*_kernel|gemm_half_q_half|^gemm_half_q4|VecQuant\dMatMul\w*|vecquant\dmatmul\w*",
        "ExLlama",
        "fp16",
        "HFMA2",
    ),
    cuda("bitsandbytes 4-bit naive", r"kgemm_4bit_inference_naive", "bitsandbytes"),
    cuda(
        "llama.cpp attention on CUDA cores",
        r"flash_attn_(?:vec|tile)(?:_ext)?(?:_f\d\d)?\b",
        "llama.cpp",
    ),
    cuda(
        "llama.cpp integer dot", r"mul_mat_q\d_[01K]\b|mul_mat_id_vec", "llama.cpp", "int8", "IDP4A"
    ),
    cuda(
        "unfused products of libraries",
        r"(?:^|::)(?:sgemmNN|sgemmNT|sgemmTN|batch_gemm_kernel|naive_(?:gemm|matmul)\w*|matmul_naive\w*)",
    ),
    # fmt: on
)
