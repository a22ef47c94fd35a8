"""Matrix math on NVIDIA's Tensor Cores: cuBLAS, cuDNN, CUTLASS and what is built from them."""

import re

from mpdiag.hardware.kernel_names.rule import KernelRule, cuda, tensor

# nvjet: the letters are the types of A, B, C, of the sum and of D (t bf16, h fp16, s fp32, q e4m3,
# r e5m2, o e2m1, b int8); A and B share one letter where they are alike. Older names leave the
# generation out: tcgen05 pairs two CTAs and scales blocks by UE8M0 or UE4M3; mma is Blackwell's
# for desktops; the rest is Hopper.
_J100 = r"\bnvjet_(?:sm1[01]\d_|(?!sm\d)(?=\w*(?:_2cta|UE[48]M[03])))"
_J120 = r"\bnvjet_(?:sm12\d_|(?!sm\d)(?=\w*_mma_))"
_J90 = r"\bnvjet_(?:sm90_|(?!sm\d))"

NVJET = (
    KernelRule("nvjet FP16 accumulator", re.compile(r"\bnvjet_(?:sm90_)?hhh_(?!\w*_2cta)"), "tensor_core", "cuBLASLt", "HGMMA", "fp16", "sm90", "fp16"),
    tensor("nvjet sm100 TF32", _J100 + r"\w*tf32", "cuBLASLt", "UTCHMMA", "tf32", "sm100"),
    tensor("nvjet sm100 BF16", _J100 + r"t\w{2,4}_", "cuBLASLt", "UTCHMMA", "bf16", "sm100"),
    tensor("nvjet sm100 FP16", _J100 + r"h\w{2,4}_", "cuBLASLt", "UTCHMMA", "fp16", "sm100"),
    tensor("nvjet sm100 FP8", _J100 + r"q", "cuBLASLt", "UTCQMMA", "fp8_e4m3", "sm100"),
    tensor("nvjet sm100 FP8 E5M2", _J100 + r"r", "cuBLASLt", "UTCQMMA", "fp8_e5m2", "sm100"),
    tensor("nvjet sm100 FP4", _J100 + r"o", "cuBLASLt", "UTCOMMA", "fp4", "sm100"),
    tensor("nvjet sm100 INT8", _J100 + r"[bi]", "cuBLASLt", "UTCIMMA", "int8", "sm100"),
    tensor("nvjet sm120 TF32", _J120 + r"\w*tf32", "cuBLASLt", "HMMA", "tf32", "sm120"),
    tensor("nvjet sm120 BF16", _J120 + r"t\w{2,4}_", "cuBLASLt", "HMMA", "bf16", "sm120"),
    tensor("nvjet sm120 FP16", _J120 + r"h\w{2,4}_", "cuBLASLt", "HMMA", "fp16", "sm120"),
    tensor("nvjet sm120 FP8", _J120 + r"[qr]", "cuBLASLt", "QMMA", "fp8_e4m3", "sm120"),
    tensor("nvjet sm120 FP4", _J120 + r"o", "cuBLASLt", "OMMA", "fp4", "sm120"),
    tensor("nvjet sm120 INT8", _J120 + r"[bi]", "cuBLASLt", "IMMA", "int8", "sm120"),
    tensor("nvjet TF32", _J90 + r"\w*tf32", "cuBLASLt", "HGMMA", "tf32", "sm90"),
    tensor("nvjet BF16", _J90 + r"t\w{2,4}_", "cuBLASLt", "HGMMA", "bf16", "sm90"),
    tensor("nvjet FP16", _J90 + r"h\w{2,4}_", "cuBLASLt", "HGMMA", "fp16", "sm90"),
    tensor("nvjet FP8", _J90 + r"q\w{2,4}_", "cuBLASLt", "QGMMA", "fp8_e4m3", "sm90"),
    tensor("nvjet FP8 E5M2", _J90 + r"r\w{2,4}_", "cuBLASLt", "QGMMA", "fp8_e5m2", "sm90"),
    tensor("nvjet INT8", _J90 + r"[bi]\w{1,4}_", "cuBLASLt", "IGMMA", "int8", "sm90"),
)  # fmt: skip

