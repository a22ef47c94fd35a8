"""``mpdiag record --live``: what it says is what ``analyze`` computes, and the training is untouched."""

import os
import re
from dataclasses import replace

import pyarrow as pa
import pytest
import script_loops as loops
import torch

from mpdiag.analysis.run_statistics import RunStatistics
from mpdiag.analysis.scaling.loss_scale import analyze_loss_scale
from mpdiag.launching import live_view
from mpdiag.launching.live_view import (
    LiveState,
    LiveView,
    scale_words,
    verdict_words,
    worst_words,
)
from mpdiag.recording.run_folder import Progress
from mpdiag.runs.run import open_run
from mpdiag.runs.training_log import TrainingStep, read_log


@pytest.mark.parametrize(("name", "need"), [("ssd", "needs a loss scale"), ("digits", "needs no")])
def test_the_verdict_so_far_is_that_of_the_analysis(root, name, need):
    run = open_run(root / "sample_runs" / name)
    table = run.table()
    state = LiveState()
    half = table.num_rows // 2
    state.add([table.slice(0, half), table.slice(half)], read_log(run.folder).steps)
    found = state.so_far()
    assert not state.changed
    expected = analyze_loss_scale(RunStatistics.of(run.records), run_layers(run))
    assert found.words == scale_words(expected)
    assert need in found.words
    assert found.steps == len(set(run.records.step.tolist()))
    told = verdict_words(found, 999)
    assert told.startswith(f"so far, {found.steps} of 999 steps recorded: FP16 {need}")
    assert verdict_words(found, 999, ended=True) == told.removeprefix("so far, ")
    few = replace(found, steps=19)
    assert verdict_words(few, 999) == "so far, 19 of 999 steps recorded: a verdict comes at 20"
    assert verdict_words(few, 999, ended=True).startswith(f"19 of 999 steps recorded: FP16 {need}")
    shares = dict(found.worst)
    assert list(shares.values()) == sorted(shares.values(), reverse=True)
    layers = {r["name"]: r for r in run_layers(run).of_kind("activation_grad").to_json()}
    for layer, lost in found.worst:
        assert layers["" if layer == "the model" else layer]["underflow"] == lost
    assert "most lost to 0 without a scale" in worst_words(found)


def run_layers(run):
    return RunStatistics.of(run.records).layers()


def test_rows_are_bounded_and_losses_are_told_with_their_course(root, monkeypatch):
    table = open_run(root / "sample_runs" / "digits").table()
    monkeypatch.setattr(live_view, "MOST_ROWS", 1000)
    state = LiveState()
    state.add([table.slice(i, 500) for i in range(0, 4000, 500)], [])
    assert 0 < state.so_far().steps < 34
    assert state.loss_words() == "no loss seen yet"
    steps = [TrainingStep(i, loss, 1.0) for i, loss in enumerate([8.0, 4.0, float("nan"), 1.0])]
    state.add([], steps[:2])
    state.add([], steps)  # some of them again
    assert state.loss_words() == "loss 1 at step 3, began at 8"
    assert verdict_words(LiveState().so_far(), 3) == "so far nothing: no step was recorded yet"


def test_a_line_in_half_a_minute_and_a_hundredth_of_the_time():
    now, slow, lines = [0.0], [0.0], []

    def say(line):
        lines.append(line)
        now[0] += slow[0]

    view = LiveView("run", say, lambda: now[0])

    def train(seconds):
        end = now[0] + seconds
        while now[0] < end:
            if view.due():
                view.show(Progress(5, 1, [], []))
            view.draw()
            now[0] += 1.0

    train(300)
    assert 9 <= len(lines) <= 11
    slow[0] = 2.0
    lines.clear()
    train(2000)
    assert len(lines) * slow[0] <= 0.012 * 2000
    lines.clear()
    view.close()
    view.close()
    assert lines == ["so far nothing: no step was recorded"]


def test_the_last_word_is_of_all_steps_whatever_was_told(root):
    """What came after the last line is judged, and nothing that was taken before it is dropped."""
    table = open_run(root / "sample_runs" / "ssd").table()
    half, lines = table.num_rows // 2, []
    view = LiveView("run", lines.append, lambda: 0.0)
    view.show(Progress(20, 1, [table.slice(0, 300)], []))
    view.draw()
    view.show(Progress(200, 20, [table.slice(300, half - 300)], []))
    view.show(Progress(400, 39, [table.slice(half)], []))
    view.close()
    first, last = lines
    assert first.startswith("run · 20 steps, 1 recorded; no loss seen yet; so far, ")
    assert last.startswith("39 of 400 steps recorded: FP16 needs a loss scale")


def test_what_fails_ends_the_lines_alone(capsys):
    view = LiveView("run")
    view.show(Progress(5, 1, [pa.table({"no": ["columns"]})], []))
    view.draw()
    assert "the live view ended" in capsys.readouterr().err
    assert not view.due()


def test_a_line_is_one_line(capsys):
    view = LiveView("a\x1b[2J\nb")
    view.show(Progress(5, 1, [], []))
    view.draw()
    assert capsys.readouterr().err.startswith("mpdiag: a [2J b · 5 steps, 1 recorded; no loss")


def test_a_closed_pipe_ends_the_lines_alone(monkeypatch):
    reader, writer = os.pipe()
    os.close(reader)
    stderr = os.fdopen(writer, "w")
    monkeypatch.setattr("sys.stderr", stderr)
    view = LiveView("run")
    view.show(Progress(5, 1, [], []))
    view.draw()
    assert not view.due()
    view.close()
    with pytest.raises(BrokenPipeError):
        stderr.close()


def test_a_training_that_is_shown_is_the_same_bit_for_bit(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(live_view, "SECONDS_BETWEEN_LINES", 0.0)
    with loops.recording(tmp_path / "live", every=2, live=True):
        made = loops.dcgan(turns=8)
    told = capsys.readouterr().err
    assert re.search(r"mpdiag: live · \d+ steps?, \d+ recorded; loss ", told)
    recorded = open_run(tmp_path / "live").meta
    counts = recorded["steps_recorded"], recorded["steps_seen"]
    last = "mpdiag: {} of {} steps recorded: ".format(*counts)
    assert any(line.startswith(last) for line in told.splitlines()[-3:])
    with loops.recording(tmp_path / "plain", every=2):
        plain = loops.dcgan(turns=8)
    assert all(map(torch.equal, loops.weights(made), loops.weights(plain)))
    assert made.printed == plain.printed
    rows = [open_run(tmp_path / name).table() for name in ("live", "plain")]
    assert rows[0].drop_columns(["scale"]).equals(rows[1].drop_columns(["scale"]))
    losses = [read_log(tmp_path / name).steps for name in ("live", "plain")]
    assert [s.loss for s in losses[0]] == [s.loss for s in losses[1]]
    assert "so far" not in capsys.readouterr().err
