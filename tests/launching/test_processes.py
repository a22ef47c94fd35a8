"""Several real processes: ranks of torchrun, processes a script spawns, and one that is killed."""

import json
import os
import signal
import threading

import numpy as np
import pytest
import torch
from script_processes import SCRIPTS, scripts
from support import NEEDS_GLOO

from mpdiag.analysis.analyzer import analyze
from mpdiag.launching.processes import claim_childs_run, claim_run, launch, release_childrens
from mpdiag.plan import PrecisionPlan
from mpdiag.runs.run import open_run
from mpdiag.runs.training_log import read_log

pytestmark = NEEDS_GLOO

TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


@pytest.fixture(scope="module")
def plain(fork_server, tmp_path_factory):
    done, other = fork_server.ranks(
        "python", SCRIPTS / "ddp.py", cwd=tmp_path_factory.mktemp("plain")
    )
    assert (done.code, other.code) == (0, 0), done.err
    return done


@pytest.fixture(scope="module")
def recorded(real, tmp_path_factory):
    folder = tmp_path_factory.mktemp("recorded")
    command = (*TORCHRUN, "-m", "mpdiag", "record", "--", SCRIPTS / "ddp.py")
    return folder, real(*command, cwd=folder)


@pytest.mark.long
def test_ranks_write_parts_of_their_own_into_one_run(recorded, plain):
    folder, done = recorded
    assert done.code == 0, done.err
    assert done.digest == plain.digest
    assert done.err.count("next: mpdiag analyze runs/ddp -o plan.json") == 1
    assert sorted(p.name for p in (folder / "runs").iterdir()) == ["ddp"]
    run = open_run(folder / "runs" / "ddp")
    assert run.meta["world_size"] == 2
    assert {meta["state"] for meta in run.rank_metas().values()} == {"complete"}
    frame = run.frame()
    assert set(frame["rank"]) == {0, 1}
    assert "0.weight" in set(frame["name"])  # as without DDP
    weights = frame[(frame["kind"] == "weight") & (frame["name"] == "0.weight")]
    assert set(weights["placement"]) == {"replicated"}
    codes = {finding.code for finding in analyze(run).findings}
    assert not codes & {"rank-stopped", "rank-missing", "ranks-disagree"}


