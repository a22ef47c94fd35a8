"""The operation policy: the same lists on every device, and what overrides do."""

from __future__ import annotations

import dataclasses
import gc
import os
import threading
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from support import constant
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import mpdiag
from mpdiag.emulation import policy
from mpdiag.emulation.mode import Emulation
from mpdiag.errors import UsageError
from mpdiag.plan import Fp32Choice, PrecisionPlan

HALF, FULL = torch.float16, torch.float32


def low(*shape: int) -> torch.Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(0)).half() + 0.1


def full(*shape: int) -> torch.Tensor:
    return low(*shape).float()


classes = torch.zeros(4, dtype=torch.long)

OPERATIONS = {
    # matrix multiplications and convolutions: low, whatever comes in
    "linear": (lambda: F.linear(full(4, 8), full(4, 8)), HALF),
    "matmul": (lambda: full(4, 8) @ full(8, 4), HALF),
    "mm": (lambda: torch.mm(full(4, 8), full(8, 4)), HALF),
    "bmm": (lambda: torch.bmm(full(2, 4, 8), full(2, 8, 4)), HALF),
    "addmm": (lambda: torch.addmm(full(4), full(4, 8), full(8, 4)), HALF),
    "baddbmm": (lambda: torch.baddbmm(full(2, 4, 4), full(2, 4, 8), full(2, 8, 4)), HALF),
    "mv": (lambda: torch.mv(full(4, 8), full(8)), HALF),
    "addmv": (lambda: torch.addmv(full(4), full(4, 8), full(8)), HALF),
    "addr": (lambda: torch.addr(full(4, 8), full(4), full(8)), HALF),
    "einsum": (lambda: torch.einsum("ij,kj->ik", full(4, 8), full(4, 8)), HALF),
    "chain_matmul": (lambda: torch.linalg.multi_dot([full(4, 8), full(8, 4), full(4, 2)]), HALF),
    "conv1d": (lambda: F.conv1d(full(2, 3, 8), full(4, 3, 3)), HALF),
    "conv2d": (lambda: F.conv2d(full(2, 3, 8, 8), full(4, 3, 3, 3)), HALF),
    "conv3d": (lambda: F.conv3d(full(1, 2, 4, 4, 4), full(2, 2, 3, 3, 3)), HALF),
    "conv_transpose2d": (lambda: F.conv_transpose2d(full(1, 3, 4, 4), full(3, 2, 3, 3)), HALF),
    "prelu": (lambda: F.prelu(full(4, 8), full(1)), HALF),
    "attention": (lambda: F.scaled_dot_product_attention(*[full(1, 2, 4, 8)] * 3), HALF),
    "lstm": (lambda: nn.LSTM(8, 4, bidirectional=True)(full(3, 2, 8))[0], HALF),
    "lstm state": (lambda: nn.LSTM(8, 4)(full(3, 2, 8))[1][1], HALF),
    "gru": (lambda: nn.GRU(8, 4, 2)(full(3, 2, 8))[0], HALF),
    "gru, batch first": (lambda: nn.GRU(8, 4, batch_first=True)(full(3, 2, 8))[0], HALF),
    "rnn": (lambda: nn.RNN(8, 4)(full(3, 2, 8))[0], HALF),
    "lstm cell": (lambda: nn.LSTMCell(8, 4)(full(2, 8))[1], HALF),
    "gru cell": (lambda: nn.GRUCell(8, 4)(full(2, 8)), HALF),
    "multi-head attention": (lambda: nn.MultiheadAttention(8, 2)(*[full(3, 2, 8)] * 3)[0], HALF),
    # exponentials, sums, norms and losses: FP32, whatever comes in
    "exp": (lambda: low(4).exp(), FULL),
    "expm1": (lambda: low(4).expm1(), FULL),
    "log": (lambda: low(4).log(), FULL),
    "log1p": (lambda: low(4).log1p(), FULL),
    "pow": (lambda: low(4) ** 2, FULL),
    "pow of tensors": (lambda: low(4) ** low(4), FULL),
    "reciprocal": (lambda: low(4).reciprocal(), FULL),
    "rsqrt": (lambda: low(4).rsqrt(), FULL),
    "acos": (lambda: low(4).clamp(max=1).acos(), FULL),
    "sinh": (lambda: low(4).sinh(), FULL),
    "tan": (lambda: low(4).tan(), FULL),
    "softplus": (lambda: F.softplus(low(4)), FULL),
    "softmax": (lambda: low(4, 8).softmax(1), FULL),
    "log_softmax": (lambda: F.log_softmax(low(4, 8), 1), FULL),
    "logsumexp": (lambda: low(4, 8).logsumexp(1), FULL),
    "sum": (lambda: low(4).sum(), FULL),
    "sum over a dimension": (lambda: low(4, 8).sum(1), FULL),
    "prod": (lambda: low(4).prod(), FULL),
    "cumsum": (lambda: low(4).cumsum(0), FULL),
    "cumprod": (lambda: low(4).cumprod(0), FULL),
    "norm": (lambda: low(4).norm(), FULL),
    "renorm": (lambda: low(4, 8).renorm(2, 0, 1.0), FULL),
    "dist": (lambda: torch.dist(low(4), full(4)), FULL),
    "cdist": (lambda: torch.cdist(low(4, 8), low(4, 8)), FULL),
    "cosine_similarity": (lambda: F.cosine_similarity(low(4, 8), low(4, 8)), FULL),
    "layer_norm": (lambda: F.layer_norm(low(4, 8), (8,)), FULL),
    "rms_norm": (lambda: F.rms_norm(low(4, 8), (8,)), FULL),
    "group_norm": (lambda: F.group_norm(low(4, 8), 2), FULL),
    "mse_loss": (lambda: F.mse_loss(low(4), low(4)), FULL),
    "l1_loss": (lambda: F.l1_loss(low(4), low(4)), FULL),
    "smooth_l1_loss": (lambda: F.smooth_l1_loss(low(4), low(4)), FULL),
    "huber_loss": (lambda: F.huber_loss(low(4), low(4)), FULL),
    "cross_entropy": (lambda: F.cross_entropy(low(4, 8), classes), FULL),
    "nll_loss": (lambda: F.nll_loss(low(4, 8), classes), FULL),
    "kl_div": (lambda: F.kl_div(low(4, 8), low(4, 8), reduction="batchmean"), FULL),
    "bce with logits": (lambda: F.binary_cross_entropy_with_logits(low(4), low(4)), FULL),
    "poisson_nll_loss": (lambda: F.poisson_nll_loss(low(4), low(4)), FULL),
    "hinge_embedding_loss": (lambda: F.hinge_embedding_loss(low(4), low(4).sign()), FULL),
    "interpolate": (lambda: F.interpolate(low(1, 1, 4, 4), scale_factor=2, mode="bilinear"), FULL),
    # as wide as the widest
    "addcmul": (lambda: torch.addcmul(low(4), low(4), full(4)), FULL),
    "addcdiv": (lambda: torch.addcdiv(full(4), low(4), low(4)), FULL),
    "atan2": (lambda: torch.atan2(low(4), full(4)), FULL),
    "dot": (lambda: torch.dot(low(4), full(4)), FULL),
    "dot of halves": (lambda: torch.dot(low(4), low(4)), HALF),
    "cross": (lambda: torch.cross(low(4, 3), full(4, 3), dim=1), FULL),
    "bilinear": (lambda: F.bilinear(low(4, 3), full(4, 3), low(2, 3, 3)), FULL),
    "tensordot": (lambda: torch.tensordot(full(4, 3), low(3, 2), 1), FULL),
    "scatter_add": (lambda: low(4).scatter_add(0, classes, full(4)), FULL),
    "index_put": (lambda: low(4).index_put((classes,), full(4)), FULL),
    "cat": (lambda: torch.cat([low(4), full(4)]), FULL),
    # not listed: as it comes
    "relu": (lambda: low(4).relu(), HALF),
    "gelu": (lambda: F.gelu(low(4)), HALF),
    "gelu of FP32": (lambda: F.gelu(full(4)), FULL),
    "mean": (lambda: low(4).mean(), HALF),
    "batch_norm": (lambda: nn.BatchNorm1d(8)(low(4, 8)), HALF),
}


