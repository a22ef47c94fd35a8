"""When a loop without an optimizer is taken to train: when it changes weights, and not before."""

import pytest
import script_loops as loops
import torch
from recorded import step
from support import constant, perceptron

import mpdiag
from mpdiag.launching import processes
from mpdiag.runs.training_log import read_log


def train(model, steps=5):
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(steps):
        step(model, optimizer, torch.randn(8, 4))


def call(model):
    """A check of shapes."""
    model(torch.randn(2, 4))


def warm_up(model):
    """A backward pass whose gradients nobody uses."""
    model(torch.randn(2, 4)).sum().backward()


def load(model):
    """A checkpoint is read between two calls."""
    model(torch.randn(2, 4))
    model.load_state_dict({k: v + 1 for k, v in model.state_dict().items()})


@pytest.mark.parametrize(("before", "times"), [(call, 5), (warm_up, 2), (load, 1)])
def test_calls_before_the_optimizer_is_made_are_no_training(tmp_path, before, times):
    def loop():
        net = perceptron()
        for _ in range(times):
            before(net)
        train(net)
        return net

    with loops.recording(tmp_path / "run"):
        nets = [loop()]
    with loops.training(tmp_path / "trained", constant(64.0)) as watch:
        nets.append(loop())
    assert not any(p._post_accumulate_grad_hooks for net in nets for p in net.parameters())
    assert watch.refused is None
    assert mpdiag.open_run(tmp_path / "run").meta["steps_seen"] == watch.trainers[0].steps == 5


def by_data(parameter):
    parameter.data -= 0.1 * parameter.grad
    parameter.grad.zero_()


def by_value(parameter):
    with torch.no_grad():
        parameter -= 0.1 * parameter.grad
    parameter.grad = None


@pytest.mark.parametrize("update", [by_data, by_value])
def test_a_loop_that_changes_weights_itself_is_recorded_and_not_trained(tmp_path, update):
    def loop():
        net = perceptron()
        for _ in range(6):
            net(torch.randn(8, 4)).square().mean().backward()
            for parameter in net.parameters():
                update(parameter)

    with loops.recording(tmp_path / "run"):
        loop()
    meta = mpdiag.open_run(tmp_path / "run").meta
    assert (meta["steps_recorded"], meta["steps_seen"]) == (5, 6)  # the first one made it known
    with pytest.raises(processes.Refusal), loops.training(tmp_path / "no", constant(64.0)) as watch:
        loop()
    assert "changes weights without an optimizer" in watch.refused


@pytest.mark.parametrize("steps", [1, 2, 3, 27, 40])
def test_every_step_of_a_loop_without_an_optimizer_is_seen(tmp_path, steps):
    """Gradients are cleared before the call that shows that weights have changed."""

    def loop():
        net = perceptron()
        for _ in range(steps):
            net.zero_grad()
            net(torch.randn(8, 4)).square().mean().backward()
            for parameter in net.parameters():
                parameter.data.add_(-0.1 * parameter.grad)

    with loops.recording(tmp_path / "run") as watch:
        loop()
    assert watch.recorded == (steps > 1)
    if steps > 1:
        run = mpdiag.open_run(tmp_path / "run")
        assert run.meta["steps_seen"] == steps
        assert run.records.step.min() == 1
        logged = [step.step for step in read_log(tmp_path / "run").steps]
        assert logged == list(range(1, steps))


class Adjoint(torch.autograd.Function):
    """As ``odeint_adjoint``: it calls the model without gradients, and again in its backward pass."""

    @staticmethod
    def forward(ctx, net, x, *parameters):
        ctx.net, ctx.parameters = net, parameters
        ctx.save_for_backward(x)
        return net(x)

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            y = ctx.net(x)
        return None, None, *torch.autograd.grad(y, ctx.parameters, gradient)


def test_the_first_step_counts_where_a_function_calls_the_model_without_gradients(tmp_path):
    def loop():
        net = perceptron()
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        for _ in range(8):
            optimizer.zero_grad()
            y = Adjoint.apply(net, torch.randn(8, 4), *net.parameters())
            y.square().mean().backward()
            optimizer.step()

    with loops.recording(tmp_path / "run"):
        loop()
    assert mpdiag.open_run(tmp_path / "run").meta["steps_seen"] == 8
    assert [step.step for step in read_log(tmp_path / "run").steps] == list(range(8))
    with loops.training(tmp_path / "trained", constant(64.0)) as watch:
        loop()
    assert watch.trainers[0].steps == 8


def test_an_optimizer_of_tensors_alone_waits_for_the_model(tmp_path):
    def loop():
        scale = torch.ones(1, requires_grad=True)
        alone = torch.optim.SGD([scale], 0.1)
        scale.square().sum().backward()
        alone.step()
        net = perceptron()
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        for _ in range(5):
            for one in (alone, optimizer):
                one.zero_grad()
            (net(torch.randn(8, 4)).square().mean() * scale.sum()).backward()
            for one in (alone, optimizer):
                one.step()
        return scale

    with loops.recording(tmp_path / "run"):
        scale = loop()
    assert torch.equal(scale, loop())
    frame = mpdiag.open_run(tmp_path / "run").frame()
    assert (frame.name.str.startswith("optimizer0.") & (frame.kind == "update")).sum() == 5
    with loops.training(tmp_path / "trained", constant(64.0)) as watch:
        trained = loop()
    assert watch.trainers[0].steps == 5
    assert trained.item() == pytest.approx(scale.item(), rel=0.02)


@pytest.mark.parametrize("trace", [True, None])
def test_a_trace_begins_with_what_is_called_without_gradients(tmp_path, trace):
    """A GAN's samples for its critic, and a teacher, come before anything with gradients."""
    with loops.recording(tmp_path / "run", trace=trace):
        torch.manual_seed(0)
        teacher = torch.nn.Linear(4, 4).requires_grad_(False).eval()
        generator, critic = torch.nn.Linear(4, 4), perceptron()
        steps = [torch.optim.SGD(m.parameters(), 0.1) for m in (generator, critic)]
        for _ in range(2):
            with torch.no_grad():
                fake = generator(teacher(torch.randn(8, 4)))
            critic(fake).square().mean().backward()
            steps[1].step()
            critic(generator(torch.randn(8, 4))).mean().backward()
            steps[0].step()
    run = mpdiag.open_run(tmp_path / "run")
    assert run.meta["steps_seen"] == 4
    assert run.meta["failures"] == []
    assert {"generator", "critic"} <= {row["name"] for row in run.modules()}
    if trace:
        rows = [r for r in run.trace() if r.step == 0]
        made = [r.module for r in rows if r.name == "addmm" and r.phase == "forward"]
        assert made[:3] == [None, "generator", "critic.0"]
        read = next(r for r in rows if (r.kind, r.module) == ("input", "critic")).reads
        assert read == (
            next(r.order for r in rows if (r.kind, r.module) == ("output", "generator")),
        )
        assert "generator" not in {r.module for r in rows if r.phase == "backward"}
