"""Which operation computes in which precision under the operation policy (level O1).

Facts alone, so that the analysis, which knows no torch, can foresee what the trainer's policy
(``training/policy.py``) will do.

Sources: PyTorch's documentation of automatic mixed precision (op reference, CUDA); GTC 2019,
*Automatic Mixed Precision for PyTorch* (white and black lists); *Mixed Precision Training*
(section 3.3, reductions in FP32).
"""

from __future__ import annotations

from typing import Literal

Rule = Literal["low", "fp32", "promote", "banned"]

RECURRENT = frozenset(
    "lstm gru rnn_tanh rnn_relu lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell".split()
)

LOW = RECURRENT | frozenset(
    """
    conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d convolution prelu
    addmm addmv addr matmul einsum mm mv linalg_vecdot linear addbmm baddbmm bmm chain_matmul
    linalg_multi_dot scaled_dot_product_attention
    """.split()
)
FP32 = frozenset(
    """
    acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow softplus
    layer_norm native_layer_norm rms_norm group_norm norm nuclear_norm cosine_similarity
    poisson_nll_loss cosine_embedding_loss nll_loss nll_loss2d hinge_embedding_loss kl_div
    l1_loss smooth_l1_loss huber_loss mse_loss margin_ranking_loss multilabel_margin_loss
    soft_margin_loss triplet_margin_loss multi_margin_loss binary_cross_entropy_with_logits dist
    pdist cdist renorm logsumexp upsample_nearest1d upsample_nearest2d upsample_nearest3d
    upsample_linear1d upsample_bilinear2d upsample_trilinear3d upsample_bicubic2d prod softmax
    log_softmax cumprod cumsum sum linalg_vector_norm linalg_matrix_norm ctc_loss
    """.split()
)
PROMOTE = frozenset(
    """
    addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot scatter_add
    """.split()
)
BANNED = frozenset({"binary_cross_entropy"})

LISTS: dict[str, Rule] = {
    **dict.fromkeys(LOW, "low"),
    **dict.fromkeys(FP32, "fp32"),
    **dict.fromkeys(PROMOTE, "promote"),
    **dict.fromkeys(BANNED, "banned"),
}

# Functions that autocast casts by their own name while ATen sees their parts: ``einsum`` of an outer
# product is a ``mul``.
COMPOSITES = frozenset({"einsum"})

# Operations (ATen's names below autograd) for which PyTorch has no FP16 and no BF16 kernel on CUDA, and
# which autocast does not cast: they raise there. From ``dtypesIfCUDA`` in torch's own table of
# operations (torch/testing/_internal/common_methods_invocations.py, torch 2.13).
NO_HALF = frozenset(
    """
    angle cholesky cholesky_inverse cholesky_solve _cholesky_solve_helper geqrf histc igamma igammac
    linalg_cholesky_ex linalg_eig _linalg_eigvals _linalg_eigh linalg_eigvals linalg_householder_product
    linalg_inv_ex _linalg_det _linalg_slogdet linalg_ldl_factor_ex linalg_ldl_solve linalg_lstsq
    linalg_lu linalg_lu_factor_ex linalg_lu_solve linalg_pinv linalg_qr _linalg_solve_ex
    linalg_solve_triangular _linalg_svd lu_unpack ormqr polar triangular_solve special_airy_ai
    special_bessel_j0 special_bessel_j1 special_bessel_y0 special_bessel_y1 special_erfcx
    special_chebyshev_polynomial_t special_chebyshev_polynomial_u special_chebyshev_polynomial_v
    special_chebyshev_polynomial_w special_hermite_polynomial_h special_hermite_polynomial_he
    special_laguerre_polynomial_l special_legendre_polynomial_p special_log_ndtr
    special_modified_bessel_i0 special_modified_bessel_i1 special_modified_bessel_k0
    special_modified_bessel_k1 special_ndtri special_scaled_modified_bessel_k0
    special_scaled_modified_bessel_k1 special_shifted_chebyshev_polynomial_t
    special_shifted_chebyshev_polynomial_u special_shifted_chebyshev_polynomial_v
    special_shifted_chebyshev_polynomial_w special_spherical_bessel_j0 special_zeta
    sparse_sampled_addmm
    """.split()
)
FFT = frozenset({"_fft_r2c", "_fft_c2c", "_fft_c2r"})
"""Transforms, ``stft`` among them: in FP16 they take lengths that are powers of two, in BF16 none."""
NO_BF16 = FFT | {"complex", "view_as_complex"}
"""The same as ``NO_HALF``, of BF16 alone."""
# Functions made of several operations that refuse half precision by their own name, before any of them.
NO_HALF_FUNCTIONS = frozenset({"quantile", "nanquantile", "linalg_matrix_power", "matrix_power"})

# ATen's names below autograd -> the name the policy knows them by.
_KNOWN_AS = {
    "_softmax": "softmax", "_safe_softmax": "softmax", "_log_softmax": "log_softmax",
    "native_group_norm": "group_norm", "_fused_rms_norm": "rms_norm",
    "nll_loss_forward": "nll_loss", "nll_loss2d_forward": "nll_loss2d", "_ctc_loss": "ctc_loss",
    "_cdist_forward": "cdist", "_euclidean_dist": "cdist", "_convolution": "convolution",
    "mkldnn_rnn_layer": "lstm", "_cudnn_rnn": "lstm", "_thnn_fused_lstm_cell": "lstm_cell",
    "_thnn_fused_gru_cell": "gru_cell", "_prelu_kernel": "prelu",
}  # fmt: skip

# What has to be named for the policy to meet a product where a user calls it.
CALLED_AS = {
    "addmm": ("linear", "addmm"),
    "mm": ("linear", "matmul", "mm"),
    "bmm": ("matmul", "bmm"),
    "mv": ("linear", "matmul", "mv"),
    "dot": ("matmul", "dot"),
    "convolution": ("conv1d", "conv2d", "conv3d", "convolution"),
}


def policy_name(op: str) -> str:
    """The policy's name of an ATen operation: ``_softmax`` -> ``softmax``, ``exp_`` -> ``exp``."""
    if op.startswith("_scaled_dot_product"):
        return "scaled_dot_product_attention"
    plain = _KNOWN_AS.get(op, op)
    return plain if plain in LISTS else plain.rstrip("_") or plain


MOVES = frozenset(
    """
    _to_copy _unsafe_view clone copy copy_ cat stack constant_pad_nd index index_select gather repeat
    expand_copy
    embedding select_backward slice_backward zeros_like ones_like full_like fill fill_ zero zero_ relu
    relu_ masked_fill masked_fill_ where max_pool2d_with_indices threshold neg neg_ abs abs_ maximum
    minimum sort topk amax amin max min triu tril flip roll unfold_backward
    """.split()
)
"""What moves values, or counts and compares them: it rounds nothing anew."""
