"""Names that do not say what they run, and what the words of an unknown name say."""

from mpdiag.hardware.kernel_names.rule import (
    cuda_words,
    helper_words,
    opaque,
    opaque_words,
    other,
    other_words,
    tensor_words,
)

OPAQUE = (
    other("TensorRT Myelin without a product", r"^__myl_(?!\w*(?:Fc|Conv|Gemm|MatM|Mmul|Bmm|Mha|Fmha|Dot|Lstm|Gru|Rnn|Deco|Kgen))", "TensorRT"),
    other("xmma pooling", r"xmma_pooling|_xmma_(?:pool|softmax|reduce)\w*", "TensorRT"),
    opaque("skinny product of either kind", r"wvSplitK", "vLLM"),
    opaque("Triton matrix template", r"triton_(?:tem|mm|bmm|flex|convolution)_", "Inductor"),
    opaque("old Inductor", r"^triton__?0d", "Inductor"),
    opaque("CUTLASS template", r"cutlass\w*::(?:device_kernel|Kernel2?)\b|^Kernel2?$|^device_kernel\b|cutlass::gemm::kernel", "CUTLASS"),
    opaque("xmma without a mark", r"xmma", "cuBLAS"),
    opaque("nvjet of another type", r"nvjet", "cuBLASLt"),
    opaque("Tensile without a mark", r"^Cij[a-z]*_", "Tensile"),
    opaque("TensorRT Myelin", r"__myl_|^myl_", "TensorRT"),
    opaque("cuTENSOR contraction", r"cutensor\S*contraction|tensor_contraction", "cuTENSOR"),
    opaque_words("words: a matrix product", r"_(?:[^_]*gemm[^_]*|[^_]*matmul[^_]*|[^_]*mat_?mul[^_]*|mm\d?|bmm|addmm|baddbmm|conv|conv\d+d?|conv_?\d+x\d+|[a-z]cudnn|[^_]*convolution[^_]*|convolve[^_]*|conv_(?:fwd|bwd|fprop|transpose[^_]*)|mul_mat[^_]*|deconv[^_]*)_"),
)  # fmt: skip

# Words that say how a product is computed, or that a kernel only serves one.
HOW = (
    cuda_words("words: a product on CUDA cores", r"_(?:simt|sgemm[^_]*|gemv[^_]*|matvec|dp4a|cuda_?core[^_]*|cuda_core|non_?tensor_?core)_|_(?:naive|reference|ref)_(?:[^_]+_){0,5}(?:[^_]*gemm[^_]*|[^_]*matmul[^_]*|mm|bmm|conv[^_]*|attention|attn)_|_(?:[^_]*gemm[^_]*|[^_]*matmul[^_]*|mm|bmm|conv[^_]*|attention|attn)_(?:[^_]+_){0,5}naive_"),
    tensor_words("words: a product on Tensor Cores", r"_(?:wmma|mma|mfma|tensor_?op|tensor_?core[^_]*|hmma|imma|wgmma|tcgen05|umma|utcmma|xdl|xdlops)_", ""),
    helper_words("words: serves a product", r"_(?:[^_]*gemm[^_]*|[^_]*matmul[^_]*|mm|bmm|conv[^_]*|winograd[^_]*|splitk|split_k|attn|attention|mha|fmha|flash|mla|marlin|moe)_(?:[^_]+_){0,5}(?:reduce|reduction|reducer|transform|combine|fixup[^_]*|helper|preprocess|postprocess|workspace[^_]*|pointers?|ptrs|offsets|tensormaps?|tensor_maps?|meta_?data|schedule|scheduler|bookkeeping)_|_(?:batched_ptrs|helper|splitk_reduc[^_]*|split_k_reduc[^_]*)_"),
)  # fmt: skip

