"""Recordings end well: when Ctrl-C is pressed again, with the program, and in forked children."""

import contextlib
import os
import signal

import numpy as np
import pytest
import torch
from recorded import model_and_optimizer, rows, step, steps
from script_processes import TRAIN, scripts
from torch import nn

import mpdiag
from mpdiag.recording.ledger import Ledger
from mpdiag.recording.lifecycle import carry_through, signals_held
from mpdiag.recording.observer import Observer
from mpdiag.runs.run import open_run
from mpdiag.runs.writer import RunWriter

SCRIPTS = scripts(__file__)


@pytest.mark.parametrize(
    ("interrupts", "told"),
    [(0, [False]), (1, [False, True]), (2, [False, True, True]), (100, [False, True, True])],
)
def test_work_goes_on_after_an_interrupt_which_is_raised_at_its_end(interrupts, told):
    """The third one is raised at once."""
    heard = []

    def work(again):
        heard.append(again)
        if len(heard) <= interrupts:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) if interrupts else contextlib.nullcontext():
        carry_through(work)
    assert heard == told
    with pytest.raises(ZeroDivisionError):  # an error is no interrupt
        carry_through(lambda _again: 1 / 0)


PLACES = [
    (RunWriter, "write_meta"),
    (RunWriter, "write_modules"),
    (RunWriter, "append"),
    (Ledger, "drain"),
    (Ledger, "drop_step"),
    (Observer, "stopped"),
]


def interrupt(monkeypatch, owner, name, after):
    """From now on the first call of a method is interrupted, before it or when it has been done."""
    method, pressed = getattr(owner, name), []

    def once(self, *args, **kwargs):
        if pressed:
            return method(self, *args, **kwargs)
        pressed.append(True)
        if after:
            method(self, *args, **kwargs)
        raise KeyboardInterrupt

    monkeypatch.setattr(owner, name, once)


@pytest.fixture
def recorder(tmp_path):
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    recorder = mpdiag.record(model, optimizer, tmp_path / "run", every=1, operations=0).start()
    steps(4, model, optimizer)
    recorder.name_models({id(model): "net"})  # there is something new to say of the modules
    return recorder


INTERRUPTED = [(*place, after, "interrupted") for place in PLACES for after in (False, True)]
OVER = (RunWriter, "write_meta", False, "complete")  # the training stays complete


@pytest.mark.parametrize(("owner", "name", "after", "state"), [*INTERRUPTED, OVER])
def test_a_second_interrupt_leaves_the_true_state(recorder, monkeypatch, owner, name, after, state):
    interrupt(monkeypatch, owner, name, after)
    with pytest.raises(KeyboardInterrupt):
        recorder.close(state)
    run = open_run(recorder.folder)
    assert run.meta["state"] == state
    numbers, counts = np.unique(run.records.step, return_counts=True)
    assert numbers.tolist() == list(range(4))
    assert len(set(counts)) == 1
    assert run.meta["rows"] == counts.sum()
    assert run.meta["failures"] == []
    assert not list(run.folder.rglob(".*"))


def test_a_step_whose_end_was_interrupted_is_there_once_or_not_at_all(tmp_path, monkeypatch):
    """Without an optimizer the last step is ended by ``close``."""
    model = nn.Linear(8, 8)
    recorder = mpdiag.record(model, None, tmp_path / "run", every=1, operations=0).start()
    for _ in range(3):
        model(torch.randn(4, 8)).square().mean().backward()
    interrupt(monkeypatch, Ledger, "close_step", after=True)
    with pytest.raises(KeyboardInterrupt):
        recorder.close()
    numbers, counts = np.unique(open_run(tmp_path / "run").records.step, return_counts=True)
    assert numbers.tolist() == [0, 1, 2]
    assert len(set(counts)) == 1


def test_an_interrupt_while_it_begins_leaves_no_hooks(tmp_path, monkeypatch):
    interrupt(monkeypatch, RunWriter, "write_modules", after=False)
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with pytest.raises(KeyboardInterrupt):
        mpdiag.record(model, optimizer, tmp_path / "run").start()
    assert open_run(tmp_path / "run").meta["state"] == "interrupted"
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_step_post_hooks


