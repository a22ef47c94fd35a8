"""A training that is not FP32: noticed, named in the run, and recorded in FP32 if that is asked for."""

import logging

import pytest
import script_loops as loops
import torch
from recorded import Wrapped
from torch import nn

import mpdiag
from mpdiag.launching.recorded_script import Options
from mpdiag.tracing import precision

ENTER = torch.amp.autocast_mode.autocast.__enter__


@pytest.fixture(autouse=True)
def nothing_is_left_behind():
    yield
    assert torch.amp.autocast_mode.autocast.__enter__ is ENTER
    assert precision._live == []


class Inner(nn.Module):
    """Computes under autocast inside, in functions alone."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))

    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            hidden = nn.functional.linear(x, self.weight)
        return hidden.float()


def train(model, autocast=None, steps=3, scaler=None, dtype=torch.float32):
    """A loop; returns its losses and all weights."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        with torch.autocast("cpu", autocast or torch.bfloat16, enabled=autocast is not None):
            loss = model(torch.randn(8, 4).to(dtype)).float().square().mean()
        (loss if scaler is None else scaler.scale(loss)).backward()
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
        losses.append(loss.item())
    return losses, [p.detach().clone() for p in model.parameters()]


def made(kind=None):
    torch.manual_seed(0)
    return (
        Inner() if kind == "inner" else nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    )


def recorded(folder, model, **options):
    with mpdiag.record(model, None, folder, fp32=options.pop("fp32", False)):
        found = train(model, **options)
    return mpdiag.open_run(folder), found


def findings(run):
    return [f for f in mpdiag.analyze(run.folder).findings if f.code == "not-fp32"]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_autocast_is_named_in_the_run_the_warning_and_the_findings(tmp_path, dtype, caplog):
    name = str(dtype).removeprefix("torch.")
    with caplog.at_level(logging.WARNING, logger="mpdiag"):
        run, _ = recorded(tmp_path / "run", made(), autocast=dtype)
    assert run.meta["precision"] == {
        "autocast": [name],
        "half_parameters": 0,
        "half_parameter_count_total": 49,
        "half_modules": 4,  # the model itself is one
        "autocast_off": False,
    }
    (warning,) = caplog.messages
    assert f"autocast is on ({name})" in warning
    assert "fp32=True" in warning
    (finding,) = findings(run)
    assert name in finding.message
    assert "not an FP32 recording" in finding.message
    assert "--fp32" in finding.fix


def test_autocast_around_functions_inside_a_module_is_seen(tmp_path):
    run, _ = recorded(tmp_path / "run", made("inner"))
    assert run.meta["precision"]["autocast"] == ["bfloat16"]


def test_autocast_around_an_evaluation_is_no_matter(tmp_path):
    model = made()
    with mpdiag.record(model, None, tmp_path / "run"):
        train(model)
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            model(torch.randn(2, 4))
    run = mpdiag.open_run(tmp_path / "run")
    assert run.meta["precision"]["autocast"] == []
    assert run.meta["precision"]["half_modules"] == 0
    assert findings(run) == []


def test_autocast_that_is_set_past_its_context_is_seen_and_cannot_be_switched_off(tmp_path):
    model = made()
    torch.set_autocast_enabled("cpu", True)
    try:
        run, _ = recorded(tmp_path / "run", model, autocast=torch.bfloat16, fp32=True)
        with mpdiag.record(model, None, tmp_path / "set", fp32=True):
            torch.set_autocast_enabled("cpu", True)
            model(torch.randn(2, 4)).float().sum().backward()
    finally:
        torch.set_autocast_enabled("cpu", False)
    assert run.meta["precision"]["autocast"] == []  # the loop's own context is off inside
    (finding,) = findings(mpdiag.open_run(tmp_path / "set"))
    assert "set_autocast_enabled" in finding.fix


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("kind", ["plain", "inner"])
def test_with_fp32_it_is_the_training_without_autocast_bit_for_bit(tmp_path, kind, scaled):
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16) if scaled else None
    run, (losses, weights) = recorded(
        tmp_path / "run", made(kind), autocast=torch.bfloat16, fp32=True, scaler=scaler
    )
    model = made(kind)
    if kind == "inner":
        model.forward = lambda x: nn.functional.linear(x, model.weight)
    expected, expected_weights = train(model)
    assert losses == expected
    assert all(map(torch.equal, weights, expected_weights))
    assert run.meta["precision"]["autocast"] == []
    assert run.meta["precision"]["autocast_off"]
    assert findings(run) == []


