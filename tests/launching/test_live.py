"""``mpdiag record --live``: a line now and then, and the training is untouched."""

import os
import re

import pytest
import script_loops as loops
import torch

from mpdiag.launching import live_view
from mpdiag.launching.live_view import LiveView
from mpdiag.recording.run_folder import Progress
from mpdiag.runs.run import open_run
from mpdiag.runs.training_log import TrainingStep, read_log


def test_losses_are_told_with_their_course():
    lines = []
    view = LiveView("run", lines.append, lambda: 0.0)
    steps = [TrainingStep(i, loss, 1.0) for i, loss in enumerate([8.0, 4.0, float("nan"), 1.0])]
    for known in ([], steps[:2], steps):  # some of them again
        view.show(Progress(5, 1, [], known))
        view.draw()
    assert [line.partition("; ")[2] for line in lines] == [
        "no loss seen yet",
        "loss 4 at step 1, began at 8",
        "loss 1 at step 3, began at 8",
    ]


def test_a_line_in_half_a_minute():
    now, lines = [0.0], []
    view = LiveView("run", lines.append, lambda: now[0])
    while now[0] < 300:
        if view.due():
            view.show(Progress(5, 1, [], []))
        view.draw()
        now[0] += 1.0
    assert 9 <= len(lines) <= 11


def test_what_fails_ends_the_lines_alone(capsys):
    view = LiveView("run")
    view.show(Progress(None, 1, [], []))
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
    with pytest.raises(BrokenPipeError):
        stderr.close()


def test_a_training_that_is_shown_is_the_same_bit_for_bit(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(live_view, "SECONDS_BETWEEN_LINES", 0.0)
    with loops.recording(tmp_path / "live", every=2, live=True):
        made = loops.dcgan(turns=8)
    told = capsys.readouterr().err
    assert re.search(r"mpdiag: live · \d+ steps?, \d+ recorded; loss ", told)
    with loops.recording(tmp_path / "plain", every=2):
        plain = loops.dcgan(turns=8)
    assert all(map(torch.equal, loops.weights(made), loops.weights(plain)))
    assert made.printed == plain.printed
    rows = [open_run(tmp_path / name).table() for name in ("live", "plain")]
    assert rows[0].drop_columns(["scale"]).equals(rows[1].drop_columns(["scale"]))
    losses = [read_log(tmp_path / name).steps for name in ("live", "plain")]
    assert [s.loss for s in losses[0]] == [s.loss for s in losses[1]]
    assert "recorded;" not in capsys.readouterr().err
