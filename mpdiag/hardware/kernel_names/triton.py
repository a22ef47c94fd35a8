"""Triton kernels whose code multiplies by ``tl.dot``, which is compiled to matrix instructions.

``tl.dot`` rounds FP32 operands to TF32 unless it is told not to, so these names say Tensor Cores
(AMD: matrix cores) but, without a type in them, not which dtype. Kernels that let a caller turn TF32
off, as Inductor's templates do, stay unknown.
"""

from collections.abc import Iterable

from mpdiag.hardware.kernel_names.rule import cuda, other, tensor, tensor_words
from mpdiag.hardware.kernel_names.triton_names import DOTS, NO_PRODUCTS, SUMS


def _any_of(names: Iterable[str]) -> str:
    """A pattern of these names, with the settings that a kernel's ``repr`` appends to its name."""
    return rf"^(?:{'|'.join(sorted(names))})(?:_[A-Z][A-Z0-9_]+_\w+|_\d+d\w*)?$"


KNOWN = (
    cuda("Triton without dots", _any_of(SUMS), "Triton"),
    other("Triton without a product", _any_of(NO_PRODUCTS), "Triton"),
    tensor("Triton dots", _any_of(DOTS), "Triton", ""),
)
"""Kernels that were looked up by their names; before any other rule."""

