"""Public precision faults: rebuilt ones are found, their twins are clean, and scoring counts right."""

from __future__ import annotations

import ast

import pytest

import mpdiag
from studies import audited_faults as study

CHEAP = {
    "megatron_149": "precision-narrow-sum",
    "speculators_668": "precision-updates-rounded-away",
}


@pytest.mark.parametrize("name", study.names())
def test_every_file_names_its_thread_and_what_it_replaces(name):
    module = study.load(name)
    source = (study.FOLDER / f"{name}.py").read_text()
    assert "Thread" in module.__doc__
    assert "#" + name.rpartition("_")[2] in module.__doc__
    assert "Stand-in" in module.__doc__
    assert module.RANKS in (1, 2)
    assert module.CAUSE
    assert module.CONSEQUENCE
    imported = {n.module for n in ast.walk(ast.parse(source)) if isinstance(n, ast.ImportFrom)}
    assert not any(str(found).startswith("mpdiag") for found in imported)


@pytest.mark.parametrize(("name", "code"), CHEAP.items())
def test_a_fault_is_found_and_its_twin_is_clean(name, code, fork_server, tmp_path):
    found = {}
    for half in study.HALVES:
        script = study.FOLDER / f"{name}.py"
        words = ("record", "--out", tmp_path / half, "--every", "1", "--", script, half)
        done = fork_server("mpdiag", *words, cwd=tmp_path)
        assert done.code == 0, done.err
        found[half] = {f.code for f in mpdiag.audit(tmp_path / half).findings}
    assert code in found["fault"]
    assert found["twin"] == set()


def test_scoring_tells_cause_consequence_and_false_alarms():
    cause, consequence = study.NAMED_BY["areal_1292"]
    named = {"code": cause.code, "message": "AdamW's exp_avg_sq in BF16 cannot fall"}
    measured = {**named, "message": named["message"] + "; it is 1.6 times FP32's"}
    other = {"code": "precision-unheld", "message": "no optimizer holds a"}

    def scored(fault, twin):
        halves = {"fault": {"findings": fault}, "twin": {"findings": twin}}
        return study.score("areal_1292", halves)

    row = scored([named, other], [])
    assert (row["cause"], row["consequence"], row["twin clean"]) == (True, False, True)
    assert row["others"] == [other]
    row = scored([measured], [named])
    assert (row["cause"], row["consequence"], row["twin clean"]) == (True, True, False)
    assert consequence(measured)
    assert not scored([], [other])["cause"]
