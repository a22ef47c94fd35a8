"""``mpdiag search``: from a name to a plan."""

import json

import pytest
from schemas import assert_described
from typer.testing import CliRunner

from mpdiag.analysis.analyzer import analyze
from mpdiag.cli import app
from mpdiag.demo.search import answer_sentence, show_search
from mpdiag.errors import ExitCode
from mpdiag.plan import PrecisionPlan
from mpdiag.reports.contents import read_contents
from mpdiag.reports.views.operations import ranking
from mpdiag.runs.results import MUST
from mpdiag.sensitivity.fp32_search import SearchResult
from mpdiag.sensitivity.loss_estimate import Fp32Candidate
from mpdiag.sensitivity.search_state import Probe


def run(*words):
    return CliRunner().invoke(app, ["search", *map(str, words)])


def test_a_file_from_recording_to_plan(tmp_path, root):
    place = tmp_path / "run"
    script = root / "examples" / "radiation.py"
    options = (script, "--no-lists", "--seeds", 2, "--steps", 20, "--run", place)
    result = run(*options)
    assert result.exit_code == ExitCode.OK, result.stderr
    assert "1 operation of 10 must stay in FP32." in result.stdout
    assert "pow" in result.stdout
    assert "next:" in result.stderr
    plan = PrecisionPlan.load(place / "plan.json")
    assert [(c.module, c.op) for c in plan.fp32_operations] == [("criterion", "pow")]
    trained = json.loads((place / "search.json").read_text())
    ranked = ranking(read_contents(analyze(place)))  # a run, which the dashboard shows
    assert ranked.source == "measured"
    assert (ranked.frame["operation"].iloc[0], ranked.frame["trained"].iloc[0]) == ("pow", MUST)
    again = run(*options, "--json")  # nothing is trained any more: recording and search are kept
    document = json.loads(again.stdout)
    assert_described("search", document)
    assert document["answer"] == "found"
    assert json.loads((place / "search.json").read_text()) == trained


def test_a_workload_by_a_plan(tmp_path):
    PrecisionPlan().save(tmp_path / "given.json")
    result = run(
        "digits", "--plan", tmp_path / "given.json", "--seeds", 2, "--steps", 4,
        "--run", tmp_path / "run", "--json",
    )  # fmt: skip
    assert result.exit_code == ExitCode.OK, result.stderr
    document = json.loads(result.stdout)
    assert_described("search", document)
    assert document["answer"] == "none"
    assert document["reference"]["higher_is_better"] is True
    assert {c["module"] for c in document["candidates"]} >= {"stem", "classifier"}


def test_no_time_is_an_answer_too(tmp_path):
    PrecisionPlan().save(tmp_path / "given.json")
    words = ("--plan", tmp_path / "given.json", "--budget", 0.01, "--run", tmp_path)
    result = run("digits", *words)
    assert result.exit_code == ExitCode.OK, result.stderr
    assert "to continue" in result.stdout or "Nothing needs" in result.stdout


def made(answer, probes=(), fp32=(), candidates=9, **more):
    ranked = tuple((Fp32Candidate(f"m{i}", "mul"), 1.0) for i in range(candidates))
    found = tuple(c for c, _ in ranked[:fp32]) if fp32 else ()
    return SearchResult(answer, found, PrecisionPlan(), None, probes, ranked, 1.0, 1, 5, **more)


FAILED = Probe(frozenset(), (9.0,), good=False, seconds=1.0)


@pytest.mark.parametrize(
    ("result", "sentence"),
    [
        (made("unfinished", sufficient=False), "before any set was tried: nothing is known yet"),
        (made("unfinished", (FAILED,), sufficient=False), "1 set tried, and none of them suffices"),
        (made("unfinished", (FAILED,), 4), "4 of 9 operations in FP32 are known to suffice"),
        (made("found", (FAILED,), 1), "1 operation of 9 must stay in FP32."),
        (made("impossible", (FAILED,), sufficient=False), "even with all 9 operations in FP32"),
        (made("impossible", (FAILED,), candidates=0, sufficient=False), "no operation that could"),
    ],
)
def test_it_says_what_was_run_and_what_was_not(result, sentence):
    assert sentence in answer_sentence(result)
    show_search(result, as_json=False)


def test_what_ran_is_counted(capsys):
    show_search(made("unfinished", sufficient=False), as_json=False)
    assert "1 FP32 training of 5, 0 trainings of 0 sets, 1 s" in capsys.readouterr().out
