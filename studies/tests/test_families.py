"""The table of families: what is done stays done, and the table is of what is there."""

from __future__ import annotations

import json

import pytest

from mpdiag import workloads
from mpdiag.errors import ExitCode, UsageError
from mpdiag.runs.run import open_run
from mpdiag.runs.training_log import read_log
from studies import families


@pytest.fixture
def run(capsys):
    def run(*words):
        families.main([*map(str, words)])
        return capsys.readouterr()

    return run


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    folder = tmp_path_factory.mktemp("all")
    words = ("--only", "vgg", "--seeds", 2, "--steps", 3, "--folder", folder, "--json")
    rows = families.run_table(folder, only=["vgg"], seeds=2, steps=3, options={"size": "small"})
    return folder, words, json.loads(json.dumps(families.document(rows)))


def test_every_way_and_seed_is_trained(table):
    folder, _, document = table
    (row,) = document["families"]
    assert row["workload"] == "vgg"
    assert set(row["sides"]) == {"fp32", "fp16-no-scale", "fp16-plan", "bf16"}
    for way, side in row["sides"].items():
        assert len(side["values"]) == 2
        assert side["steps"] == 6
        if way != "fp16-plan":
            assert open_run(folder / "vgg" / way / "seed1").meta["seeds"]["torch"] == 1
    assert document["versions"]["torch"]


def test_a_training_without_a_scale_stands_for_one_by_a_plan_that_wants_none(table):
    folder, _, document = table
    (row,) = document["families"]
    assert row["method"] == "none"
    assert not (folder / "vgg" / "fp16-plan" / "seed1").exists()
    assert row["sides"]["fp16-plan"] == row["sides"]["fp16-no-scale"]
    first, second = (  # of the first seed both were trained: they are one training indeed
        [step.loss for step in read_log(folder / "vgg" / way / "seed0").steps]
        for way in ("fp16-plan", "fp16-no-scale")
    )
    assert first == second


def test_underflow_is_predicted_and_observed(table):
    folder, _, document = table
    found = document["families"][0]["underflow"]
    assert set(found) == {"fp16-no-scale", "fp16-plan"}
    # Three steps apart from the same weights: what is lost above shows below as well, and that is all.
    unscaled = found["fp16-no-scale"]
    assert unscaled["predicted"] <= unscaled["observed"] + 0.01
    recorded = open_run(folder / "vgg" / "fp16-no-scale" / "seed0")
    assert recorded.meta["steps_recorded"] == 3


def test_what_is_done_is_not_done_again_and_what_was_cut_off_is(table, run):
    folder, words, document = table
    logs = sorted(folder.rglob("training.jsonl"))
    torn = folder / "vgg" / "bf16" / "seed1" / "training.jsonl"
    before = {log: log.stat().st_mtime_ns for log in logs}
    torn.write_text(torn.read_text().splitlines()[0] + "\n")
    again = json.loads(run(*words).out)
    after = {log: log.stat().st_mtime_ns for log in logs}
    assert [log for log in logs if after[log] != before[log]] == [torn]
    assert again["families"] == document["families"]


def test_what_is_done_can_be_shown_without_training(table, run):
    folder, words, document = table
    before = sorted(folder.rglob("*"))
    shown = run("--done", "--seeds", 5, "--steps", 3, "--folder", folder, "--json")
    assert sorted(folder.rglob("*")) == before
    assert json.loads(shown.out)["families"] == document["families"]
    assert words


def test_trainings_of_other_settings_are_not_mixed_in(table):
    folder, _, _ = table
    with pytest.raises(UsageError, match="another steps"):
        families.run_table(folder, only=["vgg"], steps=4)


def test_the_papers_scale_only_where_it_names_one():
    assert "fp16-paper" in families.ways_of(workloads.load("ssd"))
    assert "fp16-paper" not in families.ways_of(workloads.load("vit"))


def test_markdown_and_the_screen(table, run):
    _, words, _ = table
    shown = run(*words[:-1], "--markdown")
    assert shown.out.startswith("| workload | metric |")
    assert "next: mpdiag compare" in shown.err
    assert "vgg" in run(*words[:-1]).out


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--only", "nothing"], "there is no workload 'nothing'"),
        (["--only", "vgg", "--device", "cuda:99"], "cannot train on device 'cuda:99'"),
    ],
)
def test_what_cannot_be_trained_is_refused_before_anything_is(words, sentence, tmp_path, capsys):
    with pytest.raises(SystemExit) as ended:
        families.main([*words, "--folder", str(tmp_path / "runs")])
    assert ended.value.code == ExitCode.USAGE
    assert sentence in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()
