"""The profiler is a product of its own: without its folder the rest works, and ``profile`` says so."""

import shutil
from functools import partial

import pytest

TRAINING = """
import torch
import mpdiag

def parts():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
    return model, torch.optim.SGD(model.parameters(), 0.1)

def loss_of(model):
    return (model(torch.ones(4, 8)) - 1).square().mean()

model, optimizer = parts()
with mpdiag.record(model, optimizer, "fp32", every=1):
    for _ in range(4):
        optimizer.zero_grad()
        loss_of(model).backward()
        optimizer.step()
model, optimizer = parts()
mp = mpdiag.MixedPrecision(model, optimizer, mpdiag.analyze("fp32").plan, run="fp16")
for _ in range(4):
    with mp.autocast():
        loss = loss_of(model)
    mp.step(loss)
mp.close()
assert mp.tensor_cores is None

from typer.testing import CliRunner
from mpdiag.cli import app

for words in ("analyze fp32", "compare fp32 fp16", "report fp32", "doctor"):
    result = CliRunner().invoke(app, words.split())
    assert result.exit_code == 0, (words, result.output)
"""


@pytest.fixture(scope="module")
def without(real, root, tmp_path_factory):
    """Runs Python in a folder, with a copy of the package that lacks the profiler's folder."""
    folder = tmp_path_factory.mktemp("without")
    ignored = shutil.ignore_patterns("tensorcores")
    shutil.copytree(root / "mpdiag", folder / "mpdiag", ignore=ignored)
    return partial(real, cwd=folder, env={"PYTHONPATH": str(folder)})


def test_record_analyze_train_and_compare_without_it(without):
    child = without("-c", TRAINING)
    assert child.code == 0, child.err


def test_profile_without_it_is_refused_in_one_sentence(without):
    child = without("-m", "mpdiag", "profile", "trace.json")
    assert child.code == 2
    assert child.err.splitlines() == [
        "error: the Tensor Core profiler is not installed here: reinstall mpdiag to profile"
    ]
