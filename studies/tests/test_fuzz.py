"""Hostile files, a quick share of ``studies/fuzz.py``: only our errors, each one sentence."""

from __future__ import annotations

import importlib.util
import random
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st


@pytest.fixture(scope="module")
def fuzz(root):
    path = root / "studies" / "fuzz.py"
    spec = importlib.util.spec_from_file_location("fuzz", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules["fuzz"] = module  # its dataclasses look themselves up
    spec.loader.exec_module(module)
    yield module
    del sys.modules["fuzz"]
    sys.path.remove(str(path.parent))


@pytest.fixture(scope="module")
def base(fuzz, tmp_path_factory):
    folder = tmp_path_factory.mktemp("base")
    fuzz.record_run(folder / "run")
    return folder


NAMES = (
    *("meta.json", "statistics", "modules", "operations", "plan.json", "training.jsonl"),
    *("torch.profiler", "torch.profiler.gz", "nsys", "ncu", "nvprof", "rocprof", "kernel tables"),
    *("search.json", "baseline", "profile.json", "sensitivity.json"),
    *("capsule/capsule.json", "capsule/tensors.safetensors"),
)


def test_no_reader_is_forgotten(fuzz, base):
    assert tuple(reader.name for reader in fuzz.readers(base)) == NAMES


@pytest.fixture(scope="module", params=NAMES)
def reader(request, fuzz, base, tmp_path_factory):
    found = next(r for r in fuzz.readers(base) if r.name == request.param)
    folder = tmp_path_factory.mktemp("fuzz")
    fuzz.prepare(found, folder)
    return found, folder


def test_a_good_file_is_read_and_shown(fuzz, reader):
    found, folder = reader
    for seed in found.seeds:
        assert fuzz.attempt(found, folder, seed, deep=True) == "read"


@settings(max_examples=25, deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**32))
def test_a_hostile_file_is_read_or_refused(fuzz, reader, seed):
    found, folder = reader
    fuzz.attempt(found, folder, fuzz.corrupt(found, random.Random(seed)))


def test_hostile_files_all_the_way_to_the_command_line(fuzz, reader):
    found, folder = reader
    for number in range(3):
        data = fuzz.corrupt(found, random.Random(number))
        fuzz.attempt(found, folder, data, deep=True)


def test_a_failure_is_found(fuzz, reader, monkeypatch):
    """The fuzzer itself: an error that is not ours, or not a sentence, gets through to it."""
    found, folder = reader

    def broken(_folder):
        raise KeyError("not ours")

    monkeypatch.setitem(vars(found), "read", broken)
    with pytest.raises(KeyError, match="not ours"):
        fuzz.attempt(found, folder, found.seeds[0])
