"""What has changed since a recording, and which answers that touches."""

from dataclasses import replace

import pytest
import torch

import mpdiag
from mpdiag.plan import PrecisionPlan
from mpdiag.runs.run import open_run
from mpdiag.tracing.conditions import Change, OptimizerSettings, TrainingConditions, changes

SGD = OptimizerSettings("SGD", 0.1, {"weight_decay": 0.0, "nesterov": False})
ADAM = OptimizerSettings("Adam", 0.001, {"weight_decay": 0.01, "eps": 1e-8})
RECORDED = TrainingConditions((SGD,), (32, 8), "2.13.0")
GAN = replace(RECORDED, optimizers=(ADAM, replace(ADAM, learning_rate=0.004)))
BOTH = "the loss scale and the need for master weights"
MASTERS = "the need for master weights"


@pytest.mark.parametrize(
    ("recorded", "now", "expected"),
    [
        (RECORDED, RECORDED, []),
        (RECORDED, replace(RECORDED, optimizers=(replace(SGD, learning_rate=0.2),)),
         [("the learning rate", "0.1", "0.2", BOTH)]),
        (RECORDED, replace(RECORDED, optimizers=(ADAM,)), [("the optimizer", "SGD", "Adam", BOTH)]),
        (RECORDED, replace(RECORDED, optimizers=(replace(SGD, settings={"weight_decay": 0.1}),)),
         [("weight_decay", "0", "0.1", MASTERS)]),
        (RECORDED, replace(RECORDED, first_input=(64, 8), torch="2.14.0"),
         [("the model's input", "32×8", "64×8",
           "the loss scale, the memory per level and the sizes to pad"),
          ("torch", "2.13.0", "2.14.0", "the operations that stay in FP32")]),
        # Of two optimizers of one class each may be the one that is compared.
        (GAN, replace(GAN, optimizers=GAN.optimizers[::-1]), []),
        (GAN, replace(GAN, optimizers=(replace(ADAM, learning_rate=0.002),)),
         [("the learning rate", "0.001 and 0.004", "0.002", BOTH)]),
        (GAN, replace(GAN, optimizers=(SGD, SGD)), [("the optimizer", "Adam", "SGD", BOTH)]),
        # What one side does not know has not changed.
        (replace(RECORDED, optimizers=(replace(SGD, learning_rate=None),)), RECORDED, []),
        (RECORDED, replace(RECORDED, optimizers=(replace(SGD, learning_rate=None),)), []),
        (RECORDED, TrainingConditions(), []),
        (TrainingConditions(), RECORDED, []),
    ],
)  # fmt: skip
def test_changes(recorded, now, expected):
    assert changes(recorded, now) == tuple(Change(*words) for words in expected)


def test_a_run_knows_its_first_learning_rate_and_its_plan_has_it(tmp_path):
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.5, weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 0.5, total_iters=4)
    with mpdiag.record(model, optimizer, tmp_path / "run"):
        for _ in range(6):
            model(torch.randn(2, 8)).square().mean().backward()
            optimizer.step()
            schedule.step()
    run = open_run(tmp_path / "run")
    assert run.meta["optimizers"][0]["lr"] == 0.5  # of the last step
    found = mpdiag.analyze(run.folder).plan.conditions
    assert found == run.conditions()
    assert found.first_input == (2, 8)
    assert torch.__version__.startswith(found.torch)
    (settings,) = found.optimizers
    assert (settings.type, settings.learning_rate) == ("SGD", 0.25)
    assert settings.settings["weight_decay"] == 0.1


@pytest.mark.parametrize("name", ["tests/data/schema-1/run", "sample_runs/dcgan"])
def test_an_earlier_run_knows_less_and_opens(root, name):
    found = open_run(root / name).conditions()
    assert all(o.type and o.learning_rate is None for o in found.optimizers)
    assert PrecisionPlan.from_json(PrecisionPlan(conditions=found).to_json()).conditions == found


@pytest.mark.parametrize("missing", [("conditions",), ("conditions", "model")])
def test_an_earlier_plan_opens_and_says_nothing(missing):
    document = PrecisionPlan(conditions=RECORDED).to_json()
    for name in missing:
        del document[name]
    assert PrecisionPlan.from_json(document).conditions is None
