"""Names that do not say what they run, and what the words of an unknown name say."""

import re

from mpdiag.hardware.kernel_names.rule import (
    cuda_words,
    helper_words,
    opaque,
    opaque_words,
    other,
    other_words,
    tensor_words,
)

# Words that any kernel may have: a name of them alone says nothing, and a single word neither.
_ANY = (
    r"fused|forward|backward|fwd|bwd|grad|gradient|kernel\d*|cuda|gpu|device|global|test|run|launch|main"
    r"|impl|ops?|fn|func|function|v\d+|\d+|opt|optimized|fast|simple|basic|float|half|double|fp\d+|bf16"
    r"|f\d+|compute|calc|data|input|output|[a-z]|in|out|tiled?|block|shared|step\d*|stage\d*|phase\d*"
)
_TELLS = rf"(?!^_{{1,2}}(?:[^_]+|(?:(?:{_ANY})_)*(?:{_ANY}))_$)"

_NOTHING = re.compile(rf"_{{1,2}}(?:[^_]+|(?:(?:{_ANY})_)*(?:{_ANY}))_")


def says_nothing(spelled: str) -> bool:
    """Whether any kernel could have these words.

    Args:
        spelled: As ``rule.words`` returns them.
    """
    return _NOTHING.fullmatch(spelled) is not None


OPAQUE = (
    other("TensorRT Myelin without a product", r"^__myl_(?!\w*(?:Fc|Conv|Gemm|MatM|Mmul|Bmm|Mha|Fmha|Dot|Lstm|Gru|Rnn|Deco|Kgen))", "TensorRT"),
    other("xmma pooling", r"xmma_pooling|_xmma_(?:pool|softmax|reduce)\w*", "TensorRT"),
    opaque("skinny product of either kind", r"wvSplitK", "vLLM"),
    opaque("Triton matrix template", r"triton_(?:tem|mm|bmm|flex|convolution)_", "Inductor"),
    opaque("old Inductor", r"^triton__?0d", "Inductor"),
    opaque("CUTLASS template", r"cutlass\w*::(?:device_kernel|Kernel2?)\b|^Kernel2?$|^device_kernel\b|cutlass::gemm::kernel", "CUTLASS"),
    opaque("xmma without a mark", r"xmma", "cuBLAS"),
    opaque("nvjet of another type", r"nvjet", "cuBLASLt"),
    opaque("MIGraphX products", r"^mlir_(?:\w*_)?(?:dot|convolution|convolution_backwards|attention|gemm)(?:_|$)", "MIGraphX"),
    opaque_words("words: a Hadamard transform", r"^(?!_fast_hadamard)_{1,2}(?:[^_]+_)*?(?<!pre_)(?:hadamard|rht)_"),
    opaque("Tensile without a mark", r"^Cij[a-z]*_", "Tensile"),
    opaque("TensorRT Myelin", r"__myl_|^myl_", "TensorRT"),
    opaque("cuTENSOR contraction", r"cutensor\S*contraction|tensor_contraction", "cuTENSOR"),
    opaque_words("words: fused with a product", r"_fused_(?:(?!add_|bias|rope_|rotary)[^_]+_){0,5}?(?:linear|attention|attn|proj|mlp|ffn|dense)_(?!(?:[^_]+_){0,5}?(?:bias|residual|mask|combine|merge|state|states|metadata|output|input|weights?)_)|_(?:linear|attention|mlp|ffn|proj)_(?:[^_]+_){0,5}?fused_|_quant_linear_|_softmax_attention_"),
    opaque_words("words: a matrix product", r"_(?:[^_]*gemm[^_]*|[^_]*matmul[^_]*|[^_]*mat_?mul[^_]*|mm\d?|bmm|addmm|baddbmm|conv(?!_states?_)|conv\d+d?|conv_?\d+x\d+|[a-z]cudnn|[^_]*convolution[^_]*|convolve[^_]*|conv_(?:fwd|bwd|fprop|transpose[^_]*)|mul_mat[^_]*|deconv[^_]*)_"),
)  # fmt: skip

