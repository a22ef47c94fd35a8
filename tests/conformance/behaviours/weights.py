"""What people do to a model's weights between steps: nothing of it may be lost."""

import copy
import pickle
from functools import partial

import torch
from conformance.models import (
    ONE,
    Weighted,
    perceptron,
    poisoned,
    rows,
    same,
    through_a_file,
    values,
)
from conformance.outcomes import Chapter, NotApplicable, table
from conformance.subjects.protocol import Subject, Training
from torch import nn
from torch.nn.utils import parametrizations, prune

from mpdiag.errors import UsageError

CHAPTER = Chapter("Weights that a loop changes")


def holds(statement: str, weights: str, subject: Subject) -> None:
    """What a statement writes between two steps, of which the second adds nothing, is still there."""
    model = Weighted()
    with subject.training(model) as training:
        training.train(ONE)
        with torch.no_grad():
            exec(statement, globals() | {"model": model, "weight": model.weight})
        training.train(torch.zeros(2))
        assert values(training.weights()) == [float(x) for x in weights.split()]


for row in table("written"):
    check = partial(holds, row["statement"], row["weights"])
    CHAPTER.add(row["behaviour"], row["source"], check)


@CHAPTER.behaviour
def load_the_best_at_the_end(subject: Subject) -> None:
    """The best weights, loaded after the last step, are still there when training is closed."""
    model = Weighted()
    with subject.training(model) as training:
        best = copy.deepcopy(model.state_dict())
        training.train(ONE)
        model.load_state_dict(best)
    assert model.weight.tolist() == [1, 2]


@CHAPTER.trained(model=lambda: nn.Linear(2, 1, bias=False))
def reset_parameters(training: Training) -> None:
    """``reset_parameters`` of a layer in the middle of a training holds."""
    training.train(ONE)
    torch.manual_seed(1)
    training.raw.reset_parameters()
    expected = training.raw.weight.detach().float().clone()
    training.train(torch.zeros(2))
    assert torch.equal(training.weights()["weight"], expected)


@CHAPTER.behaviour
def an_average_swapped_in_and_out(subject: Subject) -> None:
    """Averaged weights swapped in for an evaluation and out again leave training as it was."""
    found = []
    for swap in (False, True):
        model = perceptron()
        with subject.training(model, rate=0.1) as training:
            training.train(rows(0))
            if swap:
                kept = [p.detach().clone() for p in model.parameters()]
                for p in model.parameters():
                    p.data.mul_(0.5)
                training.forward(rows(3))
                for p, before in zip(model.parameters(), kept, strict=True):
                    p.data.copy_(before)
            training.train(rows(1))
            found.append(training.weights())
    assert same(*found)


@CHAPTER.behaviour
def averaged_model(subject: Subject) -> None:
    """``swa_utils.AveragedModel`` averages what the optimizer steps, or is refused."""
    model = Weighted(1.0, 1.0)
    with subject.training(model, rate=2.0**-13) as training:
        try:
            average = torch.optim.swa_utils.AveragedModel(model)
            for _ in range(4):
                training.train(ONE)
                average.update_parameters(model)
        except UsageError:
            return
        if subject.level == "O3":
            raise NotApplicable("weights are half: such steps are lost before any average")
        expected = sum(1 - 2.0**-13 * n for n in (1, 2, 3, 4)) / 4
        assert average.module.weight.float().tolist() == [expected] * 2


@CHAPTER.behaviour
def update_bn(subject: Subject) -> None:
    """Batch norm's statistics set by ``update_bn`` between steps are not rolled back."""
    model = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 2))
    with subject.training(model, rate=0.01) as training:
        training.train(rows(0))
        inner = getattr(training.model, "module", training.model)
        batches = [rows(7).to(inner[1].weight.dtype if subject.level == "O3" else torch.float32)]
        with training.autocast():
            torch.optim.swa_utils.update_bn(batches, training.model)
        expected = inner[0].running_mean.float().clone()
        assert expected.any()
        training.backward(poisoned(training.forward(rows(1))).sum())
        model.eval()
        assert not training.step()
        model.train()
        if subject.name == "mpdiag":
            assert torch.equal(inner[0].running_mean.float(), expected)
        else:
            raise NotApplicable("a skipped step leaves statistics changed in any case")


@CHAPTER.behaviour
def tied_before(subject: Subject) -> None:
    """Weights tied before wrapping stay one, and receive both gradients."""
    first, second = Weighted(1.0, 1.0), Weighted(1.0, 1.0)
    second.weight = first.weight
    with subject.training(nn.Sequential(first, second)) as training:
        training.train(ONE)
        assert first.weight is second.weight
        assert first.weight.tolist() == [0, 0]


