"""The tool that runs compiling scripts, on stand-ins, and the parts that it counts with."""

from __future__ import annotations

import json
from collections import Counter

import pytest

SCRIPT = '''"""A line, in the shape of ``train.py`` of somebody/some-lines."""
import argparse
import torch
parser = argparse.ArgumentParser()
parser.add_argument("--seed", type=int)
parser.add_argument("--save")
args = parser.parse_args()
torch.manual_seed(args.seed)
model = torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.Linear(4, 1))
compiled = torch.compile(model, backend="eager")
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for size in (8, 8, 9):
    x = torch.randn(size, 2)
    loss = (compiled(x) - x.sum(1, keepdim=True)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
torch.save({"model": model.state_dict()}, args.save)
print(f"last loss: {loss.item():.6f}")
'''
TOOL = """
import pathlib, sys
sys.path.insert(0, sys.argv[1])
import compiling_scripts as tool
here = pathlib.Path.cwd()
tool.SCRIPTS, tool.KEPT, tool.RESULTS = here / "scripts", here / "kept", here / "results.json"
tool.CATALOG = {"line": tool.Judged(False, 0.5)}
for words in (["line"], ["--markdown", "line"]):
    sys.argv = ["compiling_scripts.py", *words]
    tool.main()
"""


@pytest.fixture
def studies(root, monkeypatch):
    monkeypatch.syspath_prepend(str(root / "studies"))
    return root / "studies"


@pytest.fixture(scope="module")
def row(root, fork_server, tmp_path_factory):
    """What the tool stored of a script whose second compilation is of another batch size."""
    here = tmp_path_factory.mktemp("compiling")
    (here / "scripts").mkdir()
    (here / "scripts/line.py").write_text(SCRIPT)
    called = fork_server("python", "-c", TOOL, str(root / "studies"), cwd=here)
    assert called.code == 0, called.err
    assert "`line`" in called.out.splitlines()[-1]
    return json.loads((here / "results.json").read_text())["scripts"][0]


def test_a_compiling_script_is_counted_with_and_without_a_recorder(row):
    assert row["identical"] is True
    assert row["dynamo"]["alone"] == {"graphs": 2, "breaks": 0, "recompilations": 1}
    assert row["dynamo"]["recorded"] == row["dynamo"]["alone"]


def test_what_is_due_is_what_the_eager_recording_has(row):
    # In each of 3 steps: 3 modules' activations and their gradients, 4 parameters' weights,
    # gradients and updates.
    assert row["records"]["due"] == 3 * (3 * 2 + 4 * 3)
    assert 0 < row["records"]["arrived"] <= row["records"]["due"]
    assert row["records"]["only_compiled"] == []


def test_records_that_counted_other_elements_have_not_arrived(studies):
    from real.compilation import arrived

    a, b, c, d = ("weight", "a"), ("weight", "b"), ("update", "c"), ("weight", "d")
    due = Counter({(*a, 0, 0, 0): 4, (*b, 0, 0, 0): 4, (*c, 0, 0, 0): 4})
    came = Counter({(*a, 0, 0, 0): 4, (*b, 0, 0, 0): 3, (*d, 0, 1, 0): 4})
    assert arrived(due, came) == {
        "due": 3,
        "arrived": 1,
        "missing": ["update c"],
        "only_compiled": ["weight d"],
        "other_numel": ["weight b"],
    }


def test_every_script_has_a_catalog_entry_and_names_its_repository(studies):
    import compiling_scripts as tool
    from real.one_script import source_of

    files = sorted(tool.SCRIPTS.glob("*.py"))
    assert sorted(path.stem for path in files) == sorted(tool.CATALOG)
    for path in files:
        assert "/" in source_of(path)
        assert "mpdiag" not in path.read_text(encoding="utf-8")
