"""The operation policy: the same lists on every device, and what overrides do."""

import dataclasses
import gc
import os
import weakref
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
import torch.nn.functional as F
from support import Casts, constant, wrapped
from torch import nn

import mpdiag
from mpdiag.emulation import policy
from mpdiag.errors import UsageError
from mpdiag.plan import Fp32Choice, PrecisionPlan

HALF, FULL = torch.float16, torch.float32


def low(*shape: int) -> torch.Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(0)).half() + 0.1


def full(*shape: int) -> torch.Tensor:
    return low(*shape).float()


classes = torch.zeros(4, dtype=torch.long)

TABLE = Path(__file__).with_name("policy_operations.tsv").read_text().splitlines()
OPERATIONS = {
    name: (eval(f"lambda: {call}"), {"HALF": HALF, "FULL": FULL}[dtype])
    for name, dtype, call in (row.split("\t") for row in TABLE[1:])
}
"""Products are low, and sums, exponentials, norms and losses FP32, whatever comes in; then come those as
wide as their widest operand, and those on no list."""


@pytest.fixture
def mp():
    trainer = within(nn.Linear(2, 2))
    yield trainer
    trainer.close()


@pytest.mark.parametrize("name", OPERATIONS)
def test_each_operation_has_its_precision_on_a_cpu(mp, name):
    operation, dtype = OPERATIONS[name]
    with mp.autocast():
        assert operation().dtype == dtype


@pytest.mark.gpu
@pytest.mark.parametrize("name", [n for n in OPERATIONS if n != "dot of halves"])
def test_each_operation_has_the_same_precision_on_cuda(name):
    model = nn.Linear(2, 2).cuda()
    operation, dtype = OPERATIONS[name]
    with within(model) as mp, torch.device("cuda"), mp.autocast():
        assert operation().dtype == dtype


def test_a_plain_autocast_is_as_it_was(mp):
    """Our kernels follow our policy only inside our ``autocast``."""
    with torch.autocast("cpu", HALF):
        assert low(4, 8).softmax(1).dtype == HALF
        assert low(4).exp().dtype == HALF
        assert F.binary_cross_entropy(low(4).clamp(0, 1), low(4).clamp(0, 1)).dtype == FULL
        assert F.linear(full(4, 8), full(4, 8)).dtype == HALF
        assert F.bilinear(full(4, 3), full(4, 3), full(2, 3, 3)).dtype == FULL
    assert low(4, 8).softmax(1).dtype == HALF


def within(model, plan=None, **overrides):
    chosen = mpdiag.PrecisionOverrides(**overrides)
    return wrapped(model, plan or constant(), overrides=chosen)


def test_an_operation_is_kept_in_fp32_or_low_everywhere():
    with within(nn.Linear(2, 2), fp32_operations=["linear", "gelu"]) as mp, mp.autocast():
        assert F.linear(low(4, 8), low(4, 8)).dtype == FULL
        assert F.gelu(low(4)).dtype == FULL
        assert low(4).softmax(0).dtype == FULL
    with within(nn.Linear(2, 2), low_operations=["softmax"]) as mp, mp.autocast():
        assert full(4, 8).softmax(1).dtype == HALF
    with within(nn.Linear(2, 2)) as mp, mp.autocast():
        assert F.linear(full(4, 8), full(4, 8)).dtype == HALF
        assert F.gelu(low(4)).dtype == HALF
    with torch.autocast("cpu", HALF):
        assert F.linear(full(4, 8), full(4, 8)).dtype == HALF


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        self.seen = self.a(x), self.b(x)
        return self.seen[0] + self.seen[1]


LINEAR_B = Fp32Choice("linear", "b")


@pytest.mark.parametrize(
    ("plan", "seen"),
    [
        (PrecisionPlan(fp32_modules=(Fp32Choice("", "b"),)), [HALF, FULL]),
        (PrecisionPlan(fp32_operations=(LINEAR_B,)), [HALF, FULL]),
        (PrecisionPlan(fp32_operations=(LINEAR_B, Fp32Choice("Linear", "a"))), [FULL, FULL]),
    ],
)
def test_what_the_plan_keeps_in_fp32_in_a_module_is_kept_there(plan, seen):
    model = Two()
    with within(model, plan) as mp:
        with mp.autocast():
            model(full(2, 4))
            assert [t.dtype for t in model.seen] == seen
            assert F.linear(full(2, 4), full(4, 4)).dtype == HALF
        with pytest.raises(ValueError, match="wrong"), mp.autocast():
            model.b.register_forward_hook(Mock(side_effect=ValueError("wrong")))
            model(full(2, 4))
        assert not torch.is_autocast_enabled("cpu")
    assert len(model.b._forward_hooks) == 1


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
        within(nn.Linear(2, 2), fp32_operations=["sofmax"])
    with pytest.raises(UsageError, match="module 'c'"):
        within(Two(), PrecisionPlan(fp32_modules=(Fp32Choice("", "c"),)))
    with pytest.raises(UsageError, match="choose one"):
        within(nn.Linear(2, 2), fp32_operations=["gelu"], low_operations=["gelu"])


@pytest.mark.parametrize(
    "name", ["softmax", "aten::softmax", "aten.softmax.int", "torch.softmax", "F.softmax"]
)
def test_an_operation_has_many_names(name):
    assert policy.operation_named(name) == "softmax"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
@pytest.mark.filterwarnings("ignore:This process.*is multi-threaded:DeprecationWarning")
def test_a_forked_child_follows_the_policy_too():
    model = nn.Linear(4, 4)
    with within(model, dtype="bf16", fp32_operations=["linear"]) as mp, mp.autocast():
        assert model(torch.ones(2, 4)).dtype == torch.float32
        child = os.fork()
        if child == 0:
            code = 1
            try:
                code = 0 if model(torch.ones(2, 4)).dtype == torch.float32 else 2
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def _casts_of_a_weight():
    layer = torch.nn.Linear(4, 4)
    with Casts(layer.weight) as casts, torch.autocast("cpu", torch.bfloat16):
        for _ in range(3):
            layer(torch.ones(2, 4))
    return casts.count


def test_a_policy_is_held_while_it_is_in_force_and_no_longer():
    """Up to version 2.11, torch does not count the reference that it keeps for a thread."""
    rules = policy.Policy(HALF)
    held = weakref.ref(rules)
    with policy.in_force(rules):
        del rules
        others = [(held, number) for number in range(100)]  # what was freed would be one of them
        assert policy._policy_in_force() is held() not in others
    assert held() is None


@pytest.mark.parametrize("ending", ["closed", "dropped"])
def test_after_a_training_torchs_own_kernels_are_in_force_again(ending):
    """They cast a weight once in a context; ours, which replace them for a while, at each use."""
    assert _casts_of_a_weight() == 1
    model = torch.nn.Sequential(torch.nn.Linear(4, 4))
    plan = dataclasses.replace(constant(1.0), fp32_operations=(Fp32Choice("linear", "0"),))
    mp = within(model, plan)
    with mp.autocast():
        assert model(torch.ones(2, 4)).dtype == torch.float32
    if ending == "closed":
        mp.close()
    else:
        del mp, model
        gc.collect()
    assert _casts_of_a_weight() == 1
