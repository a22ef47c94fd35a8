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
    r"my|fused|forward|backward|fwd|bwd|grad|gradient|kernel\d*|cuda|gpu|device|global|test|run|launch|main"
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
    cuda_words("words: a product on CUDA cores", r"_(?:simt(?!_(?:add|copy|transpose|cast|fill|reduce|scan|load|store)_)(?<!transpose_simt)|sgemm[^_]*|[a-z]?gemv[^_]*|matvec|dp4a|cuda_?core[^_]*|cuda_core|non_?tensor_?core)_|_(?:naive|reference|ref)_(?:[^_]+_){0,5}(?:[^_]*gemm[^_]*|[^_]*matmul[^_]*|mm|bmm|conv[^_]*|attention|attn)_|_(?:[^_]*gemm[^_]*|[^_]*matmul[^_]*|mm|bmm|conv[^_]*|attention|attn)_(?:[^_]+_){0,5}(?:naive|reference)_|_(?:naive|reference|ref)_(?:[^_]+_){0,5}(?:fmha|mha|mla|sdpa|fna|syrk|trmm)_|_(?:fmha|mha|mla|sdpa|fna)_(?:[^_]+_){0,5}(?:naive|reference)_"),
    tensor_words("words: a product on Tensor Cores", r"_(?:wmma|mma|mfma|tensor_?op|tensor_?core[^_]*|hmma|imma|wgmma|tcgen05|umma|utcmma|xdl|xdlops)_", ""),
    helper_words("words: serves a product", r"_(?:[^_]*gemm[^_]*|[^_]*matmul[^_]*|mm|bmm|conv[^_]*|winograd[^_]*|splitk|split_k|attn|attention|mha|fmha|flash|mla|marlin|moe)_(?:[^_]+_){0,5}(?:reduce(?!_scatter)|reduction|reducer|transform|combine|fixup[^_]*|helper|preprocess|postprocess|workspace[^_]*|pointers?|ptrs|offsets|tensormaps?|tensor_maps?|meta_?data|schedule|scheduler|bookkeeping)_|_gemv_params?_|_(?:batched_ptrs|helper|splitk_reduc[^_]*|split_k_reduc[^_]*)_"),
    tensor_words("words: a product as only Tensor Cores' kernels are written", r"^_{1,2}" + _NO_PRODUCT + r"(?=(?:[^_]+_){0,15}?(?:persistent|stream_?k|tma|warp_specialized|warp_spec|pingpong|ag|rs|a2a|consumer|producer)_)(?:[^_]+_){0,15}?" + _PRODUCT, ""),
    tensor_words("words: a product of types that only Tensor Cores multiply", r"^_{1,2}" + _NO_PRODUCT + r"(?=(?:[^_]+_){0,15}?(?:tf32[^_]*|(?:a8w8|a8w4|w4a8|w8a8fp8|afp[48]wfp[48]|a\d+wfp4)|(?:mxfp[468]|nvfp4|fp4|fp8|e2m1|e4m3|e5m2)_(?:x_)?(?:mxfp[468]|nvfp4|fp4|fp8|e2m1|e4m3|e5m2))_)(?:[^_]+_){0,15}?" + _PRODUCT + r"|^_(?:_|triton_)" + _NO_PRODUCT + r"(?=(?:[^_]+_){0,15}?(?:fp8[^_]*|f8[^_]*|e4m3[^_]*|e5m2[^_]*|mxfp?[468][^_]*|nvfp4|fp4[^_]*|[^_]*e2m1[^_]*|[aw]fp[48][^_]*)_)(?:[^_]+_){0,15}?" + _PRODUCT + r"|^_{1,2}" + _NO_PRODUCT + r"(?:[^_]+_){0,15}?tf32(?:gemm|matmul|mm)_", ""),
    tensor_words("words: a product for an architecture since Hopper", r"^_{1,2}" + _NO_PRODUCT + r"(?=(?:[^_]+_){0,15}?(?:sm_?(?:90|1[012]\d)[af]?|hopper|blackwell)_)(?:[^_]+_){0,15}?(?:" + _PRODUCT + "|" + _ATTENTION + ")", ""),
)  # fmt: skip

