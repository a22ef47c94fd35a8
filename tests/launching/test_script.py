"""A script runs as ``python`` would run it: the same words, modules, endings and traces."""

import json
import os
import re
import subprocess
import sys
from traceback import walk_tb

import pytest
from script_processes import SCRIPTS, TRAIN, scripts

from mpdiag.launching.processes import own_process
from mpdiag.launching.script import _without_ours, parse
from mpdiag.plan import PrecisionPlan
from mpdiag.runs.run import open_run

OWN_SCRIPTS = scripts(__file__)


def test_the_script_finds_what_it_finds_under_python(real, tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "report.py").write_text(OWN_SCRIPTS["report"])
    words = ("sub/report.py", "-x", "--out", "y", "--", "z")
    plain = real(*words, cwd=tmp_path)
    ours = real("-m", "mpdiag", "record", "--", *words, cwd=tmp_path)
    assert plain.code == 0, plain.err
    assert ours.out == plain.out
    assert ours.out.endswith("late True True\n")
    assert (ours.code, ours.err) == (
        3,
        "error: nothing was recorded: the script ended without calling a torch module that trains\n",
    )


@pytest.mark.parametrize(
    ("ending", "code", "state"),
    [
        ("sys.exit()", 0, "complete"),
        ("sys.exit(7)", 7, "failed"),
        ("sys.exit('no more')", 1, "failed"),
        ("raise ValueError('broken')", 1, "failed"),
        ("raise KeyboardInterrupt", 130, "interrupted"),
    ],
)
def test_the_exit_code_is_the_scripts_own(fork_server, tmp_path, ending, code, state):
    (tmp_path / "train.py").write_text(TRAIN + ending)
    done = fork_server("mpdiag", "record", "--out", "run", "--", "train.py", cwd=tmp_path)
    assert done.code == code
    run = open_run(tmp_path / "run")
    assert run.meta["state"] == state
    assert run.meta["steps_recorded"] == 3


@pytest.mark.parametrize("reached", ["model(torch.randn(8, 4))", "pass"])
def test_without_a_step_no_analysis_is_named(fork_server, tmp_path, reached):
    """Ctrl-C before the first step: there is nothing to analyze, and it is said."""
    begun = TRAIN.partition("for _ in")[0]
    (tmp_path / "train.py").write_text(f"{begun}\n{reached}\nraise KeyboardInterrupt\n")
    done = fork_server("mpdiag", "record", "--out", "run", "--", "train.py", cwd=tmp_path)
    assert done.code == 130
    assert "next: " not in done.err
    assert ("no step was recorded" in done.err) == (tmp_path / "run" / "meta.json").exists()


FULL = """
    if step == {0}:  # from here on writing is an error, as on a full disk
        import resource, signal
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))
"""


@pytest.mark.parametrize(
    ("full_at", "said"),
    [
        (15, r"error: the recording is incomplete: 5 of 20 steps recorded into run "),
        (0, r"error: no step was recorded: there is nothing to analyze in .*/run\n"),
    ],
)
def test_a_full_disk_is_an_error_of_the_recording_alone(fork_server, tmp_path, full_at, said):
    loop = "for step in range(20):"
    script = f"{TRAIN.replace('for _ in range(3):', loop)}print(model[0].weight.sum().item())\n"
    (tmp_path / "train.py").write_text(script)
    plain = fork_server("python", "train.py", cwd=tmp_path)
    (tmp_path / "train.py").write_text(script.replace(loop, loop + FULL.format(full_at)))
    done = fork_server("mpdiag", "record", "--out", "run", "--", "train.py", cwd=tmp_path)
    assert (plain.code, done.code, done.out) == (0, 3, plain.out)
    assert re.search(said, done.err), done.err
    assert ("next: mpdiag analyze run" in done.err) == (full_at > 0)


def test_a_full_disk_is_an_error_of_a_training_by_a_plan(fork_server, tmp_path):
    loop = "for step in range(20):"
    script = TRAIN.replace("for _ in range(3):", loop + FULL.format(15))
    (tmp_path / "train.py").write_text(script + "print('the end')\n")
    PrecisionPlan().save(tmp_path / "plan.json")
    words = ("train", "--plan", "plan.json", "--out", "run", "--", "train.py")
    done = fork_server("mpdiag", *words, cwd=tmp_path)
    assert (done.code, done.out) == (3, "the end\n")
    logged = (tmp_path / "run" / "training.jsonl").read_text().count('"step"')
    assert f"error: the run is incomplete: {logged} of 20 steps logged in run\n" in done.err
    assert 0 < logged < 20
    assert "next: " not in done.err


def written_line(run, folder):
    """What ``mpdiag record`` says that it wrote: three steps, and the size of the files."""
    size = sum(file.stat().st_size for file in (folder / run).rglob("*.*"))
    return f"note: 3 of 3 steps recorded into {run} ({size / 1e3:.0f} kB)\n"


