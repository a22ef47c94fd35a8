"""A run's stamp changes with each file that reading the run reads."""

import os
import shutil
from pathlib import Path

import pytest
from stamps import stamp_of_list, stamp_of_run


@pytest.fixture
def run(tmp_path, root) -> Path:
    return shutil.copytree(root / "sample_runs" / "ssd", tmp_path / "runs" / "ssd")


def test_every_file_of_a_run_is_in_its_stamp(run):
    before = stamp_of_run(run)
    assert before == stamp_of_run(run)
    for file in sorted(path for path in run.rglob("*") if path.is_file()):
        text = file.read_bytes()
        file.write_bytes(text + b"\n")
        longer = stamp_of_run(run)
        os.utime(file, ns=(1, 1))
        older = stamp_of_run(run)
        assert len({before, longer, older}) == 3, file
        before = older


def test_a_folder_of_runs_is_another_with_a_run_more_or_less(run):
    before = stamp_of_list(run.parent)
    assert before == stamp_of_list(run.parent)
    shutil.copytree(run, run.parent / "second")
    assert stamp_of_list(run.parent) != before
    shutil.rmtree(run.parent / "second")
    assert stamp_of_list(run.parent) == before
