"""The audit of recordings and of objects, against trainings of a known precision."""

import json

import pytest
import torch
from audited_trainings import BF16, CASES, Masters, model, train

import mpdiag
from mpdiag.errors import DamagedRun, NewerSchema, UsageError
from mpdiag.runs.precision import PRECISION, read_precision

ENTRY = {"name": "a", "numel": 1, "trainable": True, "optimizer": None, "stored": "float32"}
EMPTY = {"schema_version": 1, "step": 0, "changes": [], "settings": [], "parameters": []}


@pytest.fixture(scope="module")
def audits(tmp_path_factory):
    folder = tmp_path_factory.mktemp("audits")
    return {case.name: case.run(folder / case.name) for case in CASES}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_an_audit_says_what_the_training_is(audits, case):
    found = audits[case.name]
    assert found.line == case.line
    assert {f.code for f in found.findings} == set(case.codes)


def test_the_dtypes_are_those_of_torch(audits):
    by_name = {p.name: p for p in audits["autocast"].parameters}
    linear, norm = by_name["3.weight"], by_name["1.weight"]
    assert (linear.stored, linear.forward, linear.set_by) == ("float32", "bfloat16", "autocast")
    assert linear.input_grad == linear.weight_grad == "bfloat16"
    # Autocast on a CPU leaves the layer norm its FP32 weight, and its gradient arrives in BF16.
    assert (norm.forward, norm.weight_grad, norm.set_by) == ("float32", "bfloat16", "default")
    first = audits["bf16"].parameters[0]
    assert first.states == {"exp_avg": "bfloat16", "exp_avg_sq": "bfloat16"}
    assert (first.grad, first.accumulated, first.master) == ("bfloat16", "bfloat16", None)
    assert first.set_by == "before recording"
    assert first.unknown["reduced"] == "one process: nothing is reduced"
    assert {p.master for p in audits["bf16-masters"].parameters} == {"float32"}


def test_objects_are_audited_without_a_step():
    net = model(BF16)
    found = mpdiag.audit(net, torch.optim.AdamW(net.parameters()))
    assert found.line == "BF16 weights, no FP32 masters"
    assert found.parameters[0].unknown["states"] == "the optimizer has not stepped it"
    assert {a.answer for a in found.answers} == {"no"}


def test_what_no_optimizer_holds_is_said(tmp_path):
    net = model()
    held = [p for name, p in net.named_parameters() if not name.startswith("1.")]
    found = train(net, torch.optim.SGD(held, lr=0.1), tmp_path / "run")
    (finding,) = found.findings
    assert finding.code == "precision-unheld"
    assert finding.evidence["parameters"] == ["1.weight", "1.bias"]


def test_an_optimizer_of_copies_holds_what_it_copies(tmp_path):
    net = model(BF16)
    net[1].float()
    found = train(net, Masters(net.parameters(), lr=1e-2), tmp_path / "run")
    assert {(p.stored, p.master, p.optimizer) for p in found.parameters} == {
        ("bfloat16", "float32", "Masters"),
        ("float32", "float32", "Masters"),
    }
    assert "precision-unheld" not in {f.code for f in found.findings}


def test_a_dtype_that_changes_under_way_is_noted(tmp_path):
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)

    def narrow(step):
        if step == 1:
            for state in optimizer.state.values():
                state["momentum_buffer"] = state["momentum_buffer"].bfloat16()

    changes = train(net, optimizer, tmp_path / "run", steps=4, between=narrow).facts.changes
    assert {(c["step"], c["field"]) for c in changes} == {(2, "states")}
    assert changes[0]["is"] == {"momentum_buffer": "bfloat16"}


def test_the_document_holds_what_the_contract_says(audits):
    document = json.loads(json.dumps(audits["bf16"].to_json()))
    assert document["schema_version"] == 1
    fields = {
        "name", "numel", "stored", "forward", "input_grad", "weight_grad", "grad", "accumulated",
        "reduced", "states", "master", "set_by", "optimizer", "trainable", "unknown",
    }  # fmt: skip
    assert all(set(p) == fields for p in document["parameters"])
    assert {a["answer"] for a in document["answers"]} <= {"exact", "bound", "no"}
    assert all(f["code"].startswith("precision-") for f in document["findings"])


@pytest.mark.parametrize(
    ("content", "error"),
    [
        ("{", DamagedRun),
        ("[]", DamagedRun),
        ('{"schema_version": 1}', DamagedRun),
        ('{"schema_version": 9}', NewerSchema),
        (json.dumps(EMPTY | {"parameters": [ENTRY | {"numel": -1}]}), DamagedRun),
        (json.dumps(EMPTY | {"parameters": [ENTRY | {"states": {"a": 1}}]}), DamagedRun),
    ],
)
def test_a_damaged_document_is_one_sentence(tmp_path, content, error):
    (tmp_path / PRECISION).write_text(content)
    with pytest.raises(error) as caught:
        read_precision(tmp_path)
    assert len(str(caught.value).splitlines()) == 1


def test_a_run_without_it_says_what_to_do(tmp_path, audits):
    del audits
    net = model()
    train(net, torch.optim.SGD(net.parameters(), lr=0.1), tmp_path / "run")
    (tmp_path / "run" / PRECISION).unlink()
    with pytest.raises(UsageError, match="record it again"):
        mpdiag.audit(tmp_path / "run")
    with pytest.raises(UsageError, match="give audit\\(\\) the run alone"):
        mpdiag.audit(tmp_path / "run", torch.optim.SGD(net.parameters(), lr=0.1))