def test_a_traceback_is_pythons(fork_server, tmp_path):
    (tmp_path / "train.py").write_text(TRAIN + "\ndef fail():\n    {}[3]\n\nfail()\n")
    plain = fork_server("python", tmp_path / "train.py", cwd=tmp_path)
    ours = fork_server("mpdiag", "record", "--", tmp_path / "train.py", cwd=tmp_path)
    assert ours.code == plain.code == 1
    kept = plain.err[plain.err.index(f'  File "{tmp_path / "train.py"}"') :]
    ours_last = "next: mpdiag analyze runs/train -o plan.json\n"
    written = f"{written_line('runs/train', tmp_path)}{ours_last}"
    said = "mpdiag: FP32 weights\n"
    assert ours.err == f"{said}Traceback (most recent call last):\n{kept}{written}"


def test_the_form_of_a_package(fork_server, tmp_path):
    env = {"PYTHONPATH": f"{SCRIPTS}:{SCRIPTS.parents[1]}"}
    plain = fork_server("python", "-m", "package_form", cwd=tmp_path, env=env)
    ours = fork_server("mpdiag", "record", "--", "-m", "package_form", cwd=tmp_path, env=env)
    assert ours.code == plain.code == 5
    assert ours.digest == plain.digest
    assert (tmp_path / "runs" / "package_form" / "meta.json").is_file()


def test_folders_are_numbered_and_an_existing_run_is_kept(fork_server, tmp_path):
    (tmp_path / "train.py").write_text(TRAIN)
    for name in ("train", "train-2"):
        done = fork_server("mpdiag", "record", "--", "train.py", cwd=tmp_path)
        written = written_line(f"runs/{name}", tmp_path)
        following = f"next: mpdiag analyze runs/{name} -o plan.json\n"
        assert done.err == f"mpdiag: FP32 weights\n{written}{following}"
    done = fork_server("mpdiag", "record", "--out", "runs/train", "--", "train.py", cwd=tmp_path)
    assert done.code == 2
    assert "already holds a run" in done.err
    assert done.out == ""


def test_a_model_may_be_traced_meanwhile(fork_server, tmp_path):
    """As TensorBoard's ``add_graph`` does: nothing of ours gets into the graph."""
    (tmp_path / "traced.py").write_text(OWN_SCRIPTS["traced"])
    plain = fork_server("python", "traced.py", cwd=tmp_path)
    done = fork_server("mpdiag", "record", "--out", "run", "--", "traced.py", cwd=tmp_path)
    assert done.code == 0, done.err
    assert done.out == plain.out
    assert plain.out.startswith("['aten::linear', 'aten::relu', 'aten::linear']")
    run = open_run(tmp_path / "run")
    assert run.meta["steps_recorded"] == 3
    assert run.meta["failures"] == []


def test_max_steps_records_so_many_and_lets_the_script_go_on(fork_server, tmp_path):
    script = SCRIPTS / "plain_loop.py"
    plain = fork_server("python", script, cwd=tmp_path)
    done = fork_server(
        "mpdiag", "record", "--out", "run", "--max-steps", "5", "--include", "0|3", "--", script,
        cwd=tmp_path,
    )  # fmt: skip
    assert done.digest == plain.digest
    run = open_run(tmp_path / "run")
    assert run.meta["steps_recorded"] == 5
    assert run.meta["state"] == "complete"
    assert {name.split(".")[0] for name in run.frame()["name"]} == {"0", "3"}


@pytest.fixture
def shadowed(tmp_path):
    """A folder whose modules have the names of packages that commands import."""
    for name in ("click", "rich", "typer", "pyarrow"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('a module of the user ran')")
    return tmp_path


@pytest.mark.parametrize("command", [own_process("mpdiag"), [sys.executable, "-m", "mpdiag"]])
def test_a_process_of_ours_imports_no_module_of_the_present_folder(shadowed, root, command):
    """As ``python -m`` would: the dashboard's server, a probe, a rank that torchrun starts."""
    done = subprocess.run(
        [*command, "--version"],
        cwd=shadowed,
        env={**os.environ, "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.stdout.split()[:1], done.stderr) == (["mpdiag"], "")


def test_an_audit_of_a_script_is_a_process_of_ours(fork_server, shadowed):
    words = ("audit", "--json", "--steps", "1", "--", SCRIPTS / "plain_loop.py")
    done = fork_server("mpdiag", *words, cwd=shadowed)
    assert done.code == 0, done.err
    assert json.loads(done.out)["parameters"]


def test_every_process_of_ours_is_started_so(root):
    loose = [
        path.name
        for path in (root / "mpdiag").rglob("*.py")
        if "sys.executable, " in path.read_text(encoding="utf-8")
    ]
    assert loose == ["processes.py"]


@pytest.mark.parametrize("prefix", [[], ["python"], ["python3.11", "-u"], [sys.executable]])
def test_python_before_the_script_is_understood(prefix):
    script = parse([*prefix, str(SCRIPTS / "plain_loop.py"), "3"])
    assert script.name == "plain_loop"
    assert script.arguments == ("3",)


def test_a_traceback_through_an_instruction_of_no_line_is_shown():
    """Ctrl-C may fall on such an instruction; its line is None (CPython 3.11)."""
    code = compile("1 / 0", "train.py", "exec").replace(co_linetable=b"")
    try:
        exec(code, {})
    except ZeroDivisionError as error:
        kept = _without_ours(error.__traceback__)
    assert [frame.f_code.co_filename for frame, _ in walk_tb(kept)][-1] == "train.py"