def test_a_launcher_is_given_the_same_options():
    options = Options(every=4, include="^head", fp32=True)
    assert options.words() == ["--every", "4", "--include", "^head", "--fp32"]
    assert Options(fp32=False).words() == []


def test_a_script_is_told_of_its_autocast_once(tmp_path, capsys):
    with loops.recording(tmp_path / "run"):
        train(made(), autocast=torch.float16)
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "own autocast" in line]
    assert line.startswith("mpdiag: ")
    assert "--fp32" in line


def test_half_weights_are_counted_although_others_are_fp32(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 1))
    model[0].bfloat16()
    model[0].register_forward_hook(lambda _module, _args, output: output.float())
    with mpdiag.record(model, None, tmp_path / "run"):
        model(torch.randn(2, 4, dtype=torch.bfloat16)).sum().backward()
    run = mpdiag.open_run(tmp_path / "run")
    assert run.meta["precision"]["half_parameters"] == 40
    assert run.meta["precision"]["half_parameter_count_total"] == 49
    (finding,) = findings(run)
    assert finding.message.startswith("81.6 % of the weights are bfloat16")


def test_modules_that_return_half_precision_are_counted(tmp_path):
    model = nn.Sequential(nn.Linear(4, 8), Wrapped(nn.Identity(), lambda _, x: x.bfloat16()))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with mpdiag.record(model, optimizer, tmp_path / "run"):
        model(torch.randn(2, 4)).float().sum().backward()
        optimizer.step()
    (finding,) = findings(mpdiag.open_run(tmp_path / "run"))
    assert finding.evidence == {"half_modules": 2}
    verdict = mpdiag.analyze(tmp_path / "run").verdict.text
    assert "(2 modules returned half precision)" in verdict  # and its weights are FP32


def by_hand(body, x):
    """Returns FP32 and has FP32 weights; its product is one of bfloat16."""
    return nn.functional.linear(x.bfloat16(), body.weight.bfloat16()).float()


def step_of(model, folder, frozen=False):
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with mpdiag.record(model, optimizer, folder):
        loss = model(torch.randn(2, 4)).square().sum()
        if frozen:  # a teacher in half precision: no gradient goes through it
            with torch.no_grad():
                taught = torch.ones(2, 4).bfloat16() @ torch.ones(4, 2).bfloat16()
            loss = loss * taught.float().sum()
        loss.backward()
        optimizer.step()
    return mpdiag.analyze(folder)


def test_products_of_half_precision_inside_a_module_are_found(tmp_path):
    torch.manual_seed(0)
    analysis = step_of(Wrapped(nn.Linear(4, 8), by_hand), tmp_path / "run")
    (finding,) = (f for f in analysis.findings if f.code == "not-fp32")
    assert "computes matrix products in bfloat16 (at " in finding.message
    assert analysis.verdict.level == "expected"
    assert "its own code computes products in half precision), so these figures are bounds" in (
        analysis.verdict.text
    )
    frozen = step_of(nn.Linear(4, 1), tmp_path / "frozen", frozen=True)
    assert "not-fp32" not in {f.code for f in frozen.findings}


def test_a_recording_of_half_precision_weights_says_so_after_its_first_step(tmp_path, capsys):
    with loops.recording(tmp_path / "run"):
        train(made().half(), autocast=None, dtype=torch.float16)
    told = capsys.readouterr().err
    assert "mpdiag: FP16 weights, no FP32 masters" in told
