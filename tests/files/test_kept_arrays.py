"""Arrays kept in the user's cache."""

from __future__ import annotations

import os

import numpy as np
import pytest

from mpdiag.files import kept_arrays
from mpdiag.files.kept_arrays import KeptArrays, cache_folder


@pytest.fixture
def source(tmp_path, monkeypatch):
    monkeypatch.setenv("MPDIAG_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "source"
    path.write_text("1")
    return path


def test_arrays_come_back_as_they_were_for_the_same_files_and_words(source) -> None:
    arrays = {"a b": np.array([0.1, np.nan]), "n": np.int64(3), "c": np.arange(4, dtype=np.uint8)}
    KeptArrays([source], ["x"], ["files"]).put("one", arrays)
    found = KeptArrays([source], ["x"], ["files"]).get("one")
    assert found is not None
    for key, value in arrays.items():
        np.testing.assert_array_equal(found[key], value)
        assert found[key].dtype == np.asarray(value).dtype
    assert KeptArrays([source], ["y"], ["files"]).get("one") is None
    assert KeptArrays([source], ["x"], ["runs"]).get("one") is None
    assert KeptArrays([source], ["x"], ["files"]).get("two") is None


def test_a_file_that_is_not_there_keeps_nothing(source) -> None:
    kept = KeptArrays([source.with_name("gone")], [], ["files"])
    kept.put("one", {"a": np.arange(2)})
    assert kept.get("one") is None
    assert not (source.parent / "cache").exists()


def test_the_sets_that_were_used_longest_ago_go(source, monkeypatch) -> None:
    monkeypatch.setattr(kept_arrays, "MOST", 2)
    for i in range(4):
        KeptArrays([source], [i], ["files"]).put("one", {"a": np.arange(i)})
        for age, folder in enumerate(sorted(_sets(source), key=lambda f: f.stat().st_mtime_ns)):
            os.utime(folder, ns=(age * 10**9, age * 10**9))
        KeptArrays([source], [0], ["files"]).get("one")  # the first is used again each time
    held = [KeptArrays([source], [i], ["files"]).get("one") is not None for i in range(4)]
    assert held == [True, False, False, True]


def _sets(source):
    return (source.parent / "cache" / "statistics").iterdir()


def test_the_folder_is_the_named_one_or_the_systems(monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("MPDIAG_CACHE", str(tmp_path))
    assert cache_folder() == tmp_path
    monkeypatch.setenv("MPDIAG_CACHE", "")
    assert cache_folder() is None
    monkeypatch.delenv("MPDIAG_CACHE")
    monkeypatch.setattr(kept_arrays.sys, "platform", "linux")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "mpdiag"