# The words of a name that no other rule knows. Products first: what is fused with one is not the
# whole of it. Attention, experts and recurrent cells have parts that are no product. A common word
# alone says nothing.
WORDS = (
    other_words("words: not matrix math", r"_(?:(?:sigmoid|relu|tanh|bias[^_]*)_(?:fprop|bprop)|kv_buffer|kv_indices|req|src2dst|softmax|log_softmax|soft_max|[^_]*norm|norm\d?|[^_]*norm\d|layernorm[^_]*|rmsnorm[^_]*|batchnorm[^_]*|groupnorm[^_]*|norm_[^_]*|gamma_beta[^_]*|rope|rotary[^_]*|rotate|top_?k|topk[^_]*|argmax|argmin|quant|quantize[^_]*|quantise[^_]*|quantization|dequant[^_]*|[^_]*quant|transpose[^_]*|permute[^_]*|permutation|copy[^_]*|cpy|memcpy[^_]*|memset[^_]*|cast|convert[^_]*|gather[^_]*|scatter[^_]*|embedding[^_]*|embed[^_]*|dropout[^_]*|sampling|sampler|sample|sort[^_]*|concat[^_]*|cat|slice[^_]*|pad|padding|fill[^_]*|histogram[^_]*|cumsum[^_]*|prefix_?sum|scan|reduce[^_]*|reduction[^_]*|activation[^_]*|act|elementwise[^_]*|element_?wise[^_]*|eltwise|pointwise|adam[^_]*|optimizer[^_]*|loss|entropy|crossentropy|zero|alibi|mask|masks|bias_add|add_bias|add_residual|residual|pos_emb[^_]*|positional|position|metadata|plan|schedule|scheduler|align_block_size|routing|router|route|all_?reduce|all_?gather|all_?to_?all|barrier|offsets?|indices|index|indptr|maps?|unpermute[^_]*|dispatch|gate|gating|bbox[^_]*|swizzle[^_]*|softcap|[sdcz]?(?:getr[fs]|getf2|potr[fs]|potf2|geqr[f2]|gesvd[a-z]*|[a-z]{2}evd?[a-z]?|larf[a-z]*|laswp|sytr[df][a-z]*|steqr|laset|lacpy)|reconstruct[^_]*|(?:fp|bf|f|int|i|half|float|bfloat)\d*_to_(?:fp|bf|f|int|i|half|float|bfloat)\d*|hadamard[^_]*|fwht|lens|lengths?|count[^_]*|cache|kv_?cache|copy_blocks|swap_blocks|reshape[^_]*|pooling|pool[^_]*|init|update_state|state_passing|delta_softplus)_"),
    opaque_words("words: a product", r"_(?:dot|dots|linear|contraction|einsum|tensordot|fprop|dgrad|wgrad|winograd|batched_matrix[^_]*|matrix_mul[^_]*|mma|mfma|fc|fcn|dense|gemms|syrk|trsm|trmm|herk)_"),
    opaque_words("words: attention, experts, recurrence", r"_(?:attention|attn|mha|fmha|mla|sdpa|flash|qkv|moe|experts?|mlp|ffn|lora|lstm|gru|rnn|ssd|ssm|mamba|wkv\d?|retention|delta_rule|conv[^_]*|solve[^_]*|lu|qr|svd|eig|eigh|eigvals|cholesky[^_]*|getrf[^_]*|potrf[^_]*|inverse|decode|prefill)_"),
    other_words("words: elementwise or bookkeeping", r"(?!^_[^_]+_$)_(?:relu[^_]*|gelu[^_]*|silu[^_]*|swish|swiglu[^_]*|geglu[^_]*|sigmoid[^_]*|tanh|add[^_]*|sub|mul|div|neg|abs|exp|log|sqrt|rsqrt|pow|sin|cos|erf|clamp|clip|max|min|sum|mean|var|std|bias|scale[^_]*|unscale|index[^_]*|select[^_]*|where|mask[^_]*|random[^_]*|rand|rng|philox|init[^_]*|initialize[^_]*|set|arange|iota|range|linspace|split[^_]*|chunk[^_]*|stack|repeat[^_]*|tile|expand[^_]*|broadcast[^_]*|flip|roll|shift|shuffle|shuffled|swap|unique|count[^_]*|bincount|lookup|hash[^_]*|bucket[^_]*|partition[^_]*|compact[^_]*|filter[^_]*|interpolate[^_]*|interpolation|interp|upsample[^_]*|upsampling|resize[^_]*|resample[^_]*|bilinear|nearest|bicubic|trilinear|grid_sampl[^_]*|nms|roi|roialign|roipool|box[^_]*|iou|vectorized[^_]*|unary[^_]*|binary[^_]*|ternary|map|transform[^_]*|update[^_]*|sgd|lamb|lars|ema|momentum|grad|gradient|backward|forward|sync|wait|signal|notify|send|recv|put|get|dispatch|combine|merge[^_]*|meta|offsets?|lengths?|seq_?len[^_]*|tokens?|page[^_]*|block_table[^_]*|slot[^_]*|draft|verify|tree|eagle|accept|reject|logits?|penalt[^_]*|temperature|alphas?|betas?|gammas?|lambda\d?|welford|halos?|pivots?|ipiv|unpadding|meanvar|linewise|gen|generate[^_]*|information|rnnt|ctc|transducer|viterbi|labels?|lower|upper|sizes?|shapes?|strides?|elements?|buffers?|ban|bad_words|finished|beam[^_]*|stop|nan|inf|finite|check[^_]*|compare|equal|greater|less|not|and|or|xor|bitwise|bit[^_]*|pack[^_]*|unpack[^_]*|encode[^_]*|decode[^_]*|fft[^_]*|ifft|rfft|c2c|r2c|c2r|butterfly|hadamard|stft|window|spectrogram|mel|sparse|csr|coo|coalesc[^_]*|segment[^_]*|degree|spmm|sddmm|neighbor[^_]*|edge|node|vertex|graph|voxel[^_]*|point[^_]*|raster[^_]*|render[^_]*|ray[^_]*|sh|gaussian[^_]*|preprocess[^_]*|postprocess[^_]*|decode|blend|hist|lut|image|pixel|color|yuv|rgb|warp_affine|remap|crop|mirror|normalize|normalization|augment|force[^_]*|pair[^_]*|bond[^_]*|angle[^_]*|dihedral[^_]*|pme|lj|nonbonded|integrate[^_]*|constraint[^_]*|particle[^_]*|stencil|jacobi|laplac[^_]*|advec[^_]*|lbm|collide|stream[^_]*|bitonic|radix|empty|noop|nop|dummy|warmup|spin|sleep|delay|trap|assert[^_]*|print|l2|flush|memory|alloc[^_]*|free|lock|atomic[^_]*|acc|accumulate[^_]*|cross|distance|dist|cdist|knn|kmeans|threshold|trace|diag[^_]*|tri[lu]|eye|one_?hot|nonzero|clone|contiguous|to_copy|poi|per|red|bcast[^_]*|async|load[^_]*|store[^_]*|publish|push|pull|producer|consumer|cleanup|clear|reset|move[^_]*|probe|extract|setup|prepare|tag|timer|square[^_]*|upscale|[^_]*cpy[^_]*|correction|lse|a2a|rsag|p2p|fused)_"),
)  # fmt: skip
