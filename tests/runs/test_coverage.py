"""Shares of what a recording saw: stated by it, or worked out from the table of an earlier one."""

import json

import torch
from recorded import model_and_optimizer, step
from torch import nn

import mpdiag
from mpdiag.runs.coverage import FROZEN, UNTRAINED, Coverage, coverage_of
from mpdiag.tracing.names import NamedParameter


class Half(nn.Module):
    """Two layers, of which the loss needs one; a third is frozen."""

    def __init__(self):
        super().__init__()
        self.used, self.spare, self.frozen = nn.Linear(8, 4), nn.Linear(8, 4), nn.Linear(4, 4)
        self.frozen.requires_grad_(False)

    def forward(self, x):
        return self.frozen(self.used(x))


def trained(folder, model=None, **options):
    model = model or Half()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with mpdiag.record(model, optimizer, folder, **options):
        step(model, optimizer)
    return mpdiag.open_run(folder)


def as_earlier(folder):
    """The run as an earlier version wrote it: shares are worked out from the table of modules."""
    path = folder / "meta.json"
    meta = json.loads(path.read_text(encoding="utf-8"))
    del meta["coverage"]["seen"]
    path.write_text(json.dumps(meta), encoding="utf-8")
    return mpdiag.open_run(folder)


def test_a_part_that_the_loss_does_not_need_is_unseen(tmp_path):
    coverage = coverage_of(trained(tmp_path / "run"))
    assert coverage == Coverage(
        parameters=36 + 36 + 20,
        parameters_seen=36 + 36 + 20,  # the values of all weights are counted once
        gradients=72,
        gradients_seen=36,
        modules=4,
        modules_seen=3,
        activation_gradients=3,
        activation_gradients_seen=3,
    )
    assert coverage.gradients_unseen == 0.5
    assert coverage.activation_gradients_unseen == 0.0


def test_what_a_filter_leaves_out_is_unseen(tmp_path):
    coverage = coverage_of(trained(tmp_path / "run", include="^used"))
    assert (coverage.parameters, coverage.parameters_seen) == (92, 36)
    assert (coverage.modules, coverage.modules_seen) == (4, 1)


class Encoded(nn.Module):
    """A frozen encoder and an encoding of positions, before the layer that is trained."""

    def __init__(self):
        super().__init__()
        self.encoder, self.position, self.last = nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4)
        self.encoder.requires_grad_(False)

    def forward(self, x):
        positions = torch.arange(8.0)
        return self.last(self.encoder(x) + self.position(positions))


def test_what_nothing_trained_goes_into_has_no_gradient_that_could_be_missed(tmp_path):
    run = trained(tmp_path / "run", Encoded())
    stated = coverage_of(run)
    assert (stated.activation_gradients, stated.activation_gradients_seen) == (2, 2)
    reasons = {
        item["name"]: item["reason"]
        for item in run.meta["coverage"]["not_recorded"]
        if item["what"] == "activation_grad"
    }
    assert reasons == {"encoder": UNTRAINED, "position": UNTRAINED}
    verdict = mpdiag.analyze(run).verdict
    assert not any("output gradients" in clause for clause in verdict.not_examined)
    assert coverage_of(as_earlier(tmp_path / "run")) == stated


def test_of_an_earlier_recording_it_is_worked_out_from_the_table(tmp_path):
    stated = coverage_of(trained(tmp_path / "run"))
    assert coverage_of(as_earlier(tmp_path / "run")) == stated
    frozen = NamedParameter("p", nn.Parameter(torch.zeros(1), requires_grad=False))
    assert frozen.row()["reason"] == FROZEN


def test_a_run_without_a_table_says_nothing(tmp_path):
    model, optimizer = model_and_optimizer()
    mp = mpdiag.MixedPrecision(model, optimizer, mpdiag.PrecisionPlan(), run=tmp_path / "run")
    mp.close()
    assert coverage_of(mpdiag.open_run(tmp_path / "run")) is None
