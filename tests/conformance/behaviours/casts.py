"""Which operations run in half precision inside the context for forward passes."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from conformance.models import Weighted, rows
from conformance.outcomes import Chapter, NotApplicable
from conformance.subjects.protocol import Scale, Subject, Training
from torch import Tensor, nn

CHAPTER = Chapter("Casts of operations")

APEX = "Apex: tests/L0/run_amp"
TORCH = "torch: torch/testing/_internal/autocast_test_lists.py"
AUTOCAST = "torch: test/test_autocast.py and test/test_cuda.py"
HALF = torch.bfloat16  # native on every device, so that what is cast is seen in the dtype
NO_CASTS = "this level casts no operations"

Operation = Callable[[Tensor], Tensor]


def needs_casts(subject: Subject) -> None:
    if not subject.casts_operations:
        raise NotApplicable(NO_CASTS)


def begun(subject: Subject, model: nn.Module | None = None):
    """A training in BF16 of a model that matters little."""
    return subject.training(model or Weighted(), target="bf16", scale=Scale(1.0))


def dtypes(
    training: Training, operations: dict[str, Operation], x: Tensor
) -> dict[str, torch.dtype]:
    """What each operation returns inside the context."""
    with training.autocast():
        return {name: operation(x).dtype for name, operation in operations.items()}


def expect(
    subject: Subject, operations: dict[str, Operation], x: Tensor, dtype: torch.dtype
) -> None:
    """Every operation returns this dtype."""
    needs_casts(subject)
    with begun(subject) as training:
        wrong = [name for name, found in dtypes(training, operations, x).items() if found != dtype]
    assert not wrong, f"not {dtype}: {', '.join(wrong)}"


SQUARE = torch.rand(4, 4) + 0.5
IMAGE = torch.rand(2, 3, 8, 8)
PRODUCTS: dict[str, Operation] = {
    "matmul": lambda x: x.matmul(SQUARE),
    "@": lambda x: x @ SQUARE,
    "mm": lambda x: torch.mm(x, SQUARE),
    "mv": lambda x: torch.mv(x, SQUARE[0]),
    "addmm": lambda x: torch.addmm(x, x, SQUARE),
    "bmm": lambda x: torch.bmm(x[None], SQUARE[None]),
    "baddbmm": lambda x: torch.baddbmm(x[None], x[None], SQUARE[None]),
    "addbmm": lambda x: torch.addbmm(x, x[None], SQUARE[None]),
    "einsum": lambda x: torch.einsum("ij,jk->ik", x, SQUARE),
    "chain_matmul": lambda x: torch.linalg.multi_dot([x, SQUARE, SQUARE]),
    "linear": lambda x: F.linear(x, SQUARE),
    "attention": lambda x: F.scaled_dot_product_attention(
        x[None, None], x[None, None], x[None, None]
    ),
}
CONVOLUTIONS: dict[str, Operation] = {
    "conv1d": lambda x: F.conv1d(x[:, :, 0], torch.ones(2, 3, 3)),
    "conv2d": lambda x: F.conv2d(x, torch.ones(2, 3, 3, 3)),
    "conv3d": lambda x: F.conv3d(x[:, :, None], torch.ones(2, 3, 1, 3, 3)),
    "conv_transpose1d": lambda x: F.conv_transpose1d(x[:, :, 0], torch.ones(3, 2, 3)),
    "conv_transpose2d": lambda x: F.conv_transpose2d(x, torch.ones(3, 2, 3, 3)),
}
POINTWISE: dict[str, Operation] = {
    "exp": torch.exp, "expm1": torch.expm1, "log": torch.log, "log1p": torch.log1p,
    "log2": torch.log2, "log10": torch.log10, "pow": lambda x: x.pow(2.0), "**": lambda x: x**2.0,
    "reciprocal": torch.reciprocal, "rsqrt": torch.rsqrt, "cosh": torch.cosh, "sinh": torch.sinh,
    "tan": torch.tan, "acos": lambda x: torch.acos(x / 4), "asin": lambda x: torch.asin(x / 4),
    "erfinv": lambda x: torch.erfinv(x / 4), "softplus": F.softplus,
}  # fmt: skip
REDUCTIONS: dict[str, Operation] = {
    "sum": torch.sum, "prod": torch.prod, "cumsum": lambda x: x.cumsum(0),
    "cumprod": lambda x: x.cumprod(0), "norm": torch.norm, "dist": lambda x: torch.dist(x, x + 1),
    "logsumexp": lambda x: x.logsumexp(0), "softmax": lambda x: x.softmax(0),
    "log_softmax": lambda x: x.log_softmax(0), "cdist": lambda x: torch.cdist(x, x + 1),
    "cosine_similarity": lambda x: F.cosine_similarity(x, x + 1),
}  # fmt: skip
NORMS: dict[str, Operation] = {
    "layer_norm": lambda x: F.layer_norm(x, (8,)),
    "group_norm": lambda x: F.group_norm(x, 1),
    "rms_norm": lambda x: F.rms_norm(x, (8,)),
}
LOSSES: dict[str, Operation] = {
    "mse_loss": lambda x: F.mse_loss(x, x + 1),
    "l1_loss": lambda x: F.l1_loss(x, x + 1),
    "smooth_l1_loss": lambda x: F.smooth_l1_loss(x, x + 1),
    "huber_loss": lambda x: F.huber_loss(x, x + 1),
    "nll_loss": lambda x: F.nll_loss(x, torch.zeros(4, dtype=torch.long)),
    "cross_entropy": lambda x: F.cross_entropy(x, torch.zeros(4, dtype=torch.long)),
    "kl_div": lambda x: F.kl_div(x, x, reduction="batchmean"),
    "binary_cross_entropy_with_logits": lambda x: F.binary_cross_entropy_with_logits(x, x),
    "poisson_nll_loss": lambda x: F.poisson_nll_loss(x, x),
    "soft_margin_loss": lambda x: F.soft_margin_loss(x, x),
    "cosine_embedding_loss": lambda x: F.cosine_embedding_loss(x, x, torch.ones(4)),
    "hinge_embedding_loss": lambda x: F.hinge_embedding_loss(x, x),
    "margin_ranking_loss": lambda x: F.margin_ranking_loss(x, x, x),
    "triplet_margin_loss": lambda x: F.triplet_margin_loss(x, x, x),
}
FOLLOW: dict[str, Operation] = {
    "relu": F.relu, "gelu": F.gelu, "tanh": torch.tanh, "sigmoid": torch.sigmoid, "abs": torch.abs,
    "add": lambda x: x + 1, "max_pool": lambda x: F.max_pool2d(x, 2), "mean": torch.mean,
    "transpose": lambda x: x.transpose(-1, -2), "dropout": lambda x: F.dropout(x, 0.5),
}  # fmt: skip


def both(x: Tensor) -> list[Tensor]:
    return [x, x.to(HALF)]


@CHAPTER.behaviour(
    f"{APEX}/test_basic_casts.py, test_linear_is_half, test_matmul_op_is_half; {TORCH}",
    instead="torch's lists for CPUs lack the product with a vector",
)
def products_are_half(subject: Subject) -> None:
    """Matrix products are half, whatever their inputs."""
    for x in both(SQUARE):
        expect(subject, PRODUCTS, x, HALF)


@CHAPTER.behaviour(f"{APEX}/test_basic_casts.py, test_conv2d_is_half; {TORCH}")
def convolutions_are_half(subject: Subject) -> None:
    """Convolutions are half, whatever their inputs."""
    for x in both(IMAGE):
        expect(subject, CONVOLUTIONS, x, HALF)


LEFT = "torch's lists for CPUs leave these in half"


@CHAPTER.behaviour(f"{APEX}/test_basic_casts.py, test_pow_op_is_float; {TORCH}", instead=LEFT)
def pointwise_functions_are_fp32(subject: Subject) -> None:
    """Exponentials, logarithms, powers and their kin are FP32."""
    for x in both(SQUARE):
        expect(subject, POINTWISE, x, torch.float32)


@CHAPTER.behaviour(
    f"{APEX}/test_basic_casts.py, test_softmax_is_float, test_sum_is_float; {TORCH}", instead=LEFT
)
def reductions_are_fp32(subject: Subject) -> None:
    """Sums, products, norms and softmax are FP32."""
    for x in both(SQUARE):
        expect(subject, REDUCTIONS, x, torch.float32)


@CHAPTER.behaviour(f"{APEX}/test_basic_casts.py, test_group_norm_is_float; {TORCH}", instead=LEFT)
def normalisations_are_fp32(subject: Subject) -> None:
    """Layer, group and RMS normalisation are FP32."""
    for x in both(IMAGE):
        expect(subject, NORMS, x, torch.float32)


@CHAPTER.behaviour(f"{APEX}/test_basic_casts.py, test_mse_loss_is_float; {TORCH}")
def losses_are_fp32(subject: Subject) -> None:
    """Losses are FP32."""
    for x in both(SQUARE):
        expect(subject, LOSSES, x, torch.float32)


@CHAPTER.behaviour(f"{APEX}/test_basic_casts.py, test_relu_is_match")
def others_follow_their_input(subject: Subject) -> None:
    """Activations, pooling, dropout and views return the dtype they are given."""
    for x in both(IMAGE):
        expect(subject, FOLLOW, x, x.dtype)


@CHAPTER.behaviour(f"{APEX}/test_basic_casts.py, test_batch_norm_is_match")
def batch_norm_follows_its_input(subject: Subject) -> None:
    """Batch norm returns its input's dtype and keeps FP32 statistics, in training and evaluation."""
    needs_casts(subject)
    model = nn.BatchNorm2d(3)
    with begun(subject, model) as training:
        for mode in (True, False):
            model.train(mode)
            for x in both(IMAGE):
                with training.autocast():
                    assert (
                        F.batch_norm(
                            x, model.running_mean, model.running_var, model.weight, model.bias, mode
                        ).dtype
                        == x.dtype
                    )
        assert model.running_mean.dtype == torch.float32


