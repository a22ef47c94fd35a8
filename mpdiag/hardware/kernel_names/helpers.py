"""Kernels that serve matrix kernels, and conversions of layout: gemm, conv and flash mislead here."""

from mpdiag.hardware.kernel_names.rule import helper, layout, other_words

HELPERS = (
    other_words("words: weights laid out anew", r"_(?:repack|prepack|interleave|unswizzle|make_sequential|reorder|rearrange)_"),
    helper("split-k reduction", r"split_?[kK]_?[rR]educ|ReduceSplitK|splitk_reduce|SplitKReduc|reduce_?split_?k|GemmSplitKReduce|gemmk1_reduce|reduce_partials_kernel", "cuBLAS"),
    helper("cuDNN reduction", r"reduce_1Block_kernel|reduce_wgrad_nchw_helper", "cuDNN"),
    helper("Winograd transform", r"winograd(?:_nonfused)?::|generateWinogradTiles|winograd(?:Forward|Wgrad)(?:Data|Filter|Output|Delta)", "cuDNN"),
    helper("MIOpen Winograd transform", r"^gcnAsm.*Winograd.*[xX]form|Winograd.*[xX]form|^miopenGcnAsmMPBidirectWinograd.*[xX]form", "MIOpen"),
    helper("FFT transform", r"\bfft[12]d_[rc]2[rc]|\bfft2d_|flip_filter|fft_?shift_filter", "cuDNN"),
    helper("INT8 results", r"kdequant_mm|dequant_mm_int32", "bitsandbytes"),
    helper("im2col", r"[iI]m(?:\dd)?2(?:d_)?[cC]ol|[cC]ol2[iI]m|vol2col|col2vol|Im2Col|Col2Im|im2row|im3d2col"),
    helper("offsets", r"compute(?:Wgrad)?(?:SplitK|B)?OffsetsKernel|compute_gemm_pointers|computeGroupedGemmOffsets|get_group_gemm|setGroupedGemm", "cuDNN"),
    helper("cuBLASLt epilogue", r"epilogue::impl::globalKernel", "cuBLASLt"),
    helper("tensor maps", r"fill_tensormaps?_kernel|prepare_grouped_gemm|get_grouped_mm_|get_group_gemm_starts|set_smem_size_|computeStridesTmaWarpSpecialized"),
    helper("packed tensor scale", r"ops::scalePackedTensor_kernel", "cuDNN"),
    helper("flash backward dot", r"flash_bwd_dot_do_o|flash_bwd_convert_d(?:q|kv)|flash_bwd_clear_dkvaccum", "FlashAttention 2"),
    helper("flash combine", r"flash_fwd_splitkv_combine|FlashAttnFwdCombine|flash_fwd_(?:mla_)?combine|FlashAttentionForwardCombine|flash_attn_combine_results|flash_attn_stream_k_fixup|mul_mat_q_stream_k_fixup|mha_combine|flash_attn_mask_to_KV_max|smxay_combine", "FlashAttention"),
    helper("flash pre/post", r"FlashAttnBwd(?:Pre|Post)process|FlashAttentionBackward(?:Pre|Post)process|_attn_bwd_preprocess|^_?bwd_preprocess|^_bwd_preprocess_do_o_dot|_flash_attn.*preprocess|attn_bwd_preprocess|bwd_kernel_(?:pre|post)process", "FlashAttention 3"),
    helper("flash bookkeeping", r"prepare_varlen_num_blocks|(?:::|^)reshape_and_cache(?:_flash)?_kernel|get_mla_metadata|Prepare(?:Varlen)?Sched"),
    helper("cuDNN attention helper", r"\bcudnn_generated_.{0,60}?sdpa.{0,120}?(?:reduce|convert|dot_do_o)|^compute_dot_do_o", "cuDNN"),
    helper("attention segments", r"^_?reduce_segments|paged_attention_.*reduce_kernel|merge_attn_states|_fwd_kernel_stage2|MergeStates?(?:InPlace)?Kernel|MergeStatesKernel|VariableLengthMergeStates|_flash_decoding?_?(?:fwd_)?reduce|_splitK_reduce|kn_mla_reduce|mla_reduce|BatchAttention\w*Reduction|fmha_?[rR]eduction|fmhaReductionKernel|_merge_state"),
    helper("MIOpen cast", r"SubTensorOpWith(?:Scalar|CastTensor|SubTensor|Transform)\d?d?", "MIOpen"),
    helper("Tensile helper", r"^Cij.*(?:PostGSU|GSUA?MBBeta|BiasS_.*PostGSU|_Beta)|^Cij[a-z]*_[A-Z]\w{0,2}_(?:GG|GB|Bias|Grad|Aux|DBias|FD)?|^D[ijkl]+_Reduction|^[SDHB]_?\w*_Reduction_Kernel|^Cij\w*_(?:GB|GA)$", "Tensile"),
    helper("MoE scatter", r"^_finalize_matmul_scatter|^_reduce_grouped|moe_align_block_size|moe_sum_kernel|finalizeMoeRouting|finalizeKernel|expandInputRows|_fwd_kernel_ep_(?:scatter|gather)|moe_sum_reduce"),
    helper("CUTLASS reduction", r"cutlass::reduction::|cutlass_reduce|(?:cutlass|reduction)::kernel::(?:Reduce|TensorReduce)", "CUTLASS"),
    layout("nchw/nhwc", r"nchwToNhwc|nhwcToNchw|NchwToNhwc|NhwcToNchw|nhwcAddPadding|nchwAddPadding|nhwcToFoldedNhwc|foldedNhwcToNhwc|nchwToNchw|nhwcToNhwc|(?:^|::)nchw2nhwc|(?:^|::)nhwc2nchw|nchw_to_nhwc|nhwc_to_nchw|NCHWToNHWC|NHWCToNCHW|SwapDimension\w*TensorUsingTiles|kern_\w*nchw\w*nhwc", "cuDNN"),
    layout("cuDNN tensor transform", r"op_tensor_(?:layout|transform)|tensorTransform(?:Generic)?|transformTensor|cudnn::ops::transform|convertTensor_kernel|convertTensorLayout", "cuDNN"),
    layout("MIOpen transpose", r"^batched_transpose_\d+x\d+|^transpose_[NCDHW]+2?[NCDHW]*_|^transpose_(?:NCHW|NHWC)|^general_2d_perm|^Tensor_reorder", "MIOpen"),
    layout("TensorRT reformat", r"genericReformat|[cC]opyPackedKernel|[cC]opyVectorizedKernel|cuInt8::(?:nchw|ncxhw|nhwc|nc)\w*To\w*|(?:nchw|nhwc|ncxhw\d*|chw\d*|nc\d+hw)To(?:nchw|nhwc|ncxhw\d*|chw\d*|nc\d+hw)|permutationKernelPLC|reformat", "TensorRT"),
)  # fmt: skip
