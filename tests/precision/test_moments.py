"""What is said of optimizers' states, against the optimizers: every value of a format, one step of 0.

Lion is written after Chen et al. 2023, algorithm 2, as torch has none.
"""

import pytest
import torch
from torch import nn, optim

from mpdiag.numerics.decay import decay
from mpdiag.numerics.sums import growing
from mpdiag.precision.moments import moments, slowing, stops_falling

EVERY = {
    "bfloat16": torch.arange(0x0080, 0x7F80, dtype=torch.int32)
    .to(torch.int16)
    .view(torch.bfloat16)
    .reshape(254, 128),
    "float16": torch.arange(0x0400, 0x7C00, dtype=torch.int32)
    .to(torch.int16)
    .view(torch.float16)
    .reshape(240, 128),
}


class Lion(optim.Optimizer):
    def __init__(self, parameters, lr, betas):
        super().__init__(parameters, {"lr": lr, "betas": betas})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            one, two = group["betas"]
            for p in group["params"]:
                state = self.state[p]
                average = state.setdefault("exp_avg", torch.zeros_like(p))
                p.sub_(average.mul(one).add_(p.grad, alpha=1 - one).sign_(), alpha=group["lr"])
                average.mul_(two).add_(p.grad, alpha=1 - two)


STATES = [
    (optim.Adam, {"betas": (0.9, 0.999)}, ("exp_avg", "exp_avg_sq")),
    (optim.Adam, {"betas": (0.998, 0.998)}, ("exp_avg", "exp_avg_sq")),
    (optim.AdamW, {"betas": (0.999, 0.999), "foreach": True}, ("exp_avg", "exp_avg_sq")),
    (optim.AdamW, {"betas": (0.9, 0.9999), "fused": True}, ("exp_avg", "exp_avg_sq")),
    (optim.NAdam, {"betas": (0.999, 0.998)}, ("exp_avg", "exp_avg_sq")),
    (optim.RAdam, {"betas": (0.998, 0.999)}, ("exp_avg", "exp_avg_sq")),
    (optim.Adamax, {"betas": (0.999, 0.998), "eps": 0.0}, ("exp_avg", "exp_inf")),
    (optim.RMSprop, {"alpha": 0.998, "momentum": 0.9, "centered": True},
     ("square_avg", "grad_avg", "momentum_buffer")),
    (optim.Adadelta, {"rho": 0.998}, ("square_avg", "acc_delta")),
    (optim.SGD, {"momentum": 0.998}, ("momentum_buffer",)),
    (optim.SGD, {"momentum": 0.9}, ("momentum_buffer",)),
    (optim.Muon, {"momentum": 0.998}, ("momentum_buffer",)),
    (Lion, {"betas": (0.9, 0.99)}, ("exp_avg",)),
    (Lion, {"betas": (0.9, 0.999)}, ("exp_avg",)),
]  # fmt: skip


def stepped(make, settings, name, values):
    """An optimizer and one of its states, set to these values, after a step without gradient."""
    p = nn.Parameter(torch.ones_like(values))
    p.grad = torch.zeros_like(values)
    optimizer = make([p], lr=1e-3, **settings)
    optimizer.step()
    optimizer.state[p][name].copy_(values)
    optimizer.step()
    return optimizer, optimizer.state[p][name]


@pytest.mark.parametrize("dtype", EVERY)
@pytest.mark.parametrize(("make", "settings", "names"), STATES)
def test_as_many_values_stay_as_arithmetic_says(make, settings, names, dtype):
    values = EVERY[dtype]
    for name in names:
        optimizer, after = stepped(make, settings, name, values)
        (factor,) = moments(make.__name__, optimizer.param_groups)[name]
        assert int((after == values).sum()) == decay(dtype, factor).stuck, name


@pytest.mark.parametrize(("dtype", "power", "step"), [
    ("bfloat16", -0.8, 2436),
    ("bfloat16", -0.5, 262_136),
    ("float16", -0.8, 32_763),
])  # fmt: skip
def test_adafactors_average_stops_falling_at_a_step(dtype, power, step):
    values = EVERY[dtype].flatten()
    p = nn.Parameter(torch.ones_like(values))
    p.grad = torch.zeros_like(values)
    optimizer = optim.Adafactor([p], lr=1e-3, beta2_decay=power)
    assert slowing("Adafactor", optimizer.param_groups)["variance"] == {power}
    assert stops_falling(dtype, power) == step
    optimizer.step()
    state = optimizer.state[p]
    for at, all_stay in ((step, True), (step - 1, False)):
        state["step"].fill_(at - 1)
        state["variance"].copy_(values)
        optimizer.step()
        assert torch.equal(state["variance"], values) == all_stay


def test_adagrads_sum_stops_growing_where_arithmetic_says():
    few, many = growing("bfloat16")
    p = nn.Parameter(torch.zeros(128, dtype=torch.bfloat16))
    optimizer = optim.Adagrad([p], lr=1e-3)
    taken = torch.zeros(128, dtype=torch.int64)
    for _ in range(many + 2):
        before = optimizer.state[p]["sum"].clone()
        p.grad = (1 + torch.arange(128) / 128).to(p.dtype)
        optimizer.step()
        taken += optimizer.state[p]["sum"] != before
    assert (int(taken.min()), int(taken.max())) == (few, many)
