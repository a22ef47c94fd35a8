"""Known kernels that are not matrix math, by library."""

from mpdiag.hardware.kernel_names.rule import cuda, other, other_words

# The names of most kernels of a PyTorch trace, tried first because there are so many of them.
FIRST = (
    cuda("Inductor's sums of products", r"^triton_(?:red|per)_fused(?:_(?:mm|mv|bmm|t|transpose|permute|view|unsafe_view|_to_copy|_unsafe_view|clone|squeeze|unsqueeze|expand))*?_(?:mm|mv|bmm)(?:_(?:mm|mv|bmm|t|transpose|permute|view|unsafe_view|_to_copy|_unsafe_view|clone|squeeze|unsqueeze|expand))*_\d+$", "Inductor"),
    other("PyTorch launchers", r"^at::native::(?:(?:vectorized_|unrolled_|legacy_|index_)?elementwise_kernel(?:_manual_unroll|_with_index)?|reduce_kernel|vectorized_gather_kernel|multi_tensor_apply_kernel|CatArrayBatched\w*|softmax_warp_\w+|cunn_\w*[sS]oft[mM]ax\w*|vectorized_layer_norm_kernel|distribution_\w+)<", "PyTorch"),
    other("Inductor's pointwise and reductions", r"^triton_(?:poi|red|per)_fused", "Inductor"),
    other("NCCL", r"^nccl(?:Dev)?Kernel", "NCCL"),
)  # fmt: skip

# These precede the names that do not say what they run, whose patterns are wide.
BEFORE_OPAQUE = (
    other("nvFuser", r"^(?:CudaCodeGen::|nvfuser::)?nvfuser_(?!matmul)[a-z_]+_f\d+|^CudaCodeGen::kernel\d+$", "nvFuser"),
    other("libraries without a product of dense matrices", r"^(?:cudf|cugraph|rmm|nvtext|cuspatial|gsplat|nerfacc|dali|cuspatial|cv::cuda\w*|cv::cudev|npp\w*|nvjpeg|rocfft|curand|rocrand|hiprand|cucollections|cuco|flashcomm|nvcomp|k2|pcl|open3d)(?:::|_)(?!\S{0,200}?(?:gemm|Gemm|GEMM|matmul|MatMul|matrix_mul|conv(?!ert)|Conv(?!ert)))", ""),
    other("tinygrad elementwise", r"^E_\d+(?:_\d+)*(?:n\d+)?$", "tinygrad"),
    other_words("words: products of sparse matrices", r"_(?:sp_m[mv]|spmv|sddmm|(?:csr|bsr|ell|coo|gebsr|hyb)mv[a-z]?)_"),
    other("CuPy", r"^cupyx?_(?!\w*(?:matmul|dot|gemm|conv|correlate))", "CuPy"),
    other("MIOpen without a product", r"^MIOpen(?!Conv|Cv|\w*(?:Gemm|Conv))[A-Z]\w*|^Op(?:\dd|Tensor)\w*|^mlo[A-Z]\w*|^(?:LSTM|GRU|RNN)(?:Fwd|Bwd)\w*Update", "MIOpen"),
    other("trtllm-gen MoE", r"\bmoe::dev::(?:finalize|routing|activation|permute|convertsf)", "TensorRT-LLM"),
    other("element-wise matmul of experts", r"^moe_res_matmul", "DeepSpeed"),
    other("collective", r"^(?:nccl|rccl)|ncclKernel|ncclDevKernel|ncclKern|nvshmem|mscclKernel|cross_device_reduce|allreduce_(?:one|two)|(?:one|two)_shot_all_reduce|multimem_|deep_ep::|userbuffers|twoshot|symmetric_memory", "NCCL"),
    other("Inductor pointwise or reduction", r"triton_(?:poi|red|per|for|split_scan|spl)_", "Inductor"),
    other("PyTorch elementwise", r"at::native::.{0,300}?(?:elementwise|vectorized_gather|gpu_index|index_\w*kernel|indexSelect|indexFunc|indexing_)", "PyTorch"),
    other("fbgemm", r"fbgemm_gpu::|split_embedding|permute_(?:2D|1D|pooled|multi)|bounds_check_indices|linearize_index|block_bucketize|jagged_(?!\w*(?:bmm|gemm|matmul|attention|attn))|lengths_range|dense_to_jagged|asynchronous_complete_cumsum|histogram_binning", "FBGEMM"),
    other("PyTorch foreach", r"multi_tensor_apply|FusedAdam|FusedSgd", "PyTorch"),
)  # fmt: skip

