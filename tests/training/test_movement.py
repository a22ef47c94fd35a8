"""Optimizers that step other tensors than they were given, and those that rightly move nothing."""

import types
import warnings

import pytest
import torch
from support import BF16, LEVELS, Container, backoff, constant, summed
from torch import nn

import mpdiag
from mpdiag.errors import UsageError
from mpdiag.runs.training_log import read_log
from mpdiag.training.movement import READ_STEPS, UNREAD_STEPS

CODE = "optimizer-moved-nothing"


def layers():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))


def trainer(model, optimizer, level, **options):
    overrides = None if level == "O0" else BF16
    options |= {} if overrides is None else {"overrides": overrides}
    return mpdiag.MixedPrecision(model, optimizer, constant(1.0), level=level, **options)


def step(mp, model, factor=1.0, **options):
    return mp.step(summed(model, mp) * factor, **options)


def weights(model):
    return [p.detach().clone() for p in model.parameters()]


class Own(torch.optim.SGD):
    """Steps as a function of the optimizer and of SGD's own step says."""

    def __init__(self, parameters, lr, act):
        super().__init__(parameters, lr)
        self.act, self.calls = act, 0

    held = property(lambda self: [p for group in self.param_groups for p in group["params"]])

    @torch.no_grad()
    def step(self, closure=None):
        self.calls += 1
        self.act(self, super().step)


def acting(act, lr=0.1):
    return lambda model: Own(model.parameters(), lr, act)


def with_a_list(act, lr=0.1):
    """It keeps a list of its own, deep inside an object that is no optimizer."""

    def build(model):
        optimizer = acting(lambda o, step: act(o, step, o.parts["all"][0].them), lr)(model)
        optimizer.parts = {"all": (types.SimpleNamespace(them=list(model.parameters())),)}
        return optimizer

    return build


def add_to_each(_optimizer, _step, own):
    for p in own:
        p.add_(1)


def one_group(model):
    """Steps its second group by an optimizer inside, as those that join Muon and AdamW."""
    inside = torch.optim.SGD(model[1].parameters(), lr=0.1)

    def act(optimizer, step):
        kept = optimizer.param_groups[1:]
        optimizer.param_groups[1:] = []
        step()
        optimizer.param_groups += kept
        inside.step()

    optimizer = Own([{"params": list(part.parameters())} for part in model], 0.1, act)
    optimizer.inside = inside
    return optimizer


REFUSED = {
    "optimizers inside": Container,
    "fused optimizers inside": lambda m: Container(
        m, lambda p, lr: torch.optim.SGD(p, lr, fused=True)
    ),
    "a list of its own": with_a_list(add_to_each),
    "a list of its own, by foreach": with_a_list(lambda _, __, own: torch._foreach_add_(own, 1)),
    "one of two groups": one_group,
}


@pytest.mark.parametrize("kind", REFUSED)
@pytest.mark.parametrize("unscaled", [False, True])
def test_steps_of_what_masters_replaced_are_refused_and_undone(kind, unscaled):
    if unscaled and kind.startswith("fused"):
        pytest.skip("these kernels refuse an FP32 gradient of a BF16 weight")
    model = layers()
    optimizer = REFUSED[kind](model)
    mp = trainer(model, optimizer, "O2")
    given = weights(model)
    mp.backward(summed(model, mp))
    if unscaled:  # so that the model's parameters show the gradients that their masters have
        mp.unscale()
    with pytest.raises(
        UsageError, match=f"{type(optimizer).__name__} updates weight '[01].weight'"
    ):
        mp.step()
    own = kind == "one of two groups"  # the first steps its masters, and the model has them
    stepped = [own, own, False, False]
    assert [not torch.equal(p, q) for p, q in zip(weights(model), given, strict=True)] == stepped
    assert all(type(g["params"]) is list for g in optimizer.param_groups)


@pytest.mark.parametrize("level", ["O0", "O1", "O3"])
@pytest.mark.parametrize("kind", REFUSED)
def test_the_same_optimizers_train_where_no_masters_are(kind, level):
    if level == "O3" and kind.startswith("fused"):
        pytest.skip(
            "torch 2.13's fused SGD leaves BF16 tensors of 16 and more elements as they are"
        )
    model = layers()
    optimizer = REFUSED[kind](model)
    mp = trainer(model, optimizer, level)
    before = weights(model)
    for _ in range(UNREAD_STEPS + 2):
        step(mp, model)
    assert not any(torch.equal(p, q) for p, q in zip(weights(model), before, strict=True))


