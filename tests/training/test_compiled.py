"""Compiled and scripted models: as without ``torch.compile`` and TorchScript."""

import warnings

import pytest
import torch
from support import BF16, backoff, wrapped
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

import mpdiag
from mpdiag.errors import UsageError
from mpdiag.plan import Fp32Choice, PrecisionPlan
from mpdiag.tracing.precision_share import ProductCount

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # inductor's own imports
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor"),  # while torch traces
]


@pytest.fixture(autouse=True)
def _forgotten():
    """Nothing counts as compiled in the tests that follow."""
    yield
    torch._dynamo.reset()


def train(level, compiled, backend="inductor"):
    """Four steps, the third of them skipped; what is compiled, and how often torch compiled."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    count = CompileCounterWithBackend(backend)
    given = torch.compile(model, backend=count) if compiled == "before" else model
    options = {"level": level, "backend": "native", "overrides": BF16}
    mp = wrapped(given, backoff(64.0), optimizer, **options)
    call = torch.compile(model, backend=count) if compiled == "after" else given
    if compiled == "in place":
        model.compile(backend=count)

    def loss_of(x):
        with mp.autocast():
            return call(x).float().square().mean()

    def step(x):
        return mp.step(loss_of(x))

    scaler = mp.scaler()

    def step_by_scaler(x):
        scaler.scale(loss_of(x)).backward()
        result = scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        return result

    if compiled == "step":
        step = torch.compile(step, backend=count)
    elif compiled == "step by scaler":
        step = torch.compile(step_by_scaler, backend=count)
    skipped, graphs = [], []
    for i in range(4):
        x = torch.randn(8, 4) * (float("inf") if i == 2 else 1.0)
        skipped.append(step(x).skipped)
        graphs.append(count.frame_count)
    share = mp.context.monitor.share
    mp.close()
    return skipped, model.state_dict(), graphs, share


@pytest.mark.parametrize(
    ("level", "compiled", "backend"),
    [
        ("O1", "before", "inductor"),
        ("O1", "after", "inductor"),
        ("O1", "in place", "aot_eager"),
        ("O1", "step", "aot_eager"),
        ("O2", "before", "aot_eager"),
        ("O2", "after", "aot_eager"),
        ("O2", "step", "aot_eager"),
        ("O2", "step by scaler", "aot_eager"),
    ],
)
def test_what_is_compiled_trains_as_what_is_not(level, compiled, backend):
    """All of the model is compiled in the first step, and nothing else; no later step compiles more."""
    skipped, eager, _, counted = train(level, "")
    assert skipped == [False, False, True, False]
    assert counted.share == 1.0
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="Dynamo does not know how to trace")
        again, state, graphs, share = train(level, compiled, backend)
    assert graphs == [1] * 4
    assert share.to_json() == counted.to_json()
    assert again == skipped
    for name, value in eager.items():
        torch.testing.assert_close(state[name], value, rtol=2e-2, atol=2e-3)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        h = self.down(torch.relu(self.up(self.norm(x))))
        return x + torch.softmax(h @ h.mT, -1) @ h


class Broken(Attention):
    def forward(self, x):
        torch._dynamo.graph_break()
        return super().forward(x)


def attentive(level, choice, how="", block=Attention):
    """Losses and weights of three steps with an FP32 choice, and how many graphs there were."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    blocks = [block() for _ in range(2)]
    model = nn.Sequential(nn.Linear(4, 8), nn.Sequential(*blocks), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    given, count = model, CompileCounterWithBackend("aot_eager")
    if how == "wrapped blocks":
        model[1] = nn.Sequential(*(torch.compile(one, backend=count) for one in blocks))
    elif how == "the model":
        given = torch.compile(model, backend=count, fullgraph=block is Attention)
    plan = PrecisionPlan(target="bf16", fp32_operations=(choice,))
    losses, graphs = [], []
    with mpdiag.MixedPrecision(given, optimizer, plan, level=level) as mp:
        for one in blocks if how == "blocks" else []:
            one.compile(backend=count)
        call = torch.compile(lambda x: model(x), backend=count) if how == "a function" else given
        for i in range(3):
            x = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(i))
            with mp.autocast():
                loss = call(x).float().square().mean()
            losses.append(mp.step(loss).loss)
            graphs.append(count.frame_count)
    return losses, [p.detach().clone() for p in model.parameters()], graphs


