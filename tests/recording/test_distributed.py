"""Two real processes train together: nothing changes, and what their rows add up to is right."""

from pathlib import Path

import numpy as np
import pytest
import torch
from row_buffer import table_of
from support import NEEDS_GLOO

import mpdiag
from mpdiag.analysis.layers import countable_rows, merge_layers
from mpdiag.numerics.histograms import ExponentHistogram
from mpdiag.runs.records import Records

CHILD = Path(__file__).with_name("distributed_child.py")
WORLD = 2
WAYS = ["ddp", "inner", "outside", "fsdp", "fsdp-outside", "fsdp-gathered", "tensor"]
PARAMETERS = [f"{layer}.{p}" for layer in ("norm", "up", "down") for p in ("weight", "bias")]
ELEMENTS = dict(zip(PARAMETERS, (8, 8, 128, 16, 16, 1), strict=True))

pytestmark = NEEDS_GLOO


@pytest.fixture(scope="module")
def trained(fork_server, tmp_path_factory):
    """Train in every way: the run of each, and each rank's own account of it."""
    folder = tmp_path_factory.mktemp("distributed")
    ranks = fork_server.ranks("python", CHILD, folder, *WAYS, cwd=folder, world=WORLD)
    assert [rank.code for rank in ranks] == [0] * WORLD, "\n".join(r.err for r in ranks)

    def account(what):
        truths = [torch.load(folder / f"{what}-{rank}.pt") for rank in range(WORLD)]
        return mpdiag.open_run(folder / what), truths

    return {what: account(what) for what in WAYS}


@pytest.mark.parametrize("what", WAYS)
def test_every_rank_trains_bit_for_bit_and_writes_rows_of_its_own(trained, what):
    run, truths = trained[what]
    assert [truth["same"] for truth in truths] == [True] * WORLD
    frame = run.frame()
    ranks = sorted({path.name[4:9] for path in run.parts()})
    assert ranks == ["00000", "00001"]
    assert run.meta["world_size"] == WORLD
    assert run.meta["coverage"]["not_recorded"] == []
    shapes = frame.groupby("rank")[["step", "kind", "name"]].apply(lambda f: f.to_numpy().tolist())
    assert sorted(map(str, shapes[0])) == sorted(map(str, shapes[1]))
    assert sorted(frame["step"].unique()) == [0, 1, 2]


def _copied(what, kind, name):
    """Whether every rank holds the whole tensor."""
    if what in ("ddp", "inner", "outside"):
        return True
    # A normalisation's gradient under sequence parallelism is a partial sum on each rank.
    whole = what == "tensor" and name in ("norm.weight", "norm.bias", "down.bias")
    return whole and not (kind == "weight_grad" and name.startswith("norm"))


@pytest.mark.parametrize("kind", ["weight", "weight_grad", "update"])
@pytest.mark.parametrize("what", WAYS)
def test_copies_count_once_and_shards_add_up(trained, what, kind):
    run, truths = trained[what]
    layers = merge_layers(run.records).of_kind(kind)
    if "outside" in what and kind != "weight_grad":
        pytest.skip("weights that no optimizer steps are counted once")
    prefix = "module." if what == "ddp" else ""
    assert set(layers.names) == {prefix + name for name in PARAMETERS}
    for i, full in enumerate(layers.names):
        name = full.removeprefix(prefix)
        held = truths[:1] if _copied(what, kind, name) else truths
        values = [t for truth in held for t in truth["seen"][f"{kind} {full}"]]
        expected = ExponentHistogram.of(torch.cat([v.flatten() for v in values]).numpy())
        assert np.array_equal(layers.histograms.counts[i], expected.counts), full
        for field in ("zeros", "subnormals", "absmax", "absmin"):
            assert getattr(layers.histograms, field)[i] == getattr(expected, field), full
        if kind != "weight_grad":
            assert layers.histograms.numel[i] == 3 * ELEMENTS[name]


@pytest.mark.parametrize(
    ("what", "name", "placement"),
    [
        ("ddp", "module.up.weight", "replicated"),
        ("inner", "up.weight", "replicated"),
        ("fsdp", "up.weight", "sharded"),
        ("tensor", "up.weight", "sharded"),
        ("tensor", "down.bias", "replicated"),
    ],
)
def test_rows_say_where_they_lie_and_that_they_are_reduced(trained, what, name, placement):
    frame = trained[what][0].frame()
    for kind in ("weight", "weight_grad", "update"):
        rows = frame[(frame["kind"] == kind) & (frame["name"] == name)]
        assert set(rows["placement"]) == {placement}
        assert set(rows["stage"]) == {"reduced"}
        assert len(rows) == 3 * WORLD
    frame = trained["tensor"][0].frame()  # a partial sum is of the stage before the reduction
    rows = frame[(frame["kind"] == "weight_grad") & (frame["name"] == "norm.weight")]
    assert set(zip(rows["placement"], rows["stage"], strict=True)) == {("local", "local")}


@pytest.mark.parametrize("what", WAYS)
def test_the_calls_of_a_trace_are_the_same_on_every_rank(trained, what):
    """A rank whose part of a tensor is empty counts it, or its later calls are taken for others."""
    rows = trained[what][0].trace()
    scaled = [row for row in rows if (row.module, row.name) == (None, "mul_")]
    calls = [[row.shape for row in scaled if row.rank == rank] for rank in range(WORLD)]
    assert len(calls[0]) == len(PARAMETERS)
    assert calls[0] == calls[1]


def test_each_ranks_activations_count(trained):
    run, _ = trained["ddp"]
    layers = merge_layers(run.records).of_kind("activation", "activation_grad")
    numel = dict(zip(zip(layers.kinds, layers.names, strict=True), layers.histograms.numel))  # noqa: B905
    assert numel[("activation", "module.up")] == 3 * WORLD * 6 * 16
    assert numel[("activation_grad", "module.down")] == 3 * WORLD * 6


def test_sharded_modules_keep_the_class_they_were_written_as(trained):
    types = {row["name"]: row["type"] for row in trained["fsdp"][0].modules() if not row["shape"]}
    assert types == {"": "Model", "norm": "LayerNorm", "up": "Linear", "down": "Linear"}


def test_copies_of_shards_and_tensors_of_later_ranks():
    # Hybrid sharding: ranks 2 and 3 hold copies of the shards of 0 and 1. And a pipeline's second
    # half lies on ranks 2 and 3 alone.
    lies = [
        *[(0, "a", "sharded"), (1, "a", "sharded"), (2, "a", "replicated"), (3, "a", "replicated")],
        *[(2, "b", "replicated"), (3, "b", "replicated"), (0, "c", "local"), (1, "c", "local")],
    ]
    rows = [(0, "weight", n, [1.0], {"rank": r, "placement": where}) for r, n, where in lies]
    records = Records.from_table(table_of(rows))
    assert countable_rows(records).tolist() == [*[True] * 2, *[False] * 2, True, False, True, True]