@pytest.mark.skipif(os.name != "posix", reason="signals as POSIX has them")
@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_a_script_interrupted_twice_leaves_the_true_state(fork_server, tmp_path, name):
    """A launcher's SIGTERM, too, must wait until the folder is finished."""
    (tmp_path / "train.py").write_text(TRAIN + SCRIPTS["pressed again"].format(name=name))
    done = fork_server("mpdiag", "record", "--out", "run", "--", "train.py", cwd=tmp_path)
    expected = {"SIGINT": 130, "SIGTERM": -signal.SIGTERM}
    assert done.code == expected[name], done.err
    meta = open_run(tmp_path / "run").meta
    assert meta["state"] == "interrupted"
    assert meta["steps_recorded"] == 3


BEGIN = """
import mpdiag
mpdiag.record(model, optimizer, sys.argv[1], every=1).start()
"""


@pytest.mark.parametrize(
    ("end", "code", "state"),
    [
        ("", 0, "complete"),
        ("raise ValueError", 1, "failed"),
        ("raise KeyboardInterrupt", -signal.SIGINT, "interrupted"),
    ],
)
def test_what_nobody_closed_is_finished_as_the_program_ends(
    fork_server, tmp_path, end, code, state
):
    program = TRAIN.replace("\nfor", f"{BEGIN}for", 1) + end
    done = fork_server("python", "-c", program, tmp_path / "run", cwd=tmp_path)
    assert done.code == code, done.err
    run = open_run(tmp_path / "run")
    assert (run.meta["state"], run.meta["steps_recorded"]) == (state, 3)
    assert len(set(run.records.step.tolist())) == 3


class Noise(torch.utils.data.Dataset):
    """Runs a module itself, in the worker, as a tokenizer or an augmentation would."""

    def __init__(self, model):
        self.model = model

    def __len__(self):
        return 8

    def __getitem__(self, i):
        return self.model(torch.full((8,), float(i))).detach()


# Forking a process that has threads is what is tried here.
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_data_loader_worker_records_nothing(tmp_path):
    model, optimizer = model_and_optimizer()
    model.add_module("big", nn.Identity())
    with mpdiag.record(model, optimizer, tmp_path / "run", every=1) as recorder:
        loader = torch.utils.data.DataLoader(
            Noise(nn.Sequential(model[0], nn.Tanh(), nn.Linear(16, 8))),
            batch_size=4,
            num_workers=2,
            multiprocessing_context="fork",
        )
        for x in loader:
            step(model, optimizer, x)
    assert recorder.failures == []
    run = mpdiag.open_run(tmp_path / "run")
    assert run.meta["state"] == "complete"
    assert rows(tmp_path / "run", kind="activation", name="0")["numel"].tolist() == [64, 64]


@pytest.mark.skipif(os.name != "posix", reason="signals as POSIX has them")
@pytest.mark.parametrize("delay", ["0.0", "0.002"])
def test_ctrl_c_while_kernels_load_is_not_lost(real, tmp_path, delay):
    """What loads machine code calls Python back from C, where an exception is printed and dropped."""
    assert real("-c", SCRIPTS["interrupted"], delay, cwd=tmp_path).out.split() == ["interrupted"]
    assert open_run(tmp_path / f"run{delay}").meta["state"] == "interrupted"


@pytest.mark.skipif(os.name != "posix", reason="signals as POSIX has them")
def test_signals_that_are_held_are_raised_when_the_work_is_done():
    heard, before = [], signal.signal(signal.SIGUSR1, lambda number, _frame: heard.append(number))
    try:
        with pytest.raises(KeyboardInterrupt), signals_held():
            for number in (signal.SIGINT, signal.SIGUSR1, signal.SIGINT):
                signal.raise_signal(number)
            heard.append("done")
        assert heard == ["done", signal.SIGUSR1]
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGUSR1, before)
