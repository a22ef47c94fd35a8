"""Matrix math of libraries for inference and quantised weights, on Tensor Cores."""

from mpdiag.hardware.kernel_names.rule import tensor

INFERENCE = (
    tensor("trtllm-gen FP4", r"\b(?:bmm|gemm)_\w*?E2m1\w*?_Fp32", "TensorRT-LLM", "UTCQMMA", "fp4", "sm100"),
    tensor("trtllm-gen FP8", r"\b(?:bmm|gemm)_\w*?E4m3\w*?_Fp32", "TensorRT-LLM", "UTCQMMA", "fp8_e4m3", "sm100"),
    tensor("trtllm-gen BF16", r"(?:bmm|gemm)_Bfloat16_\w*_Fp32", "TensorRT-LLM", "UTCHMMA", "bf16", "sm100"),
    tensor("trtllm-gen FP16", r"(?:bmm|gemm)_Fp16_\w*_Fp32", "TensorRT-LLM", "UTCHMMA", "fp16", "sm100"),
    tensor("DeepGEMM sm100 BF16", r"deep_gemm::sm100_bf16|sm100_bf16_gemm", "DeepGEMM", "UTCHMMA", "bf16", sm="sm100"),
    tensor("DeepGEMM sm100 TF32", r"deep_gemm::sm100_tf32", "DeepGEMM", "UTCHMMA", "tf32", sm="sm100"),
    tensor("DeepGEMM sm100", r"deep_gemm::sm100_|sm100_(?:fp8|m?xf?p?[48])\w*gemm", "DeepGEMM", "UTCQMMA", sm="sm100"),
    tensor("DeepGEMM BF16", r"deep_gemm::sm90_bf16", "DeepGEMM", "HGMMA", "bf16", sm="sm90"),
    tensor("DeepGEMM TF32", r"deep_gemm::sm90_tf32", "DeepGEMM", "HGMMA", "tf32", sm="sm90"),
    tensor("DeepGEMM", r"deep_gemm::(?:sm90_)?fp8_gemm|deep_gemm::sm90_|fp8_gemm_kernel_swapAB", "DeepGEMM", "QGMMA", sm="sm90"),
    tensor("DeepSeek grouped gemm", r"grouped_gemm::cuda::.*fp8.*GemmKernel", "DeepGEMM", "QGMMA", sm="sm90"),
    tensor("block-scaled FP8 of TensorRT-LLM", r"[bB]lock_?[sS]cale_?F[pP]8[gG]emm\w*|fp8_blockscale_gemm_kernel|fp8_blockscale_gemm::\w*gemm\w*", "TensorRT-LLM", "QGMMA", "fp8_e4m3", sm="sm90"),
    tensor("Marlin", r"marlin(?:_moe_wna16|_24|_moe|_qqq)?::Marlin|(?:^|::)Marlin(?:_24|MoE\w*)?<|gptq_marlin|marlin_(?:moe_)?kernel|fp8_marlin|awq_marlin|(?:^|\s|::)Marlin(?:Default|_24)?$", "Marlin", "HMMA.16816", sm="sm80"),
    tensor("Machete", r"machete::|machete_", "Machete", "HGMMA", sm="sm90"),
    tensor("AWQ", r"gemm_forward_4bit_cuda_m16n\w+k32|gemm_w4a16_T[12]|gemm_w8a8|dense_gemm_w4a8", "AWQ", "HMMA.16816"),
    tensor("TensorRT-LLM weight-only", r"fpA_?[iI]ntB|fpAIntB|GemmFpAIntB", "TensorRT-LLM", "HMMA"),
    tensor("bitsandbytes 4-bit wmma", r"kgemm_4bit_inference(?!_naive)", "bitsandbytes", "HMMA"),
    tensor("FP6-LLM", r"QUANT_GEMM_Kernel|fp6_linear|fpx_linear", "FP6-LLM", "HMMA.16816", "fp16", "sm80"),
    tensor("tinygemm 2", r"kernel_tinygemm2_sm\d+|tinygemm2", "TensorRT-LLM", "HMMA.16816", "bf16"),
    tensor("TGV GEMM", r"tgv_gemm", "FlashInfer", "UTCHMMA", sm="sm100"),
    tensor("sparse MLA", r"(?:^|::)sparse_mla_(?:prefill|decode)_\w*kernel", "FlashInfer", "HMMA"),
    tensor("Hadamard product", r"(?:^|::)(?:GraphSafe)?(?:Group)?Hadamard(?:Transform|Amax)\w*Kernel|(?:^|_|::)rht_gemm", "Transformer Engine", "", "bf16"),
    tensor("FP8 products of TensorRT-LLM", r"cooperative_1x128_by_128x128_fp8_gemm|fp8_gemm_kernel_sm90", "TensorRT-LLM", "QGMMA", "fp8_e4m3", "sm90"),
    tensor("tinygemm", r"tinygemm_m16n8k16|tinygemm_kernel", "PyTorch", "HMMA.16816", "bf16", "sm80"),
    tensor("llama.cpp products on mma", r"(?:^|\s|::)mul_mat_f(?:_ids)?(?:<|$)", "llama.cpp", "HMMA"),
    tensor("cuTENSOR tensor-core contraction", r"cutensor\S*(?:tensorop|_mma|hmma|s1688|s16816|d884)", "cuTENSOR"),
    tensor("ThunderKittens", r"kittens::\S*(?:mma|gemm|matmul)", "ThunderKittens", "HGMMA", sm="sm90"),
    tensor("Quartet and FP4", r"nvfp4\w*(?:gemm|matmul|mm)\b|(?:gemm|matmul)_nvfp4\w*|mxf4nvf4", "", "UTCOMMA", "fp4", "sm100"),
)  # fmt: skip
