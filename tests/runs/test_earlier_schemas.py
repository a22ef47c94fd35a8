"""What earlier versions wrote stays readable: a stored folder of every schema, never written anew.

``tests/data/schema-N`` was written by the first version with schema N (``record_run`` and its
neighbours in ``studies/fuzz.py``). A newer schema adds a folder; none is ever replaced.
"""

import json
import shutil

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import mpdiag
from mpdiag.analysis.comparison.compare import compare
from mpdiag.errors import DamagedRun
from mpdiag.runs.results import read_profile
from mpdiag.runs.run import SCHEMA_VERSION
from mpdiag.runs.schema import schema
from mpdiag.runs.training_log import read_log
from mpdiag.sensitivity.search_state import load_state
from mpdiag.tensorcores.views.tensor_cores import kernel_frame


@pytest.fixture
def first(root):
    return root / "tests" / "data" / "schema-1"


def test_every_schema_has_its_folder(root):
    stored = {path.name for path in (root / "tests" / "data").glob("schema-*")}
    assert stored == {f"schema-{version}" for version in range(1, SCHEMA_VERSION + 1)}


@pytest.mark.parametrize("version", [1, 2])
def test_a_run_holds_what_was_written(root, version):
    run = mpdiag.open_run(root / "tests" / "data" / f"schema-{version}" / "run")
    records = run.records
    assert (run.meta["schema_version"], run.meta["state"]) == (version, "complete")
    assert len(records) == 78
    assert (int(records.numel.sum()), int(records.zeros.sum())) == (2259, 12)
    assert float(records.absmax.max()) == 2.2288901805877686
    assert float(records.absmin.min()) == 5.599856376647949e-05
    updates = records.select(records.of_kind("update"))
    assert int(updates.changed.sum()) == 513
    assert int(updates.fact("swallowed", "bf16").sum()) == 8
    names = [row["name"] for row in run.modules() if row["what"] == "module"]
    assert names == ["", "0", "1", "2"]
    assert len(run.operations()) == 16
    assert len(read_log(run.folder).steps) == 6
    assert mpdiag.analyze(run).plan.target == "fp16"


def test_facts_of_formats_in_columns_of_schema_1_are_read(first):
    paths = sorted((first / "run" / "stats").glob("*.parquet"))
    stored = pa.concat_tables([pq.read_table(path) for path in paths]).to_pandas()
    run = mpdiag.open_run(first / "run")
    columns = {
        "fp16_overflow": ("overflow", "fp16"),
        "swallowed_fp16": ("swallowed", "fp16"),
        "swallowed_bf16": ("swallowed", "bf16"),
        "vanished_fp16": ("vanished", "fp16"),
    }
    for column, (fact, fmt) in columns.items():
        expected = stored[column].fillna(0).astype(int)
        assert run.records.fact(fact, fmt).tolist() == expected.tolist(), column
    assert run.records.fact("swallowed", "fp16").sum() > 0
    frame = run.frame()  # the table itself is one of today's
    assert list(frame.columns) == schema().names
    update = frame[frame["kind"] == "update"].iloc[0]
    assert set(dict(update["formats"])) == {"fp16", "bf16"}
    (light,) = run.pieces(histograms=False)
    assert light.facts == {}
    assert light.numel.tolist() == run.records.numel.tolist()


def test_a_part_that_mixes_both_schemas_is_refused(first, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(first / "run", folder)
    (path, *_) = sorted((folder / "stats").glob("*.parquet"))
    pq.write_table(pq.read_table(path).drop_columns(["swallowed_bf16"]), path)
    with pytest.raises(DamagedRun, match="lacks the column 'swallowed_bf16'"):
        _ = mpdiag.open_run(folder).records


def test_what_was_concluded_from_it_reads_and_is_still_concluded(first):
    analysis = mpdiag.analyze(first / "run")
    plan = mpdiag.PrecisionPlan.load(first / "run" / "plan.json")
    assert plan.loss_scale.recommended == analysis.plan.loss_scale.recommended == 1.0
    assert (plan.target, plan.level) == ("fp16", "O1")
    assert plan.run == "run"
    assert {c.module for c in plan.fp32_modules} == {c.module for c in analysis.plan.fp32_modules}


def test_profiles_baselines_and_searches_of_version_1_read(first):
    profile = read_profile(first / "run")
    assert kernel_frame(profile)["time_us"].sum() == pytest.approx(profile["kernel_time_us"])
    assert compare(first / "baseline.json", first / "run").a.trainings[0].metrics["accuracy"] == 0.9
    key = json.loads((first / "search.json").read_text())["key"]
    assert len(load_state(first / "search.json", key).probes) == 1