CHOICES = {
    "module": Fp32Choice("Linear", "1.1.up"),
    "operation": Fp32Choice("matmul", "1.1._orig_mod"),  # as a recording of compiled blocks says it
    "container": Fp32Choice("", "1.1"),
}


@pytest.mark.parametrize(
    ("level", "choice", "how"),
    [
        ("O1", "module", "the model"),
        ("O1", "container", "the model"),
        ("O1", "container", "blocks"),
        ("O1", "operation", "wrapped blocks"),
        ("O1", "module", "a function"),
        ("O2", "operation", "the model"),
        ("O2", "module", "blocks"),
        ("O2", "operation", "a function"),
    ],
)
def test_what_a_plan_keeps_in_fp32_stays_there_in_compiled_code(level, choice, how, caplog):
    """To the last bit, also in the backward pass; one block is not taken for another."""
    losses, weights, _ = attentive(level, CHOICES[choice])
    again, compiled, graphs = attentive(level, CHOICES[choice], how)
    assert again == losses
    assert all(map(torch.equal, compiled, weights))
    assert 0 < graphs[0] == graphs[2]
    eager = choice == "operation" and how.endswith("blocks")
    assert ("1.1._orig_mod runs eagerly, though it is compiled" in caplog.text) == eager
    assert losses != attentive(level, Fp32Choice("Linear", "0"))[0]


@pytest.mark.parametrize("choice", CHOICES)
def test_a_graph_that_breaks_inside_what_is_fp32(choice):
    losses, weights, _ = attentive("O1", CHOICES[choice], block=Broken)
    again, compiled, graphs = attentive("O1", CHOICES[choice], "the model", Broken)
    assert again == losses
    assert all(map(torch.equal, compiled, weights))
    assert graphs[1] == graphs[2]


def test_the_compilers_settings_are_restored():
    from torch._functorch import config

    before = config.backward_pass_autocast, torch._dynamo.config.optimize_ddp
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    kept = mpdiag.PrecisionOverrides(dtype="bf16", fp32_modules=("",))
    with wrapped(first, overrides=BF16), wrapped(second, overrides=kept):
        assert (config.backward_pass_autocast, torch._dynamo.config.optimize_ddp) == ("off", False)
    assert (config.backward_pass_autocast, torch._dynamo.config.optimize_ddp) == before


def test_products_of_a_graph_count_where_it_runs_and_as_they_run():
    """A graph without gradients, one whose backward pass never comes, and one with other sizes."""
    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    call = torch.compile(model, backend="aot_eager")
    with torch.no_grad():
        call(torch.ones(3, 4))
    forward, backward = 2 * (4 * 4 + 4 * 2), 2 * (4 * 4 + 2 * 4 * 2)
    kept = mpdiag.PrecisionOverrides(dtype="bf16", fp32_modules=("1",))
    with wrapped(model, overrides=kept) as mp:
        share = mp.context.monitor.share
        with mp.autocast():
            call(torch.ones(3, 4))
            with torch.no_grad():
                call(torch.ones(3, 4))
            assert share.flops == 3 * forward
            loss = call(torch.ones(5, 4)).square().mean()
        mp.step(loss)
    assert share.flops == (3 + 5) * forward + 5 * backward
    assert share.low_flops == 2 * 4 * 4 * (3 + 5 + 5)
    assert (share.products, share.low_products) == (7, 3)