@CHAPTER.trained(model=lambda: nn.Sequential(Weighted(1.0, 1.0), Weighted(0.5, 0.5)), rate=0.25)
def tied_by_assignment(training: Training) -> None:
    """Weights tied by assignment in the middle of a training are one from then on."""
    first, second = training.raw
    training.train(ONE)  # first: 1 - 1/8, second: 1/2 - 1/4
    second.weight = first.weight
    training.optimizer.zero_grad()
    training.train(ONE)  # 7/8 - 1/4 · 2 · 7/8
    assert first.weight.tolist() == [0.4375, 0.4375]
    assert second.weight is first.weight


@CHAPTER.behaviour
def pruned(subject: Subject) -> None:
    """A layer pruned before training trains, with its mask in force."""
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    prune.l1_unstructured(model, "weight", amount=0.5)
    with subject.training(model, rate=0.1) as training:
        for i in range(2):
            training.train(rows(i))
        assert int((model.weight == 0).sum()) == 4


@CHAPTER.behaviour
def pruned_in_the_middle(subject: Subject) -> None:
    """A mask applied by hand after each step leaves its zeros in place."""
    model = Weighted(3.0, 2.0)
    mask = torch.tensor([0.0, 1.0])
    with subject.training(model) as training:
        for _ in range(2):
            training.train(ONE)
            model.weight.data.mul_(mask.to(model.weight.dtype))
            assert model.weight.tolist()[0] == 0
    assert model.weight.tolist() == [0, 1]


@CHAPTER.behaviour
def weight_norm(subject: Subject) -> None:
    """Weight and spectral normalisation train, and their weights stay finite."""
    for kind in (parametrizations.weight_norm, parametrizations.spectral_norm):
        torch.manual_seed(0)
        model = kind(nn.Linear(4, 2))
        with subject.training(model, rate=0.01) as training:
            before = training.weights()
            for i in range(2):
                assert training.train(rows(i))
            after = training.weights()
            assert not same(before, after)
            assert all(bool(torch.isfinite(w).all()) for w in after.values())


@CHAPTER.behaviour
def lazy_modules(subject: Subject) -> None:
    """A lazy module that was initialised by a first call trains."""
    model = nn.Sequential(nn.LazyLinear(3), nn.Linear(3, 1))
    model(rows(0))
    with subject.training(model, rate=0.01) as training:
        assert training.train(rows(1))


@CHAPTER.trained(model=lambda: nn.Sequential(Weighted(1.0, 1.0)))
def a_layer_added(training: Training) -> None:
    """A layer added to the model and to the optimizer in the middle of a training is trained."""
    training.train(ONE)
    added = nn.Linear(2, 2, bias=False)
    nn.init.ones_(added.weight)
    training.raw.append(added)
    training.optimizer.add_param_group({"params": list(added.parameters())})
    training.train(ONE)
    assert added.weight.detach().float().flatten().tolist() == [0.75] * 4


@CHAPTER.trained()
def deepcopy(training: Training) -> None:
    """``copy.deepcopy(model)`` computes by itself, and training leaves it alone."""
    training.train(ONE)
    other = copy.deepcopy(training.raw)
    training.train(ONE)
    assert other.weight.detach().float().tolist() == [0.5, 1.5]
    assert other(ONE.to(other.weight.dtype)).float().tolist() == [0.5, 1.5]


@CHAPTER.trained()
def pickled(training: Training) -> None:
    """A model can be pickled and saved whole while it is trained."""
    training.train(ONE)
    again = pickle.loads(pickle.dumps(training.raw))
    assert again.weight.detach().float().tolist() == [0.5, 1.5]
    loaded = through_a_file(training.raw, weights_only=False)
    assert loaded.weight.detach().float().tolist() == [0.5, 1.5]


@CHAPTER.trained(model=perceptron, rate=0.01)
def state_dict_in_fp32(training: Training) -> None:
    """``model.state_dict()`` is FP32 while the model is trained."""
    training.train(rows(0))
    assert all(v.dtype == torch.float32 for v in training.raw.state_dict().values())


@CHAPTER.behaviour
def full_weights_can_be_read(subject: Subject) -> None:
    """Weights can be read in full: small steps that half precision cannot hold are in them."""
    if subject.level == "O3":
        raise NotApplicable("there are no full weights")
    model = Weighted(1.0, 1.0)
    with subject.training(model, rate=2.0**-14) as training:
        training.train(ONE)
        assert values(training.weights()) == [1 - 2.0**-14] * 2
    assert model.weight.tolist() == [1 - 2.0**-14] * 2


@CHAPTER.behaviour
def parameters_keep_their_identity(subject: Subject) -> None:
    """The model's parameters are the same objects before, during and after training."""
    model = perceptron()
    before = list(model.parameters())
    with subject.training(model, rate=0.01) as training:
        training.train(rows(0))
        assert all(a is b for a, b in zip(before, model.parameters(), strict=True))
    assert all(a is b for a, b in zip(before, model.parameters(), strict=True))
    assert all(p.dtype == torch.float32 for p in before)
