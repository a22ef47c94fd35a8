"""Opt levels: their properties, their overrides, and what they refuse."""

import pytest
import torch
from support import (
    PRECISIONS,
    backoff,
    batch,
    network,
    perceptron,
    take_step,
    trainer,
    wrapped,
)
from torch import nn

import mpdiag
from mpdiag import PrecisionOverrides as Overrides
from mpdiag.errors import UsageError
from mpdiag.numerics.loss_scalers import Backoff, ConstantScale, LogNormal
from mpdiag.plan import PrecisionPlan
from mpdiag.training.levels import resolve

HALF, BRAIN, FULL = torch.float16, torch.bfloat16, torch.float32


def dtypes(model):
    return {name: p.dtype for name, p in model.named_parameters()}


def train(mp, model, steps=3):
    x, y = batch()
    results = []
    for _ in range(steps):
        with mp.autocast():
            out = model(x)
            loss = nn.functional.cross_entropy(out, y)
        results.append(mp.step(loss))
    return results, out


@pytest.mark.parametrize("level", ["O1", "O3"])
@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_o1_keeps_the_model_and_o3_is_low_throughout_at_scale_1(dtype, level):
    model = network()
    with wrapped(model, level=level, overrides=Overrides(dtype=dtype)) as mp:
        results, out = train(mp, model)
        low = {"fp16": HALF, "bf16": BRAIN}[dtype]
        assert set(dtypes(model).values()) == {FULL if level == "O1" else low}
        assert out.dtype == (low if level == "O1" else FULL)
        assert level == "O1" or mp.loss_scaler == ConstantScale(1.0)
        assert not any(r.skipped for r in results)


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_o2_holds_low_weights_fp32_batch_norm_and_masters(dtype):
    model = network()
    low = {"fp16": HALF, "bf16": BRAIN}[dtype]
    with wrapped(model, level="O2", overrides=Overrides(dtype=dtype)) as mp:
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


def test_every_property_can_be_overridden_where_it_makes_sense():
    assert resolve(PrecisionPlan(), "O1", Overrides(dtype="bf16")).dtype == BRAIN
    for level, name, value in (
        ("O2", "operation_casts", True),
        ("O2", "keep_batch_norm_fp32", False),
        ("O3", "keep_batch_norm_fp32", True),
        ("O3", "master_weights", True),
        ("O2", "master_weights", False),
    ):
        assert getattr(resolve(PrecisionPlan(), level, Overrides(**{name: value})), name) is value


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
        *(
            ("O1", {"loss_scale": nonsense}, "scale")
            for nonsense in (0, -1.0, float("nan"), "fast", True, [1])
        ),
        ("O1", {"loss_scale": {"method": "backoff", "groth_interval": 3}}, "groth_interval"),
    ],
)
def test_overrides_that_make_no_sense_are_refused_with_the_reason(level, options, words):
    with pytest.raises(UsageError, match=words):
        wrapped(network(), PrecisionPlan(), level=level, overrides=Overrides(**options))


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        (128, ConstantScale(128.0)),
        (2.0**-3, ConstantScale(0.125)),
        ("none", ConstantScale(1.0)),
        ("lognormal", LogNormal()),
        ({"method": "backoff", "init_scale": 8.0}, Backoff(8.0)),
        (Backoff(32.0), Backoff(32.0)),
        ("dynamic", Backoff(64.0)),  # by the plan's own numbers
        (None, Backoff(64.0)),
    ],
)
def test_the_loss_scale_can_be_overridden(override, expected, tmp_path):
    backoff(64.0).save(tmp_path / "plan.json")
    overrides = Overrides(loss_scale=override)
    mp = wrapped(network(), tmp_path / "plan.json", level="O2", overrides=overrides)
    assert mp.loss_scaler == expected


def test_adams_eps_is_caught_in_pure_fp16():
    """pytorch#147437: 1e-8 is zero in FP16; 0 / 0 at the first step."""
    model = network()
    with pytest.raises(UsageError, match="eps of 1e-08 is zero"):
        wrapped(model, optimizer=torch.optim.Adam(model.parameters()), level="O3")
    assert set(dtypes(model).values()) == {FULL}  # nothing half done
    mp = wrapped(model, optimizer=torch.optim.Adam(model.parameters(), eps=1e-4), level="O3")
    results, _ = train(mp, model, 5)
    assert not any(r.skipped for r in results)
    assert all(torch.isfinite(p).all() for p in model.parameters())


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
        ({"model": network().half()}, "'0.weight' is float16 already"),
        ({"plan": PrecisionPlan(target="fp8_e4m3")}, "fp8_e4m3"),
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


def test_the_backend_follows_the_format_and_never_changes_it():
    bf16 = Overrides(dtype="bf16")
    assert wrapped(network()).backend == "emulated"
    assert wrapped(network(), overrides=bf16).backend == "native"
    assert wrapped(network(), overrides=bf16, backend="emulated").backend == "emulated"
    with pytest.raises(UsageError, match="emulated"):
        wrapped(network(), backend="native")


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


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_a_default_device_is_the_trainings_alone(level):
    """What a trainer makes for itself lies on the devices of its weights, or on the host."""
    weights = []
    for default in ("cpu", "meta"):
        model = perceptron()
        optimizer = torch.optim.AdamW(model.parameters(), 0.1, eps=1e-4)
        x = torch.randn(5, 4, generator=torch.Generator().manual_seed(0))
        with torch.device(default):
            mp = trainer(model, optimizer, level, "bf16")
            for _ in range(2):
                with mp.autocast():
                    loss = model(x.to(next(model.parameters()).dtype)).square().mean()
                assert not mp.step(loss, clip_norm=1.0).skipped
        weights.append(model[0].weight.detach().clone())
    assert torch.equal(*weights)
