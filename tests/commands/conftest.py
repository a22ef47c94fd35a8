"""Runs that tests of several commands share."""

import json
import shutil

import pytest
import torch
from audited_trainings import BF16, model, train
from support import record_and_train
from tensorcores.timeline.test_ranks import trace as rank_trace
from tensorcores.traces import FALLBACK, SGEMM, kernel, launch, op, product, step, write

HOSTILE = "<img src=x onerror=alert(1)>|`x`"


@pytest.fixture
def folder(tmp_path):
    """A folder of runs: two that list, one that is damaged, one of a newer schema, and no run."""
    metas = {
        "old": {"schema_version": 1, "state": "finished", "created": "2025-01-01T00:00:00+00:00"},
        "[red]new": {"schema_version": 1, "state": "recording", "created": "2025-02-01T00:00:00"},
        "newer": {"schema_version": 99},
        "damaged": None,
    }
    for name, meta in metas.items():
        (tmp_path / name).mkdir()
        text = "{" if meta is None else json.dumps(meta)
        (tmp_path / name / "meta.json").write_text(text)
    (tmp_path / "no run").mkdir()
    return tmp_path


@pytest.fixture(scope="session")
def trained(tmp_path_factory):
    """A recording and a training by its plan, in a folder whose name must be quoted."""
    folder = tmp_path_factory.mktemp("trained") / "Übung 1" / "runs"
    record_and_train(folder / "first run", folder / "second")
    return folder


@pytest.fixture(scope="module")
def printed(root, tmp_path_factory):
    """Runs and traces that commands read: what they print is kept, and their JSON validated."""
    place = tmp_path_factory.mktemp("goldens")
    for name in ("ssd", "ssd-fp16-plan", "digits"):
        shutil.copytree(root / "sample_runs" / name, place / name)
    shutil.copy(root / "sample_runs" / "gpu-sample" / "trace.json.gz", place / "sample.json.gz")
    hostile = product(256, 250, 256, 60, 70, dtype="float")
    write(place / "step.json", [*step(), hostile, launch(4, 65), kernel(HOSTILE, 4, 5)])
    before = [product(256, 256, 256, 0, 10), launch(1, 5), kernel(SGEMM, 1, 90)]
    write(place / "before.json", before)
    causes = [
        *step(),
        product(128, 512, 256, 60, 70, dtype="float"), launch(5, 65), kernel(SGEMM, 5, 20),
        product(512, 513, 513, 80, 90, "c10::BFloat16"), launch(6, 85), kernel(FALLBACK, 6, 40),
        product(512, 77, 512, 95, 98, "c10::BFloat16"), launch(7, 97), kernel(FALLBACK, 7, 40),
        op("aten::relu", 99, 100),
    ]  # fmt: skip
    write(place / "causes.json", causes)
    write(place / "unlinked.json", [kernel(SGEMM, 1, 90)])  # of no operation, no module
    (place / "ranks").mkdir()
    for rank, compute in ((0, 40), (1, 70)):
        path = rank_trace(place / f"rank{rank}.json", rank, compute)
        shutil.copy(path, place / "ranks" / path.name)
    weights = model(BF16)
    train(weights, torch.optim.AdamW(weights.parameters(), lr=1e-2), place / "audited" / "bf16")
    return place