PROMOTING: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "atan2": torch.atan2, "addcmul": lambda a, b: torch.addcmul(a, a, b),
    "addcdiv": lambda a, b: torch.addcdiv(a, a, b), "cross": lambda a, b: torch.cross(a[:3], b[:3], 0),
    "cat": lambda a, b: torch.cat([a, b]), "stack": lambda a, b: torch.stack([a, b]),
    "mul": torch.mul, "add": torch.add, "bilinear": lambda a, b: F.bilinear(a, b, torch.ones(2, 4, 4)),
    "tensordot": lambda a, b: torch.tensordot(a, b, 2), "dot": lambda a, b: torch.dot(a[0], b[0]),
    "index_put": lambda a, b: a.clone().index_put((torch.tensor([0]),), b[0]),
    "scatter_add": lambda a, b: a.scatter_add(0, torch.zeros(1, 4, dtype=torch.long), b),
}  # fmt: skip


def result_type(
    operation: Callable[[Tensor, Tensor], Tensor], a: Tensor, b: Tensor
) -> torch.dtype | None:
    """What an operation returns; None where it raises."""
    try:
        return operation(a, b).dtype
    except RuntimeError:
        return None


@CHAPTER.behaviour(
    f"{APEX}/test_promotion.py, test_atan2_matches_widest, test_cat_matches_widest; {TORCH}",
    instead="torch's lists for CPUs promote few of these; others raise an error",
)
def several_inputs_promote(subject: Subject) -> None:
    """Operations on several tensors compute in the widest of their dtypes."""
    needs_casts(subject)
    wrong = []
    with begun(subject) as training, training.autocast():
        for name, operation in PROMOTING.items():
            for a, b in ((SQUARE, SQUARE.to(HALF)), (SQUARE.to(HALF), SQUARE)):
                if result_type(operation, a, b) != torch.float32:
                    wrong.append(name)
    assert not wrong, f"not in the widest dtype: {', '.join(wrong)}"


