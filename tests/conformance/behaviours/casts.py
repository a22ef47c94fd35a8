"""Which operations run in half precision inside the context for forward passes."""

import threading
from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from conformance.models import Weighted, rows
from conformance.outcomes import Chapter, NotApplicable, table
from conformance.subjects.protocol import Scale, Subject
from torch import Tensor, nn

CHAPTER = Chapter("Casts of operations")

HALF = torch.bfloat16  # native on every device, so that what is cast is seen in the dtype
NO_CASTS = "this level casts no operations"

SQUARE = torch.rand(4, 4) + 0.5
IMAGE = torch.rand(2, 3, 8, 8)
OPERATIONS: dict[str, dict[str, Callable[..., Tensor]]] = {}
"""By group and name: ``cast_operations.tsv``."""
for row in table("cast_operations"):
    OPERATIONS.setdefault(row["group"], {})[row["name"]] = eval(row["operation"])


def needs_casts(subject: Subject) -> None:
    if not subject.casts_operations:
        raise NotApplicable(NO_CASTS)


def begun(subject: Subject, model: nn.Module | None = None):
    """A training in BF16 of a model that matters little."""
    return subject.training(model or Weighted(), target="bf16", scale=Scale(1.0))


def both(x: Tensor) -> list[Tensor]:
    return [x, x.to(HALF)]


def group_has_dtype(group: str, tensor: Tensor, dtype: str, subject: Subject) -> None:
    """Every operation of a group returns this dtype: half, FP32 or that of its input."""
    needs_casts(subject)
    for x in both(tensor):
        expected = {"half": HALF, "fp32": torch.float32, "input": x.dtype}[dtype]
        with begun(subject) as training, training.autocast():
            found = {name: operation(x).dtype for name, operation in OPERATIONS[group].items()}
        wrong = [name for name, other in found.items() if other != expected]
        assert not wrong, f"not {expected}: {', '.join(wrong)}"


for row in table("cast_groups"):
    given = {"SQUARE": SQUARE, "IMAGE": IMAGE}[row["tensor"]]
    check = partial(group_has_dtype, row["group"], given, row["dtype"])
    CHAPTER.add(row["behaviour"], row["source"], check, instead=row["peers"] or None)


@CHAPTER.behaviour
def batch_norm_follows_its_input(subject: Subject) -> None:
    """Batch norm returns its input's dtype and keeps FP32 statistics, in training and evaluation."""
    needs_casts(subject)
    model = nn.BatchNorm2d(3)
    with begun(subject, model) as training:
        for mode in (True, False):
            model.train(mode)
            for x in both(IMAGE):
                statistics = model.running_mean, model.running_var
                with training.autocast():
                    y = F.batch_norm(x, *statistics, model.weight, model.bias, mode)
                assert y.dtype == x.dtype
        assert model.running_mean.dtype == torch.float32


@CHAPTER.behaviour
def several_inputs_promote(subject: Subject) -> None:
    """Operations on several tensors compute in the widest of their dtypes."""
    needs_casts(subject)
    wrong = []
    with begun(subject) as training, training.autocast():
        for name, operation in OPERATIONS["promoting"].items():
            for a, b in ((SQUARE, SQUARE.to(HALF)), (SQUARE.to(HALF), SQUARE)):
                try:
                    wide = operation(a, b).dtype == torch.float32
                except RuntimeError:
                    wide = False
                wrong += [] if wide else [name]
    assert not wrong, f"not in the widest dtype: {', '.join(wrong)}"


@CHAPTER.behaviour
def in_place_keeps_the_dtype(subject: Subject) -> None:
    """An operation in place keeps the dtype of what it changes."""
    needs_casts(subject)
    with begun(subject) as training, training.autocast():
        for x in both(SQUARE):
            for y in both(SQUARE):
                assert x.clone().add_(y).dtype == x.dtype
                assert F.relu(x.clone(), inplace=True).dtype == x.dtype


@CHAPTER.behaviour
def banned(subject: Subject) -> None:
    """Binary cross-entropy of probabilities is refused, with the name of what to use instead."""
    needs_casts(subject)
    with begun(subject) as training:
        for x in both(SQUARE / 4):
            with training.autocast(), pytest.raises(Exception, match="with_logits"):
                F.binary_cross_entropy(x, torch.ones(4, 4))


@CHAPTER.behaviour
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


@CHAPTER.behaviour
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


@CHAPTER.behaviour
def an_error_leaves_the_context(subject: Subject) -> None:
    """An error inside the context leaves nothing cast behind it."""
    with begun(subject) as training:
        with pytest.raises(ZeroDivisionError), training.autocast():
            _ = 1 / 0
        assert not torch.is_autocast_enabled("cpu")
        assert (SQUARE @ SQUARE).dtype == torch.float32
        assert torch.exp(SQUARE.to(HALF)).dtype == HALF


@CHAPTER.behaviour
def other_threads(subject: Subject) -> None:
    """The context casts nothing in another thread."""
    found: list[torch.dtype] = []
    with begun(subject) as training, training.autocast():
        thread = threading.Thread(target=lambda: found.append((SQUARE @ SQUARE).dtype))
        thread.start()
        thread.join()
    assert found == [torch.float32]


@CHAPTER.behaviour
def gradients_have_their_tensors_dtype(subject: Subject) -> None:
    """A gradient has the dtype of its tensor: FP32 for FP32 inputs and weights, half for half ones."""
    needs_casts(subject)
    with begun(subject) as training:
        for operation in (*list(OPERATIONS["products"].values())[:3], torch.exp, F.relu):
            for x in both(SQUARE):
                leaf = x.clone().requires_grad_()
                with training.autocast():
                    result = operation(leaf)
                result.float().sum().backward()
                assert leaf.grad is not None
                assert leaf.grad.dtype == x.dtype


CELLS = {"RNNCell": nn.RNNCell, "GRUCell": nn.GRUCell, "LSTMCell": nn.LSTMCell}
LAYERS = {"RNN": nn.RNN, "GRU": nn.GRU, "LSTM": nn.LSTM}


@CHAPTER.behaviour
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


@CHAPTER.behaviour
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


@CHAPTER.behaviour
def a_transformer_layer(subject: Subject) -> None:
    """A transformer encoder layer trains, and its weights stay finite."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    with subject.training(layer, rate=0.01) as training:
        for i in range(2):
            training.backward(training.forward(rows(i, 6, 8)[None]).square().mean())
            assert training.step()
        assert all(bool(torch.isfinite(w).all()) for w in training.weights().values())
