"""What people mistype, forget and mix up: each is met with what was meant, or what is wrong."""

from __future__ import annotations

import shlex

import pytest
import torch
from support import batch, network
from torch import nn
from typer.testing import CliRunner

import mpdiag
from mpdiag.cli import app
from mpdiag.runs.run import open_run


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A recording and a training by its plan, in a folder whose name must be quoted."""
    folder = tmp_path_factory.mktemp("mistakes") / "Übung 1" / "runs"
    record(folder / "first run", network())
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    plan = mpdiag.analyze(folder / "first run").plan
    with mpdiag.MixedPrecision(model, optimizer, plan, run=folder / "second") as mp:
        x, y = batch()
        mp.step(nn.functional.cross_entropy(model(x), y))
    return folder


def record(run, model, steps=3, *, step=True, dtype=torch.float32):
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with mpdiag.record(model, optimizer, run):
        for i in range(steps):
            x, y = batch(i)
            nn.functional.cross_entropy(model(x.to(dtype)), y).backward()
            if step:
                optimizer.step()


def said(*words):
    done = CliRunner().invoke(app, [str(word) for word in words])
    return done.exit_code, " ".join(done.stderr.split())


@pytest.mark.parametrize(
    ("words", "code", "sentence"),
    [
        (("analyze", "{0}"), 3, "holds runs and is none itself: name one, such as {0}/first run"),
        (("analyze", "{0}/frist run"), 3, "did you mean {0}/first run?"),
        (("analyze", "{0}/../first run"), 3, "did you mean {0}/../runs/first run?"),
        (("analyze", "{0}/second"), 3, "holds a training by a plan, which records no statistics"),
        (("why", "{0}/first run", "Conv2d"), 3, "no layer 'Conv2d': did you mean 0?"),
        (("why", "{0}/first run", "4.wieght"), 3, "did you mean 4.weight"),
        (("export", "{0}", "--to", "torch"), 3, "{0} is a folder without a plan.json: write"),
        (("train", "--plan", "{0}", "--", __file__), 3, "{0} is a folder without a plan.json"),
    ],
)
def test_what_was_meant_is_named(folder, words, code, sentence):
    found, text = said(*(word.format(folder) for word in words))
    assert (found, sentence.format(folder) in text) == (code, True)


def test_why_without_a_layer_tells_of_the_one_that_loses_most(folder):
    done = CliRunner().invoke(app, ["why", str(folder / "first run")])
    assert done.exit_code == 0
    deciding = mpdiag.analyze(folder / "first run").loss_scale.deciding_layer
    assert done.stdout.startswith(deciding)
    assert "this layer loses most; name another one" in done.stderr


def test_the_next_command_can_be_copied_into_a_shell(folder):
    done = CliRunner().invoke(app, ["analyze", str(folder / "first run")])
    line = next(x for x in done.stderr.splitlines() if x.startswith("next: "))
    assert shlex.split(line)[:4] == ["next:", "mpdiag", "why", str(folder / "first run")]


def test_a_loop_that_never_steps_is_told(tmp_path):
    record(tmp_path / "run", network(), step=False)
    codes = {f.code for f in mpdiag.analyze(tmp_path / "run").findings}
    assert "no-optimizer-step" in codes


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_a_recording_of_something_else_than_fp32_is_told(tmp_path, dtype):
    record(tmp_path / "run", network().to(dtype), dtype=dtype)
    findings = {f.code: f for f in mpdiag.analyze(tmp_path / "run").findings}
    assert str(dtype).removeprefix("torch.") in findings["not-fp32"].message


def test_trainings_of_unequal_length_are_told(folder):
    codes = [f.code for f in mpdiag.compare(folder / "first run", folder / "second").findings]
    assert "lengths-differ" in codes


def test_the_script_of_a_recording_is_known_unless_something_of_it_is_hidden(folder):
    run = open_run(folder / "first run")
    meta = {**run.meta, "script": "a b.py", "world_size": 1}
    words = [
        (["a b.py", "--epochs", "3"], "a b.py", ("a b.py", "--epochs", "3")),
        (["/x/pkg/__main__.py", "1"], "-m pkg", ("-m", "pkg", "1")),
        (["a b.py", "--token", "(hidden)"], "a b.py", ()),
    ]
    for argv, script, expected in words:
        found = type(run)(run.folder, {**meta, "argv": argv, "script": script})
        assert found.script_words == expected
    assert type(run)(run.folder, {**meta, "argv": ["a"], "world_size": 2}).script_words == ()
