"""Run folders of real processes: kills, interrupts, full disks and folders that are closed."""

import os
import random
import signal
import tempfile
import time
from pathlib import Path

import numpy as np
import pytest

from mpdiag.analysis.analyzer import analyze
from mpdiag.errors import DamagedRun
from mpdiag.runs.run import open_run

CHILD = Path(__file__).with_name("trained_child.py")
POSIX = pytest.mark.skipif(os.name != "posix", reason="signals and limits as POSIX has them")
ROWS = 3 * 2 + 4 * 3 + 2  # of a step: 4 modules' activations and gradients, 4 parameters' three
STEPS = 6

pytestmark = POSIX


@pytest.fixture(scope="module")
def start(fork_server, tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained")

    def start(run, steps, *options):
        return fork_server.start("python", CHILD, run, steps, *options, cwd=folder)

    return start


@pytest.fixture(scope="module")
def train(start):
    def train(run, *options):
        return start(run, STEPS, *options).end()

    return train


@pytest.fixture(scope="module")
def untouched(train):
    """The weights of the training without a recorder."""
    done = train("-")
    assert done.code == 0, done.err
    return done.out.split()[-1]


def assert_only_warned(done, untouched):
    """The training ended as if nothing had been, and said one thing."""
    assert done.code == 0, done.err
    assert done.out.split()[-1] == untouched
    assert done.err.count("RuntimeWarning") == 1, done.err
    assert "training goes on" in done.err
    assert "Traceback" not in done.err
    return done.err


def test_a_recorded_training_ends_with_the_same_weights(tmp_path, train, untouched):
    done = train(tmp_path / "run")
    assert (done.code, done.err) == (0, "")
    assert done.out.split()[-1] == untouched
    assert len(open_run(tmp_path / "run").records) == STEPS * ROWS
    assert open_run(tmp_path / "run").meta["state"] == "complete"


def whole_steps(run):
    """Each recorded step is there with all its rows; returns the steps."""
    steps, rows = np.unique(run.records.step, return_counts=True)
    assert steps.tolist() == list(range(len(steps)))
    # The first step also counts weights that no step will, so later ones have a row or so less.
    assert set(rows[1:]) <= {ROWS}
    return steps


def test_killed_at_random_moments(tmp_path, start):
    """SIGKILL falls between and into writes; what was whole stays, and the folder opens."""
    moments = random.Random(7)
    killed_while_recording = 0
    for i in range(4):
        folder = tmp_path / f"run{i}"
        child = start(folder, 100_000)
        child.wait_for("recording\n")
        time.sleep(moments.uniform(0.0, 0.4))
        kept = {path.name: path.read_bytes() for path in (folder / "stats").glob("rank*.parquet")}
        child.signal(signal.SIGKILL)
        assert child.end().code == -signal.SIGKILL
        run = open_run(folder)
        assert run.meta["state"] == "recording"
        for name, content in kept.items():
            assert (folder / "stats" / name).read_bytes() == content
        if not run.parts():
            with pytest.raises(DamagedRun, match="killed there"):
                _ = run.records
            continue
        assert len(whole_steps(run)) >= len(kept)
        killed_while_recording += 1
        assert analyze(folder).verdict
        assert run.modules()
    assert killed_while_recording >= 2


def test_a_disk_that_fills_up(tmp_path, train, untouched):
    done = train(tmp_path / "run", "--limit", 100, "--limit-after", 3)
    assert_only_warned(done, untouched)
    run = open_run(tmp_path / "run")
    assert len(whole_steps(run)) == 3
    assert run.meta["state"] == "recording"  # there was no room to say more
    assert not list((tmp_path / "run").rglob(".*.part"))
    assert analyze(tmp_path / "run").verdict


def test_a_folder_that_may_not_be_written(train, untouched):
    # As another user than root, so that permissions mean something; not below pytest's folder, which
    # that one cannot even enter.
    user = ["--uid", "65534"] if os.getuid() == 0 else []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        folder.chmod(0o555)
        try:
            err = assert_only_warned(train(folder / "run", *user), untouched)
            assert "PermissionError" in err
            assert list(folder.iterdir()) == []
        finally:
            folder.chmod(0o755)