TRITON = (
    tensor("GPTQ's Triton products", r"^(?:transpose_)?(?:quant_)?matmul_?(?:4|248)_kernel|^quant_fused_matmul_248_kernel|^fusedmatmul_248_kernel", "GPTQ", ""),
    tensor("Inductor's attention template of TritonBench", r"^triton_tem_fused_(?:no|with)_exp2$", "Inductor", ""),
    tensor("Triton matmul_ogs", r"^_?(?:p_)?matmul_ogs(?:_|$)|^_(?:p_)?matmul_[NT]{3}_", "Triton", ""),
    tensor("Mamba-2 chunks", r"^_(?:bmm_chunk_(?:fwd|bwd)|chunk_state_(?:fwd|bwd_d[bx]|bwd_ddAcs_stable|varlen)|chunk_scan_(?:fwd|bwd_d(?:states|c|cb|x)|bwd_ddAcs_(?:stable|prev)|chunk_state_bwd_dx))\w*", "Mamba", ""),
    tensor("Triton unified attention", r"^kernel_unified_attention_\dd|^kernel_paged_attention_2d|^_?fwd_grouped_kernel_stage1|^_fwd_grouped_(?:split_)?(?:quant_)?kernel\w*(?<!stage2)$|^_fwd_kernel_ep_gemm", "Triton", ""),
    tensor("Triton attention", r"^_?attn_(?:fwd|bwd)(?:_inner|_tma|_ws|_dkdv|_dq|_causal|_noncausal|_persist)*$|^_attn_bwd_(?:dkdv|dq|dkdvdq)(?:_(?!\w*(?:reduce|convert|pre|post))\w*)?$|^bwd_kernel_(?:dk_dv|dq|dkdv|fuse)$|^_attn_fwd_(?!\w*(?:softmax|correction|epilogue|reduce|combine|load|store|merge|preprocess))\w*|^_(?:fwd|bwd)_kernel_(?:flash|destindex)\w*|^_flash_attn_(?:fwd|bwd)|^flash_attn_(?:fwd|bwd)_kernel|^_bwd_kernel_(?:one_col_block|dkdv|dq|dk_dv)|^_flash_attention_(?:fwd|bwd)", "Triton", ""),
    tensor("vLLM fused MoE", r"^fused_moe_kernel(?:_gptq_awq)?$|^batched_triton_kernel$|^fused_batched_moe_kernel$", "vLLM", ""),
    tensor("block FP8 matmul", r"^_w8a8_(?:triton_)?block_(?:scaled_mm|fp8_matmul)\w*|^_w8a8_block_fp8_matmul\w*|^fp8_gemm_kernel$|^_fp8_(?:row|block)?\w*(?:matmul|gemm)\w*|^_kernel_matmul_fp8_(?:row|block)\w*", "Triton", "", "fp8_e4m3"),
    tensor("block INT8 matmul", r"^_w8a8_block_int8_matmul\w*", "Triton", "", "int8"),
    tensor("scaled matmul", r"^scaled_mm_kernel$|^_scaled_mm_kernel$|^awq_gemm_kernel$|^_awq_gemm\w*|^gemm_a16w\d\w*", "Triton", ""),
    tensor("Triton experts", r"^_?fused_(?:batched_)?moe_(?!\w*(?:align|sum|topk|top_k|rout|gat|mask|dispatch|combine|sort|permut|quant_|reduce|scatter|cudacore|count|index|offset|silu|act|gelu|norm|loss))(?:\w+_)?kernel\w*", "Triton", ""),
    tensor("Triton attention of prompts", r"^_(?!\w*(?:reduce|combine|merge|metadata|copy|mask|quant|rope|norm|index|indices|cache|schedule|split_info))\w*?(?:prefill|context|extend)_(?:\w+_)?(?:attn|attention|fwd)(?:_|$)\w*|^_(?:mla|mha|gqa|mqa)_prefill_(?:fwd_)?kernel\w*|^_\w*flash_(?:attn|attention)_(?:fwd|bwd|forward|backward)(?!\w*(?:preprocess|reduce|combine|delta|epilogue|load))\w*", "Triton", ""),
    tensor("mLSTM chunks", r"^_?mlstm_chunkwise__(?:parallel|recurrent|xl)\w*_(?:fw|bw)_\w+", "mLSTM", ""),
    tensor("LoRA products", r"^_\w*?(?:lora|sgmv)_(?:shrink|expand)(?!\w*(?:meta|index|indices))\w*|^_lora_(?:shrink|expand)_kernel|^_fused_moe_lora_kernel|^_sgemm_lora_[ab]_kernel|^_gate_up_lora_b_kernel|^_qkv_lora_b_kernel", "vLLM", ""),
    tensor("linear attention chunks", r"^(?:chunk_(?:\w*_)?(?:fwd|bwd)_kernel_(?:h|o|dh|dv|dqkw?g?|dqkwg|A|h_blockdim64|dhu|dv_local|intra\w*)\w*|chunk_\w*delta_rule_(?:fwd|bwd)_kernel_\w*|chunk_scaled_dot_kkt_fwd_kernel|recompute_w_u_fwd_kernel|(?:fwd|bwd)_(?:recompute|prepare)_w\w*_kernel|merge_\d+x\d+_to_\d+x\d+_inverse_kernel|prepare_wy_repr_(?:fwd|bwd)_kernel\w*|parallel_(?:\w*_)?attn_(?:fwd|bwd)_kernel\w*|parallel_\w*(?:fwd|bwd)_kernel(?:_dq|_dkv)?|chunk_gla_(?:fwd|bwd)\w*kernel\w*|chunk_kda_\w*)", "flash-linear-attention", ""),
    tensor("grouped products", r"^_?grouped_(?:gemm|matmul)(?:_fp8|_masked|_contiguous)?(?:_rowwise)?_kernel\w*|^_fbgemm_grouped_gemm\w*|^_cg_grouped_gemm\w*|^_m_grouped_gemm\w*|^_grouped_gemm_(?:forward|dX|dW)_kernel\w*|^_k_grouped\w*", "Triton", ""),
    tensor("XLA's Triton products", r"^_?(?:wrapped_)?(?:triton_)?gemm_fusion(?:_dot)?(?:_general)?[_.\d]*\w*|^triton_gemm_\w*|^_?nested_gemm_fusion\w*", "XLA", ""),
    tensor_words("Triton product", r"^_(?=_|gluon_|[^_]+_(?:[^_]+_){0,8}?triton_)_?(?=(?:[^_]+_){0,12}?(?:[^_]*gemm[^_]*|[^_]*matmul[^_]*|mm|bmm|conv\dd)_)(?!(?:[^_]+_){0,12}?(?:reduce[^_]*|reduction|quant|quantize|quantization|[^_]*quant|copy[^_]*|scatter[^_]*|gather[^_]*|schedule|metadata|masked?|transform|offsets?|indices|index|norm|rmsnorm|softmax|preprocess|pad[^_]*)_)", "Triton"),
)  # fmt: skip
