"""Runs that outgrow memory: streamed, they say to the bit what they say when held."""

from __future__ import annotations

import importlib.util
import json

import numpy as np
import pytest
import torch
from row_buffer import RowBuffer, UpdateCounts
from support import batch, network

import mpdiag
from mpdiag.analysis import streaming
from mpdiag.analysis.analyzer import analyze
from mpdiag.errors import DamagedRun
from mpdiag.numerics.histograms import ExponentHistogram
from mpdiag.runs import reader
from mpdiag.runs.run import open_run
from mpdiag.runs.schema import TOTAL
from mpdiag.runs.writer import RunWriter


@pytest.fixture(scope="module")
def benchmark(root):
    """The benchmark's generator."""
    path = root / "benchmarks" / "larger_than_memory.py"
    spec = importlib.util.spec_from_file_location("larger_than_memory", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def both(folder, monkeypatch, batch_rows=7):
    """The analysis of a run, held and streamed in small pieces."""
    held = analyze(folder)
    with monkeypatch.context() as patch:
        patch.setattr(streaming, "STREAM_FROM", 0)
        patch.setattr(reader, "BATCH_ROWS", batch_rows)
        patch.setattr(reader, "SMALL", 0)  # every part in batches
        run = open_run(folder)
        streamed = analyze(run)
        assert "records" not in run.__dict__  # it was not read whole on the way
    return held, streamed


def ranked(folder):
    """Two ranks: local, sharded and replicated rows, totals, skips, scales, several parts."""
    rng = np.random.default_rng(0)
    for rank in (0, 1):
        writer = RunWriter(folder, rank=rank, world_size=2)
        writer.write_meta(
            {
                "state": "complete",
                "world_size": 2,
                "steps_recorded": 9,
                "steps_seen": 9,
                "model": {"type": "Net", "parameters": 100},
                "optimizers": [{"type": "Adam"}],
            }
        )
        names = ("late", "a", "b.c") if rank else ("a", "b.c", "late")
        writer.write_modules([{"name": n, "what": "module", "type": "Linear"} for n in names])
        for begin in (0, 3, 6):
            buffer = RowBuffer()
            for step in range(begin, begin + 3):
                for name in names:
                    if name == "late" and step < 4:
                        continue
                    add_rows(buffer, rng, step, rank, name)
            writer.append(buffer.to_table())


def add_rows(buffer, rng, step, rank, name):
    scale = 8.0 if step % 2 else 1.0
    placement = {"b.c": "replicated", "late": "sharded"}.get(name, "local")
    labels = {"step": step, "rank": rank, "tensors": 1, "dtype": "float32", "skipped": step == 5}
    labels |= {"scale": scale, "placement": placement, "stage": "local", "name": name}
    for kind in ("activation", "activation_grad", "weight_grad", "update"):
        values = rng.standard_normal(50) * 2.0 ** rng.integers(-28, -8)
        if kind == "activation_grad" and step == 7 and name == "a":
            values[0] = np.inf
        h = ExponentHistogram.of(values.astype(np.float32))
        update = None
        if kind == "update":
            update = UpdateCounts(50, int(rng.integers(0, 50)), 3, 2, 0, 3, (20, 30))
        buffer.append(h, update, kind=kind, micro=TOTAL if kind == "update" else 0, **labels)
        if kind == "weight_grad" and name != "late":
            buffer.append(h, kind=kind, micro=TOTAL, **labels)


@pytest.mark.parametrize("batch_rows", [5, 10_000])
def test_ranks_placements_and_skips_come_out_the_same(tmp_path, monkeypatch, batch_rows):
    ranked(tmp_path / "run")
    held, streamed = both(tmp_path / "run", monkeypatch, batch_rows)
    assert json.dumps(streamed.to_json()) == json.dumps(held.to_json())
    np.testing.assert_array_equal(streamed.layers.histograms.counts, held.layers.histograms.counts)
    np.testing.assert_array_equal(streamed.layers.histograms.sums, held.layers.histograms.sums)
    assert held.plan.master_weights.swallowed_fraction > 0  # the run shows something
    assert held.loss_scale.non_finite_steps == 1


def test_a_real_recording_comes_out_the_same(tmp_path, monkeypatch):
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    with mpdiag.record(model, optimizer, tmp_path / "run", every=1):
        for i in range(12):
            x, y = batch(i)
            optimizer.zero_grad()
            (torch.nn.functional.cross_entropy(model(x), y) * 2.0**-14).backward()
            optimizer.step()
    held, streamed = both(tmp_path / "run", monkeypatch, 50)
    assert json.dumps(streamed.to_json()) == json.dumps(held.to_json())
    assert held.plan.loss_scale.method != "none"


def test_what_is_damaged_is_said_as_ever(tmp_path, monkeypatch):
    RunWriter(tmp_path / "run").write_meta({"state": "complete"})
    monkeypatch.setattr(streaming, "STREAM_FROM", 0)
    with pytest.raises(DamagedRun, match="holds no statistics"):
        analyze(tmp_path / "run")
    (tmp_path / "run" / "stats" / "rank00000-000001.parquet").write_bytes(b"PAR1")
    with pytest.raises(DamagedRun, match="is damaged"):
        analyze(tmp_path / "run")


def test_a_run_that_goes_on_meanwhile_is_taken_as_it_was(tmp_path):
    """A training writes parts while its run is analyzed: new steps, and names unheard of."""
    ranked(tmp_path / "run")
    expected = streaming.InMemoryStatistics(open_run(tmp_path / "run").records)
    streamed = streaming.StreamedStatistics(open_run(tmp_path / "run"))
    steps = streamed.step_maxima()[0]
    writer = RunWriter(tmp_path / "run", rank=2, world_size=3)
    buffer = RowBuffer()
    for name in ("a", "new"):
        add_rows(buffer, np.random.default_rng(1), 99, 2, name)
    writer.append(buffer.to_table())
    np.testing.assert_array_equal(
        streamed.layers().histograms.counts, expected.layers().histograms.counts
    )
    late = streamed.by_step(["a"], steps)[0]
    np.testing.assert_array_equal(late.counts, expected.by_step(["a"], steps)[0].counts)
    assert streamed.activations(["a", "new"]) == expected.activations(["a", "new"])


def test_small_runs_are_held(tmp_path):
    ranked(tmp_path / "run")
    run = open_run(tmp_path / "run")
    assert run.rows() == len(run.records)
    assert isinstance(
        streaming.read_statistics(open_run(tmp_path / "run")), streaming.InMemoryStatistics
    )


def test_memory_does_not_grow_with_the_steps(benchmark, tmp_path):
    """2,000 layers on 4 ranks; a process of its own for each figure. The benchmark does it all."""
    peaks = {}
    for steps in (20, 40):
        rows = benchmark.write(tmp_path / str(steps), layers=2000, steps=steps, ranks=4)
        peaks[steps] = benchmark.measure(str(tmp_path / str(steps)), stream_from=0)[1]
    assert rows == 2000 * 40 * 4
    # InMemoryStatistics, the 160,000 rows between take some 65 MB.
    assert peaks[40] - peaks[20] < 30, peaks