# The class of a kernel in Python; its module, which precedes it, is in small letters.
_CUTE = r"^kernel_cutlass_\w{0,160}?(?:Gemm|GEMM|Attention|Attn|FMHA|Fmha|MLA|Mla)(?!\w{0,40}?(?:Combine|Reduc|Preprocess|Postprocess|Norm|Quant))[A-Za-z]{0,40}?"

CUTLASS = (
    tensor("RNN persist HMMA", r"RNN_blockPersist\w*_HMMA|PersistRNN.*(?:HMMA|hmma)", "cuDNN", dtype="fp16"),
    tensor("CUTLASS sm120 block scaled", r"cutlass3x_sm12\d_bstensorop", "cuBLASLt", "QMMA"),
    tensor("CUTLASS sm120", r"cutlass3x_sm12\d_(?:sp)?tensorop", "cuBLASLt", "HMMA"),
    tensor("CUTLASS sm100 block scaled FP4", r"cutlass3x_sm1\d\d_bs(?:sp)?tensorop_\w*(?:xf4|f4_|e2m1)", "cuBLASLt", "UTCOMMA", "fp4"),
    tensor("CUTLASS sm100 block scaled", r"cutlass3x_sm1\d\d_bs(?:sp)?tensorop", "cuBLASLt", "UTCQMMA"),
    tensor("CUTLASS sm100 FP8", r"cutlass3x_sm1\d\d_(?:sp)?tensorop_\w*(?:gemm_f8|e4m3|e5m2)", "cuBLASLt", "UTCQMMA"),
    tensor("CUTLASS sm100 INT8", r"cutlass3x_sm1\d\d_(?:sp)?tensorop_i\w*gemm", "cuBLASLt", "UTCIMMA", "int8"),
    tensor("CUTLASS sm100", r"cutlass3x_sm1\d\d_(?:sp)?tensorop", "cuBLASLt", "UTCHMMA"),
    tensor("CUTLASS sm90", r"cutlass3x_sm90_(?:sp)?tensorop", "CUTLASS", "HGMMA"),
    tensor("CUTLASS wmma", r"cutlass_\w*wmma_tensorop", "cuBLAS"),
    tensor("CUTLASS tensorop", r"cutlass_(?:\d\d_)?(?:sp)?tensorop", "cuBLAS"),
    tensor("xmma warpgroup", r"xmma_\w{0,200}?_warpgroupsize", "cuBLAS", "HGMMA"),
    tensor("xmma tensor tile", r"xmma_\w{0,200}?_tensor\d+x\d+x\d+", "cuBLAS"),
    tensor("xmma of a cut-off name", r"^sm(?:[789]\d|1\d\d)_xmma_\w*?_(?:tf32f32_tf32f32|f32f32_tf32f32|bf16bf16_bf16f32|f16f16_f16f(?:32|16))_\w*(?:\.\.\.|…)$", "cuBLAS"),
    tensor("xmma traits", r"xmma\w{0,20}::.*(?:hmma|imma|hgmma|gmma|qmma|dmma)\w*_traits", "cuDNN"),
    tensor("arch integer", r"(?:turing|ampere|hopper)_\w*_i(?:8816|16832|8832|16864)(?:gemm|cudnn)", "cuBLAS", ""),
    tensor("arch 16816", r"(?:volta|turing|ampere|ada|hopper)_\w*168(?:16|32)(?:gemm|cudnn)", "cuBLAS"),
    tensor("arch 1688", r"(?:volta|turing|ampere|ada|hopper)_\w*1688(?:gemm|cudnn)", "cuBLAS"),
    tensor("arch 884", r"(?:volta|turing|ampere|ada|hopper)_\w*884(?:gemm|cudnn)", "cuBLAS"),
    tensor("Volta implicit hmma", r"[vV]olta_hmma_implicit_gemm", "cuDNN", "HMMA.884", "fp16", "sm70"),
    tensor("hmma implicit", r"(?:turing|ampere)?_?h(?:mma|884|1688)_implicit_gemm|(?:^|_)hmma_|_hmma\d*_", "cuDNN", dtype="fp16"),
    tensor("imma implicit", r"imma_implicit_gemm|(?:^|_)imma_(?:conv|gemm|fprop)", "cuDNN", "IMMA", "int8"),
    tensor("bare 884", r"(?:^|_)(?:[hsd]|g?[cz])(?:884|1688|16816|16832)(?:sp)?(?:gemm|cudnn|fprop|dgrad|wgrad)", "cuBLAS"),
    tensor("bare integer", r"(?:^|_)i(?:8816|8832|16832|16864|88128|168256)(?:sp)?(?:gemm|cudnn|_)", "cuBLAS", ""),
    tensor("PyTorch sparse", r"sparse_semi_structured|xmma_sparse_(?:gemm|conv)|spmma|SparseMma|sparse_gemm_tensorop", "cuSPARSELt"),
    tensor("vLLM's wrapper of Blackwell kernels for desktops", r"\benable_sm12\d\w*<cutlass::gemm::kernel::", "vLLM", "QMMA", sm="sm120"),
    tensor("vLLM's wrapper of Blackwell kernels", r"\benable_sm10\d\w*<cutlass::gemm::kernel::", "vLLM", "UTCHMMA", sm="sm100"),
    tensor("vLLM's wrapper of Hopper kernels", r"\benable_sm90_only<cutlass::gemm::kernel::", "vLLM", "HGMMA", sm="sm90"),
    # CuTe and CUTLASS templates: an atom or a mainloop names the instruction.
    tensor("CuTe sm120 atom", r"SM120_16x8x|MainloopSm120|SM120::BLOCKSCALED|Sm120(?:TmaWarpSpecialized|BlockScaled)", "CUTLASS", "QMMA", sm="sm120"),
    tensor("CuTe sm100 atom", r"SM100_MMA_|SM100_\w*_(?:SS|TS)\b|Mainloop\w*Sm1(?:00|03)\w*|tcgen05|Sm100\w*(?:TmaUmma|Umma)\w*|UMMA::Major", "CUTLASS", "UTCHMMA", sm="sm100"),
    tensor("CuTe sm90 atom", r"SM90_\d+x\d+x\d+_|Mainloop\w*Sm90\w*(?:Gmma|Tma|WarpSpecialized)|\bGMMA::|[wW][gG][mM][mM][aA]|KernelTmaWarpSpecialized(?:Pingpong|Cooperative)?(?!\w*Sm1)|GmmaWarpSpecialized", "CUTLASS", "HGMMA", sm="sm90"),
    tensor("CuTe sm80 atom", r"SM8[09]_16x8x\d+_|SM80_8x8x\d+_", "CUTLASS", "HMMA.16816", sm="sm80"),
    tensor("CuTe sm75 atom", r"SM75_16x8x8_|SM75_8x8x16_", "CUTLASS", "HMMA.1688", sm="sm75"),
    tensor("CuTe sm70 atom", r"SM70_8x8x4_", "CUTLASS", "HMMA.884", "fp16", "sm70"),
    tensor("CUTLASS class", r"OpClassTensorOp|OpClassWmmaTensorOp|(?<!\w)(?:Sparse|Mixed\w*|Complex|Gaussian\w*)?MmaTensorOp|MmaTensorOp(?:Policy|FragmentIterator|TileIterator)?\b|DefaultMmaTensorOp|MmaVoltaTensorOp|VoltaTensorOp|TensorOpMultiplicand|TileIteratorTensorOp|WmmaTensorOp", "CUTLASS"),
    tensor("vLLM's CUTLASS 3", r"cutlass_3x_gemm\w*", "vLLM", "HGMMA", sm="sm90"),
    tensor("vLLM's CUTLASS 2", r"cutlass_2x_gemm\w*", "vLLM"),
    cuda("CuTe DSL SIMT", r"^kernel_cutlass_\w{0,160}?(?:SGemm|Simt|SIMT)", "CuTe DSL"),
    tensor("CuTe DSL Blackwell", r"^kernel_cutlass_\w{0,160}?(?:[sS][mM]1[01]\d|Blackwell)\w{0,60}?(?:Gemm|GEMM|gemm|MultiHeadAttention|Attention|FMHA|fmha|MLA|flash_fwd|flash_bwd|Conv)", "CuTe DSL", "UTCHMMA", sm="sm100"),
    tensor("CuTe DSL Blackwell desktop", r"^kernel_cutlass_\w{0,160}?(?:[sS][mM]12\d)\w{0,60}?(?:Gemm|GEMM|gemm|Attn|Attention|FMHA|fmha|flash_fwd)", "CuTe DSL", "HMMA", sm="sm120"),
    tensor("CuTe DSL Hopper", r"^kernel_cutlass_\w{0,160}?(?:[sS][mM]90|Hopper)\w{0,60}?(?:Gemm|GEMM|gemm|Attention|Attn|FMHA|fmha|flash_fwd|flash_bwd|Conv)", "CuTe DSL", "HGMMA", sm="sm90"),
    tensor("CuTe DSL Ampere", r"^kernel_cutlass_\w{0,160}?(?:[sS][mM]8\d|Ampere|TensorOpGemm)\w{0,60}?(?:Gemm|GEMM|gemm|Attention|Attn|flash_fwd)|^kernel_cutlass_\w{0,160}?TensorOpGemm|^kernel_cutlass_\w{0,400}?MMAAtom_ThrID321_ShapeMNK168(?:16|8|32)", "CuTe DSL", "HMMA.16816", sm="sm80"),
    tensor("CuTe DSL product, then Blackwell", _CUTE + r"(?:[sS][mM]1[01]\d|Blackwell)", "CuTe DSL", "UTCHMMA", sm="sm100"),
    tensor("CuTe DSL product, then Blackwell desktop", _CUTE + r"[sS][mM]12\d", "CuTe DSL", "HMMA", sm="sm120"),
    tensor("CuTe DSL product, then Hopper", _CUTE + r"(?:[sS][mM]90|Hopper)", "CuTe DSL", "HGMMA", sm="sm90"),
    tensor("CuTe DSL product, then Ampere", _CUTE + r"(?:[sS][mM]8\d|Ampere)", "CuTe DSL", "HMMA.16816", sm="sm80"),
    tensor("CuTe DSL tcgen05 atom", r"MMAAtom_ThrID(?:10|21)_ShapeMNK(?:128|256|64)\d", "CuTe DSL", "UTCHMMA", sm="sm100"),
    tensor("CuTe DSL wgmma atom", r"MMAAtom_ThrID1281_ShapeMNK64\d", "CuTe DSL", "HGMMA", sm="sm90"),
    tensor("CuTe DSL dense GEMM", r"^kernel_cutlass_\w{0,160}?PersistentDenseGemm", "CuTe DSL", "UTCHMMA", sm="sm100"),
    tensor("nvFuser products", r"^(?:CudaCodeGen::|nvfuser::)?nvfuser_matmul_f\d", "nvFuser", ""),
    tensor("TensorRT fused stem", r"_trt_conv_act_pool", "TensorRT", "IMMA"),
    tensor("spconv", r"^(?:Volta|Turing|Ampere|Ada|Hopper)_[a-z0-9]+_m\d+n\d+k\d+\w*?T(?:16816|1688|884|8816|16832)", "spconv"),
    tensor("PyProf warp specialised", r"xmma_warp_specialized_implicit_gemm", "cuDNN"),
    tensor("PyProf first layer", r"first_layer_(?:wgrad|fwd)_kernel|dgrad_1x1_stride_2x2|first_layer_fwd", "cuDNN", dtype="fp16"),
    tensor("DLRM interaction in TF32", r"^dotBasedInteractTF32(?:Fwd|Bwd)Kernel", "DLRM", "HMMA.1688.TF32", "tf32", "sm80"),
    tensor("DLRM interaction", r"^dotBasedInteract(?:Fwd|Bwd)Kernel", "DLRM", "HMMA", "fp16"),
    tensor("HSTU attention", r"(?:^|::)hstu_(?:fwd|bwd)_(?:compute_\w+_)?kernel", "FBGEMM", "HMMA.16816"),
    tensor("WMMA and mma by name", r"\bMMA_(?:16816|81616|884|1688)\b|wmma|[mM]ma_?[sS]ync|mma_m16n8k|m16n8k\d+|m8n8k\d+|gemm_(?:16816|1688|884)(?=_|$)|tensor_?core_?gemm|_tensorop_|hmma", "", "HMMA"),
)  # fmt: skip
