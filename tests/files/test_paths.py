"""Runs at URLs: what ``place`` makes of a name, and a whole course of work in memory."""

import os
import socket
import sys
import uuid
from pathlib import Path

import calls
import fsspec
import pytest
import torch
from recorded import step
from script_processes import TRAIN, scripts
from support import backoff
from torch import nn

import mpdiag
from mpdiag.errors import RunNotFound, UsageError
from mpdiag.files.atomic import atomic_path, writing
from mpdiag.files.paths import is_remote, place
from mpdiag.runs.run import free_name, list_runs, open_run
from mpdiag.runs.training_log import LogWriter, TrainingStep, read_log


@pytest.fixture
def url():
    """A folder of its own in fsspec's memory."""
    name = f"memory://{uuid.uuid4().hex}"
    yield name
    system, path = fsspec.core.url_to_fs(name)
    if system.exists(path):
        system.rm(path, recursive=True)


def record(where, steps=3, **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 2))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with mpdiag.record(model, optimizer, where, **options):
        for _ in range(steps):
            step(model, optimizer, torch.randn(32, 8))
    return model


@pytest.mark.parametrize("name", ["runs/mine", "/tmp/x", "C:/x", "a:b", ".", "we-ird: name/x"])
def test_a_path_stays_a_path(name):
    assert place(name) == Path(name)
    assert not is_remote(place(Path(name)))


def test_urls_are_places(tmp_path):
    assert place(f"file://{tmp_path}/run") == tmp_path / "run"
    assert place(Path(f"file://{tmp_path}/run")) == tmp_path / "run"
    path = place(Path("memory://a/b"))  # a URL survives pathlib
    assert is_remote(path)
    assert path == place("memory://a/b") == place(path)
    assert hash(path) == hash(place("memory:///a/b"))
    path /= "c.txt"
    assert (path.name, path.parent, os.fspath(path)) == ("c.txt", place("memory://a/b"), str(path))


def test_a_local_folder_that_looks_like_a_url_wins(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "memory:" / "run").mkdir(parents=True)
    assert place(Path("memory:/run")) == Path("memory:/run")


def test_unknown_file_systems_are_refused_and_no_password_is_said():
    with pytest.raises(UsageError, match="no file system that fsspec knows"):
        place("nonsense://x/y")
    with pytest.raises(UsageError, match=r"nonsense://\(hidden\)@host/run") as refused:
        place("nonsense://user:secret@host/run")
    assert "secret" not in str(refused.value)


