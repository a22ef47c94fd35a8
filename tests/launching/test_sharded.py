"""Scripts whose parameters lie in shards: what the ranks record is what one would have recorded."""

from dataclasses import replace

import numpy as np
import pytest
from script_processes import SCRIPTS
from support import NEEDS_GLOO

from mpdiag.analysis.analyzer import analyze
from mpdiag.analysis.layers import merge_layers
from mpdiag.runs.run import open_run
from mpdiag.runs.training_log import read_log

pytestmark = [pytest.mark.long, NEEDS_GLOO]

# Of four ranks FSDP2 shards what tensor parallelism has split: DTensor calls that _StridedShard.
RANKS = [("fsdp", 2), ("tensor_parallel", 2), ("tensor_parallel", 4)]


@pytest.fixture(scope="module", params=RANKS, ids=lambda one: f"{one[0]}-{one[1]}")
def told(request, fork_server, tmp_path_factory):
    """A script run by some ranks, the same recorded, and recorded alone."""
    name, world = request.param
    folder = tmp_path_factory.mktemp(name)
    script = (SCRIPTS / "sharded.py", name)
    plain, *others = fork_server.ranks("python", *script, cwd=folder, world=world)
    assert {plain.code, *(other.code for other in others)} == {0}, plain.err
    record = ("record", "--every", "1")
    both, *others = fork_server.ranks(
        "mpdiag", *record, "--out", "both", "--", *script, cwd=folder, world=world
    )
    assert {both.code, *(other.code for other in others)} == {0}, both.err
    alone = fork_server("mpdiag", *record, "--out", "alone", "--", *script, cwd=folder)
    assert alone.code == 0, alone.err
    runs = open_run(folder / "both"), open_run(folder / "alone")
    return (request.param, plain, both, alone, *runs)


def layers(run, kind, step=None):
    """By name: the histograms of one kind, merged over the ranks."""
    rows = None if step is None else run.records.step == step
    found = merge_layers(run.records, rows).of_kind(kind)
    return {name: found.histograms[i] for i, name in enumerate(found.names)}


def test_recording_changes_nothing_and_every_rank_recorded_every_step(told):
    (_, world), plain, recorded, lone, both, alone = told
    assert recorded.digest == plain.digest
    assert recorded.metric == pytest.approx(lone.metric, rel=1e-3)
    assert both.meta["world_size"] == world
    for field in ("model", "coverage"):
        assert both.meta[field] == alone.meta[field]
    ranks = both.rank_metas().values()
    assert [(m["state"], m["failures"]) for m in ranks] == [("complete", [])] * world
    frame = both.frame()
    assert set(frame["rank"]) == set(range(world))
    assert sorted(frame["step"].unique()) == list(range(30))


@pytest.mark.parametrize("kind", ["weight", "weight_grad", "update"])
def test_every_element_counts_once(told, kind):
    *_, both, alone = told
    sizes = {r["name"]: r["numel"] for r in both.modules() if r["what"] == "parameter"}
    merged, whole = layers(both, kind), layers(alone, kind)
    assert merged.keys() == whole.keys() == sizes.keys()
    for name, histogram in merged.items():
        assert int(histogram.numel) == 30 * sizes[name] == int(whole[name].numel), name


def test_the_first_step_is_that_of_one_process(told):
    """Its weights bin by bin, its gradients but for rounding, and the batch that is split."""
    (name, _), *_, both, alone = told
    merged, whole = layers(both, "weight", 0), layers(alone, "weight", 0)
    for layer, histogram in merged.items():
        assert np.array_equal(histogram.counts, whole[layer].counts), layer
        for field in ("zeros", "subnormals", "absmax", "absmin"):
            assert getattr(histogram, field) == getattr(whole[layer], field), layer
    merged, whole = layers(both, "weight_grad", 0), layers(alone, "weight_grad", 0)
    for layer, histogram in merged.items():
        expected = pytest.approx(float(whole[layer].absmax), rel=1e-4)
        assert float(histogram.absmax) == expected, layer
        expected = pytest.approx(float(whole[layer].sums.sum()), rel=1e-2)
        assert float(histogram.sums.sum()) == expected, layer
    merged, whole = layers(both, "activation", 0), layers(alone, "activation", 0)
    assert merged.keys() == whole.keys()
    if name == "fsdp":
        assert {n: int(h.numel) for n, h in merged.items()} == {
            n: int(h.numel) for n, h in whole.items()
        }


def test_operations_of_every_rank(told):
    (_, world), *_, both, alone = told
    # Further ones follow layers that grow, and a rank's part of a layer grows as it will.
    assert both.meta["operations"]["steps"][:2] == alone.meta["operations"]["steps"][:2] == [0, 10]
    assert both.meta["operations"]["reason"] == alone.meta["operations"]["reason"] == ""
    found = both.operations()
    assert {o.rank for o in found} == set(range(world))
    assert {"forward", "backward"} <= {o.phase for o in found}


def test_the_analysis_finds_the_ranks_sound(told):
    *_, both, alone = told
    analysis = analyze(both)
    codes = {finding.code for finding in analysis.findings}
    assert not codes & {"rank-stopped", "rank-missing", "ranks-disagree"}
    assert analysis.plan.loss_scale.recommended == analyze(alone).plan.loss_scale.recommended


def test_training_by_the_plan(told, fork_server, tmp_path):
    """FP16 emulated: what FSDP gathers is rounded; tensor parallelism's own operations are not."""
    (name, world), plain, *_, both, _ = told
    plan = analyze(both).plan
    scale = replace(plan.loss_scale, need="needed", method="constant", init_scale=1024.0)
    replace(plan, loss_scale=scale).save(tmp_path / "plan.json")
    script = (SCRIPTS / "sharded.py", name)
    train = ("train", "--plan", "plan.json", "--out", "fp16", "--", *script)
    done, *others = fork_server.ranks("mpdiag", *train, cwd=tmp_path, world=world)
    assert {other.code for other in others} == {done.code}
    if name == "fsdp":
        assert done.code == 0, done.err
        assert done.digest != plain.digest
        assert done.metric == pytest.approx(plain.metric, rel=0.03)
        steps = read_log(tmp_path / "fp16").steps
        assert [(s.scale, s.skipped) for s in steps] == [(1024.0, False)] * 30
    else:
        assert done.code != 0
        assert "its model is tensor-parallel, where emulation cannot round" in done.err
        assert not (tmp_path / "fp16" / "training.jsonl").exists()
