"""Operations of a script: as many steps as asked for, and none where something is compiled."""

from pathlib import Path

import pytest
from script_processes import SCRIPTS, scripts

from mpdiag.launching.recorded_script import Options, RecordedScript, record_command
from mpdiag.runs.run import open_run

OWN_SCRIPTS = scripts(__file__)

LOOP = SCRIPTS / "plain_loop.py"


@pytest.mark.parametrize(
    ("options", "steps"),
    [
        ((), [0, 10]),  # and then as layers grow: how soon that shows, the machine's speed decides
        (("--operations", "2"), [0, 10]),
        (("--operations", "0"), []),
    ],
)
def test_operations_of_so_many_steps(fork_server, tmp_path, options, steps):
    plain = fork_server("python", LOOP, cwd=tmp_path)
    done = fork_server("mpdiag", "record", "--out", "run", *options, "--", LOOP, cwd=tmp_path)
    assert done.code == 0, done.err
    assert done.digest == plain.digest
    run = open_run(tmp_path / "run")
    known = run.meta["operations"]
    later = [] if options else known["steps"][len(steps) :]
    assert known == {"steps": [*steps, *later], "reason": "", "fix": ""}
    assert all(step > 10 for step in later)
    found = run.operations()
    assert sorted({o.step for o in found}) == known["steps"]
    if steps:
        products = [o for o in found if o.op == "addmm" and o.phase == "forward"]
        assert {o.module for o in products} >= {"0"}
        assert {"forward", "backward"} <= {o.phase for o in found}
        assert any(str(LOOP) in o.file and o.line > 0 for o in found)


FUNCTION = """@torch.compile(backend=backend)
def error(a, b):
    return (a - b).square().mean()
"""
WITHOUT_LENGTH = """model = torch.compile(torch.nn.Linear(4, 1), backend=backend)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
"""


@pytest.mark.parametrize(
    ("when", "late", "line", "steps"),
    [
        (FUNCTION, "", 14, []),
        ("model = torch.compile(model, backend=backend)", "", 14, []),
        (WITHOUT_LENGTH, "", 14, []),
        ("model.compile(backend=backend)", "", 14, []),
        ("", "error = torch.compile(error, backend=backend)", 21, [0]),
    ],
    ids=["function", "model", "without-length", "in-place", "late"],
)
def test_what_is_compiled_stays_compiled_and_it_is_said(
    fork_server, tmp_path, when, late, line, steps
):
    script = tmp_path / "compiled.py"
    script.write_text(OWN_SCRIPTS["compiled"].replace("WHEN", when).replace("LATE", late))
    plain = fork_server("python", script, cwd=tmp_path)
    done = fork_server("mpdiag", "record", "--out", "run", "--", script, cwd=tmp_path)
    assert plain.code == 0, plain.err
    assert done.code == 0, done.err
    assert done.out == plain.out
    known = open_run(tmp_path / "run").meta["operations"]
    assert known["steps"] == steps
    assert f"the script compiles ({script}:{line})" in known["reason"]
    assert known["fix"] == "record it without torch.compile"
    assert done.err.count("the script compiles") == 1


def test_an_optimizer_that_compiles_its_step_hides_no_operation_of_the_model(fork_server, tmp_path):
    script = tmp_path / "optimizer.py"
    script.write_text(OWN_SCRIPTS["compiled step"])
    plain = fork_server("python", script, cwd=tmp_path)
    done = fork_server("mpdiag", "record", "--out", "run", "--", script, cwd=tmp_path)
    assert (done.code, done.out) == (0, plain.out), done.err
    assert open_run(tmp_path / "run").meta["operations"]["steps"] == [0]


def test_ranks_that_a_launcher_starts_record_as_many(monkeypatch):
    started = []
    monkeypatch.setattr("torch.distributed.run.main", started.append)
    words = ["torchrun", "--nproc-per-node", "2", str(LOOP), "3"]
    out = Path("memory:/runs/one")  # one slash, as a path has it
    assert record_command(words, out, Options(operations=0)) == RecordedScript(0, None)
    ours = ["--module", "mpdiag", "record", "--operations", "0", "--out", str(out), "--"]
    assert started == [["--nproc-per-node", "2", *ours, str(LOOP), "3"]]
