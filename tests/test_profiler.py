"""The profiler is a product of its own: without its folder the rest works, and ``profile`` says so."""

import shutil
from functools import partial

import pytest

TRAINING = """
from pathlib import Path
from support import record_and_train
assert record_and_train(Path("fp32"), Path("fp16")).tensor_cores is None

from typer.testing import CliRunner
from mpdiag.cli import app

for words in ("analyze fp32", "compare fp32 fp16", "report fp32", "doctor"):
    result = CliRunner().invoke(app, words.split())
    assert result.exit_code == 0, (words, result.output)
"""


@pytest.fixture(scope="module")
def without(real, root, tmp_path_factory):
    """Runs Python in a folder, with a copy of the package that lacks the profiler's folder."""
    folder = tmp_path_factory.mktemp("without")
    ignored = shutil.ignore_patterns("tensorcores")
    shutil.copytree(root / "mpdiag", folder / "mpdiag", ignore=ignored)
    return partial(real, cwd=folder, env={"PYTHONPATH": f"{folder}:{root / 'tests'}"})


def test_record_analyze_train_and_compare_without_it(without):
    child = without("-c", TRAINING)
    assert child.code == 0, child.err


def test_profile_without_it_is_refused_in_one_sentence(without):
    child = without("-m", "mpdiag", "profile", "trace.json")
    assert child.code == 2
    assert child.err.splitlines() == [
        "error: the Tensor Core profiler is not installed here: reinstall mpdiag to profile"
    ]