@CHAPTER.behaviour(f"{APEX}/test_promotion.py, test_inplace_add_matches_self")
def in_place_keeps_the_dtype(subject: Subject) -> None:
    """An operation in place keeps the dtype of what it changes."""
    needs_casts(subject)
    with begun(subject) as training, training.autocast():
        for x in both(SQUARE):
            for y in both(SQUARE):
                assert x.clone().add_(y).dtype == x.dtype
                assert F.relu(x.clone(), inplace=True).dtype == x.dtype


@CHAPTER.behaviour(
    f"{APEX}/test_basic_casts.py, test_bce_raises_by_default; {AUTOCAST}, test_autocast_banned",
    instead="the ban is CUDA's: on a CPU it is computed",
)
def banned(subject: Subject) -> None:
    """Binary cross-entropy of probabilities is refused, with the name of what to use instead."""
    needs_casts(subject)
    with begun(subject) as training:
        for x in both(SQUARE / 4):
            with training.autocast(), pytest.raises(Exception, match="with_logits"):
                F.binary_cross_entropy(x, torch.ones(4, 4))


@CHAPTER.behaviour(f"{AUTOCAST}, test_autocast_ignored_types")
def other_types_are_left_alone(subject: Subject) -> None:
    """Double and integer tensors are not cast."""
    with begun(subject) as training, training.autocast():
        double = SQUARE.double()
        assert (double @ double).dtype == torch.float64
        assert F.linear(double, double).dtype == torch.float64
        assert double.sum().dtype == torch.float64
        whole = torch.ones(2, 2, dtype=torch.long)
        assert (whole @ whole).dtype == torch.long
        assert whole.sum().dtype == torch.long


