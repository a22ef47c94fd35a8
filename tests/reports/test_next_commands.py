"""The command named next can succeed: each that is built here is run."""

import ast
import dataclasses
import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import run_overview as overview
from typer.testing import CliRunner

from mpdiag.analysis.analyzer import analyze
from mpdiag.cli import app
from mpdiag.commands import dashboard
from mpdiag.exports.registry import export_plan
from mpdiag.installation import extras
from mpdiag.launching.trained_script import recording_of
from mpdiag.plan import PrecisionPlan
from mpdiag.reports import next_commands
from mpdiag.reports.text.analysis import can_be_settled
from mpdiag.runs.results import COMPARISON, add_to_meta
from mpdiag.runs.run import Run, list_runs, open_run
from mpdiag.runs.training_log import FILE

BUILDERS = {"after_analysis"}
"""Functions beside those of ``next_commands`` that build the words."""


@pytest.fixture
def here(tmp_path, root, monkeypatch):
    """A working folder with a recording that was not compared, trainings, and nothing else."""
    for name in ("digits", "digits-fp16-plan", "digits-fp16-no-scale"):
        shutil.copytree(root / "sample_runs" / name, tmp_path / "runs" / name)
    (tmp_path / "runs" / "digits" / COMPARISON).unlink()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(dashboard, "run_server", lambda *_: 0)
    monkeypatch.setattr(dashboard, "_refuse_used", lambda _port: None)
    return tmp_path


def succeeds(words):
    """Whether the named command runs to exit code 0; no words name none."""
    if words and words[0] == "mpdiag":
        done = CliRunner().invoke(app, [str(word) for word in words[1:]])
        assert done.exit_code == 0, (words, done.stderr)
    else:
        assert words == () or shutil.which(words[0])


