"""Opt levels: their properties, their overrides, and what they refuse."""

from __future__ import annotations

import pytest
import torch
from support import PRECISIONS, backoff, batch, constant, network, perceptron, take_step, trainer
from torch import nn

import mpdiag
from mpdiag.errors import UsageError
from mpdiag.numerics.loss_scalers import Backoff, ConstantScale, LogNormal
from mpdiag.plan import PrecisionPlan
from mpdiag.training.levels import resolve

HALF, BRAIN, FULL = torch.float16, torch.bfloat16, torch.float32


def dtypes(model):
    return {name: p.dtype for name, p in model.named_parameters()}


def wrap(model, plan=None, **options):
    return mpdiag.MixedPrecision(
        model, torch.optim.SGD(model.parameters(), 0.1), plan or backoff(), **options
    )


def train(mp, model, steps=3):
    x, y = batch()
    results = []
    for _ in range(steps):
        with mp.autocast():
            out = model(x)
            loss = nn.functional.cross_entropy(out, y)
        results.append(mp.step(loss))
    return results, out


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_o1_keeps_the_model_and_casts_operations(dtype):
    model = network()
    with wrap(model, level="O1", overrides=mpdiag.PrecisionOverrides(dtype=dtype)) as mp:
        _, out = train(mp, model)
        assert set(dtypes(model).values()) == {FULL}
        assert out.dtype == {"fp16": HALF, "bf16": BRAIN}[dtype]


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_o2_holds_low_weights_fp32_batch_norm_and_masters(dtype):
    model = network()
    low = {"fp16": HALF, "bf16": BRAIN}[dtype]
    with wrap(model, level="O2", overrides=mpdiag.PrecisionOverrides(dtype=dtype)) as mp:
        _, out = train(mp, model)
        assert dtypes(model) == {
            "0.weight": low, "0.bias": low, "1.weight": FULL, "1.bias": FULL,
            "4.weight": low, "4.bias": low,
        }  # fmt: skip
        assert model[1].running_mean.dtype == FULL
        assert out.dtype == FULL  # inputs and outputs are cast for the caller
        masters = mp.fp32_state_dict()
        assert all(v.dtype == FULL for n, v in masters.items() if "num" not in n)
        for name, p in model.named_parameters():
            assert torch.equal(masters[name].to(p.dtype), p)
    assert set(dtypes(model).values()) == {FULL}
    assert torch.equal(model[0].weight, masters["0.weight"])


def test_o2_masters_begin_with_full_precision():
    model = network()
    before = model[4].weight.detach().clone()
    with wrap(model, level="O2") as mp:
        assert torch.equal(mp.fp32_state_dict()["4.weight"], before)
        assert not torch.equal(model[4].weight.float(), before)


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_o3_is_low_precision_throughout_at_scale_1(dtype):
    model = network()
    with wrap(model, level="O3", overrides=mpdiag.PrecisionOverrides(dtype=dtype)) as mp:
        results, _ = train(mp, model)
        assert len(set(dtypes(model).values())) == 1
        assert mp.loss_scaler == ConstantScale(1.0)
        assert not any(r.skipped for r in results)


def test_every_property_can_be_overridden_where_it_makes_sense():
    plan = PrecisionPlan()
    assert resolve(plan, "O1", mpdiag.PrecisionOverrides(dtype="bf16")).dtype == BRAIN
    assert resolve(plan, "O2", mpdiag.PrecisionOverrides(operation_casts=True)).operation_casts
    assert not resolve(
        plan, "O2", mpdiag.PrecisionOverrides(keep_batch_norm_fp32=False)
    ).keep_batch_norm_fp32
    assert resolve(
        plan, "O3", mpdiag.PrecisionOverrides(keep_batch_norm_fp32=True)
    ).keep_batch_norm_fp32
    assert resolve(plan, "O3", mpdiag.PrecisionOverrides(master_weights=True)).master_weights
    assert not resolve(plan, "O2", mpdiag.PrecisionOverrides(master_weights=False)).master_weights


@pytest.mark.parametrize(
    ("level", "options", "words"),
    [
        ("O4", {}, "no level 'O4'"),
        ("O0", {"dtype": "fp16"}, "plain FP32"),
        ("O0", {"operation_casts": True}, "level O1"),
        ("O1", {"dtype": "fp32"}, "choose O0"),
        ("O1", {"dtype": "fp8"}, "dtype must be"),
        ("O1", {"operation_casts": False}, "FP32 alone"),
        ("O1", {"keep_batch_norm_fp32": True}, "FP32 already"),
        ("O1", {"master_weights": True}, "FP32 already"),
        ("O0", {"master_weights": True}, "FP32 already"),
    ],
)
def test_overrides_that_make_no_sense_are_refused_with_the_reason(level, options, words):
    with pytest.raises(UsageError, match=words):
        resolve(PrecisionPlan(), level, mpdiag.PrecisionOverrides(**options))


def test_a_plan_for_fp8_is_refused():
    with pytest.raises(UsageError, match="fp8_e4m3"):
        resolve(PrecisionPlan(target="fp8_e4m3"))


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        (128, ConstantScale(128.0)),
        (2.0**-3, ConstantScale(0.125)),
        ("none", ConstantScale(1.0)),
        ("lognormal", LogNormal()),
        ({"method": "backoff", "init_scale": 8.0}, Backoff(8.0)),
        (Backoff(32.0), Backoff(32.0)),
    ],
)
def test_the_loss_scale_can_be_overridden(override, expected):
    assert (
        wrap(network(), overrides=mpdiag.PrecisionOverrides(loss_scale=override)).loss_scaler
        == expected
    )


