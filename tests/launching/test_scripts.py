"""Unmodified scripts of the shapes people write: recorded bit for bit, trained as well as in FP32.

``spread.json`` holds the metric of each script in FP32 over eight seeds, on this project's machine
(``python tests/launching/spread.py``); a training by the plan must end within
three standard deviations of its logarithm (the seed that is trained may itself be the extreme one).
"""

import json
import math
import os
import statistics
from pathlib import Path

import pytest
from script_processes import SCRIPTS, ForkServer

from mpdiag.runs.run import open_run
from mpdiag.runs.training_log import read_log

pytestmark = pytest.mark.long

SPREAD = json.loads(Path(__file__).with_name("spread.json").read_text())
NAMES = """
    plain_loop trainer_class with_files/train lbfgs_closure accumulation own_grad_scaler
    lightning_script hf_trainer accelerate_script workers
""".split()
ALIKE = {"plain_loop", "trainer_class", "accumulation", "own_grad_scaler", "hf_trainer"}
STEPS = {"accumulation": 60, "hf_trainer": 64, "lightning_script": 64}


@pytest.fixture(scope="module")
def fork_server():
    """One that has the libraries, too, which some of these scripts use."""
    if not hasattr(os, "fork"):
        pytest.skip("this system cannot fork")
    made = ForkServer("lightning", "transformers.trainer")
    yield made
    made.close()


@pytest.fixture(scope="module")
def told(fork_server, tmp_path_factory):
    """Each script run plainly, recorded, and trained by the plan of its record; at most once."""
    known = {}

    def tell(name):
        if name not in known:
            folder = tmp_path_factory.mktemp(Path(name).name)
            script = SCRIPTS / f"{name}.py"
            plain = fork_server("python", script, cwd=folder)
            if "this script needs" in plain.err:
                pytest.skip(plain.err.strip())
            assert plain.code == 0, plain.err
            record = ("record", "--out", "run", "--every", "4", "--", script)
            known[name] = folder, plain, fork_server("mpdiag", *record, cwd=folder)
        return known[name]

    return tell


@pytest.mark.parametrize("name", NAMES)
def test_recording_changes_nothing(told, name):
    folder, plain, recorded = told(name)
    assert recorded.code == 0, recorded.err
    assert recorded.digest == plain.digest
    assert recorded.out.split()[-4:] == plain.out.split()[-4:]
    assert recorded.err.splitlines()[-1] == "next: mpdiag analyze run -o plan.json"
    run = open_run(folder / "run")
    assert run.meta["state"] == "complete"
    assert run.meta["script"].endswith(f"{name}.py")
    assert run.meta["argv"] == [str(SCRIPTS / f"{name}.py")]
    if name in STEPS:
        assert run.meta["steps_seen"] == STEPS[name]
    kinds = set(run.frame()["kind"])
    assert kinds == {"activation", "activation_grad", "weight", "weight_grad", "update"}
    frame = run.frame()
    assert len(frame[(frame["step"] == 0) & (frame["kind"] == "activation_grad")]) > 0


@pytest.mark.parametrize("name", NAMES)
def test_training_by_the_plan_ends_within_the_seeds_spread(told, fork_server, name):
    folder, plain, _ = told(name)
    analyzed = fork_server("mpdiag", "analyze", "run", "-o", "plan.json", cwd=folder)
    assert analyzed.code == 0, analyzed.err
    script = SCRIPTS / f"{name}.py"
    trained = fork_server(
        "mpdiag", "train", "--plan", "plan.json", "--out", "fp16", "--", script, cwd=folder
    )
    assert trained.code == 0, trained.err
    assert trained.digest != plain.digest  # it did train in another precision
    logs = [math.log(metric) for metric in SPREAD[name]]
    away = abs(math.log(trained.metric) - statistics.mean(logs))
    assert away <= 3 * statistics.stdev(logs)
    meta = open_run(folder / "fp16").meta
    assert meta["training"]["dtype"] == "fp16"
    steps = read_log(folder / "fp16").steps
    assert len(steps) == STEPS.get(name, len(steps))
    assert not any(step.skipped for step in steps)
    if name in ALIKE:  # one loss a step: the recording's losses are comparable
        recorded = read_log(folder / "run").steps
        assert len(recorded) == len(steps)
        assert recorded[0].loss == pytest.approx(steps[0].loss, rel=0.02)
        assert trained.err.splitlines()[-1] == "next: mpdiag compare run fp16"


def test_models_are_called_what_the_script_calls_them(told):
    folder, _, _ = told("trainer_class")
    names = {row["name"]: row["script_name"] for row in open_run(folder / "run").modules()}
    assert names["features.0.weight"] == "model.features.0.weight"
    assert names[""] == "model"


def test_calls_of_a_models_parts_are_forward_passes(told):
    folder, _, _ = told("accumulation")
    frame = open_run(folder / "run").frame()
    outputs = frame[(frame["kind"] == "activation_grad") & (frame["name"] == "head")]
    assert sorted(outputs[outputs["step"] == 4]["micro"]) == [0, 1, 2, 3]


def test_a_script_with_its_own_mixed_precision_is_told(told, fork_server):
    folder, _, _ = told("own_grad_scaler")
    fork_server("mpdiag", "analyze", "run", "-o", "plan.json", cwd=folder)
    script = SCRIPTS / "own_grad_scaler.py"
    trained = fork_server("mpdiag", "train", "--plan", "plan.json", "--", script, cwd=folder)
    assert trained.err.count("of its own") == 2
    assert "GradScaler" in trained.err
    assert "autocast" in trained.err