def test_only_these_functions_name_a_command(root):
    """Words that are written out where they are printed are looked up by nobody."""
    loose = []
    for path in sorted((root / "mpdiag").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not (isinstance(node, ast.Call) and ast.unparse(node.func).endswith("name_next")):
                continue
            words = ast.unparse(node.args[0])
            built = words.startswith("*next_commands.") or words[1:].partition("(")[0] in BUILDERS
            looked_up = words == "*analysis" and path.name == "record.py"
            if not (built or looked_up or path.name == "train.py"):
                loose.append((path.name, words))
    assert loose == []


def test_what_the_commands_name_next_succeeds(here):
    calls = Path(__file__).with_name("next_commands.txt").read_text(encoding="utf-8").splitlines()
    named = set()
    for call in calls:
        done = CliRunner().invoke(app, call.split())
        assert done.exit_code == 0, (call, done.stderr)
        lines = [x for x in done.stderr.splitlines() if x.startswith("next: ")]
        named.update(lines[-1:])
    assert len(named) >= 6
    for line in sorted(named):
        succeeds(line.removeprefix("next: ").split())


def test_what_is_named_next_knows_what_was_done(here):
    """Recorded, analyzed, trained, compared: each names the next, and none goes back."""
    run, script = Path("runs/cnn"), {"script": "train.py", "argv": ["train.py"], "world_size": 1}
    (here / "train.py").write_text("")
    shutil.copytree("runs/digits", run)
    (run / "plan.json").unlink()
    add_to_meta(run, **script)

    def named(*words):
        done = CliRunner().invoke(app, [str(word) for word in words])
        assert done.exit_code == 0, done.stderr
        return done.stderr.splitlines()[-1].removeprefix("next: mpdiag ")

    assert next_commands.go_on(run) == ("mpdiag", "analyze", run, "-o", "plan.json")
    assert named("analyze", run).startswith("why")  # keeps the plan
    train = f"train --plan {run} -- train.py"
    assert {named("why", run), named("replay", run)} == {train}
    trained = Path("runs/cnn-fp16")
    shutil.copytree("runs/digits-fp16-plan", trained)
    other = json.loads((trained / "plan.json").read_text())
    (trained / "plan.json").write_text(json.dumps(other | {"level": "O2"}))
    assert {named("why", run), named("replay", run)} == {train}  # that followed another plan
    shutil.copy(run / "plan.json", trained)
    again = f"compare {run} {trained}"
    assert {named(word, run) for word in ("analyze", "why", "replay")} == {again}
    assert named("analyze", run, "-o", "p.json") == again
    newest = [item for item in list_runs("runs") if item.folder.name == "cnn"]
    assert next_commands.after_listing(newest)[1] == "compare"
    steps = [step.command for step in overview.training_steps(trained, run)]
    assert f"mpdiag {again}" in steps
    assert named(*again.split()) == "dashboard runs"
    assert {named(word, run) for word in ("analyze", "why", "replay")} == {"dashboard runs"}
    assert next_commands.after_listing(newest)[1] == "dashboard"
    steps = [step.command for step in overview.training_steps(trained, run)]
    assert not any("compare" in step for step in steps)
    analysis = analyze(run)
    steps = overview.next_steps(analysis, PrecisionPlan.load(run))
    assert not {step.command.split()[1] for step in steps} & {"train", "compare", "dashboard"}


def test_a_training_of_another_length_is_not_compared(here):
    """As ``mpdiag compare`` says of it; what is named is the training as it was recorded."""
    run, trained = Path("runs/digits"), Path("runs/digits-fp16-plan")
    plan = PrecisionPlan.load(run)
    assert next_commands.after_training(run, plan) == ("mpdiag", "compare", run, trained)
    lines = (trained / FILE).read_text().splitlines(keepends=True)
    (trained / FILE).write_text("".join(lines[:20]))
    assert next_commands.after_training(run, plan) == ()


def test_after_several_seeds_their_folders_are_compared(here):
    run = Path("runs/digits-fp16-plan")
    assert next_commands.after_seed(run) == ("mpdiag", "runs", Path("runs"))
    shutil.copytree("runs/digits", "fp32/seed0")
    shutil.copytree(run, "fp16/seed0")
    named = next_commands.after_seed(Path("fp16/seed0"))
    assert named == ("mpdiag", "compare", Path("fp32"), Path("fp16"))
    assert next_commands.after_seed(Path("fp32/seed0")) == ("mpdiag", "runs", Path("fp32"))


def test_what_a_search_recorded_for_itself_is_not_the_newest(here):
    shutil.copytree("runs/digits", "runs/search-x")
    add_to_meta(Path("runs/search-x"), created="2099-01-01T00:00:00")
    assert next_commands.after_listing(list_runs("runs"))[2] == Path("runs/search-x")
    add_to_meta(Path("runs/search-x"), made_for="search")
    assert next_commands.after_listing(list_runs("runs"))[2] == Path("runs/digits")


def test_a_check_that_was_made_is_not_named_again(here):
    analysis = analyze("runs/digits")
    assert can_be_settled(analysis)
    assert not can_be_settled(dataclasses.replace(analysis, probe=SimpleNamespace()))


def test_a_training_of_another_model_is_not_compared_with_the_plans_recording(here, root):
    PrecisionPlan(run="runs/digits").save(here / "plan.json")
    digits, other = here / "runs" / "digits-fp16-plan", here / "runs" / "gpt-fp16-plan"
    shutil.copytree(root / "sample_runs" / "gpt-fp16-plan", other)
    assert recording_of(here / "plan.json", digits) == here / "runs" / "digits"
    shutil.copytree(root / "sample_runs" / "gpt" / "modules", other / "modules", dirs_exist_ok=True)
    assert recording_of(here / "plan.json", other) is None


def test_a_recording_of_no_step_has_no_analysis(here):
    assert next_commands.analyze_it(here / "runs" / "digits")
    shutil.rmtree("runs/digits/stats")
    assert next_commands.analyze_it(here / "runs" / "digits") == ()
    assert next_commands.analyze_it(here / "nowhere") == ()


def test_a_list_names_what_can_be_analyzed_and_else_what_can_be_looked_at(here, monkeypatch):
    named = next_commands.after_listing(list_runs("runs"))
    assert named[1:] == ("compare", Path("runs/digits"), Path("runs/digits-fp16-plan"))
    shutil.rmtree("runs/digits-fp16-plan")
    named = next_commands.after_listing(list_runs("runs"))
    assert named == ("mpdiag", "analyze", Path("runs/digits"))
    shutil.rmtree("runs/digits")
    trained = next_commands.after_listing(list_runs("runs"))
    assert trained[1] == "dashboard"
    succeeds(trained)
    monkeypatch.setattr(extras, "find_spec", lambda name: None)
    listed = next_commands.after_listing(list_runs("runs"))
    assert listed[1] == "runs"
    succeeds(listed)
    assert next_commands.after_listing([]) == ("mpdiag", "demo", "gpt")


def test_a_training_is_named_only_if_its_script_is_there(here):
    shutil.rmtree("runs/digits-fp16-plan")
    plan = PrecisionPlan()
    words = {"script": "train.py", "argv": ["train.py", "--lr", "1"], "world_size": 1}
    recorded = open_run(here / "runs" / "digits")
    known = Run(recorded.folder, {**recorded.meta, **words})
    assert next_commands.train_by(plan, here / "plan.json", known) == ()
    (here / "train.py").write_text("")
    named = next_commands.train_by(plan, here / "plan.json", known)
    assert named[-3:] == ("train.py", "--lr", "1")
    fp8 = PrecisionPlan(target="fp8_e4m3")
    assert next_commands.train_by(fp8, here / "plan.json", known) == ()
    assert next_commands.train_by(plan, here / "plan.json", None) == ()
    for module, there in (("json.tool", True), ("no_such_module.x", False)):
        for launcher in ([], ["torchrun", "--nproc-per-node=2"]):
            started = {"script": f"-m {module}", "argv": ["x"], "launcher": launcher}
            asked = Run(known.folder, {**known.meta, **started})
            named = next_commands.train_by(plan, here / "plan.json", asked)
            assert named[5:] == ((*launcher, "-m", module) if there else ())
    add_to_meta(here / "runs" / "digits", **words)
    done = CliRunner().invoke(app, ["analyze", "runs/digits", "-o", "plan.json"])
    assert done.stderr.endswith("next: mpdiag train --plan plan.json -- train.py --lr 1\n")
    exported = CliRunner().invoke(app, ["export", "runs/digits", "--to", "torch"])
    assert exported.stderr.endswith("--plan runs/digits -- train.py --lr 1\n")


def test_a_plan_that_no_longer_holds_is_made_anew_where_it_can_be_written(here):
    run = here / "runs" / "digits"
    inside = next_commands.after_check(run, run, "bf16", trained=False)
    assert inside[-4:] == ("--target", "bf16", "-o", run / "plan.json")
    other = next_commands.after_check(run, here / "runs" / "digits-fp16-plan", "fp16", trained=True)
    assert str(other[-1]) == "plan.json"
    for words in (inside, other):
        succeeds(words)


def test_searches_exports_and_boards(here, monkeypatch):
    run, again = here / "runs" / "digits", ("mpdiag", "search", "gpt")
    assert next_commands.after_search("unfinished", again, run) == again
    for answer in ("found", "none", "impossible"):
        succeeds(next_commands.after_search(answer, again, run))
    assert next_commands.after_search("impossible", again, here) == ()
    plan = PrecisionPlan()
    written = export_plan(plan, "torch")
    plan.save(here / "p.json")
    succeeds(next_commands.after_export(plan, here / "p.json", None, written))
    succeeds(next_commands.after_export(plan, here / "p.json", here / "x.py", written))
    assert next_commands.after_board("wandb", "mpdiag") == ()
    monkeypatch.setattr(next_commands.shutil, "which", lambda _name: "tensorboard")
    board = ("tensorboard", "--logdir", Path("boards"))  # the run keeps its name there
    assert next_commands.after_board("tensorboard", "boards/digits") == board
    monkeypatch.setattr(next_commands.shutil, "which", lambda _name: None)
    assert next_commands.after_board("tensorboard", "boards") == ()


def test_a_profile_that_came_through_a_pipe_has_no_report(here):
    assert next_commands.after_profile("-", None) == ()
    (here / "trace.json").write_text("{}")
    named = next_commands.after_profile("trace.json", here / "earlier.json")
    assert named[1:3] == ("report", "trace.json")


def test_a_skip_names_the_run_it_belongs_to(here):
    capsule = here / "runs" / "digits-fp16-plan" / "capsules" / "step000001"
    succeeds(next_commands.after_skip(capsule))
    assert next_commands.after_skip(here / "elsewhere" / "step000001") == ()


def test_after_the_report_of_a_trace(here, root):
    alone = here / "alone" / "inner" / "trace.json.gz"
    alone.parent.mkdir(parents=True)
    shutil.copy(root / "sample_runs" / "gpu-sample" / "trace.json.gz", alone)
    done = CliRunner().invoke(app, ["report", str(alone)])
    assert f"next: mpdiag profile {alone}" in " ".join(done.stderr.split())
    beside = shutil.copy(alone, here / "runs" / "digits" / "trace.json.gz")
    assert next_commands.after_report(Path(beside)) == next_commands.look_at(here / "runs")
    assert next_commands.after_report(here / "runs" / "gone.json") == next_commands.NOTHING