@CHAPTER.behaviour(f"{AUTOCAST}, nested autocast")
def disabled_regions(subject: Subject) -> None:
    """``torch.autocast(enabled=False)`` inside the context switches casts off, and they come back."""
    needs_casts(subject)
    with begun(subject) as training, training.autocast():
        with torch.autocast("cpu", enabled=False):
            assert (SQUARE @ SQUARE).dtype == torch.float32
            with training.autocast():
                assert (SQUARE @ SQUARE).dtype == HALF
            assert (SQUARE @ SQUARE).dtype == torch.float32
        assert (SQUARE @ SQUARE).dtype == HALF


@CHAPTER.behaviour(f"{AUTOCAST}")
def an_error_leaves_the_context(subject: Subject) -> None:
    """An error inside the context leaves nothing cast behind it."""
    with begun(subject) as training:
        with pytest.raises(ZeroDivisionError), training.autocast():
            _ = 1 / 0
        assert not torch.is_autocast_enabled("cpu")
        assert (SQUARE @ SQUARE).dtype == torch.float32
        assert torch.exp(SQUARE.to(HALF)).dtype == HALF


@CHAPTER.behaviour(f"{AUTOCAST}, thread local")
def other_threads(subject: Subject) -> None:
    """The context casts nothing in another thread."""
    found: list[torch.dtype] = []
    with begun(subject) as training, training.autocast():
        thread = threading.Thread(target=lambda: found.append((SQUARE @ SQUARE).dtype))
        thread.start()
        thread.join()
    assert found == [torch.float32]


@CHAPTER.behaviour(f"{APEX}/test_basic_casts.py, test_backward")
def gradients_have_their_tensors_dtype(subject: Subject) -> None:
    """A gradient has the dtype of its tensor: FP32 for FP32 inputs and weights, half for half ones."""
    needs_casts(subject)
    with begun(subject) as training:
        for operation in (*list(PRODUCTS.values())[:3], torch.exp, F.relu):
            for x in both(SQUARE):
                leaf = x.clone().requires_grad_()
                with training.autocast():
                    result = operation(leaf)
                result.float().sum().backward()
                assert leaf.grad is not None
                assert leaf.grad.dtype == x.dtype


CELLS = {"RNNCell": nn.RNNCell, "GRUCell": nn.GRUCell, "LSTMCell": nn.LSTMCell}
LAYERS = {"RNN": nn.RNN, "GRU": nn.GRU, "LSTM": nn.LSTM}


@CHAPTER.behaviour(
    f"{APEX}/test_rnn.py, test_rnn_cell_is_half",
    instead="the state is FP32 on a CPU",
)
def recurrent_cells_are_half(subject: Subject) -> None:
    """RNN, GRU and LSTM cells return half, and train."""
    needs_casts(subject)
    for name, kind in CELLS.items():
        cell = kind(4, 4)
        with begun(subject, cell) as training:
            with training.autocast():
                state = cell(SQUARE)
                state = cell(SQUARE, state)
            output = state[0] if isinstance(state, tuple) else state
            assert output.dtype == HALF, name
            training.backward(output.float().sum())
            assert training.step(), name


@CHAPTER.behaviour(
    f"{APEX}/test_rnn.py, test_rnn_is_half, test_lstm_is_half, test_rnn_packed_sequence",
    instead="raises, or returns FP32, for some of them on a CPU",
)
def recurrent_layers_are_half(subject: Subject) -> None:
    """RNN, GRU and LSTM layers, of two directions and on packed sequences, return half and train."""
    needs_casts(subject)
    x = torch.rand(5, 2, 4)
    packed = nn.utils.rnn.pack_padded_sequence(x, torch.tensor([5, 3]))
    for name, kind in LAYERS.items():
        layer = kind(4, 4, num_layers=2, bidirectional=True)
        with begun(subject, layer) as training:
            for given in (x, packed):
                with training.autocast():
                    output = layer(given)[0]
                found = getattr(output, "data", output) if given is packed else output
                assert found.dtype == HALF, name
                training.backward(found.float().sum())
                assert training.step(), name


@CHAPTER.behaviour("torch: test/test_transformers.py")
def a_transformer_layer(subject: Subject) -> None:
    """A transformer encoder layer trains, and its weights stay finite."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    with subject.training(layer, rate=0.01) as training:
        for i in range(2):
            training.backward(training.forward(rows(i, 6, 8)[None]).square().mean())
            assert training.step()
        assert all(bool(torch.isfinite(w).all()) for w in training.weights().values())
