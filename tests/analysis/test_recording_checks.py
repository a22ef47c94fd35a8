"""What is said of a recording that one should not rely on."""

import json
from types import SimpleNamespace

import pytest
import torch
from recorded import model_and_optimizer, recorded_steps
from recorded_steps import loss_of_network, record_steps
from row_buffer import table_of
from support import network

import mpdiag
from mpdiag.analysis import run_statistics
from mpdiag.analysis.recording_checks import period_findings, rank_findings
from mpdiag.reports.text.analysis import after_analysis
from mpdiag.runs.run import now, open_run
from mpdiag.runs.writer import RunWriter


def found(recorded, steps, **cadence):
    run = SimpleNamespace(meta={"steps_seen": steps, "cadence": cadence})
    return list(period_findings(run, list(recorded)))


def test_a_cadence_names_the_periods_that_it_cannot_see():
    (finding,) = found(range(0, 400, 2), 400, every=2)
    assert (finding.code, finding.severity) == ("periods-not-seen", "info")
    assert finding.message == (
        "the recording may have missed what your training does every 2, 4, 6, 8, 10, 12, 14 and 16 "
        "steps; 200 of 400 steps were recorded"
    )
    assert finding.evidence["unseen"]["2"] == [1]
    assert "every=1" in finding.fix
    assert "every 5, 10 and 15 steps" in found(range(0, 400, 5), 400, every=5)[0].message
    (short,) = found([*range(20), 30, 59, 61, 82], 100)
    assert "every 4 to 16 steps" in short.message
    assert found(range(0, 400, 17), 400, every=17) == []  # every phase was recorded
    assert found(range(100), 100) == []


@pytest.mark.parametrize("rows_held", [True, False])
def test_it_stands_in_the_analysis(tmp_path, monkeypatch, rows_held):
    record_steps(tmp_path, network(), loss_of_network, 9, rate=0.01, every=4, operations=0)
    if not rows_held:
        monkeypatch.setattr(run_statistics, "STREAM_FROM", 0)
    analysis = mpdiag.analyze(open_run(tmp_path))
    (finding,) = (f for f in analysis.findings if f.code == "periods-not-seen")
    assert "3 of 9 steps were recorded" in finding.message
    assert "every 2 and 4 steps" in finding.message


@pytest.fixture
def run(tmp_path):
    """A recording, whose meta.json is changed by a call."""
    recorded_steps(tmp_path / "run", model_and_optimizer()[0], 3)

    def changed(**fields):
        path = tmp_path / "run" / "meta.json"
        meta = json.loads(path.read_text(encoding="utf-8"))
        for name, value in fields.items():
            meta.pop(name) if value is None else meta.update({name: value})
        path.write_text(json.dumps(meta), encoding="utf-8")
        return {f.code: f for f in mpdiag.analyze(tmp_path / "run").findings}

    return changed


SEEN = {"type": "SGD", "steps_taken": 3, "steps_recorded": 3}


@pytest.mark.parametrize(
    ("optimizers", "missed"),
    [
        ([SEEN, {"type": "Adam", "steps_taken": 3, "steps_recorded": 0}], ["Adam"]),
        ([{"type": "SGD"}], []),  # of an earlier version
        ([SEEN], []),
        ([{"type": "SGD", "steps_taken": 0, "steps_recorded": 0}], []),
    ],
)
def test_an_optimizer_whose_steps_were_all_missed_is_named(run, optimizers, missed):
    found = run(optimizers=optimizers, precision=None)
    assert "not-fp32" not in found  # as before autocast was recorded
    assert ("optimizer-not-recorded" in found) == bool(missed)
    if missed:
        finding = found["optimizer-not-recorded"]
        assert finding.message.startswith("no step of 1 optimizer was recorded")
        assert finding.evidence == {"optimizers": missed}


def test_a_double_precision_recording_says_what_it_does_not_show(tmp_path):
    torch.manual_seed(0)
    x = torch.randn(5, 8, dtype=torch.float64)
    recorded_steps(tmp_path / "run", torch.nn.Linear(8, 4).double(), 3, x)
    analysis = mpdiag.analyze(tmp_path / "run")
    finding = next(f for f in analysis.findings if f.code == "not-fp32")
    assert finding.message.startswith("the weights are float64")
    assert "it does not show whether FP32 is enough" in finding.message
    assert "rounded away" not in finding.message  # it holds more than FP32, and not less
    assert analysis.verdict.level == "cannot"
    assert "a training in float64: it does not show whether FP32 works" in analysis.verdict.text
    named = after_analysis(analysis, tmp_path / "run", tmp_path / "plan.json")
    assert named == ("mpdiag", "report", tmp_path / "run")  # a training by its plan is refused