@pytest.mark.long
def test_the_other_way_round_and_training_by_the_plan(recorded, plain, real):
    folder, _ = recorded
    analyze(folder / "runs" / "ddp").plan.save(folder / "plan.json")
    command = ("train", "--plan", "plan.json", "--out", "fp16", "--", "torchrun", *TORCHRUN[2:])
    done = real("-m", "mpdiag", *command, SCRIPTS / "ddp.py", cwd=folder)
    assert done.code == 0, done.err
    assert done.digest != plain.digest
    assert done.metric == pytest.approx(plain.metric, rel=0.02)
    lines = (folder / "fp16" / "training.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines[:-1]] == list(range(60))
    assert json.loads(lines[-1])["half_precision_flops"] == 1.0


@pytest.mark.parametrize("named", [True, False])
def test_an_empty_folder_goes_only_if_the_user_did_not_name_it(tmp_path, monkeypatch, named):
    """The script fails before anything is written."""
    monkeypatch.chdir(tmp_path)
    out = tmp_path / "mine" / "run"
    out.mkdir(parents=True)
    started = []
    monkeypatch.setattr("torch.distributed.run.main", started.append)
    assert launch(["train.py"], out if named else None, "train", ["record"]) == 0
    folder = str(out) if named else "runs/train"
    assert started == [["--module", "mpdiag", "record", "--out", folder, "--", "train.py"]]
    assert out.is_dir()
    assert not (tmp_path / "runs").exists()


def test_spawned_processes_are_recorded(fork_server, real, tmp_path):
    script = SCRIPTS / "spawned_ddp.py"
    done = real("-m", "mpdiag", "record", "--out", "run", "--", script, cwd=tmp_path)
    assert done.code == 0, done.err
    assert done.digest == fork_server("python", script, cwd=tmp_path).digest
    run = open_run(tmp_path / "run")
    assert sorted(run.rank_metas()) == [0, 1]
    assert set(run.frame()["rank"]) == {0, 1}


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")
def test_a_forked_process_has_a_run_of_its_own(fork_server, tmp_path):
    (tmp_path / "forked.py").write_text(scripts(__file__)["forked"])
    done = fork_server("mpdiag", "record", "--out", "run", "--", "forked.py", cwd=tmp_path)
    assert done.code == 0, done.err
    for name in ("run", "run-2"):
        run = open_run(tmp_path / name)
        assert run.meta["state"] == "complete"
        assert run.meta["steps_recorded"] == 3
    analyze(run).plan.save(tmp_path / "plan.json")
    words = ("train", "--plan", "plan.json", "--out", "fp16", "--", "forked.py", "both")
    done = fork_server("mpdiag", *words, cwd=tmp_path)
    assert done.code == 0, done.err
    for name in ("fp16", "fp16-2"):  # not one file with the steps of both
        steps = read_log(tmp_path / name).steps
        assert [step.step for step in steps] == [0, 1, 2]
    assert not list(tmp_path.glob(".*"))  # of what the processes claimed


@pytest.mark.skipif(os.name != "posix", reason="signals as POSIX has them")
def test_a_killed_rank_is_named_and_the_others_records_survive(fork_server, tmp_path):
    """Rank 1 kills itself in step 25; rank 0 fails in the next collective, and closes its run."""
    words = ("record", "--out", "run", "--every", "1", "--", SCRIPTS / "ddp.py")
    survivor, killed = fork_server.ranks("mpdiag", *words, cwd=tmp_path, env={"DIE_AT": "25"})
    assert killed.code == -signal.SIGKILL
    assert survivor.code == 1, survivor.err
    assert "mpdiag/" not in survivor.err.partition("Traceback")[2]  # no frame of ours
    run = open_run(tmp_path / "run")
    records = run.records
    survived = records.step[records.rank == 0]
    assert survived.max() >= 24
    assert np.unique(survived).tolist() == list(range(survived.max() + 1))
    stopped = [f for f in analyze(run).findings if f.code == "rank-stopped"]
    assert [f.evidence["rank"] for f in stopped] == [1]
    assert stopped[0].message.startswith("rank 1 of 2 was killed after ")
    assert 1 <= stopped[0].evidence["steps"] <= 25


def test_the_ranks_of_a_group_share_a_run_whoever_is_late(tmp_path, monkeypatch):
    """Once one rank has written its meta file, the other one began a run of its own."""
    store, rank = torch.distributed.HashStore(), threading.local()
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: 2)
    monkeypatch.setattr("torch.distributed.get_rank", lambda: rank.number)
    monkeypatch.setattr("torch.distributed.distributed_c10d._get_default_store", lambda: store)
    claimed = {}

    def begin(number):
        rank.number = number
        claimed[number] = claim_childs_run(tmp_path / "run", "launch")
        claimed[number].mkdir(exist_ok=True)
        (claimed[number] / "meta.json").write_text("{}")

    for number in (1, 0):  # one after the other, as late as can be
        thread = threading.Thread(target=begin, args=(number,))
        thread.start()
        thread.join()
    assert claimed == dict.fromkeys((0, 1), tmp_path / "run")

    store = torch.distributed.HashStore()  # of the next group that the script starts
    begin(0)
    begin(1)
    assert claimed == dict.fromkeys((0, 1), tmp_path / "run-2")


def test_processes_that_begin_at_the_same_time_have_runs_of_their_own(tmp_path):
    folder = tmp_path / "new" / "runs" / "sweep"
    claimed = [
        claim_childs_run(folder, "launch") for _ in range(3)
    ]  # none has written anything yet
    assert [path.name for path in claimed] == ["sweep", "sweep-2", "sweep-3"]
    assert claim_childs_run(folder, "another launch") == folder
    release_childrens(folder, "launch")
    assert [p.name for p in folder.parent.iterdir()] == [".sweep.another launch.claim"]


def test_a_claim_names_a_folder_beside_it_and_no_other(tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert claim_run(tmp_path, "train") == claim_run(tmp_path, "train") == tmp_path / "train"
    (claim,) = tmp_path.glob(".*.claim")
    claim.write_text("../elsewhere")
    assert claim_run(tmp_path, "train").parent == tmp_path


def test_a_folder_that_was_claimed_in_vain_is_removed(fork_server, tmp_path):
    (tmp_path / "idle.py").write_text("import torch")
    assert fork_server("mpdiag", "record", "--", "idle.py", cwd=tmp_path).code == 3
    assert not (tmp_path / "runs").exists()
    PrecisionPlan().save(tmp_path / "plan.json")
    words = ("train", "--plan", "plan.json", "--", "idle.py")
    assert fork_server("mpdiag", *words, cwd=tmp_path).code == 3
    assert not (tmp_path / "runs").exists()


def test_a_folder_that_cannot_be_made_is_named_all_the_same(tmp_path):
    (tmp_path / "runs").write_text("a file")
    assert claim_run(tmp_path / "runs", "train") == tmp_path / "runs" / "train"
    (tmp_path / "linked").symlink_to(tmp_path / "missing")
    assert claim_run(tmp_path, "linked") == tmp_path / "linked"