def test_a_graph_that_cannot_be_counted_leaves_the_share_unknown(monkeypatch):
    torch._dynamo.reset()
    model = nn.Linear(4, 4)
    with wrapped(model, overrides=BF16) as mp:
        call = torch.compile(lambda x: model(x), backend="eager")
        monkeypatch.setattr(ProductCount, "run", None)
        with mp.autocast():
            loss = call(torch.ones(3, 4)).square().mean()
        assert not mp.step(loss).skipped
        share = mp.context.monitor.share
        assert share.share is None
        assert "cannot count the FLOPs of a compiled graph" in share.message


def test_micro_batches_of_a_compiled_model_compile_nothing_more():
    """At O2 its parameters change their class with the second one."""
    torch._dynamo.reset()
    model = nn.Linear(4, 4)
    count = CompileCounterWithBackend("aot_eager")
    mp = wrapped(model, level="O2", overrides=BF16)
    call, graphs = torch.compile(model, backend=count), []
    for _ in range(3):
        for _ in range(3):
            with mp.autocast():
                loss = call(torch.ones(2, 4)).float().square().mean()
            mp.backward(loss)
            graphs.append(count.frame_count)
        mp.step()
    mp.close()
    assert graphs == graphs[:1] * 9


class Buffered(nn.Module):
    """Batch norm, and buffers that the forward pass writes."""

    def __init__(self):
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.register_buffer("factor", torch.ones(4))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x):
        self.calls.add_(1)
        self.factor.mul_(0.75)
        return self.norm(self.linear(x)) * self.factor


scripted = pytest.mark.filterwarnings("ignore")  # that TorchScript is old, and what tracing fixes
KINDS = {
    "eager": lambda module: module,
    "script": torch.jit.script,
    "trace": lambda module: torch.jit.trace(module, torch.eye(4), check_trace=False),
}


def train_scripted(level, kind):
    """Five steps, the second and third of them on NaN and diagnosed."""
    torch.manual_seed(0)
    inside = Buffered()
    model = nn.Sequential(KINDS[kind](inside), nn.Linear(4, 2))
    with torch.no_grad():
        inside.calls.zero_()
        inside.factor.fill_(1)
        inside.norm.reset_running_stats()
    overrides = mpdiag.PrecisionOverrides(dtype=None if level == "O0" else "bf16")
    skipped = []
    with wrapped(model, level=level, overrides=overrides) as mp:

        def loss_of():
            with mp.autocast():
                return model(x).float().square().mean()

        for i in range(5):
            x = torch.randn(3, 4, generator=torch.Generator().manual_seed(i))
            x = x * float("nan") if i in (1, 2) else x
            result = mp.step(loss_of(), replay=loss_of)
            skipped.append((result.skipped, result.cause))
    return skipped, model.state_dict()


@scripted
@pytest.mark.parametrize("kind", ["script", "trace"])
@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
def test_a_torchscript_module_inside_a_model_trains_as_the_eager_one(level, kind):
    (skipped, eager), (again, found) = train_scripted(level, "eager"), train_scripted(level, kind)
    assert again == skipped == [(i in (1, 2), "model" if i in (1, 2) else None) for i in range(5)]
    for name, value in eager.items():
        torch.testing.assert_close(found[name], value, rtol=2e-2, atol=2e-3)
    assert int(found["0.calls"]) == 3  # skips have taken theirs back


@scripted
def test_where_torchscript_takes_no_hooks_it_is_refused_in_a_sentence():
    model = torch.jit.script(nn.Linear(4, 4))
    around = nn.Sequential(model)
    kept = mpdiag.PrecisionOverrides(dtype="bf16", fp32_modules=("0",))
    for given, overrides, said in (
        (model, BF16, "inside another"),
        (around, kept, "takes no hooks"),
        (around, mpdiag.PrecisionOverrides(), "emulation cannot see inside"),
    ):
        with pytest.raises(UsageError, match=said):
            wrapped(given, overrides=overrides)
    assert not model._forward_pre_hooks
