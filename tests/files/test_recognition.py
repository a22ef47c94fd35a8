"""A file that is something else than what was wanted is called what it is."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from mpdiag.cli import app
from mpdiag.errors import InputError
from mpdiag.files.recognition import kind_of, named_instead
from mpdiag.plan import PrecisionPlan
from mpdiag.tensorcores.readers.recognition import read

TABLE = Path(__file__).with_name("kinds.tsv").read_text().splitlines()
FILES = {name: (text, said) for name, text, said in (row.split("\t") for row in TABLE[1:])}
"""By name: what a file holds, and what it is called where a run is wanted."""


@pytest.fixture
def files(tmp_path):
    for name, (text, _) in FILES.items():
        (tmp_path / name).write_text(text)
    return tmp_path


@pytest.mark.parametrize("name", FILES)
def test_each_kind_of_file_is_known(files, name):
    assert f"{files / name} {FILES[name][1]}" in named_instead(files / name, "run")


def test_what_is_unknown_or_right_is_not_named(files):
    (files / "notes.txt").write_text("hello")
    (files / "big.json").write_text("{")
    assert kind_of(files / "notes.txt") is kind_of(files / "big.json") is None
    assert kind_of(files) is kind_of(files / "nowhere") is None
    assert named_instead(files / "plan.json", "plan") is None


def test_a_file_of_a_run_points_to_its_folder(root):
    run = root / "sample_runs" / "ssd"
    for name in ("plan.json", "training.jsonl", "meta.json", "stats/rank00000-000001.parquet"):
        assert named_instead(run / name, "run").endswith(f"not a run: give the run's folder, {run}")


def test_where_no_run_is_wanted_its_folder_is_no_advice(root):
    place = root / "sample_runs" / "digits"
    said = named_instead(place / "profile.json", "trace")
    assert said.endswith(f"is a part of a run, not a trace: it belongs to the run {place}")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("analyze {}/plan.json", "plan.json is a plan, not a run"),
        ("why {}/plan.json", "plan.json is a plan, not a run"),
        ("replay {}/trace.json", "trace.json is a trace, not a run"),
        ("analyze {}/notes.txt", "notes.txt is a file, and a run is a folder"),
        ("runs {}/plan.json", "plan.json is a plan, not a folder of runs"),
        ("runs {}/notes.txt", "notes.txt is a file: give the folder"),
        ("export {}/trace.json --to torch", "trace.json is a trace, not a plan"),
        ("export {}/report.html --to torch", "report.html is an HTML page, not a plan"),
        ("train --plan {}/profile.json -- {}/train.py", "profile --json, not a plan"),
        ("profile {}/plan.json", "plan.json is a plan, not a trace"),
        ("report {}/plan.json", "plan.json is a plan, not a trace"),
    ],
)
def test_every_command_says_so(files, words, sentence):
    (files / "notes.txt").write_text("hello")
    done = CliRunner().invoke(app, words.format(files, files).split())
    assert done.exit_code == 3
    assert sentence in " ".join(done.stderr.split())


@pytest.mark.parametrize(
    ("command", "run", "use"),
    [
        ("profile", "ssd", "not a trace: use mpdiag analyze {}"),
        ("profile", "ssd-fp16-plan", "not a trace: use mpdiag dashboard {}"),
        ("profile", "gpu-sample", "not a trace: name the trace in it, {}/trace.json.gz"),
        ("runs", "ssd", "not a folder of runs: use mpdiag analyze {}"),
        ("runs", "gpu-sample", "not a folder of runs: use mpdiag dashboard {}"),
    ],
)
def test_a_run_in_the_wrong_place_is_sent_to_what_takes_it(root, command, run, use):
    folder = root / "sample_runs" / run
    done = CliRunner().invoke(app, [command, str(folder)])
    assert done.exit_code == 3
    assert f"{folder} is a run, {use.format(folder)}" in done.stderr.replace("\n", " ")


def test_a_single_trace_of_a_run_is_no_folder_of_ranks(root):
    folder = root / "sample_runs" / "ssd"
    with pytest.raises(InputError, match="is a run, not a trace"):
        read(folder)


def test_a_plan_without_its_own_file_is_found_in_its_run(root):
    assert PrecisionPlan.load(root / "sample_runs" / "ssd").run == "ssd"