def test_a_closure_of_such_an_optimizer_is_refused():
    model = layers()
    mp = trainer(model, Container(model), "O2")
    given = weights(model)
    with pytest.raises(UsageError, match=r"Container updates weight '0\.weight'"):
        mp.step(closure=lambda: summed(model, mp))
    assert all(torch.equal(p, q) for p, q in zip(weights(model), given, strict=True))


def test_an_optimizer_that_holds_replaced_tensors_is_watched_after_its_first_steps_too():
    model = layers()

    def lookahead(optimizer, step, own):
        step()
        if optimizer.calls % 3 == 0:
            for p in own:
                p.mul_(0.5)

    mp = trainer(model, with_a_list(lookahead, 0.01)(model), "O2")
    step(mp, model)
    step(mp, model)
    with pytest.raises(UsageError, match=r"Own updates weight '0\.weight'"):
        step(mp, model)
    ours = [m.bfloat16() for m in mp.master_parameters()]
    assert all(torch.equal(p, q) for p, q in zip(weights(model), ours, strict=True))


def sam(optimizer, step):
    """Climbs in one step and goes back in the next, where it descends by the new gradient."""
    if optimizer.calls % 2:
        optimizer.climbed = [0.05 * p.grad / (p.grad.norm() + 1e-12) for p in optimizer.held]
        torch._foreach_add_(optimizer.held, optimizer.climbed)
    else:
        torch._foreach_sub_(optimizer.held, optimizer.climbed)
        step()


def schedule_free(optimizer, _step):
    """SGD without a schedule: steps z, and moves the weights to a mean of it."""
    for p in optimizer.held:
        z = optimizer.state[p].setdefault("z", p.detach().clone())
        p.lerp_(z, 1 / optimizer.calls)
        z.sub_(p.grad, alpha=0.1)


def accumulating(optimizer, _step):
    """Adds up gradients itself, and moves the weights in every eighth step."""
    for p in optimizer.held:
        total = optimizer.state[p].setdefault("sum", torch.zeros_like(p))
        total.add_(p.grad)
        if optimizer.calls % 8 == 0:
            p.sub_(total, alpha=0.1)
            total.zero_()


def by_data(optimizer, _step):
    """Writes through ``.data``, which no version counter shows."""
    for p in optimizer.held:
        p.data.sub_(p.grad.data, alpha=optimizer.defaults["lr"])


def nothing(_optimizer, _step):
    """Moves no weight."""


def hidden(optimizer, _step):
    """Reads its groups, and steps copies."""
    for p in optimizer.held:
        p.detach().clone().add_(p.grad)


class Lookahead:
    """Wraps an optimizer, is none itself, and goes back to slow weights in every third step."""

    def __init__(self, inner):
        self.inner, self.calls = inner, 0
        self.slow = {}

    param_groups = property(lambda self: self.inner.param_groups)
    state = property(lambda self: self.inner.state)

    def __getattr__(self, name):
        return getattr(self.inner, name)

    @torch.no_grad()
    def step(self, closure=None):
        held = [p for group in self.param_groups for p in group["params"]]
        for i, p in enumerate(held):
            self.slow.setdefault(i, p.detach().clone())
        self.inner.step()
        self.calls += 1
        if self.calls % 3 == 0:
            for i, p in enumerate(held):
                self.slow[i] += 0.5 * (p - self.slow[i])
                p.copy_(self.slow[i])


def sgd(lr, kind=torch.optim.SGD, **options):
    return lambda model: kind(model.parameters(), lr, **options)


RIGHT = {
    "a warm-up from 0": (sgd(0.0), 1.0),
    "a warm-up from 0 that steps nothing": (acting(nothing, 0.0), 1.0),
    "a fused warm-up from 0": (sgd(0.0, fused=True), 1.0),
    "zero gradients": (sgd(0.1), 0.0),
    "zero gradients, fused": (sgd(0.1, fused=True), 0.0),
    "SAM": (acting(sam), 1.0),
    "Lookahead": (lambda model: Lookahead(sgd(0.1)(model)), 1.0),
    "schedule-free": (acting(schedule_free), 1.0),
    "gradients that it adds up": (acting(accumulating), 1.0),
    "updates below half an ulp": (sgd(1e-6), 1.0),
    "fused": (sgd(0.1, fused=True), 1.0),
    "through .data": (acting(by_data), 1.0),
    "adam, fused": (sgd(1e-3, torch.optim.AdamW, fused=True), 1.0),
}


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("kind", RIGHT)
def test_what_may_stand_still_is_neither_stopped_nor_said(kind, level):
    build, factor = RIGHT[kind]
    model = layers()
    mp = trainer(model, build(model), level)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2 * UNREAD_STEPS + 1):
            assert not step(mp, model, factor).skipped