def test_without_activation_gradients_no_loss_scale_is_named(tmp_path):
    """As where ``torch.func`` computes gradients, and the loop assigns them."""
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with mpdiag.record(model, optimizer, tmp_path / "run", every=1):
        for _ in range(3):
            for parameter in model.parameters():
                parameter.grad = torch.randn_like(parameter)
            optimizer.step()
    analysis = mpdiag.analyze(tmp_path / "run")
    (finding,) = [f for f in analysis.findings if f.code == "no-activation-gradients"]
    assert "it sees gradients where a module returns" in finding.fix
    assert analysis.plan.loss_scale.need == "unknown"
    assert analysis.verdict.text.startswith("The recording has no activation gradients")
    assert not analysis.concluded
    assert analysis.plan.master_weights.needed


def test_parameters_that_no_module_computes_with_have_no_activation_gradients(tmp_path):
    """The loop runs all inside the recorder: more of the same is no help, a ``forward`` is."""
    torch.manual_seed(0)
    bare = torch.nn.ParameterDict({"w": torch.randn(8, 4)})

    class Called(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.table = bare

        def forward(self, x):
            return x @ self.table["w"]

    for name, model, gradients in (("bare", bare, False), ("called", Called(), True)):
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        with mpdiag.record(model, optimizer, tmp_path / name, every=1):
            for _ in range(3):
                x = torch.randn(16, 8)
                optimizer.zero_grad()
                (x @ bare["w"] if model is bare else model(x)).square().mean().backward()
                optimizer.step()
        codes = {f.code for f in mpdiag.analyze(tmp_path / name).findings}
        assert ("no-activation-gradients" not in codes) == gradients


def test_a_loop_that_never_steps_is_a_finding(tmp_path):
    model, optimizer = model_and_optimizer()
    with mpdiag.record(model, optimizer, tmp_path):
        model(torch.randn(5, 8)).sum().backward()
    assert "no-optimizer-step" in {f.code for f in mpdiag.analyze(tmp_path).findings}


LABELS = {"placement": "replicated", "stage": "reduced"}
OLD = "2026-01-01T00:00:00.000+00:00"


@pytest.fixture
def fleet(tmp_path):
    """Write a run: for each rank its state, and the weights of its steps."""

    def write(ranks, world=None, updated=OLD):
        for rank, (state, weights) in ranks.items():
            writer = RunWriter(tmp_path / "run", rank=rank, world_size=world or len(ranks))
            rows = [
                (step, "weight", "up.weight", weight, LABELS | {"rank": rank})
                for step, weight in enumerate(weights)
            ]
            writer.append(table_of(rows))
            meta = {"rank": rank, "world_size": world or len(ranks), "state": state}
            writer.write_meta({**meta, "steps_seen": len(weights), "updated": updated})
        return list(rank_findings(open_run(tmp_path / "run")))

    return write


SAME = [[1.0, 2.0]] * 4


def test_a_killed_rank_is_named_with_its_last_step(fleet):
    (finding,) = fleet({0: ("failed", SAME), 1: ("recording", SAME[:2]), 2: ("failed", SAME)})
    assert (finding.code, finding.severity) == ("rank-stopped", "warning")
    assert (finding.evidence["rank"], finding.evidence["steps"]) == (1, 2)
    assert "rank 1 of 3 was killed after 2 steps" in finding.message
    assert OLD in finding.message
    json.dumps(finding.to_json())


@pytest.mark.parametrize(
    ("ranks", "updated"),
    [
        ({0: ("complete", SAME), 1: ("complete", SAME)}, OLD),
        ({0: ("recording", SAME), 1: ("recording", SAME[:3])}, None),  # it is being recorded
    ],
    ids=["both are complete", "both go on"],
)
def test_ranks_that_agree_and_end_or_go_on_are_not_mentioned(fleet, ranks, updated):
    assert fleet(ranks, updated=updated or now()) == []  # now: not when tests were collected


OTHER = [*SAME[:2], [1.0, 2.5], [1.0, 3.0]]
STOPPED = {
    "rank": 1,
    "state": "failed",
    "steps": 3,
    "steps_of_ranks": {"0": 4, "1": 3},
    "updated": OLD,
}
MISSING = {"ranks": [1], "world_size": 2}
DIFFER = {"parameters": ["up.weight"], "first_step": 2, "ranks": [0, 1]}


@pytest.mark.parametrize(
    ("second", "code", "evidence", "words"),
    [
        (("failed", SAME[:3]), "rank-stopped", STOPPED, "failed after 3 steps"),
        (None, "rank-missing", MISSING, "left no recording"),
        (("complete", OTHER), "ranks-disagree", DIFFER, "different copies of up.weight at step 2"),
    ],
)
def test_a_rank_that_is_unlike_the_other_is_named(fleet, second, code, evidence, words):
    ranks = {0: ("complete", SAME)} | ({} if second is None else {1: second})
    (finding,) = fleet(ranks, world=2)
    assert (finding.code, words in finding.message) == (code, True)
    assert finding.evidence == evidence
