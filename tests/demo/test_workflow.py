"""The main job as a user does it: the demo in a real process, then every command on its run."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest


def mpdiag(*words, cwd):
    return subprocess.run(
        [sys.executable, "-m", "mpdiag", *map(str, words)],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=900,  # a busy machine is no failure
        check=False,
    )


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    folder = tmp_path_factory.mktemp("demo")
    done = mpdiag("demo", "digits", "--steps", "100", cwd=folder)
    assert done.returncode == 0, done.stderr
    return folder, done


def test_the_demo_prints_a_verdict_and_names_the_next_command(demo):
    folder, done = demo
    assert done.stdout.startswith("Expected from the recording of ")
    assert "this trains in FP16 without a loss scale" in " ".join(done.stdout.split())
    assert "scale 1 ·" in done.stdout
    assert "next: mpdiag why runs/digits" in done.stderr
    assert (folder / "runs" / "digits" / "plan.json").is_file()


def test_the_demo_trains_three_ways_and_compares(demo):
    folder, done = demo
    assert "Trained from the same seed" in done.stdout
    assert "FP16 loses nothing here" in done.stdout
    for name in ("digits", "digits-fp16-no-scale", "digits-fp16-plan"):
        log = (folder / "runs" / name / "training.jsonl").read_text().splitlines()
        assert len(log) == 101, name  # a line a step, and the metric
    compared = mpdiag("compare", "runs/digits", "runs/digits-fp16-plan", cwd=folder)
    assert compared.returncode == 0
    assert "accuracy" in compared.stdout


def test_json_is_one_document(demo):
    folder, _ = demo
    done = mpdiag("analyze", "runs/digits", "--json", "-o", "plan.json", cwd=folder)
    document = json.loads(done.stdout)
    assert document["plan"] == json.loads((folder / "plan.json").read_text())
    kinds = {layer["kind"] for layer in document["layers"]}
    assert kinds == {"activation", "activation_grad", "weight", "weight_grad", "update"}


def test_strict_lets_a_healthy_run_pass(demo):
    folder, _ = demo
    assert mpdiag("analyze", "runs/digits", "--strict", cwd=folder).returncode == 0


@pytest.mark.parametrize(
    "words",
    [
        ("why", "runs/digits", "stem"),
        ("why", "runs/digits", "stem.weight"),
        ("replay", "runs/digits", "--scaler", "lognormal"),
        ("replay", "runs/digits", "--json"),
        ("compare", "runs/digits", "runs/digits-fp16-no-scale", "--json"),
        ("runs",),
        ("runs", "--json"),
        ("analyze", "runs/digits", "--target", "bf16"),
        ("analyze", "runs/digits", "--target", "fp8_e4m3"),
    ],
    ids=" ".join,
)
def test_every_command_works_on_the_run(demo, words):
    done = mpdiag(*words, cwd=demo[0])
    assert done.returncode == 0, done.stderr
    assert done.stdout
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("words", "code", "sentence"),
    [
        (("analyze", "nowhere"), 3, "there is no run at nowhere"),
        (("why", "runs/digits", "steem"), 3, "stem"),
        (("demo", "nothing"), 2, "digits"),
        (("replay", "runs/digits", "--init-scale", "0"), 2, "init_scale"),
        (("analyze", "runs/digits", "--target", "fp4"), 2, "fp16"),
    ],
)
def test_bad_input_is_one_sentence(demo, words, code, sentence):
    done = mpdiag(*words, cwd=demo[0])
    assert done.returncode == code
    assert sentence in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""
