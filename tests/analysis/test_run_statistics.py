"""A run's rows: streamed, they say to the bit what they say when held; paths have a second way."""

import importlib.util
import json
from dataclasses import replace

import numpy as np
import pytest
from row_buffer import RowBuffer, UpdateCounts

from mpdiag.analysis import run_statistics
from mpdiag.analysis.analyzer import analyze
from mpdiag.analysis.run_statistics import (
    PARTS_OF_TRAINING,
    PATH_FIGURES,
    RunStatistics,
    read_statistics,
    sum_paths,
)
from mpdiag.errors import DamagedRun
from mpdiag.installation.bundled import sample_runs
from mpdiag.numerics.formats import HALVES
from mpdiag.numerics.histograms import ExponentHistogram
from mpdiag.runs import reader
from mpdiag.runs.records import Records
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
        patch.setattr(run_statistics, "STREAM_FROM", 0)
        patch.setattr(reader, "BATCH_ROWS", batch_rows)
        run = open_run(folder)
        streamed = analyze(run)
        assert "records" not in run.__dict__  # it was not read whole on the way
    return held, streamed


def ranked(folder):
    """Two ranks: local, sharded and replicated rows, totals, skips, scales, several parts."""
    rng = np.random.default_rng(0)
    for rank in (0, 1):
        writer = RunWriter(folder, rank=rank, world_size=2)
        counts = {"world_size": 2, "steps_recorded": 9, "steps_seen": 9}
        model = {"model": {"type": "Net", "parameters": 100}, "optimizers": [{"type": "Adam"}]}
        writer.write_meta({"state": "complete"} | counts | model)
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


def test_a_real_recording_comes_out_the_same(root, monkeypatch):
    held, streamed = both(root / "sample_runs" / "digits", monkeypatch, 50)
    assert json.dumps(streamed.to_json()) == json.dumps(held.to_json())


def test_what_is_damaged_is_said_as_ever(tmp_path, monkeypatch):
    RunWriter(tmp_path / "run").write_meta({"state": "complete"})
    for stream_from in (run_statistics.STREAM_FROM, 0):
        monkeypatch.setattr(run_statistics, "STREAM_FROM", stream_from)
        with pytest.raises(DamagedRun, match="holds no statistics"):
            analyze(tmp_path / "run")
    (tmp_path / "run" / "stats" / "rank00000-000001.parquet").write_bytes(b"PAR1")
    with pytest.raises(DamagedRun, match="is damaged"):
        analyze(tmp_path / "run")


def test_a_run_that_goes_on_meanwhile_is_taken_as_it_was(tmp_path, monkeypatch):
    """A training writes parts while its run is analyzed: new steps, and names unheard of."""
    ranked(tmp_path / "run")
    expected = RunStatistics.of(open_run(tmp_path / "run").records)
    monkeypatch.setattr(run_statistics, "STREAM_FROM", 0)
    streamed = read_statistics(open_run(tmp_path / "run"))
    steps = streamed.step_maxima()[0]
    writer = RunWriter(tmp_path / "run", rank=2, world_size=3)
    buffer = RowBuffer()
    for name in ("a", "new"):
        add_rows(buffer, np.random.default_rng(1), 99, 2, name)
    writer.append(buffer.to_table())
    np.testing.assert_array_equal(
        streamed.layers().histograms.counts, expected.layers().histograms.counts
    )
    late, held = streamed.by_step(["a"], steps)[0], expected.by_step(["a"], steps)[0]
    for figure in ("counts", "absmax", "absmin", "fp16_overflow"):
        np.testing.assert_array_equal(getattr(late, figure), getattr(held, figure))
    assert (late.absmax > 0).all()


def test_a_short_run_is_read_once(tmp_path):
    ranked(tmp_path / "run")
    run = open_run(tmp_path / "run")
    assert run.rows() == len(open_run(tmp_path / "run").records)
    read_statistics(run).layers()
    assert "records" in vars(run)


def test_memory_does_not_grow_with_the_steps(benchmark, tmp_path):
    """2,000 layers on 4 ranks; a process of its own for each figure. The benchmark does it all."""
    peaks = {}
    for steps in (20, 40):
        own = [("activation_grad", "")]
        rows = benchmark.write(tmp_path / str(steps), layers=2000, steps=steps, ranks=4, own=own)
        peaks[steps] = benchmark.measure(str(tmp_path / str(steps)), stream_from=0)[1]
    assert rows == 2000 * 40 * 4
    # Held in memory, the 160,000 rows between take some 65 MB.
    assert peaks[40] - peaks[20] < 30, peaks


def _spread_out(records: Records, rows: np.ndarray, steps: np.ndarray) -> np.ndarray:
    """What ``sum_paths`` adds, each row as a histogram of all bins."""
    sums = np.zeros((PATH_FIGURES, PARTS_OF_TRAINING, len(records.words["name"])))
    gaps = np.diff(steps, append=2 * steps[-1] - steps[-2])
    updates = records.select(rows)
    h = updates.histograms()
    before = np.cumsum(h.counts, axis=1) - h.counts
    figures = [h.sums.sum(axis=1)]
    for fmt in HALVES:
        many = updates.fact("swallowed", fmt.name)[:, None]
        taken = np.clip(many - before, 0, h.counts)
        figures.append((h.sums * taken / np.maximum(1, h.counts)).sum(axis=1))
    for i, (step, name) in enumerate(zip(updates.step, updates.name, strict=True)):
        part = min(PARTS_OF_TRAINING - 1, step * PARTS_OF_TRAINING // (steps[-1] + gaps[-1]))
        weight = gaps[np.searchsorted(steps, step)] * (
            updates.sampled_from[i] / max(1, updates.numel[i]) if updates.sampled_from[i] else 1.0
        )
        sums[:, part, name] += [weight * figure[i] for figure in figures]
    return sums


def test_paths_are_those_of_rows_that_are_spread_out() -> None:
    found = open_run(sample_runs() / "language_model").records  # some updates are empty
    sampled = np.where(found.of_kind("update") & (found.step % 3 == 1), 7 * found.numel, 0)
    records = replace(found, sampled_from=sampled, scale=np.full(len(found), 4.0))
    rows, steps = np.flatnonzero(records.of_kind("update")), np.unique(records.step)
    sums = np.zeros((PATH_FIGURES, PARTS_OF_TRAINING, len(records.words["name"])))
    sum_paths(records.select(rows), steps, sums)
    np.testing.assert_allclose(sums, _spread_out(records, rows, steps), rtol=1e-14)
    assert sums.any(axis=(1, 2)).all()