@pytest.mark.parametrize("build", [acting(by_data, 1e-9), sgd(1e-9, fused=True)])
def test_bf16_weights_may_stand_still_as_long_as_they_will(build, recwarn):
    model = layers()
    mp = trainer(model, build(model), "O3")
    before = weights(model)
    for _ in range(READ_STEPS + 2):
        step(mp, model)
    assert all(torch.equal(p, q) for p, q in zip(weights(model), before, strict=True))
    assert not recwarn.list


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(("act", "after"), [(nothing, UNREAD_STEPS), (hidden, READ_STEPS)])
def test_weights_that_do_not_move_are_said_once(act, after, level, tmp_path):
    if level == "O3" and act is hidden:
        pytest.skip("such weights may stand still")
    model = layers()
    mp = trainer(model, acting(act)(model), level, run=tmp_path / "run")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for i in range(after + 3):
            step(mp, model)
            assert len(caught) == (i + 1 >= after)
    mp.close()
    said = str(caught[0].message)
    assert f"Own has moved no weight in {after} steps" in said
    assert said.endswith(f"[{CODE}]")
    assert caught[0].filename == __file__
    (note,) = [n for n in read_log(tmp_path / "run").notes if n.get("code") == CODE]
    assert note["before_step"] == after


def test_groups_added_later_are_watched(recwarn):
    model = layers()
    optimizer = torch.optim.SGD(model[0].parameters(), 0.1)
    mp = mpdiag.MixedPrecision(model, optimizer, backoff(1.0), level="O1", overrides=BF16)
    step(mp, model)
    optimizer.step = lambda: None
    for _ in range(UNREAD_STEPS + 1):
        step(mp, model)
    assert not recwarn.list  # it was seen to move
    optimizer.add_param_group({"params": list(model[1].parameters())})
    for _ in range(UNREAD_STEPS + 1):
        step(mp, model)
    assert [CODE in str(w.message) for w in recwarn.list] == [True]


class Momentum(nn.Module):
    """MoCo: an encoder inside the model follows the other by an average, in the forward pass."""

    def __init__(self, write):
        super().__init__()
        self.query, self.key = nn.Linear(4, 4), nn.Linear(4, 4)
        self.key.load_state_dict(self.query.state_dict())
        self.key.requires_grad_(False)
        self.write = write

    def forward(self, x):
        if self.training and torch.is_grad_enabled():
            for key, query in zip(self.key.parameters(), self.query.parameters(), strict=True):
                self.write(key, query.detach().to(key.dtype))
        return self.query(x) * self.key(x).detach()


def in_place(key, query):
    with torch.no_grad():
        key.mul_(0.9).add_(query, alpha=0.1)


def as_data(key, query):
    key.data = key.data * 0.9 + query * 0.1


def averaging(write, level, tmp_path, **overrides):
    torch.manual_seed(0)
    model = Momentum(write)
    overrides = mpdiag.PrecisionOverrides(**({"dtype": "bf16"} | overrides))
    optimizer = torch.optim.SGD(model.query.parameters(), 0.5)
    run = tmp_path / "run"
    mp = mpdiag.MixedPrecision(
        model, optimizer, constant(1.0), level=level, overrides=overrides, run=run
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(60):
            step(mp, model)
    mp.close()
    return [str(w.message) for w in caught], read_log(run).notes


@pytest.mark.parametrize("level", ["O2", "O3"])
@pytest.mark.parametrize("write", [in_place, as_data, lambda key, query: in_place(key.data, query)])
def test_an_average_in_half_precision_is_said_once(write, level, tmp_path):
    (said,), notes = averaging(write, level, tmp_path)
    assert "writes key.weight, key.bias in every step" in said
    assert "an average in BF16" in said
    assert [n["averages"] for n in notes if "averages" in n] == [["key.weight", "key.bias"]]


@pytest.mark.parametrize(
    ("level", "write", "overrides"),
    [
        ("O1", in_place, {}),
        ("O2", in_place, {"fp32_modules": ["key"]}),
        ("O2", lambda _key, _query: None, {}),
    ],
)
def test_an_average_in_fp32_and_frozen_weights_are_not(level, write, overrides, tmp_path):
    said, notes = averaging(write, level, tmp_path, **overrides)
    assert not said
    assert not any("averages" in note for note in notes)