_NO_PRODUCT = r"(?!(?:[^_]+_){0,15}?(?:reduc[^_]*|[^_]*quant|quant[^_]*|dequant[^_]*|copy[^_]*|scatter[^_]*|gather[^_]*|schedul[^_]*|metadata|meta|masks?|transform[^_]*|offsets?|indices|index|ind|norm|rmsnorm|layernorm|softmax|preprocess|postprocess|pad[^_]*|combine|merge|convert[^_]*|cast|prepare|init[^_]*|zero|pack[^_]*|repack|unpack|transpose[^_]*|permut[^_]*|shuffle[^_]*|sort|rope|rotary|cache|append|workspace|ptrs?|pointers?|args?|arguments|tensormaps?|swizzle|interleave|scales|amax|gemv|vec|gemvs|simt|naive|reference|ref|small|skinny|sgemm|dp4a|cuda|cudacore|weights|layout|dispatch(?!_\d)|routing|router|topk|load|store|epilogue|test|(?<!mm_)decode|m1|gate|act|activation|silu|gelu|swiglu|hadamard|allreduce|allgather|barrier|wait|signal|clean|sum|update|check|size|sizes|problem|stride|strides|dummy|comp|cvt|f32)_)"
_PRODUCT = r"(?:[^_]*gemm[^_]*|[^_]*matmul[^_]*|mm|bmm|gmm|addmm|scaled_mm)_"
_ATTENTION = r"(?:attention|attn|fmha|mha|mla|mqa|gqa|sdpa|fa[234])_"

# Words that say how a product is computed, or that a kernel only serves one.
HOW = (
    cuda_words("words: a product on CUDA cores", r"_(?:simt(?!_(?:add|copy|transpose|cast|fill|reduce|scan|load|store)_)(?<!transpose_simt)|sgemm[^_]*|gemv[^_]*|matvec|dp4a|cuda_?core[^_]*|cuda_core|non_?tensor_?core)_|_(?:naive|reference|ref)_(?:[^_]+_){0,5}(?:[^_]*gemm[^_]*|[^_]*matmul[^_]*|mm|bmm|conv[^_]*|attention|attn)_|_(?:[^_]*gemm[^_]*|[^_]*matmul[^_]*|mm|bmm|conv[^_]*|attention|attn)_(?:[^_]+_){0,5}(?:naive|reference)_|_(?:naive|reference|ref)_(?:[^_]+_){0,5}(?:fmha|mha|mla|sdpa|syrk|trmm)_|_(?:fmha|mha|mla|sdpa)_(?:[^_]+_){0,5}(?:naive|reference)_"),
    tensor_words("words: a product on Tensor Cores", r"_(?:wmma|mma|mfma|tensor_?op|tensor_?core[^_]*|hmma|imma|wgmma|tcgen05|umma|utcmma|xdl|xdlops)_", ""),
    helper_words("words: serves a product", r"_(?:[^_]*gemm[^_]*|[^_]*matmul[^_]*|mm|bmm|conv[^_]*|winograd[^_]*|splitk|split_k|attn|attention|mha|fmha|flash|mla|marlin|moe)_(?:[^_]+_){0,5}(?:reduce(?!_scatter)|reduction|reducer|transform|combine|fixup[^_]*|helper|preprocess|postprocess|workspace[^_]*|pointers?|ptrs|offsets|tensormaps?|tensor_maps?|meta_?data|schedule|scheduler|bookkeeping)_|_gemv_params?_|_(?:batched_ptrs|helper|splitk_reduc[^_]*|split_k_reduc[^_]*)_"),
    tensor_words("words: a product as only Tensor Cores' kernels are written", r"^_{1,2}" + _NO_PRODUCT + r"(?=(?:[^_]+_){0,15}?(?:persistent|stream_?k|tma|warp_specialized|warp_spec|pingpong|ag|rs|a2a|consumer|producer)_)(?:[^_]+_){0,15}?" + _PRODUCT, ""),
    tensor_words("words: a product of types that only Tensor Cores multiply", r"^_{1,2}" + _NO_PRODUCT + r"(?=(?:[^_]+_){0,15}?(?:tf32[^_]*|(?:a8w8|a8w4|w4a8|w8a8fp8|afp[48]wfp[48]|a\d+wfp4)|(?:mxfp[468]|nvfp4|fp4|fp8|e2m1|e4m3|e5m2)_(?:x_)?(?:mxfp[468]|nvfp4|fp4|fp8|e2m1|e4m3|e5m2))_)(?:[^_]+_){0,15}?" + _PRODUCT + r"|^__" + _NO_PRODUCT + r"(?=(?:[^_]+_){0,15}?(?:fp8[^_]*|f8[^_]*|e4m3[^_]*|e5m2[^_]*|mxfp?[468][^_]*|nvfp4|fp4[^_]*|[^_]*e2m1[^_]*|[aw]fp[48][^_]*)_)(?:[^_]+_){0,15}?" + _PRODUCT + r"|^_{1,2}" + _NO_PRODUCT + r"(?:[^_]+_){0,15}?tf32(?:gemm|matmul|mm)_", ""),
    tensor_words("words: a product for an architecture since Hopper", r"^_{1,2}" + _NO_PRODUCT + r"(?=(?:[^_]+_){0,15}?(?:sm_?(?:90|1[012]\d)[af]?|hopper|blackwell)_)(?:[^_]+_){0,15}?(?:" + _PRODUCT + "|" + _ATTENTION + ")", ""),
)  # fmt: skip

