"""``mpdiag profile -- script.py``: the script runs as under Python, and ends when enough is measured."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from script_processes import SCRIPTS, scripts

from mpdiag.errors import UsageError
from mpdiag.tensorcores import profiled_script

OWN_SCRIPTS = scripts(__file__)

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="what a CPU says; a GPU's capture is read as a trace"
)

SCRIPT = OWN_SCRIPTS["script"]


@pytest.fixture
def script(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "script.py").write_text(SCRIPT)
    (tmp_path / "sub" / "beside.py").write_text("")
    return "./sub/script.py"


@pytest.fixture
def profile(fork_server, tmp_path):
    """The command forked; the script it profiles starts afresh."""

    def run(*words, cwd=tmp_path, **options):
        return fork_server("mpdiag", "profile", "--steps", "2", *words, cwd=cwd, **options)

    return run


def test_a_script_is_profiled_and_ended(profile, script):
    child = profile("--warmup", "1", "--json", "--", script, 1000, 0)
    assert child.code == 0, child.err
    document = json.loads(child.out)
    assert document["steps"] == 2
    assert ("aten::addmm", "Linear") in {(o["op"], o["module"]) for o in document["operations"]}
    assert "USDT" not in child.err  # kineto's own lines
    assert "caught" not in child.err.split()
    assert "end" not in child.err.split()  # it was ended after its third step


def test_the_script_finds_what_it_finds_under_python_and_fails_alike(
    profile, script, real, tmp_path
):
    words = (script, "2", "fail", "--json", "-x", "--", "y")
    plain = real(*words, cwd=tmp_path)
    child = profile("--warmup", "1", "--", *words)
    assert plain.code == child.code == 1
    assert plain.out.startswith("words ['./sub/script.py', '2', 'fail', '--json', '-x', '--', 'y']")
    assert {*plain.out.splitlines(), *plain.err.splitlines()} <= set(child.err.splitlines())
    assert "KeyError: 3" in plain.err
    assert "mpdiag/" not in child.err.partition("Traceback")[2]
    assert "of operator time" in child.out.splitlines()[0]  # the verdict comes first


def test_the_form_of_a_package(profile, tmp_path):
    env = {"PYTHONPATH": f"{SCRIPTS}:{SCRIPTS.parents[1]}"}
    child = profile("--json", "--warmup", "0", "--", "-m", "package_form", env=env)
    assert child.code == 0, child.err
    assert json.loads(child.out)["steps"] == 2


def test_no_module(profile):
    child = profile("--", "-m", "nowhere.at_all")
    assert (child.code, child.out) == (3, "")
    assert child.err.splitlines()[-1].startswith("error: there is no module nowhere.at_all")


def test_a_script_that_fails_before_its_steps(profile, script):
    child = profile("--", script, 0, 3)
    assert child.code == 2
    assert "ended with exit code 3" in child.err.splitlines()[-1]


@pytest.mark.parametrize(
    ("seen", "sentence"), [(0, "no optimizer took a step"), (1, "took 1 steps, of which 5 are")]
)
def test_why_a_script_gave_nothing(monkeypatch, script, tmp_path, seen, sentence):
    def child(command, **_):
        note = {"seen": seen, "measured": 0}
        (Path(command[3]) / "capture.json").write_text(json.dumps(note))
        return SimpleNamespace(returncode=0)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(profiled_script.subprocess, "run", child)
    with pytest.raises(UsageError, match=sentence):
        profiled_script.profile_script([script], steps=1, warmup=5)


IN_A_THREAD = OWN_SCRIPTS["in a thread"]


def test_a_training_in_a_thread_ends_quietly(profile, tmp_path):
    (tmp_path / "threaded.py").write_text(IN_A_THREAD)
    child = profile("--json", "--", "threaded.py")
    assert child.code == 0, child.err
    assert json.loads(child.out)["steps"] == 2
    assert "end" in child.err.splitlines()
    assert "Traceback" not in child.err
