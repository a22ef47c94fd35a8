"""Each example runs as a user would run it, and leaves a recording and a training to compare."""

import os
import socket
import sys

import pytest

from mpdiag.runs.run import open_run
from mpdiag.runs.training_log import read_log

RUNS = {
    "plain_loop": "plain",
    "gradient_accumulation": "accumulated",
    "gan": "gan",
    "lbfgs": "lbfgs",
    "lightning_module": "lightning",
    "ddp": "ddp",
}
NEEDS = {"lightning_module": "lightning"}
NOTEBOOK = "recommend_then_train"
WORKLOAD = "radiation"  # tests/demo searches it


def test_every_example_is_run(root):
    found = {
        path.stem for path in (root / "examples").iterdir() if path.suffix in (".py", ".ipynb")
    }
    assert found == {*RUNS, NOTEBOOK, WORKLOAD}


@pytest.mark.parametrize("name", RUNS)
def test_the_script(name, root, tmp_path, fork_server):
    if name in NEEDS:
        pytest.importorskip(NEEDS[name])
    script = root / "examples" / f"{name}.py"
    assert 20 <= len(script.read_text(encoding="utf-8").splitlines()) <= 60
    done = fork_server("python", script, cwd=tmp_path, env=environment(root), timeout=300)
    assert done.code == 0, done.err
    assert "loss scale:" in done.out
    recorded, trained = (tmp_path / "runs" / f"{RUNS[name]}{end}" for end in ("", "-fp16"))
    assert open_run(recorded).meta["state"] == "complete"
    assert read_log(trained).steps


def test_the_notebook(root, tmp_path, monkeypatch):
    nbformat = pytest.importorskip("nbformat")
    nbclient = pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    for name, value in environment(root).items():
        monkeypatch.setenv(name, value)
    notebook = nbformat.read(root / "examples" / f"{NOTEBOOK}.ipynb", as_version=4)
    assert not any(cell.get("outputs") for cell in notebook.cells)  # stored without output
    resources = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(notebook, timeout=300, resources=resources).execute()
    shown = [c.outputs for c in notebook.cells if c.cell_type == "code" and c.outputs]
    assert sum("text/html" in o.get("data", {}) for outputs in shown for o in outputs) >= 4
    assert read_log(tmp_path / "runs" / "notebook-fp16").steps


def environment(root):
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    paths = [str(root), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "OMP_NUM_THREADS": "1",
        "MASTER_PORT": str(port),
        **({"GLOO_SOCKET_IFNAME": "lo"} if sys.platform == "linux" else {}),
    }
