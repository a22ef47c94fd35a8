"""``mpdiag train`` by the plan of another model, and of an edited one."""

from __future__ import annotations

from dataclasses import replace

import pytest
from script_processes import TRAIN
from support import constant

from mpdiag.tracing.fingerprint import fingerprint

OWN = [("0.weight", (8, 4)), ("0.bias", (8,)), ("2.weight", (1, 8)), ("2.bias", (1,))]
CNN = [("stem.weight", (8, 3, 3, 3)), ("norm.weight", (8,)), ("head.weight", (10, 8))]


@pytest.mark.parametrize(
    ("model", "code", "sentence"),
    [
        (OWN, 0, None),
        (CNN, 3, "error: this script cannot be trained by a plan: the plan is of another model"),
        (OWN[:2], 0, "the plan was made without these layers of the model"),
    ],
)
def test_whose_plan_it_is(fork_server, tmp_path, model, code, sentence):
    (tmp_path / "train.py").write_text(TRAIN)
    replace(constant(8.0), model=fingerprint(model)).save(tmp_path / "plan.json")
    words = ("train", "--plan", "plan.json", "--out", "run", "--", "train.py")
    done = fork_server("mpdiag", *words, cwd=tmp_path)
    assert done.code == code, done.err
    assert (sentence or "") in done.err
    assert ("model" in done.err) == (sentence is not None)
