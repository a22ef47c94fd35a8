"""Hooks around a backward pass at a loss scale, without a trainer."""

import copy
import pickle
from contextlib import contextmanager
from functools import partial

import pytest
import torch

from mpdiag.launching.patches import (
    TrueGradients,
    _reduce,
    call_backward,
)


class Pass:
    """A backward pass at scale 8 that notes what it is told."""

    loss_scale = 8.0
    computing_gradients = True
    accumulated_are_true = False
    in_script_code = False

    def __init__(self):
        self.finite, self.half_only, self.inside = [], [], []

    @contextmanager
    def script_code(self):
        self.inside.append(True)
        yield

    def note_seen(self, gradient):
        self.finite.append(bool(torch.isfinite(gradient).all()))

    def note_half_only(self, function):
        self.half_only.append(function)

    def refuse(self, reason):
        raise AssertionError(reason)


def test_what_a_hook_leaves_alone_keeps_every_bit():
    gradient = torch.tensor([1 / 3])
    assert TrueGradients(lambda g: None, Pass())(gradient) is None
    assert TrueGradients(lambda g: g, Pass())(gradient) is gradient
    changed = TrueGradients(lambda g: g.mul_(2) and None, Pass())(torch.tensor([8.0]))
    assert changed.tolist() == [16.0]


def _clamp_data(gradient):
    gradient.data.clamp_(max=1.5)


def _clamp_numpy(gradient):
    gradient.numpy().clip(max=1.5, out=gradient.numpy())


@pytest.mark.parametrize("write", [_clamp_data, _clamp_numpy])
def test_what_a_hook_writes_past_version_counters_counts(write):
    """In the elements that it wrote; the others keep every bit, which a scale of 3 would not leave."""
    state = Pass()
    state.loss_scale = 3.0
    gradient = torch.tensor([1 / 3, 24.0, float("nan")])
    result = TrueGradients(write, state)(gradient)
    assert result[:2].tolist() == [gradient[0].item(), 4.5]
    assert result[2].isnan()
    assert state.finite == [False]
    with pytest.raises(AssertionError, match="in place"):
        TrueGradients(lambda gradients: write(gradients[0]), Pass(), None)([gradient])


def test_what_a_function_writes_past_version_counters_counts():
    class Straight(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            gradient.data.clamp_(max=1.5)
            return gradient

    node = Straight.apply(torch.zeros(2, requires_grad=True)).grad_fn
    gradient = torch.tensor([8.0, 16.0], dtype=torch.float16)
    result = call_backward(Pass(), type(node).apply, node, gradient)
    assert result.tolist() == [8.0, 12.0]
    assert result.dtype == torch.float16


def test_a_saved_hook_is_the_scripts_and_a_copied_one_still_sees_true_gradients():
    hook = TrueGradients(torch.sign, Pass())
    assert pickle.loads(pickle.dumps(hook)) is torch.sign
    assert b"mpdiag" not in pickle.dumps(hook)
    assert copy.deepcopy(hook)(torch.tensor([4.0])).tolist() == [8.0]


class Kernel:
    __qualname__ = "Kernel"


def test_a_function_that_takes_half_precision_alone_is_told_of():
    class Node:
        _forward_cls = Kernel

    def backward(node, gradient):
        if gradient.dtype != torch.float16:
            raise RuntimeError("expected Half")
        return gradient

    state = Pass()
    half = torch.ones(2, dtype=torch.float16)
    assert call_backward(state, backward, Node(), half) is half
    assert state.half_only == ["Kernel"]
    with pytest.raises(RuntimeError, match="expected Half"):
        call_backward(state, backward, Node(), half.float())


def test_a_communication_hook_of_the_scripts_own_is_refused():
    def own(state, bucket):
        return None

    def placed(model, state, hook):
        return hook

    register = partial(_reduce, Pass(), placed)
    with pytest.raises(AssertionError, match="its own communication hook"):
        register(None, None, own)
    own.__module__ = "torch.distributed.algorithms.ddp_comm_hooks.default_hooks"
    assert register(None, None, own) is own
