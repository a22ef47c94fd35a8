"""What is easily done wrong in a loop: each gets one sentence that says what to do."""

from __future__ import annotations

import gc
import logging

import pytest
import torch
from support import backoff, batch, constant, network, wrapped
from torch import nn

import mpdiag
from mpdiag.analysis.analyzer import analyze
from mpdiag.errors import MpdiagError, PlanNotFound
from mpdiag.numerics.formats import TARGETS, TRAINABLE
from mpdiag.runs import training_log


def sgd(model):
    return torch.optim.SGD(model.parameters(), 0.1)


def plain_loss(model):
    x, y = batch()
    return nn.functional.cross_entropy(model(x), y)


def never_started(folder):
    model = network()
    mpdiag.record(model, sgd(model), folder)
    gc.collect()


def recorded(folder, **options):
    model = network()
    with mpdiag.record(model, sgd(model), folder, **options):
        pass
    gc.collect()


def metric_of_no_run(folder):
    training_log._warn_of_no_run.cache_clear()
    kept, training_log._sinks[:] = training_log._sinks[:], []
    for name in ("accuracy", "loss", "accuracy"):
        mpdiag.log_metric(name, 0.9)
    training_log._sinks[:] = kept


def never_cast(folder, plan=None):
    model = network()
    mp = wrapped(model, plan or constant(8.0))
    mp.step(plain_loss(model))
    mp.step(plain_loss(model))


def cast(folder):
    model = network()
    mp = wrapped(model, constant(8.0))
    with mp.autocast():
        loss = plain_loss(model)
    mp.step(loss)
    mp.step(plain_loss(model))


def float_loss(act):
    def misuse(folder):
        model = network()
        mp = wrapped(model, backoff())
        act(mp, plain_loss(model).item())

    return misuse


class Holder:
    """What ``analyze`` returns holds a plan."""

    plan = constant()


def recorded_twice(folder):
    model = network()
    with mpdiag.record(model, sgd(model), folder), mpdiag.record(model, sgd(model), f"{folder}-2"):
        pass


MISUSES = {
    "no optimizer": (
        lambda f: mpdiag.record(network(), str(f)),
        "name it as the third argument, after the optimizer",
    ),
    "one model in two recordings": (recorded_twice, "the model is being recorded into"),
    "a plan that is not there": (
        lambda f: mpdiag.PrecisionPlan.load(f),
        "write one with mpdiag analyze RUN -o plan.json",
    ),
    "a recorder that was never started": (never_started, "write `with mpdiag.record(...):`"),
    "a recorder that was started": (recorded, None),
    "include": (
        lambda f: recorded(f, include="zzz"),
        "include='zzz' leaves no module or parameter",
    ),
    "names to include": (lambda f: recorded(f, include="zzz"), "names like 0, 1, 2"),
    "exclude": (lambda f: recorded(f, exclude=""), "exclude='' leaves no module or parameter"),
    "an include that matches": (lambda f: recorded(f, include="4"), None),
    "a metric of no run": (metric_of_no_run, "start the script with `mpdiag record --`"),
    "no autocast": (never_cast, "inside `with mp.autocast():`"),
    "no autocast, no casts": (lambda f: never_cast(f, mpdiag.PrecisionPlan(level="O0")), None),
    "autocast": (cast, None),
    "step(float)": (float_loss(lambda mp, x: mp.step(x)), "pass the tensor, without .item()"),
    "backward(float)": (float_loss(lambda mp, x: mp.backward(x)), "without .item()"),
    "scale(float)": (float_loss(lambda mp, x: mp.scale(x)), "without .item()"),
    "closure": (
        float_loss(
            lambda mp, x: mp.step(optimizer=mp.context.wrapped.optimizers[0], closure=lambda: x)
        ),
        "without .item()",
    ),
    "an analysis": (lambda f: wrapped(network(), Holder()), "not Holder: pass its .plan"),
    "a number": (
        lambda f: wrapped(network(), 3),
        "a plan is a PrecisionPlan or the path of one, not",
    ),
}


@pytest.mark.parametrize("name", MISUSES)
def test_one_sentence_says_what_to_do(tmp_path, caplog, name):
    act, words = MISUSES[name]
    gc.collect()  # what other tests have left
    caplog.clear()
    caplog.set_level(logging.WARNING, "mpdiag")
    said = []
    try:
        act(tmp_path / "run")
    except MpdiagError as error:
        said.append(str(error))
    said += [record.getMessage() for record in caplog.records]
    if words is None:
        assert said == []
    else:
        (sentence,) = said
        assert words in sentence


def test_a_missing_plan_is_not_called_damaged(tmp_path):
    for path in (tmp_path, tmp_path / "plan.json"):
        with pytest.raises(PlanNotFound):
            mpdiag.PrecisionPlan.load(path)


@pytest.mark.parametrize("target", [fmt for fmt in TARGETS if fmt not in TRAINABLE])
def test_no_format_is_promised_that_nothing_here_trains_in(root, target):
    analysis = analyze(root / "sample_runs" / "digits", target=target.name)
    text = analysis.verdict.text
    assert "trains in" not in text
    assert f"fit {target.label} with a scale per tensor. To train, use --target fp8-tensor" in text
    told = f"an actual {target.label} training (mpdiag cannot run one)"
    assert told in analysis.verdict.not_examined