def test_a_run_in_memory_says_what_a_local_one_says(url, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    record(f"{url}/run")
    assert list(tmp_path.iterdir()) == []
    record(tmp_path / "run")
    remote, local = mpdiag.analyze(f"{url}/run"), mpdiag.analyze(tmp_path / "run")
    mine, other = remote.to_json(), local.to_json()
    assert mine.pop("run") == str(place(f"{url}/run"))
    other.pop("run")
    assert mine == other
    assert open_run(f"{url}/run").name == "run"
    assert [m["name"] for m in remote.run.modules()] == [m["name"] for m in local.run.modules()]


def test_listing(url):
    with pytest.raises(RunNotFound, match="no run at memory:"):
        open_run(f"{url}/none")
    for name in ("a", "b"):
        record(f"{url}/{name}", steps=1)
    assert sorted(item.folder.name for item in list_runs(url)) == ["a", "b"]
    assert str(free_name(place(url), "a")).endswith("a-2")


@pytest.mark.parametrize("name", ["", ".", "/"])
def test_what_has_no_name_is_not_written(name):
    with pytest.raises(UsageError, match="choose another file with -o"), writing(Path(name)):
        atomic_path(Path(name))


@pytest.mark.parametrize("remote", [True, False])
def test_a_failed_write_leaves_what_was_there(url, tmp_path, remote):
    target = place(f"{url}/file" if remote else tmp_path / "file")
    target.write_text("old")
    with pytest.raises(KeyError), atomic_path(target) as partial:
        partial.write_text("half of the new")
        assert remote or partial.parent == tmp_path  # across file systems it would be a copy
        raise KeyError
    assert target.read_text() == "old"
    assert not partial.exists()
    assert remote or list(tmp_path.iterdir()) == [target]


def trained(where, model, rate, steps):
    """A trainer that has logged some steps."""
    optimizer = torch.optim.SGD(model.parameters(), rate)
    mp = mpdiag.MixedPrecision(model, optimizer, backoff(), run=where)
    for _ in range(steps):
        with mp.autocast():
            loss = model(torch.ones(3, 4)).sum()
        mp.step(loss)
    return mp


def test_training_logs_are_sent_at_the_end_and_on_the_way(url):
    with trained(f"{url}/run", nn.Linear(4, 2), 0.1, 9):
        underway = len(read_log(f"{url}/run").steps)
    assert 4 <= underway <= 9
    assert len(read_log(f"{url}/run").steps) == 9
    assert open_run(f"{url}/run").meta["state"] == "complete"


def test_a_training_that_goes_on_adds_to_its_log(url):
    for number in range(2):
        log = LogWriter(url)
        log.append(TrainingStep(number, 1.0, 8.0))
        log.close()
    assert [s.step for s in read_log(url).steps] == [0, 1]


def test_the_command_takes_urls(url):
    record(f"{url}/run")
    result = calls.run("analyze", f"{url}/run")
    assert result.exit_code == 0, result.output
    assert f"next: mpdiag why {place(url)}/run" in result.stderr  # not memory:/…
    assert f"next: mpdiag analyze {place(url)}/run" in calls.run("runs", url).stderr
    assert calls.run("analyze", f"{url}/none").exit_code == 3
    result = calls.run("report", f"{url}/run")
    assert result.exit_code == 0, result.output
    assert "<!doctype html>" in (place(url) / "run" / "report.html").read_text()


def test_a_broken_connection_is_a_warning_and_training_goes_on(url, monkeypatch):
    class ClientError(Exception):
        """As botocore's, which are no OSErrors."""

    def refuse(*_, **__):
        raise ClientError

    before = record(f"{url}/good")
    monkeypatch.setattr(fsspec.filesystem("memory"), "put_file", refuse)
    with pytest.warns(RuntimeWarning, match="training goes on"):
        after = record(f"{url}/bad")
    assert all(map(torch.equal, before.parameters(), after.parameters()))


def test_s3_needs_its_package():
    try:
        import s3fs  # noqa: F401
    except ImportError:
        with pytest.raises(UsageError, match="s3"):
            place("s3://bucket/run")


def test_a_url_needs_universal_pathlib_and_says_so(monkeypatch):
    monkeypatch.setitem(sys.modules, "upath", None)
    monkeypatch.setitem(sys.modules, "upath.extensions", None)
    monkeypatch.delitem(sys.modules, "mpdiag.files.remote", raising=False)
    with pytest.raises(UsageError, match="pip install universal-pathlib"):
        place("memory://a/b")
    assert place("runs/mine") == Path("runs/mine")


def test_a_script_is_recorded_at_a_url(tmp_path, fork_server):
    (tmp_path / "train.py").write_text(TRAIN)
    words = ("record", "--out", f"file://{tmp_path}/run", "--", "train.py")
    done = fork_server("mpdiag", *words, cwd=tmp_path)
    assert done.code == 0, done.err
    assert done.err.endswith("\nnext: mpdiag analyze run -o plan.json\n")
    assert open_run(tmp_path / "run").meta["steps_recorded"] == 3
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run", "train.py"]
    assert not list((tmp_path / "run").rglob("*.part"))


@pytest.mark.parametrize("scheme", ["http", "ftp"])
def test_a_server_that_is_not_reached_is_one_sentence(scheme, fork_server, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    address = f"{scheme}://127.0.0.1:{port}/run"
    done = fork_server("mpdiag", "analyze", address, cwd=tmp_path)
    assert done.code == 3
    assert done.err.startswith(f"error: cannot use {address}: ")
    assert done.err.count("\n") == 1


def test_a_folder_whose_name_is_no_utf8_is_recorded_and_read(tmp_path, fork_server):
    folder = Path(os.fsdecode(os.fsencode(tmp_path) + b"/run\xff"))
    (tmp_path / "train.py").write_text(TRAIN)
    done = fork_server("mpdiag", "record", "--out", str(folder), "--", "train.py", cwd=tmp_path)
    assert done.code == 0, done.err
    for words in (["analyze"], ["analyze", "--json"], ["report", "-o", "a.html"], ["runs"]):
        named = str(tmp_path if words == ["runs"] else folder)
        done = fork_server("mpdiag", *words, named, cwd=tmp_path)
        assert done.code == 0, (words, done.err)
    assert "run�" in (tmp_path / "a.html").read_text()


# What lies in memory is gone with its process: all commands run in one.
IN_MEMORY = scripts(__file__)["in memory"]


def test_a_run_in_memory(fork_server, tmp_path):
    (tmp_path / "train.py").write_text(TRAIN + 'print("trained")')
    (tmp_path / "commands.py").write_text(IN_MEMORY)
    done = fork_server("python", "commands.py", cwd=tmp_path)
    assert done.code == 0, done.err
    lines = done.out.splitlines()
    assert lines[:2] == ["trained", "record exit 0"], done.err
    assert lines[2:4] == ["complete 3 [0]", "['backward', 'forward'] True"]
    ends = [line for line in lines if " exit " in line][1:]
    assert ends == ["analyze exit 0", "record exit 2", "train exit 0", "compare exit 0"]
    assert any(
        line.startswith("memory:///fleet/one-fp16 against memory:///fleet/one:") for line in lines
    )
    assert lines[-1] == "fp16"
    assert "next: mpdiag analyze memory:///fleet/one -o plan.json" in done.err.splitlines()
    assert "memory:///fleet/one already holds a run" in done.err
    assert (
        "next: mpdiag compare memory:///fleet/one memory:///fleet/one-fp16" in done.err.splitlines()
    )
    assert not (tmp_path / "runs").exists()
