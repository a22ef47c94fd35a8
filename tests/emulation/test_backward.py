"""When a backward pass has the same bits without the emulation."""

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from mpdiag.emulation import linear, policy, recurrent
from mpdiag.emulation.backward import Watch, _is_wide
from mpdiag.emulation.mode import Emulation

HALF = policy.Policy(torch.float16)


@pytest.fixture(autouse=True)
def _kernels():
    held = policy.install("cpu"), linear.in_one_piece(), recurrent.in_one_piece()
    yield
    del held


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm, self.head = nn.LSTM(8, 8, batch_first=True), nn.Linear(8, 8)

    def forward(self, x):
        return self.head(self.lstm(x.view(-1, 2, 8))[0][:, -1])


class Residual(nn.Module):
    """Its norm is the one operation that FP16 weights would round inside."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 8, bias=False)

    def forward(self, x):
        x = x.view(-1, 4, 8)
        x = x + self.first(x)
        return self.head(self.norm(x) if self.norm.weight.dtype == torch.float32 else x)[:, 0]


class Calling(nn.Module):
    """A function as a layer."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


def elementwise(x):
    return x * x.relu() - x / 3 + 2 * nn.functional.leaky_relu(x)


class Doubling(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, gradient):
        return 2 * gradient


def mlp(*between):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), *between, nn.Linear(8, 8))


@pytest.fixture
def watched():
    emulation = Emulation()
    return emulation, Watch(emulation)


def loss_of(model, emulation, watch, *, half=False):
    torch.manual_seed(1)
    x = torch.randn(16, 8)
    watch.begin()
    with emulation, torch.autocast("cpu", HALF.dtype, enabled=not half), policy.in_force(HALF):
        out = model(x.half() if half else x)
        return functional.cross_entropy(out.float(), torch.arange(len(out)) % 8)


@pytest.mark.parametrize("half", [False, True], ids=["autocast", "an FP16 model"])
@pytest.mark.parametrize(
    "make",
    [lambda: mlp(nn.ReLU()), Recurrent, Residual, lambda: mlp(Calling(elementwise))],
    ids=["MLP", "LSTM", "residual", "elementwise"],
)
def test_where_every_formula_rounds_itself_its_bits_are_those_of_the_emulation(make, half, watched):
    torch.manual_seed(0)
    model = make().half() if half else make()
    emulation, watch = watched
    found = []
    for emulate in (True, False):
        model.zero_grad()
        loss = loss_of(model, emulation, watch, half=half)
        assert watch.lets_go(loss)
        if emulate:
            with emulation:
                loss.backward()
        else:
            loss.backward()
        found.append([p.grad for p in model.parameters() if p.grad is not None])
    assert all(map(torch.equal, *found))


def hooked(hook):
    def relu(x):
        y = x.relu()
        hook(y)
        return y

    return Calling(relu)


class Shifted(nn.Module):
    """A sum over the batch is in the gradient of what is broadcast."""

    def __init__(self):
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(8))

    def forward(self, x):
        return x + self.shift


UNKNOWN = {
    "GELU": nn.GELU(),
    "batch norm": nn.BatchNorm1d(8),
    "a tensor's hook": hooked(lambda y: y.register_hook(lambda g: g / g.norm())),
    "a node's hook": hooked(lambda y: y.grad_fn.register_hook(lambda *_: None)),
    "checkpoint": Calling(lambda x: checkpoint(torch.relu, x, use_reentrant=False)),
    "custom": Calling(Doubling.apply),
}


@pytest.mark.parametrize("between", UNKNOWN)
def test_what_is_not_known_keeps_it(between, watched):
    assert not watched[1].lets_go(loss_of(mlp(UNKNOWN[between]), *watched))


def test_a_sum_in_fp16_keeps_it(watched):
    lets_go = watched[1].lets_go
    assert not lets_go(loss_of(mlp(Shifted()).half(), *watched, half=True))
    assert not lets_go(loss_of(mlp(nn.LayerNorm(8)).half(), *watched, half=True))
    assert lets_go(loss_of(mlp(nn.LayerNorm(8)), *watched))


def test_the_formulas_of_operations_that_the_policy_casts_are_known_by_their_names():
    x = torch.rand(4, 4, requires_grad=True)
    target = torch.ones(4, dtype=torch.long)
    known = [
        x.log_softmax(1), x.softmax(1), x.exp(), x.log1p(), x.sum(), x.sum(0), x.mean(), x.mean(0),
        functional.smooth_l1_loss(x, x.detach()), functional.huber_loss(x, x.detach()),
        functional.mse_loss(x, x.detach()), functional.layer_norm(x, [4]),
        functional.nll_loss(x, target), functional.nll_loss(x[None, :, :, None], target[None, :, None]),
        functional.binary_cross_entropy_with_logits(x, x.detach()), functional.gelu(x),
    ]  # fmt: skip
    assert all(_is_wide(type(y.grad_fn).__name__) for y in known)
    unknown = [x.pow(2), x @ x, x.cos(), x.expand(2, 4, 4), functional.conv1d(x[None], x[None])]
    assert not any(_is_wide(type(y.grad_fn).__name__) for y in unknown)


def test_what_was_made_before_the_forward_pass_keeps_it(watched):
    emulation, watch = watched
    model = mlp()
    first = loss_of(model, emulation, watch)
    assert watch.lets_go(first)
    second = loss_of(model, emulation, watch)
    assert watch.lets_go(second)
    assert not watch.lets_go(first)
    assert not watch.lets_go(first + second)
    assert not watch.lets_go(second, create_graph=True)
    assert not watch.lets_go(second.detach())


def test_a_hook_on_a_weight_matters_where_the_weight_is_half(watched):
    for half in (False, True):
        model = mlp().half() if half else mlp()
        model[0].weight.register_hook(lambda g: g / g.norm())
        assert watched[1].lets_go(loss_of(model, *watched, half=half)) != half
