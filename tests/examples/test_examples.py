"""Each example runs as a user would run it, and leaves a recording and a training to compare."""

import os
import re
import socket
import sys

import pytest
from doc_pages import script

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
LONG = {"lightning_module", "ddp"}
NOTEBOOK = "recommend_then_train"
WORKLOAD = "radiation"  # tests/demo searches it
SHOWN = {
    "bf16_weights",
    "nan_in_fp16",
    "pipeline_stages",
    "rotary",
    "small_gpt",
}  # tests/docs runs them


def test_every_example_is_run(root):
    found = {
        path.stem for path in (root / "examples").iterdir() if path.suffix in (".py", ".ipynb")
    }
    assert found == {*RUNS, *SHOWN, NOTEBOOK, WORKLOAD}


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.long) if name in LONG else name for name in RUNS],
)
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


def test_the_notebook_is_stored_with_what_it_displays(root, tmp_path):
    nbformat = pytest.importorskip("nbformat")
    pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    path = root / "examples" / f"{NOTEBOOK}.ipynb"
    stored = nbformat.read(path, as_version=4)
    executed = script("outputs").executed(path, tmp_path, environment(root))
    assert [words(cell) for cell in executed.cells] == [words(cell) for cell in stored.cells]
    shown = [o for c in stored.cells if c.cell_type == "code" for o in c.outputs]
    assert sum("text/html" in o.get("data", {}) for o in shown) >= 4
    assert read_log(tmp_path / "runs" / "notebook-fp16").steps


def words(cell):
    """What a cell displays, in words: its numbers are of the machine and of the day."""
    html = [o.data.get("text/html", o.data["text/plain"]) for o in cell.get("outputs", ())]
    return re.sub(r"<[^>]*>|[-−]?\d[\d.,:T+-]*", " ", "".join(html)).split()


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
