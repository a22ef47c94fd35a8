"""``mpdiag why``: which layer is meant."""

from __future__ import annotations

import json

import pytest
import torch
from typer.testing import CliRunner

import mpdiag
from mpdiag.cli import app
from mpdiag.errors import ExitCode


def said(*words):
    """The exit code, and what went to stderr, on one line."""
    done = CliRunner().invoke(app, [str(word) for word in words])
    return done.exit_code, " ".join(done.stderr.split())


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("why", "{0}/first run", "Conv2d"), "no layer 'Conv2d': did you mean 0?"),
        (("why", "{0}/first run", "4.wieght"), "did you mean 4.weight"),
    ],
)
def test_a_mistyped_name_gets_the_one_that_was_meant(trained, words, sentence):
    code, text = said(*(word.format(trained) for word in words))
    assert code == ExitCode.INPUT
    assert sentence.format(trained) in text


def test_why_without_a_layer_explains_the_one_that_decides(trained, root):
    done = CliRunner().invoke(app, ["why", str(trained / "first run")])
    assert done.exit_code == 0
    deciding = mpdiag.analyze(trained / "first run").loss_scale.deciding_layer
    assert done.stdout.startswith(deciding)
    assert "this layer decides the loss scale, and loses nothing" in done.stderr
    done = CliRunner().invoke(app, ["why", str(root / "sample_runs" / "ssd")])
    assert "this layer loses most; the next ones are: trunk.0, " in done.stderr


def test_a_layer_is_optional_and_json_is_for_runs_too(trained):
    place = str(trained / "first run")
    for words in ((place,), (place, "4")):
        document = json.loads(CliRunner().invoke(app, ["why", *words, "--json"]).stdout)
        assert {"schema_version", "layer", "roles", "tensors", "steps", "fixes"} <= set(document)
    code, text = said("why", place, "--model", "a:b")
    assert (code, "--model is for a skip capsule" in text) == (ExitCode.USAGE, True)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("why", "{0}/second"), "holds a training by a plan"),
        (("why", "{0}/nowhere"), "there is no run at"),
        (("why", "{0}"), "is a folder of runs, not a run"),
    ],
)
def test_what_is_no_run_is_not_asked_for_a_layer(trained, words, sentence):
    code, text = said(*(word.format(trained) for word in words))
    assert code == ExitCode.INPUT
    assert sentence in text
    assert "LAYER" not in text


def test_one_step_without_a_loss_is_told_as_one(tmp_path):
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with mpdiag.record(model, optimizer, tmp_path / "one"):
        model(torch.ones(2, 4)).square().mean().backward()
        optimizer.step()
    done = CliRunner().invoke(app, ["why", str(tmp_path / "one")])
    assert done.exit_code == 0
    assert "without a loss scale, step 0\n" in done.stdout
    assert "at most" not in done.stdout  # of several steps
    assert "this layer decides the loss scale, and loses nothing" in done.stderr
