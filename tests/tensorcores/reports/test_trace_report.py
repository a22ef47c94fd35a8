"""The report of a trace: for whoever has the trace alone, and whoever they send it to."""

import re

import pytest
from tensorcores.timeline.test_ranks import trace as rank_trace
from tensorcores.traces import kernel, launch, product, step, write
from typer.testing import CliRunner

from mpdiag.cli import app
from mpdiag.tensorcores.trace_analysis import profile_trace

HOSTILE = "<img src=x onerror=alert(1)>|`x`"


@pytest.fixture
def trace(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    hostile = [
        product(256, 250, 256, 60, 70, dtype="float"), launch(4, 65), kernel(HOSTILE, 4, 5)
    ]  # fmt: skip
    return write(tmp_path / "t.json", step() + hostile)


def report(*arguments):
    return CliRunner().invoke(app, ["report", *map(str, arguments)])


def test_one_file_that_opens_offline(trace, tmp_path):
    result = report(trace)
    assert (result.exit_code, result.stdout) == (0, "t.json.html\n")
    page = (tmp_path / "t.json.html").read_text(encoding="utf-8")
    assert page.count("plotly.js v") == 1
    head, _, body = page.partition("<body>")
    assert "<link" not in head
    assert profile_trace(trace).verdict[1:] in body
    shown = ("Findings", "Biggest potential speedups", "Kernels by time", "Provenance")
    for title in shown:
        assert title in body
    assert HOSTILE not in page
    assert "&lt;img src=x onerror=alert" in body  # in a table


def test_the_page_of_a_folder_of_ranks(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "traces").mkdir()
    for rank, compute in ((0, 40), (1, 70)):
        rank_trace(tmp_path / "traces" / f"rank{rank}.json", rank, compute)
    assert report("traces").stdout == "traces.html\n"
    page = (tmp_path / "traces.html").read_text(encoding="utf-8")
    assert "2 of 2 ranks, step 6: rank 1 is the slowest" in page
    assert "Own: time outside exposed collectives" in page


def test_operations_stand_under_their_cause(root, tmp_path):
    """The causes are the report; each opens to its operations, and their fix is said once."""
    trace = root / "sample_runs" / "gpu-sample" / "trace.json.gz"
    profile = profile_trace(trace)
    assert report(trace, "-o", tmp_path / "r.html").exit_code == 0
    body = (tmp_path / "r.html").read_text(encoding="utf-8").partition("<body>")[2]
    folds = re.findall(r'<details class="fold"><summary><b>(.*?)</b>.*?</details>', body, re.DOTALL)
    assert folds == [group.sentence for group in profile.cause_groups]
    for group in profile.cause_groups:
        fold = body.partition(f"<b>{group.sentence}</b>")[2].partition("</details>")[0]
        assert fold.count("<tr>") - 1 <= group.operations
        assert "<th>cause</th>" not in fold
    open_tables = re.sub(r"<details.*?</details>", "", body, flags=re.DOTALL).count("<table>")
    assert open_tables == 0
    said = body.partition("which the causes above give in detail")[2].partition("Evidence")[0]
    assert "matrix-on-cuda-cores" in said
