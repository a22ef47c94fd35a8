"""How a process ends: by a signal, which saves the run, and with nothing of the script's kept."""

import os
import signal
import threading
import time

import numpy as np
import pytest
from script_processes import TRAIN, scripts
from support import NEEDS_GLOO

from mpdiag.launching import termination
from mpdiag.plan import PrecisionPlan
from mpdiag.runs.run import open_run
from mpdiag.runs.training_log import read_log

SCRIPTS = scripts(__file__)

pytestmark = pytest.mark.skipif(os.name != "posix", reason="signals as POSIX has them")

ENDLESS = SCRIPTS["endless"]


OPTIONS = {"record": ["--every", "1"], "train": ["--plan", "plan.json"]}


@pytest.mark.parametrize(
    ("command", "number"),
    [
        *(("record", number) for number in ("SIGTERM", "SIGHUP", "SIGINT")),
        *(("train", number) for number in ("SIGTERM", "SIGINT")),
    ],
)
def test_a_signal_leaves_a_good_run(fork_server, tmp_path, command, number):
    (tmp_path / "endless.py").write_text(ENDLESS)
    PrecisionPlan().save(tmp_path / "plan.json")
    words = (command, *OPTIONS[command], "--out", "run", "--", "endless.py")
    child = fork_server.start("mpdiag", *words, cwd=tmp_path)
    child.wait_for("training\n")
    time.sleep(0.2)
    child.signal(getattr(signal, number))
    assert child.end(60).code == (130 if number == "SIGINT" else -getattr(signal, number))
    run = open_run(tmp_path / "run")
    assert run.meta["state"] == "interrupted"
    logged = [step.step for step in read_log(tmp_path / "run").steps]
    steps = logged if command == "train" else np.unique(run.records.step).tolist()
    assert steps == list(range(len(steps)))
    assert len(steps) >= 3


def test_a_signal_that_is_ignored_stays_ignored(fork_server, tmp_path):
    (tmp_path / "endless.py").write_text(ENDLESS)
    words = ("record", "--out", "run", "--", "endless.py", "ignore")
    child = fork_server.start("mpdiag", *words, cwd=tmp_path)
    child.wait_for("training\n")
    child.signal(signal.SIGHUP)
    child.wait_for("on\n")
    child.signal(signal.SIGTERM)
    assert child.end(60).code == -signal.SIGTERM
    assert open_run(tmp_path / "run").meta["state"] == "interrupted"


@NEEDS_GLOO
@pytest.mark.parametrize("command", OPTIONS)
def test_sigterm_ends_a_rank_that_waits_in_a_collective(fork_server, tmp_path, command):
    """Python runs no handler there: the launcher had to kill it, and what it had counted was lost."""
    (tmp_path / "waiting.py").write_text(SCRIPTS["waiting"])
    PrecisionPlan().save(tmp_path / "plan.json")
    words = (command, *OPTIONS[command], "--out", "run", "--", "waiting.py")
    ranks = fork_server.start_ranks("mpdiag", *words, cwd=tmp_path)
    end = time.monotonic() + 60
    while not (tmp_path / "stuck").exists() and time.monotonic() < end:
        time.sleep(0.05)
    time.sleep(1)
    ranks[0].signal(signal.SIGTERM)
    ended = ranks[0].ends_within(4)
    for rank in ranks:
        rank.signal(signal.SIGKILL)
        rank.ends_within(10)
    assert ended
    assert ranks[0].code == -signal.SIGTERM
    run = open_run(tmp_path / "run")
    assert run.meta["state"] == "interrupted"
    if command == "train":
        assert [step.step for step in read_log(tmp_path / "run").steps] == list(range(30))
    else:
        records = run.records
        assert np.unique(records.step[records.rank == 0]).tolist() == list(range(30))


@pytest.mark.parametrize("command", ["record", "train", "profile"])
def test_nothing_of_the_script_outlives_it(fork_server, tmp_path, command):
    """A model takes its process group's threads along, which must not happen while Python shuts down."""
    (tmp_path / "gone.py").write_text(SCRIPTS["gone"])
    PrecisionPlan().save(tmp_path / "plan.json")
    options = {"record": ["--out", "run"], "train": ["--plan", "plan.json", "--out", "run"]}
    words = options.get(command, ["--warmup", "60"])
    done = fork_server("mpdiag", command, *words, "--", "gone.py", cwd=tmp_path)
    assert "alive [False, False]" in (done.out + done.err)


WORKERS = f"""{TRAIN}
import multiprocessing, time
context = multiprocessing.get_context("fork")
for _ in range(40):
    worker = context.Process(target=time.sleep, args=[60])
    worker.start()
    worker.terminate()
    worker.join(10)
    assert worker.exitcode == -15, worker.exitcode
time.sleep(1)
print("on", flush=True)
"""


def test_a_worker_that_is_ended_at_once_ends_and_ends_no_training(fork_server, tmp_path):
    """Between fork and Python's own work after it, a signal was the parent's, too, or was dropped."""
    (tmp_path / "workers.py").write_text(WORKERS)
    done = fork_server("mpdiag", "record", "--out", "run", "--", "workers.py", cwd=tmp_path)
    assert done.code == 0, done.err
    assert "on\n" in done.out
    assert open_run(tmp_path / "run").meta["state"] == "complete"


@pytest.mark.parametrize("first", ["rescue", "finish"])
def test_a_run_is_saved_once_though_both_threads_would(monkeypatch, first):
    """The main thread comes back from its call while the other one begins to save."""
    saved, died, threads = [], [], []

    class Run:
        def finish(self, _state):
            saved.append("finish")
            if first == "finish":
                hear()

        def rescue(self):
            threads.append(threading.current_thread())
            saved.append("rescue")
            if first == "rescue":
                run._handle(signal.SIGTERM, None)

    def hear():
        reading, writing = os.pipe()
        os.write(writing, bytes([signal.SIGTERM]))
        os.close(writing)
        run._hear(reading)
        os.close(reading)

    target = Run()
    run = termination.Termination(target)
    monkeypatch.setattr(termination, "die_of", died.append)
    monkeypatch.setattr(termination, "ANSWER_SECONDS", 0.0)
    monkeypatch.setattr(termination, "SAVE_SECONDS", 0.01)
    monkeypatch.setattr(run._answered, "wait", lambda _seconds: False)  # it was asked just before
    monkeypatch.setattr(signal, "getsignal", lambda _number: run._handle)
    if first == "finish":
        run._handle(signal.SIGTERM, None)
    else:
        hear()
    for thread in threads:  # one that is left behind would end this process for good
        thread.join(20)
    assert saved == [first]
    assert set(died) == {signal.SIGTERM}
