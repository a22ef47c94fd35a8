"""The tool that records, analyzes, trains and compares real scripts, on stand-ins."""

from __future__ import annotations

import importlib.util
import json

import pytest

SCRIPT = '''"""A line, in the shape of ``train.py`` and ``model.py`` of somebody/some-lines."""
import argparse
import torch
parser = argparse.ArgumentParser()
parser.add_argument("--seed", type=int)
parser.add_argument("--save")
args = parser.parse_args()
torch.manual_seed(args.seed)
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for _ in range(6):
    x = torch.randn(8, 2)
    loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
torch.save({"model": model.state_dict()}, args.save)
print(f"last loss: {loss.item():.6f}")
'''
BROKEN = SCRIPT.replace("print(", "raise ValueError('no paper')\nprint(")
TOOL = """
import importlib.util, json, pathlib, sys
spec = importlib.util.spec_from_file_location("real_scripts", sys.argv[1])
tool = importlib.util.module_from_spec(spec)
sys.modules["real_scripts"] = tool
spec.loader.exec_module(tool)
here = pathlib.Path.cwd()
tool.SCRIPTS, tool.KEPT, tool.RESULTS = here / "scripts", here / "kept", here / "results.json"
tool.CATALOG = {name: tool.Judged(False, 0.5) for name in ("lines/line", "lines/broken")}
for words in (["--seeds", "1"], ["--seeds", "1"], ["--markdown"]):
    sys.argv = ["real_scripts.py", *words]
    print("call", *words, file=sys.stderr)
    tool.main()
"""


@pytest.fixture(scope="module")
def tool(root):
    spec = importlib.util.spec_from_file_location("real_scripts", root / "studies/real_scripts.py")
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(__import__("sys").modules, "real_scripts", module)
        patch.syspath_prepend(str(root / "studies"))
        spec.loader.exec_module(module)
        yield module


@pytest.fixture(scope="module")
def processes(tool):
    return importlib.import_module("real.processes")


@pytest.fixture(scope="module")
def done(root, fork_server, tmp_path_factory):
    """The folder after two calls with one seed and one for the table, and what they printed."""
    here = tmp_path_factory.mktemp("real")
    (here / "scripts/lines").mkdir(parents=True)
    (here / "scripts/lines/line.py").write_text(SCRIPT)
    (here / "scripts/lines/broken.py").write_text(BROKEN)
    path = str(root / "studies" / "real_scripts.py")
    return here, fork_server("python", "-c", TOOL, path, cwd=here)


def rows(here):
    return {
        row["script"]: row for row in json.loads((here / "results.json").read_text())["scripts"]
    }


def test_a_script_goes_through_every_command(done):
    here, called = done
    assert called.code == 0, called.err
    row = rows(here)["lines/line"]
    assert row["source"] == "somebody/some-lines: train.py"
    assert row["identical"] is True
    assert row["failures"] == []
    assert row["steps"] == 6
    assert row["steps_by_plan"] == [6]
    assert row["half_precision_flops"] == 1.0
    assert row["metric"] == "last loss"
    assert len(row["fp32"]) == len(row["by_plan"]) == 1
    assert row["compare"] == "inconclusive"  # of one seed
    assert row["verdict"]["level"] == "expected"


def test_a_script_that_fails_is_a_row_that_says_so(done):
    here, _ = done
    row = rows(here)["lines/broken"]
    assert "no paper" in row["failures"][0]
    assert row["identical"] is None
    assert row["fp32"] == row["by_plan"] == []


def test_what_is_known_is_not_run_again(done):
    _, called = done
    first, second, _ = called.err.split("call --")[1:]
    assert "lines/line: inconclusive" in first
    assert "lines/line:" not in second


def test_the_table_has_a_line_for_each_script(done):
    _, called = done
    lines = called.out.splitlines()
    assert len(lines) == 4
    assert lines[0].count("|") == lines[1].count("|") == lines[2].count("|")
    assert "| somebody/some-lines: train.py |" in lines[2]


def test_every_script_has_a_catalog_entry_and_names_its_repository(tool, root):
    files = sorted((root / "studies" / "scripts").rglob("*.py"))
    names = [
        path.relative_to(root / "studies/scripts").with_suffix("").as_posix() for path in files
    ]
    assert names == sorted(tool.CATALOG)
    for path in files:
        assert "/" in importlib.import_module("real.one_script").source_of(path)
        assert "mpdiag" not in path.read_text(encoding="utf-8")


def test_a_digest_sees_every_tensor(processes, tmp_path):
    import torch

    def digest(values):
        torch.save({"a": torch.zeros(3), "b": torch.tensor(values)}, tmp_path / "x.pt")
        return processes.tensors_digest(tmp_path / "x.pt")

    assert digest([1.0, 2.0]) == digest([1.0, 2.0]) != digest([1.0, 2.5])
    assert processes.tensors_digest(tmp_path / "none.pt") is None


def test_the_metric_is_the_last_line_of_its_form(processes):
    said = processes.Outcome(
        0, 1.0, "step: 3\nEpoch: 4 loss 2\nval loss: 1.5\nrelative error: 2e-05\nbye", ""
    )
    assert said.metric == ("relative error", 2e-05)
    assert processes.Outcome(0, 1.0, "nothing", "").metric is None