@pytest.fixture
def mp():
    model = nn.Linear(2, 2)
    trainer = mpdiag.MixedPrecision(model, torch.optim.SGD(model.parameters(), 0.1), constant())
    yield trainer
    trainer.close()


@pytest.mark.parametrize("name", OPERATIONS)
def test_each_operation_has_its_precision_on_a_cpu(mp, name):
    operation, dtype = OPERATIONS[name]
    with mp.autocast():
        assert operation().dtype == dtype


class _Looking(TorchDispatchMode):
    """Looks on, so that every operation is intercepted."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", [n for n, (_, dtype) in OPERATIONS.items() if dtype is FULL])
def test_an_operation_in_fp32_that_is_not_intercepted_has_the_same_bits(name):
    operation, _ = OPERATIONS[name]
    held = policy.install("cpu")
    half = policy.Policy(HALF)
    found = []
    for looking in (False, True):
        emulation = Emulation()
        with emulation, _Looking() if looking else nullcontext():
            with torch.autocast("cpu", HALF), policy.in_force(half):
                found.append(operation())
            assert torch._C._get_dispatch_stack_at(0) is emulation  # which goes on
        assert torch._C._len_torch_dispatch_stack() == 0
    assert torch.equal(*found)
    assert found[0].dtype == found[1].dtype == FULL
    del held


@pytest.mark.gpu
@pytest.mark.parametrize("name", [n for n in OPERATIONS if n != "dot of halves"])
def test_each_operation_has_the_same_precision_on_cuda(name):
    model = nn.Linear(2, 2).cuda()
    operation, dtype = OPERATIONS[name]
    with (
        mpdiag.MixedPrecision(model, torch.optim.SGD(model.parameters(), 0.1), constant()) as mp,
        torch.device("cuda"),
        mp.autocast(),
    ):
        assert operation().dtype == dtype


def test_probabilities_are_banned_with_a_way_out(mp):
    with mp.autocast(), pytest.raises(UsageError, match="with_logits"):
        F.binary_cross_entropy(low(4).clamp(0, 1), low(4).clamp(0, 1))


def test_a_plain_autocast_is_as_it_was(mp):
    """Our kernels follow our policy only inside our ``autocast``."""
    with torch.autocast("cpu", HALF):
        assert low(4, 8).softmax(1).dtype == HALF
        assert low(4).exp().dtype == HALF
        assert F.binary_cross_entropy(low(4).clamp(0, 1), low(4).clamp(0, 1)).dtype == FULL
        assert F.linear(full(4, 8), full(4, 8)).dtype == HALF
        assert F.bilinear(full(4, 3), full(4, 3), full(2, 3, 3)).dtype == FULL
    assert low(4, 8).softmax(1).dtype == HALF


def within(model, plan=None, **options):
    return mpdiag.MixedPrecision(
        model, torch.optim.SGD(model.parameters(), 0.1), plan or constant(), **options
    )


def test_an_operation_is_kept_in_fp32_everywhere():
    with (
        within(
            nn.Linear(2, 2), overrides=mpdiag.PrecisionOverrides(fp32_operations=["linear", "gelu"])
        ) as mp,
        mp.autocast(),
    ):
        assert F.linear(low(4, 8), low(4, 8)).dtype == FULL
        assert F.gelu(low(4)).dtype == FULL
        assert low(4).softmax(0).dtype == FULL
    with within(nn.Linear(2, 2)) as mp, mp.autocast():
        assert F.linear(full(4, 8), full(4, 8)).dtype == HALF
        assert F.gelu(low(4)).dtype == HALF
    with torch.autocast("cpu", HALF):
        assert F.linear(full(4, 8), full(4, 8)).dtype == HALF


def test_an_operation_is_kept_low():
    with (
        within(
            nn.Linear(2, 2), overrides=mpdiag.PrecisionOverrides(low_operations=["softmax"])
        ) as mp,
        mp.autocast(),
    ):
        assert full(4, 8).softmax(1).dtype == HALF


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        self.seen = self.a(x), self.b(x)
        return self.seen[0] + self.seen[1]


def test_a_module_is_kept_in_fp32_by_the_plan():
    plan = PrecisionPlan(fp32_modules=(Fp32Choice("", "b"),))
    model = Two()
    with within(model, plan) as mp:
        with mp.autocast():
            model(full(2, 4))
        assert [t.dtype for t in model.seen] == [HALF, FULL]
        with pytest.raises(ValueError, match="wrong"), mp.autocast():
            model.b.register_forward_hook(raises)
            model(full(2, 4))
        assert not torch.is_autocast_enabled("cpu")
    assert len(model.b._forward_hooks) == 1


def raises(*_):
    message = "wrong"
    raise ValueError(message)


def test_an_operation_is_kept_in_fp32_in_one_module_by_the_plan():
    plan = PrecisionPlan(fp32_operations=(Fp32Choice("linear", "b"), Fp32Choice("Linear", "a")))
    model = Two()
    with within(model, plan) as mp, mp.autocast():
        model(full(2, 4))
        assert [t.dtype for t in model.seen] == [FULL, FULL]
        assert F.linear(full(2, 4), full(4, 4)).dtype == HALF
    plan = PrecisionPlan(fp32_operations=(Fp32Choice("linear", "b"),))
    with within(model, plan) as mp, mp.autocast():
        model(full(2, 4))
        assert [t.dtype for t in model.seen] == [HALF, FULL]


def test_a_number_may_stand_for_a_tensor_where_an_operation_is_named():
    """`x + 1` outside of the module that keeps additions in FP32, whose kernel is ours now."""
    plan = dataclasses.replace(constant(), fp32_operations=(Fp32Choice("add", "1"),))
    model = nn.Sequential(nn.Linear(2, 2), nn.Identity())
    with within(model, plan) as mp, mp.autocast():
        assert (low(4) + 1).dtype == HALF
        assert (1 + low(4)).dtype == HALF
        assert (low(4) + 1.5 == torch.full((4,), 1.5, dtype=HALF) + low(4)).all()


def test_a_module_in_fp32_inside_a_low_precision_model():
    plan = PrecisionPlan(level="O2", fp32_modules=(Fp32Choice("", "b"),))
    model = Two()
    with within(model, plan) as mp:
        assert (model.a.weight.dtype, model.b.weight.dtype) == (HALF, FULL)
        with mp.autocast():
            out = model(full(2, 4))
        assert [t.dtype for t in model.seen] == [HALF, HALF]
        assert out.dtype == FULL


def test_names_that_nothing_bears_are_refused():
    with pytest.raises(UsageError, match="no operation 'sofmax': did you mean softmax"):
        within(nn.Linear(2, 2), overrides=mpdiag.PrecisionOverrides(fp32_operations=["sofmax"]))
    with pytest.raises(UsageError, match="module 'c'"):
        within(Two(), PrecisionPlan(fp32_modules=(Fp32Choice("", "c"),)))
    with pytest.raises(UsageError, match="choose one"):
        within(
            nn.Linear(2, 2),
            overrides=mpdiag.PrecisionOverrides(fp32_operations=["gelu"], low_operations=["gelu"]),
        )


@pytest.mark.parametrize(
    "name", ["softmax", "aten::softmax", "aten.softmax.int", "torch.softmax", "F.softmax"]
)
def test_an_operation_has_many_names(name):
    assert policy.operation_named(name) == "softmax"


def test_weights_are_cast_anew_when_an_optimizer_steps_inside_autocast():
    """torch.amp goes on with the stale copies in its cache."""
    model = nn.Linear(4, 4, bias=False)
    with within(model) as mp, mp.autocast():
        before = model(full(1, 4))
        mp.step(before.float().sum())
        assert not torch.equal(model(full(1, 4)), before)


def test_two_threads_follow_their_own_policies():
    """Each enters autocast before the other has left it."""
    entered, seen = threading.Barrier(2, timeout=30), {}

    def train(name, operations):
        model = nn.Linear(4, 4)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        with mpdiag.MixedPrecision(
            model,
            optimizer,
            constant(),
            level="O1",
            overrides=mpdiag.PrecisionOverrides(dtype="bf16", fp32_operations=operations),
        ) as mp:
            entered.wait()
            with mp.autocast():
                entered.wait()
                seen[name] = model(torch.randn(2, 4)).dtype
                entered.wait()

    threads = [
        threading.Thread(target=train, args=words) for words in [("low", ()), ("wide", ("linear",))]
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert seen == {"low": torch.bfloat16, "wide": torch.float32}


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
@pytest.mark.filterwarnings("ignore:This process.*is multi-threaded:DeprecationWarning")
def test_a_forked_child_follows_the_policy_too():
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with (
        mpdiag.MixedPrecision(
            model,
            optimizer,
            constant(),
            level="O1",
            overrides=mpdiag.PrecisionOverrides(dtype="bf16", fp32_operations=["linear"]),
        ) as mp,
        mp.autocast(),
    ):
        assert model(torch.ones(2, 4)).dtype == torch.float32
        child = os.fork()
        if child == 0:
            code = 1
            try:
                code = 0 if model(torch.ones(2, 4)).dtype == torch.float32 else 2
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


class _Casts(TorchDispatchMode):
    """Counts the casts of one tensor."""

    def __init__(self, tensor):
        super().__init__()
        self.tensor, self.count = tensor, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._to_copy.default and args[0] is self.tensor:
            self.count += 1
        return func(*args, **(kwargs or {}))


def _casts_of_a_weight():
    layer = torch.nn.Linear(4, 4)
    with _Casts(layer.weight) as casts, torch.autocast("cpu", torch.bfloat16):
        for _ in range(3):
            layer(torch.ones(2, 4))
    return casts.count


@pytest.mark.parametrize("ending", ["closed", "dropped"])
def test_after_a_training_torchs_own_kernels_are_in_force_again(ending):
    """They cast a weight once in a context; ours, which replace them for a while, at each use."""
    assert _casts_of_a_weight() == 1
    model = torch.nn.Sequential(torch.nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    plan = dataclasses.replace(constant(1.0), fp32_operations=(Fp32Choice("linear", "0"),))
    mp = mpdiag.MixedPrecision(model, optimizer, plan, level="O1")
    with mp.autocast():
        assert model(torch.ones(2, 4)).dtype == torch.float32
    if ending == "closed":
        mp.close()
    else:
        del mp, model, optimizer
        gc.collect()
    assert _casts_of_a_weight() == 1
