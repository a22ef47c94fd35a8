"""Whether a plan is of the model that is to be trained by it."""

import dataclasses

import pytest
from support import constant, network
from torch import nn
from torch.optim import SGD

from mpdiag.errors import UsageError
from mpdiag.tracing.fingerprint import fingerprint
from mpdiag.training.setup import fingerprint_of
from mpdiag.training.trainer import MixedPrecision


def of(**models):
    """A plan of some models by their names."""
    shapes = {}
    for name, model in models.items():
        shapes |= fingerprint_of(model, "" if len(models) == 1 else name).parameters
    return dataclasses.replace(constant(), model=fingerprint(shapes.items()))


def train(plan, *models):
    parameters = [p for m in models for p in m.parameters()]
    MixedPrecision(list(models), SGD(parameters, 0.1), plan).close()


def test_the_plan_of_another_model_is_refused_and_the_model_stays_as_it_was():
    model = network()
    plan = of(
        model=nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
    )
    with pytest.raises(UsageError, match="the plan is for another model: no layer"):
        train(plan, model)
    train(of(model=network()), model)  # nothing holds it
    train(dataclasses.replace(plan, model=None), model)  # whoever wants to, can


def test_layers_that_the_plan_does_not_know_are_named():
    plan, model = of(model=network()), network()
    model.append(nn.Linear(10, 2))
    with pytest.warns(RuntimeWarning, match=r"knows nothing about them: 5$"):
        train(plan, model)


def test_a_small_model_beside_a_large_plan_may_be_a_part_of_it_under_another_name():
    plan = of(model=nn.Sequential(*(nn.Linear(4, 4) for _ in range(8))))
    with pytest.warns(RuntimeWarning, match="knows nothing about them"):
        train(plan, nn.ModuleDict({"own": nn.Linear(4, 4)}))
    with pytest.raises(UsageError, match="the plan is for another model: no layer"):
        train(plan, nn.Conv2d(1, 1, 1))
    some = dataclasses.replace(plan.model, complete=False)  # of a recording of some layers
    train(dataclasses.replace(plan, model=some), nn.Conv2d(1, 1, 1))
