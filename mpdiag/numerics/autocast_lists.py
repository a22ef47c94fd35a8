"""Which operation computes in which precision under the operation policy (level O1).

Facts alone, so that the analysis, which knows no torch, can foresee what the trainer's policy
(``training/policy.py``) will do.

The lists and their sources stand in ``autocast_lists.tsv``.
"""

from pathlib import Path
from typing import Literal

from mpdiag.hardware.tables import read_table

Rule = Literal["low", "fp32", "promote", "banned"]


def _lists(file: str) -> dict[str, frozenset[str]]:
    lists: dict[str, set[str]] = {}
    for row in read_table(Path(__file__).with_name(file)):
        lists.setdefault(row["list"], set()).update(row["operation"].split())
    return {name: frozenset(operations) for name, operations in lists.items()}


OPERATIONS = _lists("operations.tsv")
"""Operations by what else they do; who reads a list says what it is."""
_LISTS = _lists("autocast_lists.tsv")
RECURRENT, FP32, PROMOTE = _LISTS["recurrent"], _LISTS["fp32"], _LISTS["promote"]
LOW, BANNED = RECURRENT | _LISTS["low"], _LISTS["banned"]
NO_HALF, NO_HALF_FUNCTIONS = _LISTS["no_half"], _LISTS["no_half_function"]
"""Operations, and functions of several, that have neither an FP16 nor a BF16 kernel on CUDA."""
FFT = _LISTS["fft"]
"""Transforms, ``stft`` among them: in FP16 they take lengths that are powers of two, in BF16 none."""
NO_BF16 = FFT | _LISTS["no_bf16"]
"""The same as ``NO_HALF``, of BF16 alone."""
ONE_DTYPE = _LISTS["one_dtype"]
"""Products and sums of a sparse matrix: they take one dtype alone, and autocast casts none."""
MOVES = _LISTS["move"]
"""What moves values, or counts and compares them: it rounds nothing anew."""

LISTS: dict[str, Rule] = {
    **dict.fromkeys(LOW, "low"),
    **dict.fromkeys(FP32, "fp32"),
    **dict.fromkeys(PROMOTE, "promote"),
    **dict.fromkeys(BANNED, "banned"),
}

# Functions that autocast casts by their own name while ATen sees their parts: ``einsum`` of an outer
# product is a ``mul``.
COMPOSITES = frozenset({"einsum"})

# ATen's names below autograd -> the name the policy knows them by.
_KNOWN_AS = {
    "_softmax": "softmax", "_safe_softmax": "softmax", "_log_softmax": "log_softmax",
    "native_group_norm": "group_norm", "_fused_rms_norm": "rms_norm",
    "nll_loss_forward": "nll_loss", "nll_loss2d_forward": "nll_loss2d", "_ctc_loss": "ctc_loss",
    "_cdist_forward": "cdist", "_pdist_forward": "pdist",
    "_euclidean_dist": "cdist", "_convolution": "convolution",
    "mkldnn_rnn_layer": "lstm", "_cudnn_rnn": "lstm", "_thnn_fused_lstm_cell": "lstm_cell",
    "_thnn_fused_gru_cell": "gru_cell", "_prelu_kernel": "prelu",
}  # fmt: skip

# ATen's name below autograd -> the name above it, of layers.
LAYERS = {
    "native_layer_norm": "layer_norm", "native_batch_norm": "batch_norm",
    "_native_batch_norm_legit": "batch_norm", "native_dropout": "dropout",
    "_adaptive_avg_pool2d": "adaptive_avg_pool2d", "max_pool2d_with_indices": "max_pool2d",
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