_MORE = sorted(
    """
    absmax accuracy ack acos adadelta adagrad adamw addcdiv addcmul adjacency affine_grid
    anchor append arrange asin assign asum atan atan2 auc average avgpool axes axis axpby axpy
    ball_query ballquery bandwidth barostat bce bernoulli bessel bezier bfs bgr binomial
    bitfield black_scholes blending bloom blur brightness bspline bucket bucketize camera
    canny carlo cauchy ceil celu centroid channel_shuffle charge clean cleanup clock col_sum
    colmax coloring colorize colsum compaction component composite compositing compress
    concatenate concatenation conj conjugate contour contrast convex coord coordinate coords
    copyto correlate correlation cosh coulomb covar create csv cu_seqlens cummax cummin
    cumprod cumulative daxpy dbscan dct ddim debayer decay decimate decompress decrement dedup
    deinterleave delay delete demosaic denoise density depth_to_space devoxelize dft diagonal
    dice dictionary diffuse diffusion digamma dilate dilated diou dipole dipoles disparity
    distort distribution divide divided doorbell download downsample downscale drop drop_path
    droppath dump duplicate dwt elu emb encoding energies energy erfinv erode error euler
    evaluate evict ewald exclusive exp2 expert_ids expert_map expm1 exponential face fake
    fence find flag flatten floor floor_divide flow fluid fmod focal forest fps frac
    frequencies frequency frontier frustum functor fused_add fwt geometry giou glu grammar
    gray grayscale greedy groupby gtsv guidance haar handshake hardsigmoid hardswish hardtanh
    harmonic hash_find hash_insert heun hinge histc homography hsv huber huffman idct
    identities identity ids idx inclusive inclusive_scan increment inplace_update integral
    interp1 interp2 interp2d intersect intersection iou ipc isect isfinite isinf isnan
    isolation join jpeg json karras kde keypoint kl kthvalue labeling langevin larfg latency
    leaky length_mask lerp lgamma lincs lion local_response log10 log1p log2 logcumsumexp
    logical logit lognormal logprob logsumexp lookahead louvain lrn lz4 march margin masked
    match matches matching maximum maxpool median medusa memfill memzero mesh metric min_p
    minimum mipmap mirror_pad mish mode modulo moments monte morph morton mse mst multicast
    multinomial multiply_add nadam negate negative nesterov neuron next_token ngram nll noise
    noisy normal normalizer nrm2 nv12 offset_copy offsets ones optical_flow option pagerank
    parquet percentile perplexity pixel_shuffle placement poisson poll gridsample
    potential ppl prefetch prefix_sums prelu pressure priors propagate propagation proposal
    prune pruning qsort quadtree quantile quasirandom quat quats quick_gelu quicksort radam
    ragged randint randperm rcp rdma read rearranged reciprocal reflection regex rejection
    relabel relative relu6 remainder renorm renormalize reorg replace replication request
    rescale reverse rgba ring rle rmse rmsprop rolling rot90 rotate_image rotg round rounding
    row_max row_sum rowmax rowsum sanitize saturate saturation saxpy scaling scheduler_step
    sdf search searchsorted selu semaphore sendrecv seqlen seqlens sequence_mask settle shake
    shap shuffle_channel sign signbit sinh sinusoidal slerp slots smooth_l1 snappy sobel sobol
    softplus space_to_depth sparsify sphere spherical splat spline spread squash sssp
    standardize statistics stats stencil stereo stochastic stochastic_depth string subsample
    substring subtract surface swap sweep take targets tensor_to texel texture thermostat
    thomas threshold_mask timestamp timestep token_ids tokenizer tolist topp torsion transfer
    transpose_image triangle tridiagonal trim triplet true_divide trunc truncate truncation
    tsne umap unbind undistort unfinished uniform union unique_consecutive unpool unscale
    unstack upfirdn2d upload valid validate variance vdw velocities velocity verification
    verlet virial vote voxelize walk warp_perspective  weight_decay write zeros zipf zstd
    sharpen sharpness overlay tonemap halton stratify shade shading shadow cdf pdf activate
    constrain suppress shortcut logistic smooth smoothing binarize blit leapfrog leap_frog
    predict leaf vertex_normal aabb occupancy density_grid near_far advance sphere_trace
    envmap error_map error_overlay jitter perturb relocate relocation prep packet ranks
    inpaint nearest_neighbor nn3 three_nn cov2d cov3d mipmaps barycentric skinning deform_mesh
    topology winding marching collision contact rigid_body cloth fluid_sim particles_to_grid
    p2g g2p launch_global parallel_for
    stitch propose respond radius interleaved perturbation evaluation all_to_all arrive arrive_inc inc
    transport ping_pong pingpong_latency histo trapz fma vector_op combiner compose decompose ranges
    destruct distribute remove export hotness  approx bilateral orientation descriptor harris
    meanshift mean_shift wrap unwrap diff extrema flood iir fir corner feature locate medfilt maximal
    deriv derivative susan unfold fold  positive interval bisect bisection shmem membar tid pid shfl
    tiling swizzle2 mandelbrot julia_set srad nlm nbody encrypt decrypt aes sha md5 sha256 keccak
    needleman_wunsch smith_waterman floyd floydwarshall dijkstra hotspot pathfinder backprop lava lavamd
    heartwall myocyte acceleration kinematics hourglass eos monotonic sound_speed boundary_condition
    portfolio option_price bezier_curve refine coarsen amr flux time_step dups dedupe prescan triad
    ballot mapping inverse_map overlap_save lookup_table cmvn householder reflector compact_index
    shampoo symmetrize subtract ldr restore modulation    epilogue_sync one_blob
    frequency_encoding triangle_wave identity_encoding   vecadd vector_add vec_add 
    se3 so3 se3pose quaternion_product  lie_group icp tsdf marching_cubes voxelization splatting
    shrink softshrink hardshrink celu rrelu xielu  hardtanh logsigmoid threshold clampmin clampmax
    addr where_nonzero unravel ravel meshgrid vander kron tril_indices triu_indices bincount digitize
    isin isclose allclose isneginf isposinf nan_to_num heaviside hypot gcd lcm ldexp frexp nextafter
    copysign signbit sinc i0 i0e i1 i1e erfc erfcx igamma igammac ndtri xlogy logaddexp rsub fmax fmin
    floor_mod trunc_div true_div int_div logspace diff_abs index_put masked_fill masked_select take_along
    dstack hstack vstack swapaxes movedim narrow squeeze unsqueeze expand_as repeat_interleave tile_copy
    pixel_unshuffle space_to_batch batch_to_space reflection_pad replication_pad circular_pad max_unpool
    avg_pool lp_pool fractional_pool rot180 hflip vflip channel_last count_nonzero nansum nanmedian
    weight_norm weightnorm instance_norm spectral_norm dyt rmsnorm_gated vector_norm matrix_norm
    multilabel hinge_embedding cosine_embedding poisson_nll gaussian_nll kl_div ctc_loss smooth_l1 wasserstein
    one_hot multi_hot embedding_bag cosine_similarity pairwise_distance hamming jaccard levenshtein
    speculative ngram_match tree_mask eagle_prepare medusa_mask req_to_token page_table block_table
    slot_mapping kv_len cu_seqlen write_req alloc_extend alloc_decode get_last_loc
    lane warp_any ballot_sync while_loop  watchdog heartbeat profiler timer_tick
    gels_kernel gesv posv hegst ungqr unmqr ormtr bandwidth_test latency_test stride_test
    windowing spectrum   magnitude envelope  vad fbank mfcc cepstral dither preemphasis
    demod modulate qpsk ofdm viterbi_decode  ldpc  beamform
    eq ne lt le gt ge all any prod full randn floordiv dtype freq invert celoss nllloss dropblock stretch
    aggregate collapse paste splice regularize uncompress stash sequence leftshift rightshift zeroing
    determinant det draw antialias discontinuity cov covariance save commit checkpoint antialiasing
    learnable augmentation largest smallest topn topmost paint contrastive
    """.split()
)
"""Words of operations that are no product of matrices; few of them are common in other senses."""

