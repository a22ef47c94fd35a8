"""The README's examples run as they stand there, and its table of columns is complete."""

from __future__ import annotations

import re
import warnings

import numpy as np
import pytest
import torch
from torch import nn

import mpdiag
from mpdiag.analysis.layers import merge_layers
from mpdiag.numerics.formats import FP16
from mpdiag.runs.run import open_run
from mpdiag.runs.schema import schema
from mpdiag.runs.training_log import read_log


@pytest.fixture(scope="module")
def readme(root):
    return (root / "README.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def ran(readme, tmp_path_factory):
    """What the examples leave behind: their names, their folder, and what they print."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 2))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    pushes = torch.logspace(-34, -20, 128, base=2).view(64, 2)  # around FP16's lower end

    def train():
        for _ in range(5):
            optimizer.zero_grad()
            (model(torch.randn(64, 8)) * pushes).sum().backward()
            optimizer.step()

    printed = []
    batches = [(torch.randn(64, 8), torch.randn(64, 2)) for _ in range(4)]
    names = {"model": model, "optimizer": optimizer, "train": train, "loader": batches}
    names["loss_fn"] = lambda output, _: (output * pushes).sum()  # as recorded
    names["scheduler"] = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    names["print"] = lambda *words: printed.append(words)
    folder = tmp_path_factory.mktemp("readme")
    blocks = re.findall(r"^```python\n(.*?)^```", readme, flags=re.MULTILINE | re.DOTALL)
    assert len(blocks) >= 2
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            # The examples share one model: FP32's loop is profiled while a trainer holds it.
            warnings.filterwarnings("ignore", message=r"optimizer\.step\(\) was called past")
            for block in blocks:
                exec(compile(block, "README.md", "exec"), names)
    return names, folder, printed


def test_the_recording_and_the_plan(ran):
    names, folder, printed = ran
    assert isinstance(names["plan"], mpdiag.PrecisionPlan)
    run = open_run(folder / "runs" / "mine")
    assert run.meta["steps_recorded"] == 5
    findings = names["analysis"].findings
    assert [words[0] for words in printed[: len(findings)]] == [f.severity for f in findings]
    assert printed


def test_shapes_and_what_ran_where(ran):
    _, _, printed = ran
    advice = mpdiag.analyze(ran[1] / "runs" / "mine").plan.shapes
    assert [words[1] for words in printed if len(words) == 5] == [a.dimension for a in advice]
    assert advice
    assert "unit" in printed[-1][0] or "Tensor Core" in printed[-1][0]


def test_the_training_by_the_plan(ran):
    names, folder, _ = ran
    assert names["result"].scale == names["plan"].loss_scale.init_scale
    log = read_log(folder / "runs" / "mine-fp16")
    assert len(log.steps) == 4


def test_pandas_alone_tells_what_a_loss_scale_would_lose(ran):
    names, folder, _ = ran
    records = open_run(folder / "runs" / "mine").records
    first = records.select(np.flatnonzero(records.of_kind("activation_grad"))[:1])
    expected = first.histograms().lost_to_zero(FP16, names["scale_exponent"])
    assert names["lost"] == expected.value[0]
    assert 0 < names["lost"] < names["row"]["numel"]  # an example that shows something


def test_every_column_is_documented_and_no_other(readme):
    table = readme.partition("The columns of `stats/*.parquet`:")[2].partition("A bin is closed")[0]
    documented = {
        name
        for line in table.splitlines()
        if line.startswith("| `")
        for name in re.findall(r"`(\w+)`", line.split("|")[1])
    }
    assert documented == set(schema().names)


def test_counts_add_up_as_documented(ran):
    frame = ran[0]["stats"]
    apart = frame[["zeros", "subnormals", "infs", "nans"]].sum(axis=1)
    assert (frame["numel"] == apart + frame["counts"].map(sum)).all()
    assert (frame["means"].map(len) == frame["counts"].map(len)).all()


def test_duckdb_says_what_the_analysis_says(readme, ran, monkeypatch):
    duckdb = pytest.importorskip("duckdb")
    monkeypatch.chdir(ran[1])
    (query,) = re.findall(r"^```sql\n(.*?)^```", readme, flags=re.MULTILINE | re.DOTALL)
    rows = duckdb.sql(query).fetchall()
    layers = merge_layers(open_run("runs/mine").records).of_kind("activation_grad")
    h = layers.histograms
    lost = h.lost_to_zero(FP16).value / h.nonzero
    expected = {
        n: (float(h.absmax[i]), int(h.numel[i]), float(lost[i])) for i, n in enumerate(layers.names)
    }
    assert {name: tuple(rest) for name, *rest in rows} == {
        name: pytest.approx(rest) for name, rest in expected.items()
    }
    assert rows[0][3] > 0
    assert [row[3] for row in rows] == sorted((row[3] for row in rows), reverse=True)
