"""Real libraries: what the audit says of them is what a witness sees; the dear ones run by hand."""

import json

import pytest
from support import NEEDS_GLOO

import mpdiag
from studies import audited_libraries as study

CHEAP = [
    "fsdp1-2",
    "tp-fsdp2-2",
    "accelerate-fsdp2-2",
    "trainer-auto",
    "lightning-bf16-mixed",
]


@pytest.mark.parametrize("name", CHEAP)
@NEEDS_GLOO
def test_the_audit_says_what_the_witness_sees(name, fork_server, tmp_path):
    case = study.CASES[name]
    for package in case.needs:
        pytest.importorskip(package)
    file, kind = case.script.split()
    script = (study.SCRIPTS / file, kind)
    words = ("record", "--out", "run", "--every", "1", "--operations", "3", "--")
    cpu = {"ACCELERATE_USE_CPU": "true"}
    for program, given in (
        ("python", (study.HERE / "dtype_witness.py", "seen.json")),
        ("mpdiag", words),
    ):
        started = (
            fork_server.ranks(program, *given, *script, cwd=tmp_path, world=case.ranks, env=cpu)
            if case.ranks > 1
            else [fork_server(program, *given, *script, cwd=tmp_path, env=cpu)]
        )
        assert [done.code for done in started] == [0] * case.ranks, started[0].err
    audit = mpdiag.audit(tmp_path / "run")
    seen = json.loads((tmp_path / "seen.json").read_text())
    assert list(study.differences(seen, audit.to_json())) == []
    assert set(case.codes) <= {finding.code for finding in audit.findings}
    assert mpdiag.open_run(tmp_path / "run").meta["failures"] == []


def test_a_difference_is_seen():
    parameter = {
        "name": "module.a.weight", "stored": "float32", "trainable": True, "accumulated": "float32",
        "states": {"exp_avg": "float32"}, "forward": "float32", "reduced": None,
    }  # fmt: skip
    witnessed = {
        "stored": [["int8", 64], ["float32", 8]], "trainable": True, "grad": "bfloat16",
        "states": {"exp_avg": [["uint8", 64]]},
    }  # fmt: skip
    seen = {
        "parameters": {"a.weight": witnessed, "b": witnessed},
        "forward": {"a": {"bfloat16": 3}},
        "collectives": {"bfloat16": 1000, "float32": 3},
    }
    found = list(study.differences(seen, {"parameters": [parameter]}))
    assert [line.split(" ")[1] for line in found] == [
        "only", "stored", "accumulated", "states", "forward", "are"
    ]  # fmt: skip