_MORE = sorted(
    """
    aabb absmax acceleration accuracy ack acos activate adadelta adagrad adamw addcdiv addcmul
    addr adjacency advance aes affine_grid aggregate align_block all all_to_all allclose
    alloc_decode alloc_extend amr anchor antialias antialiasing any append approx arrange arrive
    arrive_inc asin assign asum atan atan2 auc augmentation average avg_pool avgpool axes axis
    axpby axpy backprop ball_query ballot ballot_sync ballquery bandwidth bandwidth_test
    barostat barycentric batch_to_space bce beamform bernoulli bessel bezier bezier_curve bfs
    bgr bilateral binarize bincount binomial bisect bisection bitfield black_scholes blending
    blit block_table bloom blur boundary_condition bounds brightness bspline bucket bucketize
    bvh camera canny carlo cauchy cdf ceil celoss celu centroid cepstral channel_last
    channel_shuffle charge checkpoint circular_pad clampmax clampmin clean cleanup clock cloth
    cmvn coarsen col_sum collapse collision colmax coloring colorize colsum combiner commit
    compact_index compaction component compose composite compositing compress concatenate
    concatenation conj conjugate constrain contact contour contrast contrastive convex coord
    coordinate coords copysign copyto corner correlate correlation cosh cosine_embedding
    cosine_similarity coulomb count_nonzero cov cov2d cov3d covar covariance create csv ctc_loss
    cu_seqlen cu_seqlens cubic cummax cummin cumprod cumulative cusum cutmix daxpy dbscan dct
    ddim debayer decay decimate decompose decompress decrement decrypt dedup dedupe deform_mesh
    deinterleave delay delete demod demosaic denoise density density_grid depth_to_space deriv
    derivative descriptor destruct det determinant devoxelize dft diagonal dice dictionary diff
    diff_abs diffuse diffusion digamma digitize dijkstra dilate dilated diou dipole dipoles
    discontinuity disparity distort distribute distribution dither divide divided doorbell
    download downsample downscale draw drop drop_path dropblock droppath dstack dtype dump
    duplicate dups dwt dyt eagle_prepare elemwise elu emb embedding_bag encoding encrypt
    energies energy envelope envmap eos epilogue_sync eq erfc erfcx erfinv erode error error_map
    error_overlay euler evaluate evaluation evict ewald exclusive exp2 expand_as expert_ids
    expert_map expm1 exponential export extrema face fake fbank feature fence find fir flag
    flatten flood floor floor_divide floor_mod floordiv flow floyd floydwarshall fluid fluid_sim
    fma fmax fmin fmod focal fold forest fps frac fractional_pool freq frequencies frequency
    frequency_encoding frexp frontier frustum full functor fused_add fwt g2p gaussian_nll gcd ge
    gels_kernel geometry gesv get_last_loc giou glu grammar gray grayscale greedy gridsample
    groupby gt gtsv guidance haar halton hamming handshake hardshrink hardsigmoid hardswish
    hardtanh harmonic harris hash_find hash_insert heartbeat heartwall heaviside hegst heun
    hflip hierarchy hinge hinge_embedding histc histo homography hotness hotspot hourglass
    householder hstack hsv huber huffman hypot i0 i0e i1 i1e icp idct identities identity
    identity_encoding ids idx igamma igammac iir inc inclusive inclusive_scan increment
    index_put inpaint inplace_update instance_norm int_div integral interleaved interp1 interp2
    interp2d intersect intersection interval inverse_map invert iou ipc isclose isect isfinite
    isin isinf isnan isneginf isolation isposinf jaccard jaccardoverlap jitter join jpeg json
    julia_set karras kde keccak keypoint kinematics kl kl_div kron kth kthvalue kv_len labeling
    lanczos lane langevin larfg largest latency latency_test launch_global lava lavamd lcm ldexp
    ldpc ldr le leaf leaky leap_frog leapfrog learnable leaves leftshift length_mask lerp
    levenshtein lgamma lie_group lincs lion local_response locate log10 log1p log2 logaddexp
    logcumsumexp logical logistic logit lognormal logprob logsigmoid logspace logsumexp
    lookahead lookup_table louvain lp_pool lrn lt lz4 magnitude mandelbrot mapping march
    marching marching_cubes margin masked masked_fill masked_select match matches matching
    matrix_norm max_unpool maximal maximum maxpool md5 mean_shift meanshift medfilt median
    medusa medusa_mask membar memfill memzero mesh meshgrid metric mfcc min_p minimum minmax
    mipmap mipmaps mirror_pad mish mixup mode modulate modulation modulo moments monotonic monte
    morph morton movedim mse mst mult multi_hot multicast multilabel multinomial multiply_add
    myocyte nadam nan_to_num nanmedian nansum narrow nbody ndtri ne near_far nearest_neighbor
    needleman_wunsch negate negative nesterov neuron next_token nextafter ngram ngram_match nll
    nllloss nlm nn3 noise noisy normal normalizer nrm2 nv12 occupancy ofdm offset_copy offsets
    one_blob one_hot ones optical_flow option option_price orientation ormtr overlap_save
    overlay p2g packet page_table pagerank paint pairwise_distance parallel_for parquet
    particles_to_grid paste pathfinder pdf percentile perplexity perturb perturbation pid
    ping_pong pingpong_latency pixel_shuffle pixel_unshuffle placement poisson poisson_nll poll
    portfolio positive posv potential powx ppl predict preemphasis prefetch prefix_sums prelu
    prep prescan pressure priors prod profiler propagate propagation proposal propose prune
    pruning qpsk qsort quadtree quantile quasirandom quat quaternion_product quats quick_gelu
    quicksort radam radius ragged randint randn randperm ranges ranks ravel rcp rdma read
    rearranged reciprocal refine refit reflection reflection_pad reflector regex regularize
    rejection relabel relative relayout relocate relocation relu6 remainder remove renorm
    renormalize reorg repeat_interleave replace replication replication_pad req_to_token request
    rescale respond restore reverse rgba rightshift rigid_body ring rle rmse rmsnorm_gated
    rmsprop rolling rot180 rot90 rotate_image rotg round rounding row_max row_sum rowmax rowsum
    rrelu rsub sanitize saturate saturation save saxpy scaling scheduler_step sdf se3 se3pose
    search searchsorted selu semaphore sendrecv seqlen seqlens sequence sequence_mask settle sha
    sha256 shade shading shadow shake shampoo shap sharpen sharpness shfl shmem shortcut shrink
    shuffle_channel sign signbit sinc sinh sinusoidal skinning slerp slot_mapping slots smallest
    smith_waterman smooth smooth_l1 smoothing snappy so3 sobel sobol softplus softshrink
    sound_speed space_to_batch space_to_depth sparsify spectral_norm spectrum speculative sphere
    sphere_trace spherical splat splatting splice spline spread squash squeeze srad sssp
    standardize stash statistics stats stencil stereo stitch stochastic stochastic_depth
    stratify stretch stride_test string subsample substring subtract suppress surface susan swap
    swapaxes sweep swizzle2 symmetrize take take_along targets tensor_to texel texture
    thermostat thomas three_nn threshold threshold_mask tid tile_copy tiling time_step
    timer_tick timestamp timestep to_marlin token_ids tokenizer tolist tonemap topmost topn
    topology topp torsion transfer transport transpose_image trapz tree_mask triad triangle
    triangle_wave tridiagonal tril_indices trim triplet triu_indices true_div true_divide trunc
    trunc_div truncate truncation tsdf tsne umap unbind uncompress undistort unfinished unfold
    ungqr uniform union unique_consecutive unmqr unpool unravel unscale unsqueeze unstack unwrap
    upfirdn2d upload vad valid validate vander variance vdw vec_add vecadd vector_add
    vector_norm vector_op velocities velocity verification verlet vertex_normal vflip virial
    viterbi_decode vote voxelization voxelize vstack walk warp_any warp_perspective wasserstein
    watchdog weight_decay weight_norm weightnorm where_nonzero while_loop winding windowing wrap
    write write_req xielu xlogy zeroing zeros zipf zstd
    """.split()
)
"""Words of operations that are no product of matrices; few of them are common in other senses."""

