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
    opaque_words("words: a matrix product", r"_(?:\w*gemm\w*|\w*matmul\w*|\w*mat_?mul\w*|mm|bmm|addmm|baddbmm|conv|conv\d+d?|conv_?\d+x\d+|\w*convolution\w*|convolve\w*|conv_(?:fwd|bwd|fprop|transpose\w*)|mul_mat\w*|deconv\w*)_"),
)  # fmt: skip

# Words that say how a product is computed, or that a kernel only serves one.
HOW = (
    cuda_words("words: a product on CUDA cores", r"_(?:simt|gemv\w*|matvec|dp4a|cuda_?core\w*|cuda_core|non_?tensor_?core)_|_naive_(?:\w+_)?(?:\w*gemm\w*|\w*matmul\w*|mm|bmm|conv\w*|attention|attn)_|_(?:\w*gemm\w*|\w*matmul\w*|mm|bmm|conv\w*|attention|attn)_(?:\w+_)?naive_"),
    tensor_words("words: a product on Tensor Cores", r"_(?:wmma|mma|mfma|tensor_?op|tensor_?core\w*|hmma|imma|wgmma|tcgen05|umma|utcmma|xdl|xdlops)_", ""),
    helper_words("words: serves a product", r"_(?:\w*gemm\w*|\w*matmul\w*|mm|bmm|conv\w*|winograd\w*|splitk|split_k|attn|attention|mha|fmha|flash|mla|marlin|moe)_(?:\w+_)?(?:reduce|reduction|reducer|transform|combine|fixup\w*|helper|preprocess|postprocess|workspace\w*|pointers?|ptrs|offsets|tensormaps?|tensor_maps?|meta_?data|schedule|scheduler|bookkeeping)_|_(?:batched_ptrs|helper|splitk_reduc\w*|split_k_reduc\w*)_"),
)  # fmt: skip

# The words of a name that no other rule knows. Products first: what is fused with one is not the
# whole of it. Attention, experts and recurrent cells have parts that are no product.
WORDS = (
    other_words("words: not matrix math", r"_(?:softmax|log_softmax|soft_max|\w*norm|norm\d?|\w*norm\d|layernorm\w*|rmsnorm\w*|batchnorm\w*|groupnorm\w*|norm_\w*|gamma_beta\w*|rope|rotary\w*|rotate|top_?k|topk\w*|argmax|argmin|quant|quantize\w*|quantise\w*|quantization|dequant\w*|\w*quant|transpose\w*|permute\w*|permutation|copy\w*|cpy|memcpy\w*|memset\w*|cast|convert\w*|gather\w*|scatter\w*|embedding\w*|embed\w*|dropout\w*|sampling|sampler|sample|sort\w*|relu\w*|gelu\w*|silu\w*|swish|swiglu\w*|geglu\w*|sigmoid\w*|tanh|concat\w*|cat|slice\w*|pad|padding|fill\w*|histogram\w*|cumsum\w*|prefix_?sum|scan|reduce\w*|reduction\w*|activation\w*|act|elementwise\w*|element_?wise\w*|eltwise|pointwise|adam\w*|optimizer\w*|loss|entropy|crossentropy|zero|alibi|mask|masks|bias_add|add_bias|add_residual|residual|pos_emb\w*|positional|position|metadata|plan|schedule|scheduler|align_block_size|routing|router|route|all_?reduce|all_?gather|all_?to_?all|barrier|offsets?|indices|index|indptr|maps?|unpermute\w*|dispatch|gate|gating|bbox\w*|swizzle\w*|softcap|reconstruct\w*|(?:fp|bf|f|int|i|half|float|bfloat)\d*_to_(?:fp|bf|f|int|i|half|float|bfloat)\d*|hadamard\w*|fwht|lens|lengths?|count\w*|cache|kv_?cache|copy_blocks|swap_blocks|reshape\w*|pooling|pool\w*|update_state|state_passing|delta_softplus)_"),
    opaque_words("words: a product", r"_(?:dot|dots|linear|contraction|einsum|tensordot|fprop|dgrad|wgrad|winograd|batched_matrix\w*|matrix_mul\w*|mma|mfma|fc|fcn|dense|gemms|syrk|trsm|trmm|herk)_"),
    opaque_words("words: attention, experts, recurrence", r"_(?:attention|attn|mha|fmha|mla|sdpa|flash|qkv|moe|experts?|mlp|ffn|lora|lstm|gru|rnn|ssd|ssm|mamba|wkv\d?|retention|delta_rule|conv\w*|solve\w*|lu|qr|svd|eig\w*|cholesky\w*|getrf\w*|potrf\w*|inverse|decode|prefill)_"),
    other_words("words: elementwise or bookkeeping", r"_(?:add\w*|sub|mul|div|neg|abs|exp|log|sqrt|rsqrt|pow|sin|cos|erf|clamp|clip|max|min|sum|mean|var|std|bias|scale\w*|unscale|index\w*|select\w*|where|mask\w*|random\w*|rand|rng|philox|init\w*|initialize\w*|set|arange|iota|range|linspace|split\w*|chunk\w*|stack|repeat\w*|tile|expand\w*|broadcast\w*|flip|roll|shift|shuffle|shuffled|swap|unique|count\w*|bincount|lookup|hash\w*|bucket\w*|partition\w*|compact\w*|filter\w*|interpolate\w*|interpolation|interp|upsample\w*|upsampling|resize\w*|resample\w*|bilinear|nearest|bicubic|trilinear|grid_sampl\w*|nms|roi|roialign|roipool|box\w*|iou|vectorized\w*|unary\w*|binary\w*|ternary|map|transform\w*|update\w*|sgd|lamb|lars|ema|momentum|grad|gradient|backward|forward|sync|wait|signal|notify|send|recv|put|get|dispatch|combine|merge\w*|meta|offsets?|lengths?|seq_?len\w*|tokens?|page\w*|block_table\w*|slot\w*|draft|verify|tree|eagle|accept|reject|logits?|penalt\w*|temperature|ban|bad_words|finished|beam\w*|stop|nan|inf|finite|check\w*|compare|equal|greater|less|not|and|or|xor|bitwise|bit\w*|pack\w*|unpack\w*|encode\w*|decode\w*|fft\w*|ifft|rfft|c2c|r2c|c2r|butterfly|hadamard|stft|window|spectrogram|mel|sparse|csr|coo|coalesc\w*|segment\w*|degree|spmm|sddmm|neighbor\w*|edge|node|vertex|graph|voxel\w*|point\w*|raster\w*|render\w*|ray\w*|sh|gaussian\w*|preprocess\w*|postprocess\w*|decode|blend|hist|lut|image|pixel|color|yuv|rgb|warp_affine|remap|crop|mirror|normalize|normalization|augment|force\w*|pair\w*|bond\w*|angle\w*|dihedral\w*|pme|lj|nonbonded|integrate\w*|constraint\w*|particle\w*|stencil|jacobi|laplac\w*|advec\w*|lbm|collide|stream\w*|bitonic|radix|empty|noop|nop|dummy|warmup|spin|sleep|delay|trap|assert\w*|print|l2|flush|memory|alloc\w*|free|lock|atomic\w*|acc|accumulate\w*|cross|distance|dist|cdist|knn|kmeans|threshold|trace|diag\w*|tri[lu]|eye|one_?hot|nonzero|clone|contiguous|to_copy|poi|per|red|fused)_"),
)  # fmt: skip
