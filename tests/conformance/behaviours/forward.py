"""Forward passes: caches of casts, evaluation, custom functions, checkpointing, buffers."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from conformance.models import INF, ONE, Weighted, close, perceptron, poisoned, rows, same, values
from conformance.outcomes import Chapter, NotApplicable
from conformance.subjects.protocol import Subject, Training
from support import Casts
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

CHAPTER = Chapter("Forward passes and buffers")


# -- evaluation and the cache of casts -------------------------------------------------------------


@CHAPTER.behaviour
def evaluation_between_steps(subject: Subject) -> None:
    """An evaluation without gradients between two steps leaves the second one right."""
    found = []
    for between in ((), (rows(5),)):
        with subject.training(perceptron(), rate=0.1) as training:
            for i in range(2):
                training.train(rows(i))
                with torch.no_grad():
                    _ = [training.forward(x) for x in between]
            found.append(training.weights())
    assert same(*found)


@CHAPTER.behaviour
def evaluation_in_the_same_context(subject: Subject) -> None:
    """A forward pass under ``no_grad`` or ``inference_mode`` in the context of the training one."""
    for quiet in (torch.no_grad, torch.inference_mode):
        model = perceptron()
        with subject.training(model, rate=0.1, target="bf16") as training:
            before = training.weights()
            with training.autocast():
                with quiet():
                    training.model(rows(0))
                output = training.model(rows(1))
            assert output.requires_grad, quiet.__name__
            training.backward(output.float().sum())
            training.step()
            after = training.weights()
            assert not any(torch.equal(before[n], after[n]) for n in before), quiet.__name__


@CHAPTER.trained()
def evaluation_sees_new_weights(training: Training) -> None:
    """A forward pass after a step computes with the new weights."""
    training.train(ONE)
    with torch.no_grad():
        assert training.forward(ONE).tolist() == [0.5, 1.5]
    training.model.eval()
    assert training.forward(ONE).tolist() == [0.5, 1.5]


@CHAPTER.behaviour
def a_step_inside_the_context(subject: Subject) -> None:
    """A step inside the context for forward passes: the next pass computes with the new weights."""
    model = nn.Linear(256, 64, bias=False)
    nn.init.ones_(model.weight)
    with subject.training(model, rate=0.5, target="bf16") as training, training.autocast():
        x = torch.ones(1, 256)
        training.backward(training.model(x).float().sum())
        training.step()
        assert training.model(x).float().mean().item() == 128.0


@CHAPTER.behaviour
def an_fp16_step_inside_the_context(subject: Subject) -> None:
    """The same in FP16, with a weight of 2^14 elements."""
    if not subject.ours:
        raise NotApplicable("see the row above")
    model = nn.Linear(256, 64, bias=False)
    nn.init.ones_(model.weight)
    with subject.training(model, rate=0.5) as training, training.autocast():
        x = torch.ones(1, 256)
        for expected in (128.0, 0.0):
            training.backward(training.model(x).float().sum())
            training.step()
            assert training.model(x).float().mean().item() == expected


@CHAPTER.behaviour
def a_weight_is_cast_once(subject: Subject) -> None:
    """A weight that is used three times in one context is cast once."""
    if not subject.casts_operations:
        raise NotApplicable("this level casts no operations")
    model = nn.Linear(4, 4)
    with subject.training(model, target="bf16") as training:
        with Casts(model.weight) as casts, training.autocast():
            for _ in range(3):
                F.linear(torch.ones(1, 4), model.weight)
        assert casts.count == 1
        with Casts(model.weight) as casts, training.autocast():
            F.linear(torch.ones(1, 4), model.weight)
        assert casts.count == 1, "the cache outlived its context"


# -- custom functions, checkpointing ---------------------------------------------------------------


class Product(torch.autograd.Function):
    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu")
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x.mm(weight.t())

    @staticmethod
    @torch.amp.custom_bwd(device_type="cpu")
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return gradient.mm(weight), gradient.t().mm(x)


class FP32Exp(torch.autograd.Function):
    seen: list[torch.dtype]

    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu", cast_inputs=torch.float32)
    def forward(ctx: Any, x: Tensor) -> Tensor:
        FP32Exp.seen.append(x.dtype)
        result = x.exp()
        ctx.save_for_backward(result)
        return result

    @staticmethod
    @torch.amp.custom_bwd(device_type="cpu")
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (result,) = ctx.saved_tensors
        return gradient * result


class WithFunctions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(3, 4) / 4)

    def forward(self, x: Tensor) -> Tensor:
        return FP32Exp.apply(Product.apply(x, self.weight))


@CHAPTER.behaviour
def custom_functions(subject: Subject) -> None:
    """A ``custom_fwd`` function trains; with ``cast_inputs`` its inputs are FP32."""
    plain = WithFunctions()
    FP32Exp.seen = []
    plain(rows(0)).sum().backward()
    with subject.training(WithFunctions(), rate=0.1) as training:
        before = training.weights()["weight"]
        FP32Exp.seen = []
        training.train(rows(0))
        moved = (before - training.weights()["weight"]) / 0.1
        assert torch.allclose(moved, plain.weight.grad, rtol=0.02, atol=0.02)
        if subject.casts_operations:
            assert FP32Exp.seen == [torch.float32]


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool | None) -> None:
        super().__init__()
        self.inner, self.reentrant = perceptron(), reentrant

    def forward(self, x: Tensor) -> Tensor:
        if self.reentrant is None:
            return self.inner(x)
        result: Tensor = checkpoint(self.inner, x, use_reentrant=self.reentrant)
        return result


@CHAPTER.behaviour
def activation_checkpointing(subject: Subject) -> None:
    """Activation checkpointing changes no bit of the weights."""
    found = []
    for reentrant in (None, False, True):
        with subject.training(Checkpointed(reentrant), rate=0.1) as training:
            for i in range(2):
                training.train(rows(i).requires_grad_())
            found.append(training.weights())
    assert same(found[0], found[1])
    assert same(found[0], found[2])


@CHAPTER.behaviour
def dropout_is_repeatable(subject: Subject) -> None:
    """The same seed gives the same training with dropout."""
    found = []
    for _ in range(2):
        torch.manual_seed(5)
        model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1))
        with subject.training(model, rate=0.1) as training:
            for i in range(2):
                training.train(rows(i))
            found.append(training.weights())
    assert same(*found)


@CHAPTER.behaviour
def module_hooks(subject: Subject) -> None:
    """Forward hooks and full backward hooks of modules run, and what they return counts."""
    model = Weighted()
    calls: list[str] = []
    model.register_forward_pre_hook(lambda _m, args: calls.append("pre") or (args[0] * 2,))
    model.register_forward_hook(lambda *_: calls.append("forward"))
    model.register_full_backward_hook(lambda *_: calls.append("backward"))
    with subject.training(model) as training:
        training.train(ONE.clone().requires_grad_())
        assert calls == ["pre", "forward", "backward"]
        assert values(training.weights()) == [0, 1]


@CHAPTER.behaviour
def nested_inputs_and_outputs(subject: Subject) -> None:
    """Models with dicts, lists and None among inputs and outputs train."""

    class Nested(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Weighted()

        def forward(self, batch: dict[str, Any], *, scale: Tensor, nothing: None = None) -> Any:
            return {"out": [self.inner(batch["x"][0]) * scale, nothing], "n": 3}

    with subject.training(Nested()) as training:
        with training.autocast():
            result = training.model({"x": [ONE, "text"]}, scale=torch.tensor(2.0))
        assert result["n"] == 3
        assert result["out"][1] is None
        training.backward(result["out"][0].float().sum())
        training.step()
        assert values(training.weights()) == [0, 1]


# -- buffers ---------------------------------------------------------------------------------------


class OwnNorm(nn.Module):
    """Batch normalisation by ``F.batch_norm`` on buffers of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("variance", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return F.batch_norm(x, self.mean, self.variance, training=self.training)


@CHAPTER.behaviour
def batch_norm_after_a_skip(subject: Subject) -> None:
    """A skipped step leaves statistics as they were, of batch norm and of one written by hand."""
    for norm in (nn.BatchNorm1d(4), OwnNorm()):
        model = nn.Sequential(norm, nn.Linear(4, 1))
        with subject.training(model, rate=0.01) as training:
            training.train(rows(0))
            before = {n: b.clone() for n, b in model.named_buffers()}
            assert any(bool(b.any()) for b in before.values())
            x = rows(1)
            x[0, 0] = INF
            training.backward(training.forward(x).sum())
            assert not training.step()
            assert all(torch.equal(b, before[n]) for n, b in model.named_buffers())


@CHAPTER.behaviour
def batch_norm_statistics(subject: Subject) -> None:
    """Batch norm's running statistics agree with FP32's."""
    plain = nn.BatchNorm1d(4)
    model = nn.BatchNorm1d(4)
    for i in range(3):
        plain(rows(i))
    with subject.training(model, rate=0.0) as training:
        for i in range(3):
            training.train(rows(i))
        for name in ("running_mean", "running_var"):
            found, expected = getattr(model, name).float(), getattr(plain, name)
            tolerance = 1e-2 if subject.level == "O3" else 1e-3  # statistics in FP16
            assert torch.allclose(found, expected, rtol=tolerance, atol=tolerance), name
        assert int(model.num_batches_tracked) == 3


@CHAPTER.trained([0.5, 1.5])
def a_loss_that_is_not_finite(training: Training) -> None:
    """A NaN in the inputs skips the step, and training goes on with the next batch."""
    training.backward(training.forward(torch.tensor([1.0, math.nan])).sum())
    assert not training.step()
    assert training.train(ONE)


@CHAPTER.trained()
def a_nan_loss_with_finite_gradients(training: Training) -> None:
    """A loss that is NaN skips the step, even where its gradients are finite."""
    output = training.forward(ONE)
    training.backward(output.sum() + math.nan)
    assert not training.step()


@CHAPTER.trained(model=perceptron, rate=0.1)
def two_batches_of_other_shapes(training: Training) -> None:
    """Batches of other sizes, an empty one among them, train."""
    for count in (8, 3, 0, 1):
        assert training.train(rows(0, count)) or count == 0
    assert all(bool(torch.isfinite(w).all()) for w in training.weights().values())


@CHAPTER.trained(model=perceptron)
def gradients_of_inputs(training: Training) -> None:
    """Gradients of inputs carry the scale and are those of FP32 otherwise."""
    x, y = rows(0).requires_grad_(), rows(0).requires_grad_()
    perceptron()(x).sum().backward()
    training.backward(training.forward(y).sum())
    assert close({"x": y.grad / training.scale}, {"x": x.grad}, 5e-3)


@CHAPTER.behaviour
def an_abandoned_pass(subject: Subject) -> None:
    """A forward pass that is thrown away without a backward pass leaves nothing behind."""
    found = []
    for abandon in (False, True):
        with subject.training(perceptron(), rate=0.1) as training:
            training.train(rows(0))
            if abandon:
                poisoned(training.forward(rows(5)))
            training.train(rows(1))
            found.append(training.weights())
    assert same(*found)