# The words of a name that no other rule knows. Products first: what is fused with one is not the
# whole of it. Attention, experts and recurrent cells have parts that are no product. A common word
# alone says nothing.
WORDS = (
    other_words("words: not matrix math", r"_(?:idx|attr|all2all|rms|texture[^_]*|mip[^_]*|warp_linear|(?:lstm|gru|rnn)_(?:cell_(?:forward|backward|fwd|bwd)|elementwise|pointwise|nonlinearity|gates)|dynamic_(?:fp8|int8|mxfp\d|fp4|nvfp4)|(?:add|sub|mul|div|multiply|dice|prelu|elementwise|concat|slice|order\d)_(?:dgrad|wgrad|fprop|bprop)|broadcast[^_]*|map_?reduce|sgd|momentum|adagrad|rmsprop|adadelta|lse|correct|correction|add_(?:[^_]+_){0,3}bias[^_]*|resiz[^_]*|upsampl[^_]*|interpol[^_]*|interp|blend[^_]*|remap|huffman|normaliz[^_]*|[^_]*rowwise|\ddgs|rle|col32|append[^_]*|insert[^_]*|evict|logprobs?|log_?softmax\d*|nope|penalties|dequantise|fakequant|float2half|half2float|cvt|padded_to_dense|dense_representation|csr|coo|(?:sigmoid|relu|tanh|bias[^_]*)_(?:fprop|bprop)|kv_buffer|kv_indices|req|src2dst|softmax|log_softmax|soft_max|[^_]*norm|norm\d?|[^_]*norm\d|layernorm[^_]*|rmsnorm[^_]*|batchnorm[^_]*|groupnorm[^_]*|norm_[^_]*|gamma_beta[^_]*|rope|rotary[^_]*|rotate|top_?k|topk[^_]*|arg_?max|arg_?min|arg_?sort[^_]*|srgb|quant|quantize[^_]*|quantise[^_]*|quantization|dequant[^_]*|[^_]*quant|transpose[^_]*|permute[^_]*|permutation|copy[^_]*|cpy|memcpy[^_]*|memset[^_]*|cast|convert[^_]*|gather[^_]*|scatter[^_]*|embedding[^_]*|embed[^_]*|dropout[^_]*|sampling|sampler|sample|sort[^_]*|concat[^_]*|cat|slice[^_]*|pad|padding|fill[^_]*|histogram[^_]*|cum_?sum[^_]*|prefix_?sum|scan|reduce[^_]*|reduction[^_]*|activation[^_]*|act|elementwise[^_]*|element_?wise[^_]*|eltwise|pointwise|adam[^_]*|optimizer[^_]*|[^_]*loss|entropy|crossentropy|zero|alibi|mask|masks|bias_add|add_bias|add_residual|residual|pos_emb[^_]*|positional|position|metadata|plan|schedule|scheduler|align_block_size|routing|router|route|all_?reduce|all_?gather|all_?to_?all|barrier|offsets?|indices|index|indptr|maps?|unpermute[^_]*|dispatch(?!_\d)|gate|gating|bbox[^_]*|swizzle[^_]*|softcap|[sdcz]?(?:getr[fs]|getf2|potr[fs]|potf2|geqr[f2]|gesvd[a-z]*|[a-z]{2}evd?[a-z]?|larf[a-z]*|laswp|sytr[df][a-z]*|steqr|laset|lacpy)|reconstruct[^_]*|(?:(?:fp|bf|f|u?int|i|half|float|bfloat)\d*|e\dm\d|dtype)_to_(?:(?:fp|bf|f|u?int|i|half|float|bfloat)\d*|e\dm\d|dtype)|hadamard[^_]*|fwht|lens|lengths?|count[^_]*|cache|kv_?cache|copy_blocks|swap_blocks|reshape[^_]*|pooling|pool[^_]*|init|update_state|state_passing|delta_softplus)_"),
    opaque_words("words: a product", r"_(?:dot\d?|dots|dotbased|linear|proj|projection|(?<=matrix_)multiply|matrixmul[^_]*|matmuls?|mmk?|splitk|split_k|gmm|xgemm|contraction|einsum|tensordot|fprop|dgrad|wgrad|winograd|batched_matrix[^_]*|matrix_mul[^_]*|mma|mfma|fc|fcn|dense|gemms|syrk|trsm|trmm|herk)_"),
    opaque_words("words: attention, experts, recurrence", r"_(?:attention|attn|mha|fmha|mla|sdpa|gqa|mqa|nsa|fna|hstu|sage|qk|pv|qkpv|kkt|kda|gla|gdn\d?|gdpa|ssu|rwkv\d*|delta_h|indexer|flash|qkv|moe|experts?|mlp|ffn|lora|[^_]*lstm|gru|rnn|chunkwise|chunk_(?:[^_]+_){0,4}(?:fwd|bwd|fw|bw)|ssd|ssm|mamba|wkv\d?|retention|delta_rule|chunk_delta|recompute_w|conv(?!_states?_)[^_]*|solve[^_]*|lu|qr|svd|eig|eigh|eigvals|cholesky[^_]*|getrf[^_]*|potrf[^_]*|inverse|decode|prefill)_"),
    other_words("words: elementwise or bookkeeping", _TELLS + r"_(?:relu[^_]*|gelu[^_]*|silu[^_]*|swish|swiglu[^_]*|geglu[^_]*|sigmoid[^_]*|tanh|add[^_]*|sub|mul|div|neg|abs|exp|log|sqrt|rsqrt|pow|sin|cos|erf|clamp|clip|max|min|sum|mean|var|std|bias|scale[^_]*|unscale|index[^_]*|select[^_]*|where|mask[^_]*|random[^_]*|rand|rng|philox|init[^_]*|initialize[^_]*|set|arange|iota|range|linspace|split[^_]*|chunk[^_]*|stack|repeat[^_]*|tile|expand[^_]*|broadcast[^_]*|flip|roll|shift|shuffle|shuffled|swap|unique|count[^_]*|bincount|lookup|hash[^_]*|bucket[^_]*|partition[^_]*|compact[^_]*|filter[^_]*|interpolate[^_]*|interpolation|interp|upsample[^_]*|upsampling|resize[^_]*|resample[^_]*|bilinear|nearest|bicubic|trilinear|grid_sampl[^_]*|nms|roi|roialign|roipool|box[^_]*|iou|vectorized[^_]*|unary[^_]*|binary[^_]*|ternary|map|transform[^_]*|update[^_]*|sgd|lamb|lars|ema|momentum|grad|gradient|backward|forward|sync|wait|signal|notify|send|recv|put|get|dispatch(?!_\d)|combine|merge[^_]*|meta|offsets?|lengths?|seq_?len[^_]*|tokens?|page[^_]*|block_table[^_]*|slot[^_]*|draft|verify|tree|eagle|accept|reject|logits?|penalt[^_]*|temperature|penalize[^_]*|alphas?|betas?|gammas?|lambda\d?|welford|halos?|pivots?|ipiv|unpadding|meanvar|linewise|gen|generate[^_]*|information|rnnt|ctc|transducer|viterbi|labels?|lower|upper|sizes?|shapes?|strides?|elements?|buffers?|ban|bad_words|finished|beam[^_]*|stop|nan|inf|finite|check[^_]*|compare|equal|greater|less|not|and|or|xor|bitwise|bit[^_]*|pack[^_]*|unpack[^_]*|encode|encodes|fft[^_]*|ifft|rfft|c2c|r2c|c2r|butterfly|hadamard|stft|window|spectrogram|mel|sparse|csr|coo|coalesc[^_]*|segment[^_]*|degree|spmm|sddmm|neighbor[^_]*|edge|node|vertex|graph|voxel[^_]*|point[^_]*|raster[^_]*|render[^_]*|ray[^_]*|sh|gaussian[^_]*|preprocess[^_]*|postprocess[^_]*|decode|blend|hist|lut|image|pixel|color|yuv|rgb|warp_affine|remap|crop|mirror|normalize|normalization|augment|force[^_]*|pair[^_]*|bond[^_]*|angle[^_]*|dihedral[^_]*|pme|lj|nonbonded|integrate[^_]*|constraint[^_]*|particle[^_]*|stencil|jacobi|laplac[^_]*|advec[^_]*|lbm|collide|stream[^_]*|bitonic|radix|empty|noop|nop|dummy|warmup|spin|sleep|delay|trap|assert[^_]*|print|l2|flush|memory|alloc[^_]*|free|lock|atomic[^_]*|acc|accumulate[^_]*|cross|distance|dist|cdist|knn|kmeans|threshold|trace|diag[^_]*|tri[lu]|eye|one_?hot|nonzero|clone|contiguous|to_copy|poi|per|red|bcast[^_]*|async|load[^_]*|store[^_]*|publish|push|pull|producer|consumer|cleanup|clear|reset|move[^_]*|probe|extract|setup|prepare|tag|timer|square[^_]*|upscale|[^_]*cpy[^_]*|correction|lse|a2a|rsag|p2p|fused)(?:s|ed|ing)?(?:\d+(?:x\d+)*d?)?_"),
    other_words("words: other operations", rf"{_TELLS}_(?:{'|'.join(_MORE)})(?:s|es|ed|d|ing|er)?(?:\d+(?:x\d+)*d?)?_"),
)  # fmt: skip