OTHERS = (
    other("XLA fusion", r"^(?:wrapped_|loop_|input_|command_buffer|triton_softmax|triton_fn|redzone_checker|__xla|xla::|stream_executor::)\w*|^(?:\w+_)?fusion(?:[_.]\d+)*(?:__\d+)?$|^(?:copy|convert|broadcast|transpose|concatenate|reduce|scatter|gather|sort|iota|select_and_scatter|dynamic_update_slice|slice|pad|reverse|cholesky|triangular_solve|rng_bit_generator)(?:[_.]\d+)+$", "XLA"),
    other("TensorRT pooling and shuffling", r"trt_?\w*pooling|pooling_?Tiled|tiledMaxPooling|(?:^|::)tiled\w*[pP]ooling|generatedNativePointwise|__cuda_sm|CUTENSOR_\w*|shuffle|resizeNearest|sliceKernel|gatherKernel|scatterNd|cub_\w*topk|EfficientNMS|nvinfer1::plugin|op_generic_tensor", "TensorRT"),
    other("cuTENSOR permutation", r"cutensor\S*(?:permutation|elementwise|reduction|tensor_elementwise|permute|transpose)|(?:^|::)permutation_kernel|tensor_permut", "cuTENSOR"),
    other("quantisers and dequantisers", r"kDequantizeBlockwise|kQuantizeBlockwise|kQuantize|kDequant|kOptimizer|kInt8VectorQuant|kdequant_mm|kPercentileClipping|kEstimateQuantiles|kSpMM|kTransformRowToFormat|kExtractOutliers|reconstruct(?:_gptq|_exllama)?_kernel|shuffle_kernel|make_q4|quantize_(?:q8|mmq)|dequantize_|convert_unary|k_bin_bcast|k_argsort|k_[gs]et_rows|cpy_\w+|column_remap|q4_reconstruct"),
    other("Triton state passing", r"^_(?:state_passing|chunk_cumsum|chunk_scan_bwd_(?:dz|ddAcs_unstable)|chunk_state_bwd_ddAcs_unstable)\w*|chunk_(?:local|global)_cumsum\w*|l2norm_(?:fwd|bwd)", "Mamba"),
    other("PyTorch reduction", r"at::native::.{0,300}?(?:reduce_kernel|[sS]oft[mM]ax|[nN]orm|[sS]catter|[gG]ather|cat|Cat|[sS]ort|[tT]opk|cumsum|scan|[eE]mbedding|embedding|[dD]ropout|[pP]ool|[uU]psample|[nN]llLoss|nll_loss|[lL]oss|[rR]oll|[fF]lip|tri[ul]_|[uU]nique|histogram|[dD]istribution|[rR]andom|[sS]um|[mM]ean|[wW]elford|fill|copy|where|mask|range|linspace|pad|Pad|compute_\w*|krn_partial|write_|split_|chunk_|segment|glu|lstm_cell|gru_cell|amp_|FunctionTraits)", "PyTorch"),
    other("warp softmax", r"(?:^|::)(?:masked_)?soft_?max|softmax_warp_(?:forward|backward)|cunn_[sS]oft[mM]ax|cunn_SpatialSoftMax|softmax_", "PyTorch"),
    other("criterion", r"cunn_\w*Criterion|nll_loss|cross_entropy|CrossEntropy|liger_"),
    other("batch norm", r"\bbn_(?:fw|bw)|batch_norm|batchnorm|BatchNorm|bnFw|bnBw", "cuDNN"),
    other("layer norm", r"(?:layer|rms|group|instance)_?[nN]orm|LayerNorm|RMSNorm|RmsNorm|GroupNorm|Rmsnorm2d|Layernorm2d|ln_(?:fwd|bwd|parallel)|rms_norm|cuComputeGradInput|cuApplyLayerNorm|cuComputePartGradGammaBeta", ""),
    other("pooling", r"pooling_(?:fw|bw)|max_?pool|avg_?pool|average_pool|adaptive_\w*pool|MaxPool|AvgPool"),
    other("cuDNN elementwise", r"(?:^|::)op_(?:generic_)?tensor|OpTensor|add_tensor|scale_tensor|activation_(?:fw|bw)|elementWise|setTensor|LSTM_elementWise|GRU_elementWise|RNN_elementWise|dropout_(?:fp|bp|fw|bw)|cudnn::reduction|softmax_(?:fw|bw)|scalePackedTensor|kern_precompute|elemWiseRNNcell", "cuDNN"),
    other("CUB and Thrust", r"^(?:at_cuda_detail::)?cub::|thrust::|at_cuda_detail|hipcub::|rocprim::|DeviceScan|DeviceReduce|DeviceRadixSort|CUDAFunctor", "CUB"),
    other("vLLM elementwise", r"vllm::(?:rotary_embedding|rms_norm|fused_add_rms|act_and_mul|silu|gelu|moe::topk|moe::moe_|scaled_fp8|dynamic_|static_|per_token|convert_|copy_|concat_and_cache|batched_rotary|topk|apply_repetition)", "vLLM"),
    other("MoE routing", r"^_(?:combined_routing|topk_forward|topk_backward|sum_bitmatrix|routing_|compute_(?:writeback|expt)|expt_data|masked_compaction)|moe_topk|topkGating|moe_softmax|sampling|TopK|topk_"),
    other("rotary, activation", r"rotary|rope_|_rope|swiglu|SwiGLU|geglu|silu_|gelu_|relu_kernel|act_and_mul|bias_(?:gelu|act|add)|add_bias|quantize|dequant|cast_transpose|cast_\w*kernel|fp8_quant|scaled_quant|amax"),
    other("transformer engine", r"transformer_engine::(?!.*[gG]emm)", "Transformer Engine"),
    other("optimizer", r"(?<![hH])[aA]dam|adagrad|lamb_|multi_tensor_|l2norm_|LAMB|sgd_|_sgd|adafactor|kOptimizer", ""),
    other("memory", r"(?:^|::)(?:memcpy|memset|Memcpy|Memset|copy_kernel|fill_kernel|transpose|permute|CopyBuffer|FillBuffer|copyBuffer|fillBuffer)|__amd_rocclr_|vectorized_copy|TransposeKernel|transpose_\w*kernel|tensor_kernel_scan"),
    other("random and masks", r"[pP]hilox|curand|bernoulli|generate_seed_pseudo|dropout|Dropout"),
    other("scan and state space", r"selective_scan|mamba_|cumsum|^(?!\w*(?:kda|gdn|gla|delta|ssd|rwkv)_)\w*_scan_"),
    other("loss scaling", r"amp_(?:foreach|update)|non_finite_check|unscale"),
    other("cuFFT", r"(?:regular|vector|multi_bluestein|spRealComplex|dpRealComplex)_fft|regular_fft|vector_fft|spRadix|composite_2way_fft|cufft", "cuFFT"),
    other("cuSOLVER", r"(?:^|::)(?:getrf|potrf|geqrf|larft|syevj|gesvdj|gesvd|laswp|ormqr|sytrd)\w*", "cuSOLVER"),
    other("MXNet", r"mxnet_generic_kernel|mshadow::cuda::", "MXNet"),
    other("Eigen", r"Eigen::internal::|EigenMetaKernel", "Eigen"),
    other("rocBLAS vectors", r"rocblas_(?:axpy|rot\w*|scal|swap|copy|nrm2|asum|iam\w+|geam|dgmm|set_\w+|reduction)\w*", "rocBLAS"),
    other("cuBLAS vector", r"(?:^|::)(?:axpy|scal|copy|nrm2|asum|swap|iamax)_kernel|scal_(?:64addr_)?kernel|axpy_kernel_val|scale_kernel", "cuBLAS"),
    other("cuSPARSE", r"cusparse::|csrmm|csrmv", "cuSPARSE"),
    other("CK elementwise", r"ck_tile\S*(?:Rmsnorm|Layernorm|Topk|MoeSorting|MoeSmoothquant|Elementwise|Permute)|elementwise", ""),
    other("PyTorch rest", r"^at::native::(?!.*(?:gemm|conv|matmul|attention|fmha|flash|mma))", "PyTorch"),
    other("apex", r"apex::|xentropy|distopt", "Apex"),
    other("spin", r"spin_kernel|cuda_sleep|nanosleep|delay_kernel|busy_wait"),
    other("reduction", r"(?:^|::|_)reduce(?:_\w*)?kernel|^reduce_kernel|column_reduce|row_reduce|(?<![a-z])sum_kernel|argmax|argmin"),
)  # fmt: skip