def test_dynamic_takes_the_plans_own_numbers():
    assert (
        wrap(
            network(),
            backoff(64.0),
            level="O3",
            overrides=mpdiag.PrecisionOverrides(loss_scale="dynamic"),
        ).loss_scaler.scale
        == 64.0
    )


@pytest.mark.parametrize("override", [0, -1.0, float("nan"), "fast", True, [1]])
def test_a_nonsense_loss_scale_is_refused(override):
    with pytest.raises(UsageError):
        wrap(network(), overrides=mpdiag.PrecisionOverrides(loss_scale=override))


def test_models_that_are_not_fp32_are_refused():
    with pytest.raises(UsageError, match=r"'0.weight' is float16 already"):
        wrap(network().half())


def test_adams_eps_is_caught_in_pure_fp16():
    """pytorch#147437: 1e-8 is zero in FP16; 0 / 0 at the first step."""
    model = network()
    adam = torch.optim.Adam(model.parameters())
    with pytest.raises(UsageError, match="eps of 1e-08 is zero"):
        mpdiag.MixedPrecision(model, adam, backoff(), level="O3")
    assert set(dtypes(model).values()) == {FULL}  # nothing half done
    adam = torch.optim.Adam(model.parameters(), eps=1e-4)
    mp = mpdiag.MixedPrecision(model, adam, backoff(), level="O3")
    results, _ = train(mp, model, 5)
    assert not any(r.skipped for r in results)
    assert all(torch.isfinite(p).all() for p in model.parameters())


def test_weights_that_pure_fp16_cannot_hold_are_not_let_in():
    model = nn.Linear(1, 1, bias=False)
    mp = mpdiag.MixedPrecision(
        model, torch.optim.SGD(model.parameters(), 1e6), backoff(), level="O3"
    )
    before = model.weight.detach().clone()
    with mp.autocast():
        loss = model(torch.ones(1, 1)).sum()
    result = mp.step(loss)
    assert result.skipped
    assert (result.first.where, result.first.name) == ("weights", "weight")
    assert torch.equal(model.weight, before)


def test_a_master_that_the_model_cannot_hold_stops_training():
    model = nn.Linear(1, 1, bias=False)
    mp = mpdiag.MixedPrecision(
        model, torch.optim.SGD(model.parameters(), 1e6), constant(1.0), level="O2"
    )
    with mp.autocast():
        loss = model(torch.ones(1, 1)).sum()
    with pytest.raises(mpdiag.errors.TrainingDiverged, match="'weight' grew beyond FP16"):
        mp.step(loss)
    assert torch.isfinite(model.weight).all()


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        ({"model": 3}, "model must be"),
        ({"model": []}, "model must be"),
        ({"optimizer": "sgd"}, "optimizer must be"),
        ({"optimizer": [object()]}, "has no param_groups"),
        ({"backend": "fast"}, "backend must be"),
        ({"overrides": {"dtype": "bf16"}}, "overrides must be a PrecisionOverrides"),
        ({"options": {"max_skips": 3}}, "options must be a TrainerOptions"),
    ],
)
def test_arguments_of_the_wrong_kind_are_refused(arguments, word):
    model = network()
    given = {
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), 0.1),
        "plan": backoff(),
    }
    with pytest.raises(UsageError, match=word):
        mpdiag.MixedPrecision(**{**given, **arguments})


def test_a_plan_is_taken_from_its_file(tmp_path):
    backoff(64.0).save(tmp_path / "plan.json")
    assert wrap(network(), tmp_path / "plan.json").loss_scale == 64.0


def test_the_backend_follows_the_format_and_never_changes_it():
    assert wrap(network()).backend == "emulated"
    assert wrap(network(), overrides=mpdiag.PrecisionOverrides(dtype="bf16")).backend == "native"
    assert (
        wrap(
            network(), overrides=mpdiag.PrecisionOverrides(dtype="bf16"), backend="emulated"
        ).backend
        == "emulated"
    )
    with pytest.raises(UsageError, match="emulated"):
        wrap(network(), backend="native")


KINDS = {
    "adam": lambda ps: torch.optim.Adam(ps, 1e-2, eps=1e-4),
    "momentum": lambda ps: torch.optim.SGD(ps, 0.1, momentum=0.9),
    "fused adagrad": lambda ps: torch.optim.Adagrad(ps, 0.1, eps=1e-4, fused=True),
    "foreach adam": lambda ps: torch.optim.Adam(ps, 1e-2, eps=1e-4, foreach=True),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("level", "dtype"), PRECISIONS)
def test_state_that_an_optimizer_has_from_before_fits_the_weights(level, dtype, kind):
    model = perceptron()
    optimizer = KINDS[kind](model.parameters())
    model(torch.ones(2, 4)).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    mp = trainer(model, optimizer, level, dtype)
    take_step(model, mp)
    for held, state in optimizer.state.items():
        assert {v.dtype for k, v in state.items() if k != "step" and v is not None} == {held.dtype}
    mp.close()
    for held, state in optimizer.state.items():
        assert held.dtype == torch.float32
        assert {v.dtype for v in state.values() if v is not None} == {torch.float32}
    model(torch.ones(2, 4)).mean().backward()
    optimizer.step()


@pytest.mark.parametrize("limit", [0, -1, 2.0, True])
def test_a_limit_of_skips_is_a_count(limit):
    with pytest.raises(UsageError, match="max_skips"):
        mpdiag.TrainerOptions(max_skips=limit)
