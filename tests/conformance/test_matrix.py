"""Levels by optimizers by what loops do: bit for bit the loop by hand, and nothing lost silently."""

from __future__ import annotations

import os

import pytest
import torch
from conformance import matrix
from conformance.matrix import LEVELS, OPTIMIZERS, SCENARIOS

FULL = bool(os.environ.get("MPDIAG_FULL_MATRIX"))
FEW = ("SGD", "Adam", "Adagrad", "LBFGS", "SparseAdam")
"""What emulated FP16, which is slow, is resumed with unless the whole product is asked for."""

NO_CLIP = {"SparseAdam"}
"""torch's own ``clip_grad_norm_`` takes no sparse gradients."""

AWAITED: dict[tuple[str, str], tuple[set[str], str]] = {}
"""By level and scenario: the optimizers for which it fails until that is repaired, and what is wrong."""


def judge(level, scenario, wrong):
    """Nothing is wrong but what is known, and all of that still is."""
    known, reason = AWAITED.get((level, scenario), (set(), ""))
    names = {sentence.split(":")[0] for sentence in wrong}
    assert names <= known, "; ".join(wrong)
    assert known <= names, f"repaired: {sorted(known - names)} ({reason}): take the mark away"


@pytest.mark.parametrize("scenario", SCENARIOS)
@pytest.mark.parametrize("level", LEVELS)
def test_as_a_loop_by_hand(level, scenario):
    names = [n for n in OPTIMIZERS if scenario != "clip" or n not in NO_CLIP]
    wrong = [found for name in names if (found := matrix.differs(level, name, scenario))]
    judge(level, scenario, wrong)


@pytest.mark.parametrize(
    ("level", "target"),
    [*((level, "bf16") for level in LEVELS), ("O1", "fp16"), ("O2", "fp16"), ("O3", "fp16")],
)
def test_resumed_bit_for_bit(level, target):
    names = OPTIMIZERS if FULL or target == "bf16" else FEW
    wrong = [found for name in names if (found := matrix.resumes(level, name, target))]
    judge(level, "resume", wrong)


def test_every_optimizer_of_torch_is_there():
    kinds = {
        name
        for name, kind in vars(torch.optim).items()
        if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)
    }
    assert kinds - {"Optimizer"} <= OPTIMIZERS.keys()
