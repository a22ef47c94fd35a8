"""Loops with several optimizers: recorded and trained with the same steps, losses and parameters."""

import pytest
import script_loops as loops
import torch
from recorded import step
from support import constant, perceptron
from torch import nn

import mpdiag
from mpdiag.runs.training_log import read_log


@pytest.fixture(scope="module")
def gan(tmp_path_factory):
    """The recording of 20 turns of a GAN's loop, and what the loop printed."""
    folder = tmp_path_factory.mktemp("gan") / "run"
    with loops.recording(folder, every=1):
        made = loops.dcgan()
    assert all(map(torch.equal, loops.weights(made), loops.weights(loops.dcgan())))  # bit for bit
    return folder, made.printed


def test_a_gans_generator_has_activation_gradients(gan):
    run = mpdiag.open_run(gan[0])
    frame = run.frame()
    gradients = frame[(frame.kind == "activation_grad") & frame.name.str.startswith("generator")]
    assert sorted(gradients.step.unique()) == list(range(1, 40, 2))
    missing = [i["name"] for i in run.meta["coverage"]["not_recorded"]]
    assert not [name for name in missing if name.startswith("generator")]
    assert {"generator.0", "critic.2.weight"} <= {row["name"] for row in run.modules()}


def test_a_gans_log_has_what_the_loop_prints(gan):
    folder, printed = gan
    assert [s.loss for s in read_log(folder).steps] == pytest.approx(printed, rel=1e-12)
    meta = mpdiag.open_run(folder).meta
    assert meta["steps_seen"] == 40
    assert [o["steps_taken"] for o in meta["optimizers"]] == [20, 20]


def test_a_gan_is_recorded_turn_by_turn_although_few_steps_are(tmp_path, capsys):
    with loops.recording(tmp_path / "run", every=4):
        loops.dcgan(turns=9)
    told = "18 steps, each an update of weights; by optimizer: Adam 9, Adam 9"
    assert told in capsys.readouterr().err
    run = mpdiag.open_run(tmp_path / "run")
    frame = run.frame()
    assert set(frame.step) == {0, 1, 8, 9, 16, 17}
    generator = frame[frame.name.str.startswith("generator")]
    assert set(generator.step[generator.kind == "update"]) == {1, 9, 17}
    assert set(generator.step[generator.kind == "activation_grad"]) == {1, 9, 17}
    assert [o["steps_recorded"] for o in run.meta["optimizers"]] == [3, 3]


def test_a_graph_of_an_unrecorded_step_is_watched(tmp_path):
    """A loop whose output is differentiated one step later, always."""
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with mpdiag.record(model, optimizer, tmp_path / "run", every=3):
        for _ in range(5):
            ahead = model(torch.randn(8, 4)).square().mean()
            optimizer.step()
            optimizer.zero_grad()
            ahead.backward()
        optimizer.step()
    frame = mpdiag.open_run(tmp_path / "run").frame()
    # Steps 0 and 3 are recorded. What arrives in step 3 was computed in step 2, which is not.
    assert set(frame.step[frame.kind == "activation_grad"]) == {3}


def test_every_optimizers_operations_are_recorded(gan):
    operations = mpdiag.open_run(gan[0]).operations()
    steps = sorted({o.step for o in operations})
    assert steps == [0, 1, 10, 11]
    for module in ("generator.0", "critic.0"):
        phases = {o.phase for o in operations if o.module == module}
        assert phases == {"forward", "backward"}


def test_a_gan_trained_by_its_plan_can_be_compared(gan, tmp_path):
    plan = mpdiag.analyze(gan[0]).plan
    with loops.training(tmp_path / "trained", plan) as watch:
        loops.dcgan()
    assert watch.trainers[0].steps == 40
    assert watch.summary().startswith("40 steps of 2 optimizers in ")
    steps = read_log(tmp_path / "trained").steps
    assert [s.loss for s in steps] == pytest.approx(gan[1], rel=0.02)
    assert mpdiag.compare(gan[0], tmp_path / "trained").curve.steps == 40


def test_a_lone_parameter_with_an_optimizer_of_its_own_is_recorded_and_trained(tmp_path):
    with loops.recording(tmp_path / "run", every=1):
        recorded = loops.soft_actor_critic()
    plain = loops.soft_actor_critic()
    assert all(map(torch.equal, loops.weights(recorded), loops.weights(plain)))
    assert torch.equal(recorded.log_alpha, plain.log_alpha)
    run = mpdiag.open_run(tmp_path / "run")
    frame = run.frame()
    assert (frame.name.str.startswith("optimizer2.") & (frame.kind == "update")).sum() == 20
    with loops.training(tmp_path / "trained", constant(64.0)) as watch:
        trained = loops.soft_actor_critic()
    assert watch.refused is None
    assert run.meta["steps_seen"] == watch.trainers[0].steps == 60
    assert trained.log_alpha.item() == pytest.approx(plain.log_alpha.item(), rel=0.05)
    logs = [read_log(tmp_path / name).steps for name in ("run", "trained")]
    assert [len(steps) for steps in logs] == [60, 60]
    for a, b in zip(*logs, strict=True):
        assert a.loss == pytest.approx(b.loss, abs=0.02)


