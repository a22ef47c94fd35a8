"""``mpdiag search``: from a name to a plan."""

import json
import math
import textwrap

import pytest
from schemas import assert_described
from script_processes import scripts
from typer.testing import CliRunner

from mpdiag.analysis.analyzer import analyze
from mpdiag.cli import app
from mpdiag.demo.script_search import ScriptTrainings
from mpdiag.demo.search import answer_sentence, show_search
from mpdiag.errors import ExitCode, InputError
from mpdiag.launching import probe
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


SQUARES = scripts(__file__)["squares"]


@pytest.fixture
def scripts(tmp_path, monkeypatch, fork_server):
    """Writes a script; the processes of its trainings are forks, and their commands are kept."""
    monkeypatch.chdir(tmp_path)
    commands = []

    def apart(command, *_limits):
        commands.append(list(command))
        done = fork_server("mpdiag", *command, cwd=tmp_path, timeout=600)
        return "" if done.code == 0 else done.err.splitlines()[-1]

    monkeypatch.setattr(probe, "run_apart", apart)

    def write(text):
        (tmp_path / "train.py").write_text(textwrap.dedent(text))
        return commands

    return write


def test_a_script_of_ones_own_from_recording_to_plan(scripts, tmp_path):
    commands = scripts(SQUARES.replace("SIZE", "2000.0"))
    words = ("--seeds", 2, "--", "train.py", "{seed}", "--metric", "goodness")
    result = run(*words)
    assert result.exit_code == ExitCode.OK, result.stderr
    assert "must stay in FP32." in result.stdout
    place = tmp_path / "runs" / "search-train"
    plan = PrecisionPlan.load(place / "plan.json")
    assert [(c.module, c.op) for c in plan.fp32_operations] == [("squares", "mul")]
    last = result.stderr.splitlines()[-1]
    assert last == "next: mpdiag train --plan runs/search-train/plan.json -- train.py 0"
    assert [c[0] for c in commands] == ["record", *["train"] * (len(commands) - 1)]
    # The recording, FP32 with the other seed, nothing in FP32, the square with both seeds.
    assert [c[-1] for c in commands] == ["0", "1", "0", "0", "1"]
    again = run("--higher-is-better", "--json", *words)
    document = json.loads(again.stdout)
    assert_described("search", document)
    assert document["reference"]["higher_is_better"]  # as the script logs it
    assert document["fp32"] == [{"module": "squares", "op": "mul"}]
    assert len(commands) == 5  # nothing is trained any more


def test_a_script_that_needs_nothing_in_fp32_by_its_loss(scripts):
    commands = scripts(SQUARES.replace("SIZE", "1.0"))
    result = run("--metric", "loss", "--json", "--", "train.py", 3)
    assert result.exit_code == ExitCode.OK, result.stderr
    document = json.loads(result.stdout)
    assert document["answer"] == "none"
    assert not document["reference"]["higher_is_better"]
    assert len(set(document["reference"]["metrics"])) == 1  # no {seed}: two trainings alike
    assert {c[-1] for c in commands} == {"3"}
    assert len(commands) == 4


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (
            ("--metric", "goodnes", "--", "train.py", 0),
            "no metric 'goodnes' (did you mean goodness?)",
        ),
        (("--", "train.py", 0), "--metric NAME is missing"),
        (("--", "train.py"), "--metric NAME is missing"),
        (("train.py",), "add --metric NAME to search a training script"),
        (("--metric", "loss", "--", "none.py"), "there is no script none.py"),
        (("--metric", "loss", "--no-lists", "--", "train.py"), "leave them out for a script"),
        (("--metric", "loss", "--", "train.py", "x"), "failed while it was recorded: ValueError"),
    ],
)
def test_a_search_that_cannot_begin_says_what_to_do(scripts, words, sentence):
    scripts(SQUARES.replace("SIZE", "1.0"))
    result = run(*words)
    assert result.exit_code in (ExitCode.USAGE, ExitCode.INPUT)
    assert sentence in " ".join(result.stderr.split())


def test_a_script_that_fails_by_the_plan_ends_the_search_but_a_constant_too_large_does_not(
    scripts, monkeypatch, tmp_path
):
    scripts("")
    trainings = ScriptTrainings(("train.py",), "loss", tmp_path / "run")
    monkeypatch.setattr(probe, "run_apart", lambda *_: "RuntimeError: … half without overflow")
    assert math.isnan(trainings.by_plan(0, PrecisionPlan()))
    monkeypatch.setattr(probe, "run_apart", lambda *_: "KeyError: 7")
    with pytest.raises(InputError, match="the script failed: KeyError: 7"):
        trainings.by_plan(0, PrecisionPlan())


def test_a_recording_that_was_broken_off_is_not_searched(scripts, tmp_path):
    scripts("")
    place = tmp_path / "run"
    place.mkdir()
    (place / "meta.json").write_text('{"schema_version": 2, "state": "recording"}')
    result = run("--metric", "loss", "--run", place, "--", "train.py")
    assert result.exit_code == ExitCode.INPUT
    assert "delete the folder" in result.stderr


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
