"""Attention on Tensor Cores, by library."""

from mpdiag.hardware.kernel_names.rule import tensor

ATTENTION = (
    # fmt: off
    tensor(
        "FlashAttention 4",
        r"FlashAttention(?:Forward|Backward|MLA\w*)Sm1[01]\d|BlackwellFusedMultiHeadAttention|flash_(?:fwd|bwd)_sm1[01]\d",
        "FlashAttention 4",
        "UTCHMMA",
    ),
    tensor(
        "FlashAttention 4 sm90",
        r"FlashAttention(?:Forward|Backward)Sm90|flash_(?:fwd|bwd)_sm90",
        "FlashAttention 4",
        "HGMMA",
        sm="sm90",
    ),
    tensor(
        "FlashAttention 3",
        r"FlashAttn(?:Fwd|Bwd)\w*[\s<].*Sm90|FlashAttn(?:Fwd|Bwd)Sm90|flash::compute_attn_ws|flash::Collective(?:Mainloop|Epilogue)(?:Fwd|Bwd)|PrefillWithKVCacheKernel|CollectiveMainloop\w*, cutlass::arch::Sm90",
        "FlashAttention 3",
        "HGMMA",
        sm="sm90",
    ),
    tensor(
        "FlashAttention 3 sm80",
        r"FlashAttn(?:Fwd|Bwd)\w*[\s<].*Sm80|FlashAttn(?:Fwd|Bwd)Sm80",
        "FlashAttention 3",
        "HMMA.16816",
        sm="sm80",
    ),
    tensor(
        "FlashMLA sm100",
        r"sm100::\S*(?:mla|attn|decode|prefill)\w*|Sm100FmhaMla",
        "FlashMLA",
        "UTCHMMA",
        sm="sm100",
    ),
    tensor(
        "FlashMLA",
        r"flash_fwd_(?:splitkv_)?mla_kernel|flash_mla|sparse_attn_fwd_kernel|sm90::\S*(?:mla|attn|decode|prefill)\w*|BatchMLAPage[d]?AttentionHopper|BatchMLAPagedAttentionKernelHopper",
        "FlashMLA",
        "HGMMA",
        sm="sm90",
    ),
    tensor(
        "FlashInfer MLA",
        r"BatchMLAPage[d]?Attention(?:Kernel|RunKernel)",
        "FlashInfer",
        "HMMA.16816",
        sm="sm80",
    ),
    tensor(
        "FlashAttention 2",
        r"flash_fwd_(?:splitkv_)?(?:block_|sparse_)?kernel|flash_bwd_(?:dq_dk_dv_loop|kernel|dq_dk_dv|block_kernel|sparse)|flash_fwd_sparse|Flash_(?:fwd|bwd)_kernel_traits",
        "FlashAttention 2",
        "HMMA.16816",
        sm="sm80",
    ),
    tensor(
        "FlashAttention 1",
        r"fmha_(?:fprop|dgrad|bprop)_fp16_\w*sm(?:70|75|80)|fmha_(?:block_)?(?:f|d)(?:prop|grad).*_kernel<.*[kK]ernel_traits|fmha::(?:device|FMHA_kernel_traits)|FMHA_kernel_traits",
        "FlashAttention 1",
        sm="sm80",
    ),
    tensor(
        "FlashInfer prefill",
        r"(?:Batch|Single)Prefill\w*Kernel|BatchPODWith\w*Kernel|PODWithKVCache\w*Kernel|BatchDecode\w*TensorCore\w*|BatchAttention\w*(?:Persistent)?Kernel|PersistentKernelTemplate<.*BlockBatchPagedAttention",
        "FlashInfer",
        "HMMA.16816",
        sm="sm80",
    ),
    tensor(
        "trtllm-gen attention FP8",
        r"fmhaSm1\d\d\w*_QkvE4m3|fmhaSm1\d\d\w*_QE4m3",
        "TensorRT-LLM",
        "UTCQMMA",
        "fp8_e4m3",
    ),
    tensor("trtllm-gen attention", r"fmhaSm1\d\d\w*Kernel", "TensorRT-LLM", "UTCHMMA"),
    tensor(
        "TensorRT-LLM XQA Hopper",
        r"xqa_kernel\w*_sm_?90|kernel_mha_sm90|xqa\w*_sm90",
        "TensorRT-LLM",
        "HGMMA",
        sm="sm90",
    ),
    tensor(
        "TensorRT-LLM XQA", r"(?:^|_|::)xqa_|xqa_kernel|^kernel_mha\b|kernel_mha_", "TensorRT-LLM"
    ),
    tensor(
        "TensorRT fused attention Hopper",
        r"fmha_v2_flash_attention\w*_sm90|fmha_v2_\w*_sm90|fused_multihead_attention\w*_sm90",
        "TensorRT-LLM",
        "HGMMA",
        sm="sm90",
    ),
    tensor(
        "TensorRT fused attention",
        r"fmha_v2_\w*_sm(?:70|72|75|80|86|87|89|120)|fused_multihead_(?:flash_)?attention|mha_v2_|fmha_m(?:h)?c?a_\w*_sm\d+|fmhca_\w*_sm\d+|fmha_v2_|bert::\w*fmha|trt_fused_multihead_attention|cross_multihead_attention",
        "TensorRT-LLM",
    ),
    tensor(
        "memory-efficient attention FP32",
        r"fmha_cutlass[FB]_f32_\w*_sm80",
        "PyTorch",
        "HMMA.1688.TF32",
        "tf32",
        "sm80",
    ),
    tensor(
        "memory-efficient attention sm70",
        r"fmha_cutlass[FB]_f16_\w*_sm70",
        "PyTorch",
        "HMMA.884",
        "fp16",
        "sm70",
    ),
    tensor(
        "memory-efficient attention sm75",
        r"fmha_cutlass[FB]_f16_\w*_sm75",
        "PyTorch",
        "HMMA.1688",
        "fp16",
        "sm75",
    ),
    tensor(
        "memory-efficient attention",
        r"fmha_cutlass[FB]_b?f16_\w*_sm80",
        "PyTorch",
        "HMMA.16816",
        "",
        "sm80",
    ),
    tensor(
        "memory-efficient attention template",
        r"attention_kernel_(?:backward_)?batched_impl.*(?:half_t|bfloat16_t).*(?:Sm|sm)(?:80|86|90)|AttentionKernel<cutlass::(?:half_t|bfloat16_t), cutlass::arch::Sm80|AttentionBackwardKernel<cutlass::arch::Sm80, cutlass::(?:half_t|bfloat16_t)",
        "xFormers",
        "HMMA.16816",
        "",
        "sm80",
    ),
    tensor(
        "CUTLASS attention sm100",
        r"Sm100Fmha|sm100_fmha|Sm100Mla|Sm100FmhaFwd|Sm100FmhaBwd",
        "CUTLASS",
        "UTCHMMA",
        sm="sm100",
    ),
    tensor(
        "CUTLASS attention",
        r"cutlass::fmha::|Sm90Fmha|Fmha(?:Fwd|Bwd)?KernelTma",
        "CUTLASS",
        "HGMMA",
    ),
    tensor(
        "cuDNN attention sm100",
        r"cudnn_generated_\w*sdpa\w*_sm1[01]\d\w*_[fb]prop",
        "cuDNN",
        "UTCHMMA",
    ),
    tensor(
        "cuDNN attention sm120", r"cudnn_generated_\w*sdpa\w*_sm12\d\w*_[fb]prop", "cuDNN", "HMMA"
    ),
    tensor(
        "cuDNN attention sm90", r"cudnn_generated_\w*sdpa\w*_sm90\w*_[fb]prop", "cuDNN", "HGMMA"
    ),
    tensor(
        "cuDNN attention sm80",
        r"cudnn_generated_\w*sdpa\w*_sm8\d\w*_[fb]prop",
        "cuDNN",
        "HMMA.16816",
    ),
    tensor("cuDNN attention on mma", r"cudnn_generated_\w*_(?:wmma|mma|wgmma)_", "cuDNN"),
    tensor(
        "SageAttention Hopper",
        r"qk_int(?:8|4)_sv_f\d+\w*_sm90|qk_int8\w*_attn_inst_buf_kernel\w*sm90",
        "SageAttention",
        "IGMMA",
        "int8",
        "sm90",
    ),
    tensor(
        "SageAttention",
        r"qk_int(?:8|4)_sv_f\d+\w*|qk_int8\w*",
        "SageAttention",
        "IMMA",
        "int8",
        "sm80",
    ),
    tensor("llama.cpp attention", r"flash_attn_ext_f16", "llama.cpp", "HMMA", "fp16"),
    tensor(
        "ThunderKittens attention",
        r"^(?:void )?(?:fwd_attend_ker|bwd_attend_ker|attend_ker)\b",
        "ThunderKittens",
        "HGMMA",
        "bf16",
        "sm90",
    ),
    # fmt: on
)
