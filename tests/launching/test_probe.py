"""The probe trains a script's first steps twice, in processes of their own, and ends them."""

import textwrap

import pytest
import torch
from support import planned

from mpdiag.errors import InputError
from mpdiag.launching.probe import run_probe
from mpdiag.plan import PrecisionPlan

ENDLESS = """
    import itertools, sys, torch
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    x = torch.randn(32, 4)
    for _ in itertools.count():
        optimizer.zero_grad()
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean() * float(sys.argv[1])
        loss.backward()
        optimizer.step()
"""


@pytest.fixture
def script(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(textwrap.dedent(ENDLESS))
    return "train.py"


def test_an_endless_script_is_ended_after_so_many_steps(script):
    torch.manual_seed(0)
    model, x = torch.nn.Linear(4, 1), torch.randn(32, 4)
    first = (model(x) - x.sum(1, keepdim=True)).square().mean().detach()
    recorded = float(torch.nextafter(first, torch.tensor(9.0)))  # by a recorder that changes bits
    probe = run_probe(PrecisionPlan(), [script, "1.0"], steps=12, recorded={0: recorded})
    assert probe.recorder_ulps == (1, 0)
    assert probe.steps == 12
    assert probe.outcome == "agrees"
    assert probe.fp32 != probe.by_plan  # one of them is rounded
    assert probe.fp32[0] == pytest.approx(probe.by_plan[0], rel=0.01)


def test_block_formats_are_probed_beside_bf16(script):
    plan = planned("mxfp8", ("", "weight", "linear"))
    probe = run_probe(plan, [script, "1.0"], steps=3, recorded={0: -1.0})
    assert (probe.reference, probe.recorder_ulps) == ("BF16", None)  # no FP32 to hold it against
    torch.manual_seed(0)
    model, x = torch.nn.Linear(4, 1), torch.randn(32, 4)
    exact = float((model(x) - x.sum(1, keepdim=True)).square().mean().detach())
    assert exact != probe.fp32[0] == pytest.approx(exact, rel=0.02)
    assert probe.fp32[0] != probe.by_plan[0] == pytest.approx(exact, rel=0.2)


def test_a_script_that_fails_says_why(tmp_path, script):
    (tmp_path / script).write_text("raise ValueError('no data here')")
    with pytest.raises(InputError, match="no data here"):
        run_probe(PrecisionPlan(), [script], steps=3)


def test_a_training_that_fails_by_the_plan_alone_does_not_agree(tmp_path, script):
    """Its few steps are like those in FP32; that it ended there is what the probe shows."""
    text = (tmp_path / script).read_text()
    text += "    if _ == 4 and model(x).detach().half().float().equal(model(x).detach()):\n"
    text += "        raise ValueError('only by the plan')\n"
    (tmp_path / script).write_text(text)
    probe = run_probe(PrecisionPlan(), [script, "1.0"], steps=12)
    assert probe.steps < 12
    assert probe.outcome == "diverges"
    assert "only by the plan" in probe.describe()