def test_optimizers_that_share_a_step_share_its_line(tmp_path):
    def loop():
        model = perceptron()
        optimizers = [torch.optim.SGD(model[i].parameters(), 0.1) for i in (0, 2)]
        for _ in range(6):
            for _ in range(2):
                (model(torch.randn(16, 4)).square().mean() / 2).backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()

    with loops.recording(tmp_path / "run"):
        loop()
    with loops.training(tmp_path / "trained", constant(64.0)) as watch:
        loop()
    assert watch.trainers[0].steps == 6
    logs = [read_log(tmp_path / name).steps for name in ("run", "trained")]
    assert [[s.step for s in steps] for steps in logs] == [list(range(6))] * 2
    for a, b in zip(*logs, strict=True):
        assert a.loss == pytest.approx(b.loss, rel=0.02)


def test_a_step_that_one_of_two_optimizers_skips_is_one_skipped_step(tmp_path):
    torch.manual_seed(0)
    models = [nn.Linear(4, 1), nn.Linear(4, 1)]
    with loops.training(tmp_path / "run", constant(64.0)) as watch:
        optimizers = [torch.optim.SGD(m.parameters(), 0.1) for m in models]
        for i in range(4):
            losses = [m(torch.randn(8, 4)).square().mean() for m in models]
            sum(losses).backward()
            if i == 2:
                models[1].weight.grad.fill_(torch.inf)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    steps = read_log(tmp_path / "run").steps
    assert [s.skipped for s in steps] == [False, False, True, False]
    assert all(s.loss is not None for s in steps)
    (trainer,) = watch.trainers
    assert (trainer.steps, trainer.skipped) == (4, 1)


def in_turn():
    """One training begins, then a second one beside it: eight steps, three of them in turn."""
    torch.manual_seed(0)
    pairs = []
    for rounds in (2, 3):
        model = nn.Linear(4, 1)
        pairs.append((model, torch.optim.SGD(model.parameters(), 0.01)))
        for _ in range(rounds):
            for model, optimizer in pairs:
                step(model, optimizer, torch.randn(8, 4))


def test_two_trainings_in_turn_count_their_steps_together(tmp_path):
    with loops.recording(tmp_path / "run"):
        in_turn()
    with loops.training(tmp_path / "trained", constant(64.0)) as watch:
        in_turn()
    assert len(watch.trainers) == 2
    for folder in ("run", "trained"):
        assert [s.step for s in read_log(tmp_path / folder).steps] == list(range(8))
    assert watch.summary().startswith("8 steps of 2 optimizers in ")


def test_autocast_stays_off_until_the_script_ends_though_recording_has(tmp_path):
    """A script with autocast of its own, recorded with --fp32 in its first steps alone."""
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    dtypes = set()
    with loops.recording(tmp_path / "run", fp32=True, max_steps=2):
        for _ in range(5):
            with torch.autocast("cpu", torch.bfloat16):
                y = model(torch.randn(8, 4))
            dtypes.add(y.dtype)
            y.float().square().mean().backward()
            optimizer.step()
    assert dtypes == {torch.float32}
    assert mpdiag.open_run(tmp_path / "run").meta["steps_recorded"] == 2
    with torch.autocast("cpu", torch.bfloat16):  # and is back afterwards
        assert model(torch.randn(8, 4)).dtype == torch.bfloat16


def searching(model, x):
    """L-BFGS for a model, and its closure."""
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)

    def closure():
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        return loss

    return optimizer, closure


def test_a_recording_that_begins_in_an_optimizers_step_sees_every_forward_pass(tmp_path):
    """The first forward pass lies in the closure, as where L-BFGS alone trains."""
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    with loops.recording(tmp_path / "run"):
        lbfgs, closure = searching(model, torch.ones(8, 4))
        for _ in range(12):
            lbfgs.step(closure)
    run = mpdiag.open_run(tmp_path / "run")
    assert run.meta["operations"]["steps"] == [0, 10]
    frame = run.frame()
    passes = frame[(frame.kind == "activation") & (frame.step == 0)].micro
    assert sorted(passes) == list(range(len(passes)))
    assert len(passes) > 1


def test_the_one_step_of_lbfgs_after_adam_is_recorded(tmp_path):
    """As in a network that solves an equation: both optimizers are there from the beginning."""
    model, x = perceptron(), torch.randn(8, 4)
    with loops.recording(tmp_path / "run"):
        adam = torch.optim.Adam(model.parameters())
        lbfgs, closure = searching(model, x)
        for _ in range(60):
            step(model, adam, x)
        lbfgs.step(closure)
    run = mpdiag.open_run(tmp_path / "run")
    assert [o["steps_recorded"] > 0 for o in run.meta["optimizers"]] == [True, True]
    assert 60 in set(run.frame().step)
    assert 60 in run.meta["operations"]["steps"]
    assert mpdiag.analyze(run).verdict.level == "cannot"  # a search cannot be foretold
