"""The ranking of operations: which source it rests on, and that its receipt gives the same."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from receipt_checks import same_numbers

from mpdiag.analysis.analyzer import analyze
from mpdiag.errors import DamagedRun, DamagedSearch
from mpdiag.plan import Fp32Choice
from mpdiag.reports.contents import read_contents
from mpdiag.reports.views.operations import ranking, sensitivity, shown
from mpdiag.runs.results import (
    MAY,
    MUST,
    OPEN,
    OperationSensitivity,
    Sensitivities,
    read_search,
    read_sensitivities,
)

SEARCH = json.loads(Path(__file__).with_name("search.json").read_text(encoding="utf-8"))


def row(module, op, error, **more):
    finite = error is not None
    values = {"output_error": 0.1, "loss_error": 0.2, "gradient_cosine": 0.9, "estimate": 0.3}
    return OperationSensitivity(
        module=module, op=op, calls=1, gradient_error=error, worst_gradient="w", finite=finite,
        **{**values, **more},
    )  # fmt: skip


@pytest.fixture(scope="module")
def digits(root, tmp_path_factory):
    """A run without operations and without measurements, and its analysis."""
    folder = tmp_path_factory.mktemp("run") / "digits"
    shutil.copytree(root / "sample_runs" / "digits", folder)
    for name in ("sensitivity.json", "search.json"):
        (folder / name).unlink(missing_ok=True)
    return analyze(folder)


@pytest.fixture
def folder(digits, tmp_path):
    """A copy to put files into."""
    return shutil.copytree(digits.run.folder, tmp_path / "run")


def ranked(folder, analysis):
    """The ranking of an analysis by the files of another folder."""
    contents = read_contents(analysis)
    measured, search = read_sensitivities(folder), read_search(folder)
    return ranking(replace(contents, sensitivities=measured, search=search))


def receipt(picture):
    names: dict[str, object] = {}
    exec(compile(picture.receipt, "sensitivity.py", "exec"), names)
    return names["frame"]


def test_measured_goes_first(folder, digits):
    rows = (row("stem", "conv2d", 0.01), row("blocks.0", "add", None), row("head", "linear", 0.02))
    Sensitivities("fp16", 64.0, rows).save(folder)
    (folder / "search.json").write_text(json.dumps(SEARCH))
    found = ranked(folder, digits)
    assert (found.source, found.scale) == ("measured", 64.0)
    assert list(found.frame["operation"]) == ["add", "linear", "conv2d"]
    assert np.isinf(found.frame["value"].iloc[0])
    assert list(found.frame["trained"]) == ["", "", MAY]
    picture = sensitivity(str(folder), found)
    assert "Measured" in picture.caption
    same_numbers(picture, needed=["module", "operation", "value"])


def test_what_trainings_decided(folder, digits):
    (folder / "search.json").write_text(json.dumps(SEARCH))
    found = ranked(folder, digits)
    assert found.source == "searched"
    decided = dict(zip(found.frame["operation"], found.frame["trained"], strict=True))
    assert decided == {"pow": MUST, "linear": MAY, "conv2d": MAY}
    assert found.frame["operation"].iloc[0] == "pow"
    assert read_search(folder).trainings == 5
    assert list(found.frame["value"]) == [np.inf, 0.5, 0.25]
    same_numbers(sensitivity(str(folder), found), needed=["module", "operation", "value"])


def test_what_no_training_decided_is_open(folder, digits):
    undecided = {**SEARCH, "probes": SEARCH["probes"][1:]}
    (folder / "search.json").write_text(json.dumps(undecided))
    assert read_search(folder).decisions["head", "pow"] == OPEN
    (folder / "search.json").write_text(json.dumps({**SEARCH, "probes": []}))
    assert set(read_search(folder).decisions.values()) == {OPEN}
    picture = sensitivity(str(folder), ranked(folder, digits))
    assert "No training has shown yet" in picture.caption
    assert MAY not in {trace.name for trace in picture.figure.data}


@pytest.mark.parametrize("text", ["{", "[]", '{"candidates": [[1]]}', '{"candidates": null}'])
def test_damage_is_a_sentence(folder, digits, text):
    (folder / "search.json").write_text(text)
    with pytest.raises(DamagedSearch, match="delete it"):
        ranked(folder, digits)
    (folder / "search.json").unlink()
    (folder / "sensitivity.json").write_text(text)
    with pytest.raises(DamagedRun, match="damaged"):
        ranked(folder, digits)


def test_modules_stand_for_operations_that_were_not_recorded(folder, digits):
    found = ranked(folder, digits)
    assert (found.source, found.by_operation) == ("recorded", False)
    assert list(found.frame["value"]) == sorted(found.frame["value"], reverse=True)
    same_numbers(sensitivity(str(folder), found), needed=["module", "forward"])


def test_recorded_operations_have_their_line(root):
    run = root / "sample_runs" / "vgg"
    analysis = analyze(run)
    contents = read_contents(analysis)
    found = ranking(replace(contents, sensitivities=None, search=None))
    assert (found.source, found.by_operation) == ("recorded", True)
    assert (found.frame["line"] != "").all()
    own = receipt(sensitivity(str(run), found))
    where = own["file"].astype(str) + ":" + own["line"].astype(str)
    largest = own["forward"].groupby([own["module"], where]).max()
    rows = found.frame.assign(where=found.frame["line"].str.split(": ").str[0])
    forward = rows.groupby(["module", "where"])["forward"].max()
    for key, error in forward.items():
        assert largest[key] == pytest.approx(error, rel=1e-6)


def test_measured_operations_find_their_line_by_the_name_users_call(root, folder):
    analysis = analyze(root / "sample_runs" / "vgg")
    rows = (row("features.0", "conv2d", 0.5), row("(outside)", "log_softmax", 0.1))
    Sensitivities("fp16", 1.0, rows).save(folder)
    lines = list(ranked(folder, analysis).frame["line"])
    assert "vgg.py" in lines[0]  # recorded as aten::convolution
    assert "cross_entropy" in lines[1]


def test_the_plan_s_reason_stands_beside_its_operation(folder, digits):
    rows = (row("head", "exp", 0.5), row("body", "mm", 0.1), row("x", "sum", 0.05))
    Sensitivities("fp16", 1.0, rows).save(folder)
    choice = Fp32Choice("exp", "head", "it reaches 1e5")
    kept = replace(digits, plan=replace(digits.plan, fp32_operations=(choice,), fp32_modules=()))
    found = ranked(folder, kept)
    *known, listed = found.frame["plan"]
    assert known == ["it reaches 1e5", ""]
    assert "autocast's own list" in listed
    names = {trace.name for trace in sensitivity("RUN", found).figure.data if trace.name}
    assert names == {"stays in FP32", "not kept in FP32"}
    table = shown(found)
    assert "by training" not in table  # nothing was trained
    assert "why the plan keeps it in FP32" in table


def test_nothing_to_rank_is_a_sentence(folder, digits):
    Sensitivities("fp16", 1.0, ()).save(folder)
    picture = sensitivity(str(folder), ranked(folder, digits))
    assert picture.figure.layout.annotations[0].text == "no operation was recorded"