# The words of a name that no other rule knows. Products first: what is fused with one is not the
# whole of it. Attention, experts and recurrent cells have parts that are no product. A common word
# alone says nothing.
WORDS = (
    other_words("words: not matrix math", r"_(?:idx|attr|all2all|rms|texture[^_]*|mip[^_]*|warp_linear|(?:lstm|gru|rnn)_(?:cell_(?:forward|backward|fwd|bwd)|elementwise|pointwise|nonlinearity|gates)|dynamic_(?:fp8|int8|mxfp\d|fp4|nvfp4)|(?:add|sub|mul|div|multiply|dice|prelu|elementwise|concat|slice|order\d)_(?:dgrad|wgrad|fprop|bprop)|broadcast[^_]*|map_?reduce|sgd|momentum|adagrad|rmsprop|adadelta|lse|correct|correction|add_(?:[^_]+_){0,3}bias[^_]*|resiz[^_]*|upsampl[^_]*|interpol[^_]*|interp|blend[^_]*|remap|huffman|normaliz[^_]*|[^_]*rowwise|\ddgs|rle|col32|append[^_]*|insert[^_]*|evict|logprobs?|log_?softmax\d*|nope|penalties|dequantise|fakequant|float2half|half2float|cvt|padded_to_dense|dense_representation|csr|coo|(?:sigmoid|relu|tanh|bias[^_]*)_(?:fprop|bprop)|kv_buffer|kv_indices|req|src2dst|softmax|log_softmax|soft_max|[^_]*norm|norm\d?|[^_]*norm\d|layernorm[^_]*|rmsnorm[^_]*|batchnorm[^_]*|groupnorm[^_]*|norm_[^_]*|gamma_beta[^_]*|rope|rotary[^_]*|rotate|top_?k|topk[^_]*|arg_?max|arg_?min|arg_?sort[^_]*|srgb|quant|quantize[^_]*|quantise[^_]*|quantization|dequant[^_]*|[^_]*quant|transpose[^_]*|permute[^_]*|permutation|copy[^_]*|cpy|memcpy[^_]*|memset[^_]*|cast|convert[^_]*|gather[^_]*|scatter[^_]*|embedding[^_]*|embed[^_]*|dropout[^_]*|sampling|sampler|sample|sort[^_]*|concat[^_]*|cat|slice[^_]*|pad|padding|fill[^_]*|histogram[^_]*|cum_?sum[^_]*|prefix_?sum|scan|reduce[^_]*|reduction[^_]*|activation[^_]*|act|elementwise[^_]*|element_?wise[^_]*|eltwise|pointwise|adam[^_]*|optimizer[^_]*|[^_]*loss|entropy|crossentropy|zero|alibi|mask|masks|bias_add|add_bias|add_residual|residual|pos_emb[^_]*|positional|position|metadata|plan|schedule|scheduler|align_block_size|routing|router|route|all_?reduce|all_?gather|all_?to_?all|barrier|offsets?|indices|index|indptr|maps?|unpermute[^_]*|dispatch(?!_\d)|gate|gating|bbox[^_]*|swizzle[^_]*|softcap|[sdcz]?(?:getr[fs]|getf2|potr[fs]|potf2|geqr[f2]|gesvd[a-z]*|[a-z]{2}evd?[a-z]?|larf[a-z]*|laswp|sytr[df][a-z]*|steqr|laset|lacpy)|reconstruct[^_]*|(?:(?:fp|bf|f|u?int|i|half|float|bfloat)\d*|e\dm\d|dtype)_to_(?:(?:fp|bf|f|u?int|i|half|float|bfloat)\d*|e\dm\d|dtype)|hadamard[^_]*|fwht|lens|lengths?|count[^_]*|cache|kv_?cache|copy_blocks|swap_blocks|reshape[^_]*|pooling|pool[^_]*|init|update_state|state_passing|delta_softplus)_"),
    opaque_words("words: a product", r"_(?:dot\d?|dots|dotbased|linear|proj|projection|(?<=matrix_)multiply|matrixmul[^_]*|matmuls?|mmk?|splitk|split_k|gmm|xgemm|contraction|einsum|tensordot|fprop|dgrad|wgrad|winograd|batched_matrix[^_]*|matrix_mul[^_]*|mma|mfma|fc|fcn|dense|gemms|syrk|trsm|trmm|herk)_"),
    opaque_words("words: attention, experts, recurrence", r"_(?:attention|attn|mha|fmha|mla|sdpa|gqa|mqa|nsa|fna|hstu|sage|qk|pv|qkpv|kkt|kda|gla|gdn\d?|gdpa|ssu|rwkv\d*|delta_h|indexer|flash|qkv|moe|experts?|mlp|ffn|lora|[^_]*lstm|gru|rnn|chunkwise|chunk_(?:[^_]+_){0,4}(?:fwd|bwd|fw|bw)|ssd|ssm|mamba|wkv\d?|retention|delta_rule|chunk_delta|recompute_w|conv[^_]*|solve[^_]*|lu|qr|svd|eig|eigh|eigvals|cholesky[^_]*|getrf[^_]*|potrf[^_]*|inverse|decode|prefill)_"),
    other_words("words: elementwise or bookkeeping", _TELLS + r"_(?:relu[^_]*|gelu[^_]*|silu[^_]*|swish|swiglu[^_]*|geglu[^_]*|sigmoid[^_]*|tanh|add[^_]*|sub|mul|div|neg|abs|exp|log|sqrt|rsqrt|pow|sin|cos|erf|clamp|clip|max|min|sum|mean|var|std|bias|scale[^_]*|unscale|index[^_]*|select[^_]*|where|mask[^_]*|random[^_]*|rand|rng|philox|init[^_]*|initialize[^_]*|set|arange|iota|range|linspace|split[^_]*|chunk[^_]*|stack|repeat[^_]*|tile|expand[^_]*|broadcast[^_]*|flip|roll|shift|shuffle|shuffled|swap|unique|count[^_]*|bincount|lookup|hash[^_]*|bucket[^_]*|partition[^_]*|compact[^_]*|filter[^_]*|interpolate[^_]*|interpolation|interp|upsample[^_]*|upsampling|resize[^_]*|resample[^_]*|bilinear|nearest|bicubic|trilinear|grid_sampl[^_]*|nms|roi|roialign|roipool|box[^_]*|iou|vectorized[^_]*|unary[^_]*|binary[^_]*|ternary|map|transform[^_]*|update[^_]*|sgd|lamb|lars|ema|momentum|grad|gradient|backward|forward|sync|wait|signal|notify|send|recv|put|get|dispatch(?!_\d)|combine|merge[^_]*|meta|offsets?|lengths?|seq_?len[^_]*|tokens?|page[^_]*|block_table[^_]*|slot[^_]*|draft|verify|tree|eagle|accept|reject|logits?|penalt[^_]*|temperature|penalize[^_]*|alphas?|betas?|gammas?|lambda\d?|welford|halos?|pivots?|ipiv|unpadding|meanvar|linewise|gen|generate[^_]*|information|rnnt|ctc|transducer|viterbi|labels?|lower|upper|sizes?|shapes?|strides?|elements?|buffers?|ban|bad_words|finished|beam[^_]*|stop|nan|inf|finite|check[^_]*|compare|equal|greater|less|not|and|or|xor|bitwise|bit[^_]*|pack[^_]*|unpack[^_]*|encode|encodes|fft[^_]*|ifft|rfft|c2c|r2c|c2r|butterfly|hadamard|stft|window|spectrogram|mel|sparse|csr|coo|coalesc[^_]*|segment[^_]*|degree|spmm|sddmm|neighbor[^_]*|edge|node|vertex|graph|voxel[^_]*|point[^_]*|raster[^_]*|render[^_]*|ray[^_]*|sh|gaussian[^_]*|preprocess[^_]*|postprocess[^_]*|decode|blend|hist|lut|image|pixel|color|yuv|rgb|warp_affine|remap|crop|mirror|normalize|normalization|augment|force[^_]*|pair[^_]*|bond[^_]*|angle[^_]*|dihedral[^_]*|pme|lj|nonbonded|integrate[^_]*|constraint[^_]*|particle[^_]*|stencil|jacobi|laplac[^_]*|advec[^_]*|lbm|collide|stream[^_]*|bitonic|radix|empty|noop|nop|dummy|warmup|spin|sleep|delay|trap|assert[^_]*|print|l2|flush|memory|alloc[^_]*|free|lock|atomic[^_]*|acc|accumulate[^_]*|cross|distance|dist|cdist|knn|kmeans|threshold|trace|diag[^_]*|tri[lu]|eye|one_?hot|nonzero|clone|contiguous|to_copy|poi|per|red|bcast[^_]*|async|load[^_]*|store[^_]*|publish|push|pull|producer|consumer|cleanup|clear|reset|move[^_]*|probe|extract|setup|prepare|tag|timer|square[^_]*|upscale|[^_]*cpy[^_]*|correction|lse|a2a|rsag|p2p|fused)(?:s|ed|ing)?(?:\d+(?:x\d+)*d?)?_"),
    other_words("words: other operations", rf"{_TELLS}_(?:{'|'.join(_MORE)})(?:s|es|ed|d|ing|er)?(?:\d+(?:x\d+)*d?)?_"),
)  # fmt: skip
