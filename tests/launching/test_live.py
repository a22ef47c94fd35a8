"""``mpdiag record --live``: what it says is what ``analyze`` computes, and the training is untouched."""

import os
import re
import struct
from dataclasses import replace

import pyarrow as pa
import pytest
import script_loops as loops
import torch

from mpdiag.analysis.run_statistics import RunStatistics
from mpdiag.analysis.scaling.loss_scale import analyze_loss_scale
from mpdiag.launching import live_view
from mpdiag.launching.live_view import (
    LINES,
    LiveState,
    LiveView,
    Panel,
    PlainLines,
    open_surface,
    scale_words,
    verdict_words,
    worst_words,
)
from mpdiag.recording.run_folder import Progress
from mpdiag.runs.run import open_run
from mpdiag.runs.training_log import TrainingStep, read_log

fcntl = pytest.importorskip("fcntl", reason="needs a terminal of POSIX")
termios = pytest.importorskip("termios")


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
    assert state.loss_words() == "loss 1 at step 3  █▄×▁  began at 8"
    assert verdict_words(LiveState().so_far(), 3) == "so far nothing: no step was recorded yet"


@pytest.fixture
def terminal():
    """A pseudo-terminal of 80 × 24: what is read from it, and the end to draw on."""
    reader, writer = os.openpty()
    fcntl.ioctl(writer, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    yield lambda: os.read(reader, 1 << 16).decode(), writer
    os.close(reader)
    os.close(writer)


def test_the_panel_keeps_to_its_lines_and_gives_the_terminal_back(terminal, capsys):
    read, fd = terminal
    panel = Panel(fd)
    panel.draw("mpdiag · \x1b[2Jrun", ["loss 1", "so far " + "x" * 200, "a\nb"])
    text = read()
    assert "\x1b[1;19r" in text  # all but the last five lines scroll
    assert text.count("\x1b7") == text.count("\x1b8") == 2  # the cursor is put back
    assert re.findall(r"\x1b\[(\d+);1H", text) == ["20", "21", "22", "23", "24"]
    assert "\x1b[2J" not in text  # a name cannot clear the screen
    assert "\n" not in text  # which would take the cursor away from a line that is not complete
    lines = re.sub(r"\x1b(\[[0-9;]*[A-Za-z]|[78])", "\n", text).split("\n")
    assert max(map(len, lines)) < 80
    assert any(line.endswith("x…") for line in lines)
    panel.draw("again", [])
    assert "r\x1b8" not in read()  # the margins are set once
    panel.close(["the last word"])
    assert "\x1b[r" in read()
    assert capsys.readouterr().err == "mpdiag: the last word\n"


def test_a_resized_terminal_gets_new_margins(terminal):
    read, fd = terminal
    panel = Panel(fd)
    panel.draw("run", [])
    read()
    fcntl.ioctl(fd, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 100, 0, 0))
    panel.draw("run", [])
    assert f"\x1b[1;{40 - LINES}r" in read()


def test_no_terminal_and_a_dumb_one_get_plain_lines(terminal, monkeypatch):
    _, fd = terminal
    assert isinstance(open_surface(), PlainLines)  # stderr is captured
    with os.fdopen(os.dup(fd), "w") as stderr:
        monkeypatch.setattr("sys.stderr", stderr)
        cases = [("xterm", 24, Panel), ("dumb", 24, PlainLines), ("xterm", 10, PlainLines)]
        for term, lines, surface in cases:
            monkeypatch.setenv("TERM", term)
            fcntl.ioctl(fd, termios.TIOCSWINSZ, struct.pack("HHHH", lines, 80, 0, 0))
            assert isinstance(open_surface(), surface)


class Surface:
    seconds = 0.5

    def __init__(self):
        self.drawn, self.closed = [], []

    def draw(self, title, lines):
        self.drawn.append((title, list(lines)))

    def close(self, lines):
        self.closed.append(list(lines))


def test_at_most_two_a_second_and_a_hundredth_of_the_time():
    now = [0.0]
    surface = Surface()
    view = LiveView("run", surface, lambda: now[0])
    slow = [0.0]

    def draw(title, lines):
        Surface.draw(surface, title, lines)
        now[0] += slow[0]

    surface.draw = draw

    def train(seconds):
        end = now[0] + seconds
        while now[0] < end:
            if view.due():
                view.show(Progress(5, 1, [], []))
            view.draw()
            now[0] += 0.01

    train(10)
    assert 18 <= len(surface.drawn) <= 21
    slow[0] = 0.02
    surface.drawn.clear()
    train(20)
    assert len(surface.drawn) * slow[0] <= 0.02 * 20
    view.close()
    view.close()
    assert surface.closed == [["so far nothing: no step was recorded"], []]


def test_the_last_word_is_of_all_steps_whatever_was_drawn(root):
    """What came after the last drawing is judged, and nothing that was taken before it is dropped."""
    table = open_run(root / "sample_runs" / "ssd").table()
    half, surface = table.num_rows // 2, Surface()
    view = LiveView("run", surface, lambda: 0.0)
    view.show(Progress(20, 1, [table.slice(0, 300)], []))
    view.draw()
    view.show(Progress(200, 20, [table.slice(300, half - 300)], []))
    view.show(Progress(400, 39, [table.slice(half)], []))
    view.close()
    ((words,),) = surface.closed
    assert words.startswith("39 of 400 steps recorded: FP16 needs a loss scale")


def test_what_fails_while_drawing_ends_the_drawing_alone(capsys):
    view = LiveView("run", Surface())
    view.show(Progress(5, 1, [pa.table({"no": ["columns"]})], []))
    view.draw()
    assert "the live view ended" in capsys.readouterr().err
    assert not view.due()


def test_a_plain_line_is_one_line(capsys):
    PlainLines().draw("mpdiag · run\n2", ["most lost: a\x1b[2J\nb 1 %"])
    assert capsys.readouterr().err == "mpdiag: mpdiag · run 2; most lost: a [2J b 1 %\n"


def test_a_closed_pipe_ends_the_drawing_alone(tmp_path, monkeypatch):
    reader, writer = os.pipe()
    os.close(reader)
    stderr = os.fdopen(writer, "w")
    monkeypatch.setattr("sys.stderr", stderr)
    view = LiveView("run", PlainLines())
    view.show(Progress(5, 1, [], []))
    view.draw()
    assert not view.due()
    other = LiveView("run", Surface())
    other.show(Progress(5, 1, [], []))
    other.draw()
    other._surface = PlainLines()
    other.close()
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
